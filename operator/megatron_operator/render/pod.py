"""Parts that all pods share: the restricted profile, writable volumes, environment, keys, probes, and the podTemplate.

ConfigMap `NAME-config-HASH` has the environment of all containers. The name of the ConfigMap has the hash of its
content, so a changed content reaches a pod only when the pod's template changes.
"""

from __future__ import annotations

import math
import re
from typing import Any

from megatron_operator.render.context import (
    InvalidPodTemplate,
    Manifest,
    RenderContext,
    child,
    digest,
    labels,
    literal_args,
    once,
    seal,
)
from megatron_operator.render.options import Option
from megatron_operator.render.pod_policy import enforce
from megatron_operator.resource.names import GROUP, PORT_HEALTH

USER = 65532
KEYS_DIR = "/etc/megatron/keys"
CACHE_DIR = "/cache"
MODEL_DIR = "/model"
MODEL_CACHE_DIR = "/model-cache"
HOSTNAME = "kubernetes.io/hostname"
_FIXED_IDS = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
"""Security context of containers, for the profile `restricted` of the Pod Security Standards."""


def pod_security(ctx: RenderContext) -> dict[str, Any]:
    """Return the security context of a pod.

    On OpenShift, the context has no user and group IDs, because OpenShift assigns the IDs of the namespace to the pod.
    """
    return {
        "runAsNonRoot": True,
        **({} if ctx.settings.openshift else _FIXED_IDS),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def secret_volume(ctx: RenderContext, name: str, *, secret: str, items: list[dict[str, str]]) -> dict[str, Any]:
    """Return a volume with entries of a Secret. Only the containers that mount the volume can read it.

    The files have mode 0440, and the pod's `fsGroup` lets the container's user read them. On OpenShift, the operator
    sets no `fsGroup`. If the security context constraint (SCC) sets none either, as anyuid does, the files belong to
    group root, and the process is not in this group. On OpenShift, the files therefore have mode 0444.
    """
    mode = 0o444 if ctx.settings.openshift else 0o440
    return {"name": name, "secret": {"secretName": secret, "defaultMode": mode, "items": items}}


def config_data(ctx: RenderContext) -> dict[str, str]:
    """Return the environment variables of all containers. They place caches on the pod's writable cache volume."""
    # The default is left out, so that no pod of a resource that an earlier release rendered is restarted.
    log_format = ctx.settings.runtime_log_format
    logs = {} if log_format == "text" else {"MEGATRON_LOG_FORMAT": log_format}
    return {
        **logs,
        "HOME": "/tmp",
        "HF_HOME": "/cache/huggingface",
        "TRITON_CACHE_DIR": "/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "XDG_CACHE_HOME": "/cache",
        "MEGATRON_RESOURCE": f"{ctx.namespace}/{ctx.name}",
        "PYTHONUNBUFFERED": "1",
    }


@once
def config_name(ctx: RenderContext) -> str:
    return f"{ctx.name}-config-{digest(config_data(ctx))}"


def config_map(ctx: RenderContext) -> Manifest:
    return seal(child(ctx, "ConfigMap", config_name(ctx), immutable=True, data=config_data(ctx)))


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
    claims: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """Return the pod template of a component, with the podTemplate of the spec merged into it.

    Args:
        container: name, args, env, ports, probes and resources of the container. The kubelet expands nothing in args
            except the operator's own `$(MEGATRON_THREADS)`.
        init_containers: the same fields of the init containers.
        claims: ResourceClaims of the pod.
        grace_seconds: time from SIGTERM to SIGKILL.
        keys: entries of the keys Secret that this component mounts.
        overlay: the component's `podTemplate`.

    Raises:
        InvalidPodTemplate: the podTemplate is not a valid pod template.
        NotAllowed: the operator's pod policy does not allow the podTemplate.
    """
    settings = ctx.settings
    identity = {**labels(ctx, component), **(extra_labels or {})}
    all_volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}, *volumes]
    all_mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": CACHE_DIR}, *mounts]
    if settings.security:
        items = [{"key": key, "path": key} for key in keys]
        all_volumes.append(secret_volume(ctx, "keys", secret=ctx.keys_name, items=items))
        all_mounts.append({"name": "keys", "mountPath": KEYS_DIR, "readOnly": True})
    frame = {
        "image": settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "envFrom": [{"configMapRef": {"name": config_name(ctx)}}],
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }

    def rendered(fields: dict[str, Any]) -> dict[str, Any]:
        return {**frame, **fields, "args": literal_args(fields["args"])}

    base = {
        "metadata": {"labels": identity},
        "spec": {
            "serviceAccountName": ctx.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": pod_security(ctx),
            "containers": [rendered({"volumeMounts": all_mounts, **container})],
            **({"initContainers": [rendered(before) for before in init_containers]} if init_containers else {}),
            **({"resourceClaims": list(claims)} if claims else {}),
            "volumes": all_volumes,
        },
    }
    merged = merge_template(base, overlay, field=ctx.template_field(component))
    names = {"containers": [container["name"]], "initContainers": [before["name"] for before in init_containers]}
    enforce(ctx, component, overlay, containers=names)
    # Selectors match these labels. An overlay may add labels but not remove a pod from its owner. The policy rejects
    # such an overlay, but not one that was recorded earlier.
    metadata = merged.setdefault("metadata", {})
    added = metadata.get("labels") or {}
    metadata["labels"] = {**{key: added[key] for key in added if not key.startswith(f"{GROUP}/")}, **identity}
    return merged


_UNITS = {"": 1, **{f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGTPE", 1)}} | {
    unit: 10 ** (3 * power) for power, unit in enumerate("kMGTPE", 1)
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]{0,2})")


def quantity_bytes(quantity: object) -> float:
    """Return the number of bytes of a Kubernetes quantity, or infinity for an unknown notation."""
    found = _QUANTITY.fullmatch(str(quantity))
    return float(found[1]) * _UNITS[found[2]] if found is not None and found[2] in _UNITS else math.inf


def bounded_memory(
    overlay: dict[str, Any] | None, container: str, *, cpu: str, request: str, limit: str
) -> dict[str, Any]:
    """Return the resources of a container with the memory limit `limit`, which protects other pods on its node.

    If the podTemplate sets a memory limit, or a memory request above `limit`, the result has no memory limit.
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


KEYS_DIR_OPTION = Option("--keys-dir", lambda ctx, _: KEYS_DIR if ctx.settings.security else None)


def trainer_keys(ctx: RenderContext) -> tuple[str, ...]:
    """Return the names of the keys Secret's entries by which coordinator and engines identify the trainer.

    Returns an empty tuple if the resource has no trainer.
    """
    return ("trainer.pub",) if ctx.spec.has_trainer else ()


def http_probe(path: str, **timing: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PORT_HEALTH}, "timeoutSeconds": 3, **timing}


def anti_affinity(own: dict[str, str], other: dict[str, str] | None = None) -> dict[str, Any]:
    """Return an affinity that prefers nodes that run no pods with the labels `own` or `other`.

    own:   labels of the component's own pods.
    other: labels of another component's pods, which must not be lost together with the component's own pods. They have
           a higher weight than `own`, because a terminating pod of the component may be on the best node for its
           successor.
    """
    weighted = [
        {"weight": weight, "podAffinityTerm": {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": match}}}
        for weight, match in ((50, own), (100, other))
        if match is not None
    ]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}


MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "claims": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Lists of objects that are merged by a key. All other lists are replaced."""


def merge_template(base: dict[str, Any], overlay: dict[str, Any] | None, *, field: str) -> dict[str, Any]:
    """Return the pod template `base` with `overlay` merged into it, as `kubectl patch --type strategic` does.

    Objects are merged, and lists of objects are merged by a key (MERGE_KEYS). null removes a field. All other values
    replace the old value. A volume has one source, so a volume with another source replaces the rendered volume.

    Args:
        field: path of the overlay in the resource, for messages.

    Raises:
        InvalidPodTemplate: a field has different types in `base` and `overlay`, or an object in a merged list lacks its
            key.
    """
    if overlay is None:
        return base
    unknown = sorted(set(overlay) - {"metadata", "spec"})
    if unknown:
        raise InvalidPodTemplate(f"{field}: unknown field {unknown[0]!r}; a pod template has metadata and spec only")
    return _merge_object(base, overlay, field)


def _merge_object(base: dict[str, Any], overlay: Any, path: str) -> dict[str, Any]:
    if not isinstance(overlay, dict):
        raise InvalidPodTemplate(f"{path}: is {overlay!r}; give an object")
    merged = dict(base)
    for key, value in overlay.items():
        where = f"{path}.{key}"
        if value is None:
            merged.pop(key, None)
        elif key in MERGE_KEYS:
            merged[key] = _merge_keyed(base.get(key, []), value, MERGE_KEYS[key], where)
        elif isinstance(base.get(key), dict):
            merged[key] = _merge_object(base[key], value, where)
        else:
            merged[key] = value
    return merged


def _merge_keyed(base: list[dict[str, Any]], overlay: Any, key: str, path: str) -> list[dict[str, Any]]:
    if not isinstance(overlay, list):
        raise InvalidPodTemplate(f"{path}: is {overlay!r}; give a list")
    merged = list(base)
    for index, entry in enumerate(overlay):
        where = f"{path}[{index}]"
        if not isinstance(entry, dict) or key not in entry:
            raise InvalidPodTemplate(f"{where}: has no {key!r}; entries of this list are merged by it, so set it")
        for position, known in enumerate(merged):
            if known.get(key) == entry[key]:
                if path.endswith(".volumes") and any(entry[field] is not None for field in entry.keys() - known.keys()):
                    known = {key: entry[key]}
                merged[position] = _merge_object(known, entry, where)
                break
        else:
            merged.append(entry)
    return merged
