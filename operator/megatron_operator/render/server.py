"""Deployment `NAME-server`, whose pods are the OpenAI servers."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import Manifest, RenderContext, child, release_annotations, seal, selector
from megatron_operator.render.model_source import (
    model_argument,
    model_env,
    model_hash,
    model_mounts,
    model_volumes,
    weights_revision,
)
from megatron_operator.render.options import SEQUENCE_LENGTH_OPTION, Option, command_line, of_field
from megatron_operator.render.pod import (
    KEYS_DIR_OPTION,
    anti_affinity,
    bounded_memory,
    http_probe,
    pod_template,
    secret_volume,
)
from megatron_operator.render.vllm import engine_image, vllm_env
from megatron_operator.resource.engine import CPU_SEQUENCE_LENGTH, Backend
from megatron_operator.resource.names import (
    ANNOTATION_MODEL,
    LABEL_WEIGHTS,
    PORT_CLIENT,
    PORT_HEALTH,
    PORT_HTTP,
    SERVER,
)

KEYS = ("client.key", "client.pub", "server.pub")
API_KEYS_DIR = "/etc/megatron/api-keys"
TLS_DIR = "/etc/megatron/tls"
TLS_FILES = ("tls.crt", "tls.key")
MEMORY_LIMIT = "4Gi"
"""Memory limit. A tokenizer uses up to several hundred MB. The rest is for held requests and slowly read streams."""
VLLM_MEMORY_LIMIT = "8Gi"
"""Memory limit of servers for vLLM engines. vLLM's renderer and parsers take 1 GiB, and each worker takes up to 1 GiB
while it handles a request.
"""
HELD_SECONDS = 30
"""Time for which a server holds requests while no coordinator answers."""
_BACKEND = {"name": "MEGATRON_ENGINE_BACKEND", "value": "vllm"}
"""The option --backend of `megatron server`, in a form that images of earlier releases ignore."""
_INPUTS: dict[str, Any] = {"model": True, "weights": True, "server": True, "lifecycle": {"drain_seconds"}}
_NOT_IN_TEMPLATE: dict[str, Any] = {"model": {"adapters", "cache"}, "weights": {"trainer"}}


OPTIONS = (
    Option("--coordinator", lambda ctx, _: ctx.coordinator_address(PORT_CLIENT)),
    Option("--model", lambda ctx, _: model_argument(ctx)),
    Option("--model-name", lambda ctx, _: [ctx.model_name, *(ctx.spec.server.model_aliases or ())]),
    Option("--model-hash", lambda ctx, _: model_hash(ctx)),
    SEQUENCE_LENGTH_OPTION,
    Option("--host", lambda ctx, _: "::"),
    Option("--port", lambda ctx, _: PORT_HTTP),
    Option("--health-port", lambda ctx, _: PORT_HEALTH),
    KEYS_DIR_OPTION,
    of_field("--drain-seconds", "lifecycle.drain_seconds"),
    of_field("--api-keys-file", "server.api_keys_secret_ref", write=lambda _: f"{API_KEYS_DIR}/keys"),
    of_field("--tls-certificate-file", "server.tls", write=lambda _: f"{TLS_DIR}/tls.crt"),
    of_field("--tls-key-file", "server.tls", write=lambda _: f"{TLS_DIR}/tls.key"),
    of_field("--any-model-name", "server.any_model_name"),
    of_field("--share-prefix-cache", "server.share_prefix_cache"),
    of_field("--allow-priority", "server.allow_priority"),
    of_field("--allowed-origin", "server.allowed_origins"),
    of_field("--allowed-media-host", "server.allowed_media_hosts"),
    of_field("--reserve-tokens", "server.reserve_tokens"),
    of_field("--tool-call-parser", "server.tool_call_parser"),
    of_field("--reasoning-parser", "server.reasoning_parser"),
    of_field("--generation-config", "server.generation_config"),
)
"""Options of `megatron server`."""


def server_args(ctx: RenderContext) -> list[str]:
    """Return the command-line arguments of an OpenAI server."""
    return command_line("server", OPTIONS, ctx, SERVER)


def server_deployment(ctx: RenderContext) -> Manifest:
    """Return the Deployment of the OpenAI servers.

    If `spec.server.replicas` is not set, the Deployment has no `replicas`. The API server then creates it with one
    replica, and an autoscaler can change the number.
    """
    server, drain = ctx.spec.server, ctx.spec.lifecycle.drain_seconds
    volumes, mounts = model_volumes(ctx), model_mounts(ctx)
    if server.api_keys_secret_ref is not None:
        ref = server.api_keys_secret_ref
        items = [{"key": ref.key, "path": "keys"}]
        volumes = (*volumes, secret_volume(ctx, "api-keys", secret=ref.name, items=items))
        mounts = (*mounts, {"name": "api-keys", "mountPath": API_KEYS_DIR, "readOnly": True})
    if server.tls is not None:
        items = [{"key": name, "path": name} for name in TLS_FILES]
        volumes = (*volumes, secret_volume(ctx, "tls", secret=server.tls.secret_name, items=items))
        mounts = (*mounts, {"name": "tls", "mountPath": TLS_DIR, "readOnly": True})
    is_vllm = ctx.spec.engine.backend is Backend.VLLM
    request, limit = ("1536Mi", VLLM_MEMORY_LIMIT) if is_vllm else ("256Mi", MEMORY_LIMIT)
    container = {
        "name": SERVER,
        **({"image": engine_image(ctx)} if is_vllm else {}),
        "args": server_args(ctx),
        "env": [*model_env(ctx), *vllm_env(ctx), *([_BACKEND] if is_vllm else ())],
        "ports": [
            {"name": ctx.scheme, "containerPort": PORT_HTTP},
            {"name": "health", "containerPort": PORT_HEALTH},
        ],
        "resources": bounded_memory(server.pod_template, SERVER, cpu="50m", request=request, limit=limit),
        # The probes have a separate port, so that clients that exhaust the other port's connections restart no pod.
        "startupProbe": http_probe("/livez", periodSeconds=1, failureThreshold=300),
        # Ready for a while without a coordinator, because requests are held and new ones must be accepted.
        "readinessProbe": http_probe("/readyz", periodSeconds=2, failureThreshold=HELD_SECONDS // 2),
        "livenessProbe": http_probe("/livez", periodSeconds=10, failureThreshold=6),
    }
    template = pod_template(
        ctx,
        SERVER,
        container=container,
        grace_seconds=drain + 15,
        keys=KEYS,
        overlay=server.pod_template,
        volumes=volumes,
        mounts=mounts,
    )
    if weights_revision(ctx):
        template["metadata"]["labels"][LABEL_WEIGHTS] = weights_revision(ctx)
    template["spec"].setdefault("affinity", anti_affinity(selector(ctx, SERVER)))
    template["spec"]["containers"] = [_with_port(entry, ctx.scheme) for entry in template["spec"]["containers"]]
    spec = {
        **({} if server.replicas is None else {"replicas": server.replicas}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": selector(ctx, SERVER)},
        "template": template,
        "revisionHistoryLimit": 2,
    }
    manifest = child(ctx, "Deployment", ctx.server_name, api_version="apps/v1", component=SERVER, spec=spec)
    inputs = ctx.spec.model_dump(mode="json", include=_INPUTS, exclude=_NOT_IN_TEMPLATE, exclude_defaults=True)
    if ctx.spec.has_trainer:
        del inputs["weights"]
    # Resources of earlier releases have stored a fixed default, which must not count as a change of the spec.
    if ctx.spec.max_sequence_length == CPU_SEQUENCE_LENGTH:
        inputs["model"].pop("max_sequence_length", None)
    elif ctx.spec.max_sequence_length is None:
        inputs["model"]["max_sequence_length"] = None
    if ctx.spec.engine.vllm is not None and ctx.spec.engine.vllm.image is not None:
        inputs["engine"] = {"vllm": {"image": ctx.spec.engine.vllm.image}}
    manifest["metadata"]["annotations"] = {ANNOTATION_MODEL: model_hash(ctx), **release_annotations(ctx, inputs)}
    return seal(manifest)


def _with_port(container: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a container whose server port has the name `name`, because the Service selects the port by its name.

    The podTemplate may have given this port another name.
    """
    if container["name"] != SERVER:
        return container
    ports = [{**port, "name": name} if port["containerPort"] == PORT_HTTP else port for port in container["ports"]]
    return {**container, "ports": ports}
