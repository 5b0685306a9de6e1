"""Common parts of all pods: the restricted profile, writable volumes, keys, probes."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_operator.render.config import config_name
from megatron_operator.render.context import (
    PORT_HEALTH,
    RenderContext,
    labels,
    literal_args,
    selector,
)
from megatron_operator.render.merge import merge_template
from megatron_operator.render.pod_policy import check

USER = 65532
KEYS_DIR = "/etc/megatron/keys"
CACHE_DIR = "/cache"
MODEL_DIR = "/model"
MODEL_CACHE_DIR = "/model-cache"
HOSTNAME = "kubernetes.io/hostname"


def pod_template(
    ctx: RenderContext,
    component: str,
    *,
    container: dict[str, Any],
    grace_seconds: int,
    keys: tuple[str, ...],
    overlay: dict[str, Any] | None,
    extra_labels: dict[str, str] | None = None,
    volumes: tuple[dict[str, Any], ...] = (),
    mounts: tuple[dict[str, Any], ...] = (),
    init_containers: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """Return the pod template of a component, with the resource's podTemplate merged into it.

    Args:
        container: name, args, env, ports, probes and resources of the container. Nothing in args is expanded by the
            kubelet, except the operator's own `$(MEGATRON_THREADS)`.
        init_containers: the same of the init containers.
        grace_seconds: time from SIGTERM to SIGKILL.
        keys: entries of the keys Secret for this component.
        overlay: the component's `podTemplate`.

    Raises:
        InvalidPodTemplate: the podTemplate is not a valid pod template.
        NotAllowed: the operator's pod policy does not allow it.
    """
    settings = ctx.settings
    identity = {**selector(ctx, component), **(extra_labels or {})}
    all_volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}, *volumes]
    all_mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": CACHE_DIR}, *mounts]
    if settings.security:
        items = [{"key": key, "path": key} for key in keys]
        secret = {"secretName": ctx.keys_name, "defaultMode": 0o440, "items": items}
        all_volumes.append({"name": "keys", "secret": secret})
        all_mounts.append({"name": "keys", "mountPath": KEYS_DIR, "readOnly": True})
    frame = {
        "image": settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "envFrom": [{"configMapRef": {"name": config_name(ctx)}}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }

    def rendered(fields: dict[str, Any]) -> dict[str, Any]:
        return {**frame, **fields, "args": literal_args(fields["args"])}

    base = {
        "metadata": {"labels": {**labels(ctx, component), **identity}},
        "spec": {
            "serviceAccountName": ctx.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [rendered({"volumeMounts": all_mounts, **container})],
            **({"initContainers": [rendered(before) for before in init_containers]} if init_containers else {}),
            "volumes": all_volumes,
        },
    }
    merged = merge_template(base, overlay, field=f"spec.{component}.podTemplate")
    names = {"containers": [container["name"]], "initContainers": [before["name"] for before in init_containers]}
    check(ctx, component, overlay, containers=names)
    # Selectors match these labels: an overlay may add labels but not remove a pod from its owner.
    metadata = merged.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **identity}
    return merged


_UNITS = {"": 1, **{f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGTPE", 1)}} | {
    unit: 10 ** (3 * power) for power, unit in enumerate("kMGTPE", 1)
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]{0,2})")


def quantity_bytes(quantity: object) -> float:
    """Return the bytes of a Kubernetes quantity; infinity for an unknown notation."""
    found = _QUANTITY.fullmatch(str(quantity))
    return float(found[1]) * _UNITS[found[2]] if found is not None and found[2] in _UNITS else math.inf


def bounded_memory(
    overlay: dict[str, Any] | None, container: str, *, cpu: str, request: str, limit: str
) -> dict[str, Any]:
    """Return the resources of a container with a memory limit, which protects other pods on its node.

    A memory limit of the podTemplate, or a request above `limit`, replaces `limit`.
    """
    requests = {"cpu": cpu, "memory": request}
    spec = (overlay or {}).get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    for entry in containers if isinstance(containers, list) else ():
        resources = entry.get("resources") if isinstance(entry, dict) and entry.get("name") == container else None
        if not isinstance(resources, dict):
            continue
        limits, asked = resources.get("limits"), resources.get("requests")
        if isinstance(limits, dict) and limits.get("memory") is not None:
            return {"requests": requests}
        if isinstance(asked, dict) and quantity_bytes(asked.get("memory") or "0") > quantity_bytes(limit):
            return {"requests": requests}
    return {"requests": requests, "limits": {"memory": limit}}


def keys_args(ctx: RenderContext) -> list[str]:
    return ["--keys-dir", KEYS_DIR] if ctx.settings.security else []


def http_probe(path: str, **timing: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT_HEALTH}, "timeoutSeconds": 3, **timing}


def anti_affinity(own: dict[str, str], other: dict[str, str] | None = None) -> dict[str, Any]:
    """Return an affinity that prefers nodes without pods of these labels.

    own:   of the replicas of the component itself.
    other: of a component that must not be lost with it. Its pods count more: a pod of the component itself may be
           terminating on the node on which its successor is wanted.
    """
    weighted = [
        {"weight": weight, "podAffinityTerm": {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": match}}}
        for weight, match in ((50, own), (100, other))
        if match is not None
    ]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}
