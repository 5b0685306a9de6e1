"""Deployment `NAME-coordinator`, whose process routes requests, journals them and confirms verbs.

With `replicas: 2` there is a second Deployment, `NAME-standby`, with its own Service. The two coordinators are equal,
and each is the standby of the other. If a resource has only one coordinator and its node is lost, the operator replaces
the pod on another node (see `decision/losses.py`).
"""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import Manifest, RenderContext, child, release_annotations, seal, selector
from megatron_operator.render.options import Option, command_line, of_field
from megatron_operator.render.pod import (
    KEYS_DIR_OPTION,
    anti_affinity,
    bounded_memory,
    http_probe,
    pod_template,
    trainer_keys,
)
from megatron_operator.resource.names import (
    ANNOTATION_SERVER_KEY,
    COORDINATOR,
    LABEL_COMPONENT,
    PORT_ADMIN,
    PORT_CLIENT,
    PORT_ENGINE,
    PORT_HEALTH,
    STANDBY,
)

KEYS = ("server.key", "server.pub", "engine.pub", "client.pub", "admin.pub")
PORTS = (("client", PORT_CLIENT), ("engine", PORT_ENGINE), ("admin", PORT_ADMIN), ("health", PORT_HEALTH))
MEMORY_LIMIT = "4Gi"
"""Memory limit. Open requests use at most 1 GiB (`journal_bytes`), and send and receive buffers use as much again."""
GRACE_SECONDS = 15
"""Grace period. The coordinator exits when no request is open, or 5 s after SIGTERM."""
TOLERATION_SECONDS = 5
"""Time after which Kubernetes evicts the pod from a node that it considers lost; 300 s by default."""
NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def _other_host(ctx: RenderContext, component: str) -> str | None:
    """Return the host of the other coordinator of a pair, or None if the resource has one coordinator."""
    other = ctx.standby_name if component == COORDINATOR else ctx.coordinator_name
    return f"{other}.{ctx.namespace}.svc" if ctx.has_standby else None


OPTIONS = (
    Option("--listen", lambda ctx, _: "::"),
    Option("--client-port", lambda ctx, _: PORT_CLIENT),
    Option("--engine-port", lambda ctx, _: PORT_ENGINE),
    Option("--admin-port", lambda ctx, _: PORT_ADMIN),
    Option("--health-port", lambda ctx, _: PORT_HEALTH),
    Option("--other-host", _other_host),
    KEYS_DIR_OPTION,
    of_field("--routing-policy", "coordinator.routing.policy"),
    of_field("--alpha", "coordinator.routing.alpha"),
    of_field("--pause-mode", "lifecycle.pause.mode"),
    of_field("--max-queued", "lifecycle.pause.max_queued"),
    of_field("--max-wait-seconds", "lifecycle.pause.max_wait_seconds"),
)
"""Options of `megatron coordinator`."""


def coordinator_args(ctx: RenderContext, component: str) -> list[str]:
    """Return the command-line arguments of a coordinator.

    component: COORDINATOR or STANDBY.
    """
    return command_line("coordinator", OPTIONS, ctx, component)


def lost_node_tolerations(given: list[Any]) -> list[Any]:
    """Return the tolerations `given`, plus a toleration of each taint of lost nodes for which `given` has none."""
    keys = {entry.get("key") for entry in given if isinstance(entry, dict)}
    missing = [key for key in NODE_TAINTS if key not in keys]
    effect = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATION_SECONDS}
    return [*given, *({"key": key, **effect} for key in missing)]


def coordinator_deployment(ctx: RenderContext, component: str = COORDINATOR) -> Manifest:
    """Return the Deployment of the coordinator, or of its standby if `component` is STANDBY.

    Raises:
        InvalidPodTemplate: the podTemplate in the spec is invalid.
        NotAllowed: the pod policy does not allow the podTemplate.
    """
    container = {
        "name": COORDINATOR,
        "image": ctx.settings.coordinator_image,
        "command": ["megatron"],
        "args": coordinator_args(ctx, component),
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS],
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
        keys=(*KEYS, *trainer_keys(ctx)),
        overlay=ctx.spec.coordinator.pod_template,
        extra_labels={LABEL_COMPONENT: component},
    )
    pod = template["spec"]
    # On a lost node, the old pod of this coordinator still exists and is terminating. The new pod should avoid this
    # node. If there is a pair, avoiding the node of the other coordinator is more important.
    other = selector(ctx, STANDBY if component == COORDINATOR else COORDINATOR) if ctx.has_standby else None
    pod["affinity"] = {**anti_affinity(selector(ctx, component), other), **(pod.get("affinity") or {})}
    pod["tolerations"] = lost_node_tolerations(pod.get("tolerations") or [])
    if ctx.spec.coordinator.priority_class_name is not None:
        pod.setdefault("priorityClassName", ctx.spec.coordinator.priority_class_name)
    if ctx.server_key > 1:
        annotations = template["metadata"].get("annotations") or {}
        template["metadata"]["annotations"] = {**annotations, ANNOTATION_SERVER_KEY: str(ctx.server_key)}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": selector(ctx, component)},
        "template": template,
        "revisionHistoryLimit": 2,
    }
    name = ctx.coordinator_name if component == COORDINATOR else ctx.standby_name
    manifest = child(ctx, "Deployment", name, api_version="apps/v1", component=component, spec=spec)
    manifest["metadata"]["annotations"] = release_annotations(ctx, _inputs(ctx))
    return seal(manifest)


def _inputs(ctx: RenderContext) -> list[Any]:
    sections = (ctx.spec.coordinator, ctx.spec.lifecycle.pause)
    return [*(section.model_dump(mode="json", exclude_defaults=True) for section in sections), ctx.server_key]
