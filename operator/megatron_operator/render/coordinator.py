"""Deployment `NAME-coordinator`: the process that routes requests, journals them and confirms verbs."""

from __future__ import annotations

from megatron_operator.render.context import (
    ANNOTATION_SERVER_KEY,
    COORDINATOR,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    Manifest,
    RenderContext,
    child,
    seal,
    selector,
)
from megatron_operator.render.pod import bounded_memory, http_probe, keys_args, pod_template

KEYS = ("server.key", "server.pub", "engine.pub", "client.pub", "admin.pub")
MEMORY_LIMIT = "4Gi"
"""Open requests use at most 1 GiB (`journal_bytes`); send and receive buffers use as much again."""
GRACE_SECONDS = 15
"""It exits when no request is open, or 5 s after SIGTERM."""


def coordinator_args(ctx: RenderContext) -> list[str]:
    routing, pause = ctx.spec.coordinator.routing, ctx.spec.lifecycle.pause
    return [
        "coordinator",
        *("--listen", "::"),
        *("--client-port", str(PORT_CLIENT)),
        *("--engine-port", str(PORT_ENGINE)),
        *("--admin-port", str(PORT_ADMIN)),
        *("--health-port", str(PORT_HEALTH)),
        *keys_args(ctx),
        *("--routing-policy", routing.policy.value),
        *("--alpha", routing.alpha),
        *("--pause-mode", pause.mode.value),
        *("--max-queued", str(pause.max_queued)),
        *("--max-wait-seconds", str(pause.max_wait_seconds)),
    ]


def coordinator_deployment(ctx: RenderContext) -> Manifest:
    container = {
        "name": COORDINATOR,
        "args": coordinator_args(ctx),
        "ports": [
            {"name": "client", "containerPort": PORT_CLIENT},
            {"name": "engine", "containerPort": PORT_ENGINE},
            {"name": "admin", "containerPort": PORT_ADMIN},
            {"name": "health", "containerPort": PORT_HEALTH},
        ],
        "resources": bounded_memory(
            ctx.spec.coordinator.pod_template, COORDINATOR, cpu="50m", request="128Mi", limit=MEMORY_LIMIT
        ),
        "startupProbe": http_probe("/readyz", periodSeconds=1, failureThreshold=120),
        "readinessProbe": http_probe("/readyz", periodSeconds=5, failureThreshold=2),
        "livenessProbe": http_probe("/livez", periodSeconds=10, failureThreshold=6),
    }
    template = pod_template(
        ctx,
        COORDINATOR,
        container=container,
        grace_seconds=GRACE_SECONDS,
        keys=KEYS,
        overlay=ctx.spec.coordinator.pod_template,
    )
    if ctx.server_key > 1:
        annotations = template["metadata"].get("annotations") or {}
        template["metadata"]["annotations"] = {**annotations, ANNOTATION_SERVER_KEY: str(ctx.server_key)}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector(ctx, COORDINATOR)},
        "template": template,
        "revisionHistoryLimit": 2,
    }
    return seal(child(ctx, "Deployment", ctx.coordinator_name, api_version="apps/v1", component=COORDINATOR, spec=spec))
