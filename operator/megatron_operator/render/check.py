"""The pod `NAME-check-REVISION`, which runs `megatron engine --check` with the settings of a new revision.

The pod reads the metadata of the model and validates the settings before any engine is drained for the revision. It
loads no weights and needs no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.render.context import Manifest, RenderContext, child, seal
from megatron_operator.render.engine import (
    KUEUE,
    engine_revision,
    engine_statefulset,
    has_placeholder,
    volumes_of_one_engine,
)
from megatron_operator.render.pod import quantity_bytes
from megatron_operator.resource.names import CHECK, ENGINE, LABEL_COMPONENT, LABEL_ENGINE, LABEL_WEIGHTS, PREFLIGHT

_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
_MEMORY_LIMIT = "4Gi"
"""Memory limit of the pod, unless engines have a lower limit. Importing vLLM takes 2 GiB."""
_GRACE_SECONDS = 5
_POD_FIELDS_OF_ENGINES = frozenset(
    {"affinity", "containers", "initContainers", "resourceClaims", "resources", "topologySpreadConstraints"}
)
"""Fields that are not copied unchanged from the template of engines."""
_CONTAINER_FIELDS_OF_ENGINES = frozenset(
    {"lifecycle", "livenessProbe", "ports", "readinessProbe", "resizePolicy", "resources", "startupProbe"}
)
_HOST_RESOURCES = ("cpu", "memory", "ephemeral-storage", "hugepages-")


def check_pod_name(ctx: RenderContext, revision: str) -> str:
    return f"{ctx.name}-{CHECK}-{revision}"


def check_pod(ctx: RenderContext) -> Manifest:
    """Return the pod that checks whether the engines of the spec can start.

    The pod has the image, environment, volumes, node selection, security context and init containers of an engine's
    pod. Engines may occupy all GPUs of the nodes that it needs, so it requests no GPUs and has no affinity to other
    pods. A claim of one engine may be mounted on another node, so the pod has an empty volume instead of such a claim.

    Raises:
        RenderError: the spec cannot be rendered.
    """
    ctx = ctx.of_role(ctx.role)
    engine = engine_statefulset(ctx, 0, pods=0)
    template, revision = engine["spec"]["template"], engine_revision(engine)
    pod = template["spec"]
    before = [entry for entry in pod.get("initContainers") or () if entry["name"] != PREFLIGHT]
    nodes = (pod.get("affinity") or {}).get("nodeAffinity")
    of_engine = volumes_of_one_engine(ctx)
    volumes = [{"name": each["name"], "emptyDir": {}} if each["name"] in of_engine else each for each in pod["volumes"]]
    spec = {
        **{key: value for key, value in pod.items() if key not in _POD_FIELDS_OF_ENGINES},
        "volumes": volumes,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [_container(entry) for entry in pod["containers"] if entry["name"] == ENGINE],
        **({"initContainers": before} if before else {}),
        **({"affinity": {"nodeAffinity": nodes}} if nodes else {}),
    }
    manifest = child(ctx, "Pod", check_pod_name(ctx, revision), component=CHECK, spec=spec)
    metadata, copied = manifest["metadata"], template["metadata"]
    of_engines = (LABEL_COMPONENT, LABEL_ENGINE, LABEL_WEIGHTS)
    grouping = _grouping_keys(ctx)
    labels = {key: value for key, value in copied["labels"].items() if key not in (*of_engines, *grouping)}
    metadata["labels"] = {**labels, **metadata["labels"]}
    annotations = {key: value for key, value in (copied.get("annotations") or {}).items() if key not in grouping}
    if annotations:
        metadata["annotations"] = annotations
    return seal(manifest)


def _grouping_keys(ctx: RenderContext) -> set[str]:
    """Return the keys of the engine's pod labels and annotations that the check pod must not copy.

    Keys of Kueue are not copied, because the queue may have quota only for GPUs. Keys whose value contains a
    placeholder for an engine are not copied, because the check pod belongs to no engine.
    """
    metadata = (ctx.spec.engine.pod_template or {}).get("metadata") or {}
    found = [*(metadata.get("labels") or {}).items(), *(metadata.get("annotations") or {}).items()]
    return {key for key, value in found if key.startswith(KUEUE) or has_placeholder(value)}


def _container(engine: Mapping[str, Any]) -> dict[str, Any]:
    resources = engine.get("resources") or {}
    limits = resources.get("limits") or {}
    memory = str(limits.get("memory") or _MEMORY_LIMIT)
    if quantity_bytes(memory) > quantity_bytes(_MEMORY_LIMIT):
        memory = _MEMORY_LIMIT
    requested = min(_REQUESTS["memory"], memory, key=quantity_bytes)
    # A quota may demand a limit of CPUs, and the number of threads is read from it.
    cpus = {"cpu": limits["cpu"]} if "cpu" in limits else {}
    # The check has no GPU, but must know that engines have GPUs. vLLM's image determines the kind of device.
    has_device = {"--device", "--backend"} & {*engine["args"]}
    device = ["--device", "cuda"] if _has_accelerator(resources) and not has_device else []
    return {
        **{key: value for key, value in engine.items() if key not in _CONTAINER_FIELDS_OF_ENGINES},
        "args": [*engine["args"], *device, "--check"],
        "resources": {"requests": {**_REQUESTS, "memory": requested}, "limits": {**cpus, "memory": memory}},
    }


def _has_accelerator(resources: Mapping[str, Any]) -> bool:
    named = [*(resources.get("limits") or {}), *(resources.get("requests") or {})]
    return bool(resources.get("claims")) or any(not name.startswith(_HOST_RESOURCES) for name in named)
