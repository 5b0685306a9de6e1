"""Deployment `NAME-server`: the OpenAI servers."""

from __future__ import annotations

from typing import Any

from megatron_operator.model.names import ANNOTATION_MODEL, LABEL_WEIGHTS, PORT_CLIENT, PORT_HEALTH, PORT_HTTP, SERVER
from megatron_operator.render.context import Manifest, RenderContext, child, release_annotations, seal, selector
from megatron_operator.render.model_source import (
    model_argument,
    model_env,
    model_hash,
    model_mounts,
    model_volumes,
    weights_revision,
)
from megatron_operator.render.pod import anti_affinity, bounded_memory, http_probe, keys_args, pod_template

KEYS = ("client.key", "client.pub", "server.pub")
API_KEYS_DIR = "/etc/megatron/api-keys"
TLS_DIR = "/etc/megatron/tls"
MEMORY_LIMIT = "4Gi"
"""A tokenizer uses up to some hundred MB; the rest is for held requests and slowly read streams."""
HELD_SECONDS = 30
"""Time for which a server holds requests while no coordinator answers."""
_INPUTS: dict[str, Any] = {"model": True, "weights": True, "server": True, "lifecycle": {"drain_seconds"}}
_NOT_IN_TEMPLATE: dict[str, Any] = {"model": {"adapters", "cache"}}


def server_args(ctx: RenderContext) -> list[str]:
    server = ctx.spec.server
    args = [
        "server",
        *("--coordinator", ctx.coordinator_address(PORT_CLIENT)),
        *("--model", model_argument(ctx)),
        *("--model-name", ctx.model_name),
        *("--model-hash", model_hash(ctx)),
        *("--max-sequence-length", str(ctx.spec.model.max_sequence_length)),
        *("--host", "::"),
        *("--port", str(PORT_HTTP)),
        *("--health-port", str(PORT_HEALTH)),
        *keys_args(ctx),
        *("--drain-seconds", str(ctx.spec.lifecycle.drain_seconds)),
    ]
    if server.api_keys_secret_ref is not None:
        args += ["--api-keys-file", f"{API_KEYS_DIR}/keys"]
    if server.tls is not None:
        args += ["--tls-certificate-file", f"{TLS_DIR}/tls.crt", "--tls-key-file", f"{TLS_DIR}/tls.key"]
    if server.share_prefix_cache:
        args.append("--share-prefix-cache")
    if server.allow_priority:
        args.append("--allow-priority")
    if server.reserve_tokens is not None:
        args += ["--reserve-tokens", str(server.reserve_tokens)]
    if server.tool_call_parser is not None:
        args += ["--tool-call-parser", server.tool_call_parser.value]
    if server.reasoning_parser is not None:
        args += ["--reasoning-parser", server.reasoning_parser.value]
    return args


def server_deployment(ctx: RenderContext) -> Manifest:
    """Return the Deployment. Without `spec.server.replicas` it has no number of replicas: the API server creates it
    with 1, and an autoscaler may change that.
    """
    server, drain = ctx.spec.server, ctx.spec.lifecycle.drain_seconds
    volumes, mounts = model_volumes(ctx), model_mounts(ctx)
    if server.api_keys_secret_ref is not None:
        ref = server.api_keys_secret_ref
        secret = {"secretName": ref.name, "defaultMode": 0o440, "items": [{"key": ref.key, "path": "keys"}]}
        volumes = (*volumes, {"name": "api-keys", "secret": secret})
        mounts = (*mounts, {"name": "api-keys", "mountPath": API_KEYS_DIR, "readOnly": True})
    if server.tls is not None:
        secret = {"secretName": server.tls.secret_name, "defaultMode": 0o440}
        volumes = (*volumes, {"name": "tls", "secret": secret})
        mounts = (*mounts, {"name": "tls", "mountPath": TLS_DIR, "readOnly": True})
    scheme = "https" if server.tls is not None else "http"
    container = {
        "name": SERVER,
        "args": server_args(ctx),
        "env": model_env(ctx),
        "ports": [
            {"name": scheme, "containerPort": PORT_HTTP},
            {"name": "health", "containerPort": PORT_HEALTH},
        ],
        "resources": bounded_memory(server.pod_template, SERVER, cpu="50m", request="256Mi", limit=MEMORY_LIMIT),
        # On a separate port, so that clients which exhaust the connections of the other one do not restart the pod.
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
    spec = {
        **({} if server.replicas is None else {"replicas": server.replicas}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": selector(ctx, SERVER)},
        "template": template,
        "revisionHistoryLimit": 2,
    }
    manifest = child(ctx, "Deployment", ctx.server_name, api_version="apps/v1", component=SERVER, spec=spec)
    inputs = ctx.spec.model_dump(mode="json", include=_INPUTS, exclude=_NOT_IN_TEMPLATE, exclude_defaults=True)
    manifest["metadata"]["annotations"] = {ANNOTATION_MODEL: model_hash(ctx), **release_annotations(ctx, inputs)}
    return seal(manifest)
