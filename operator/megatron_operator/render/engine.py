"""StatefulSet `NAME-engine-I`, which is one data-parallel engine. It has one pod for each group of its ranks.

A prefill engine is the StatefulSet `NAME-prefill-I`.

The pods of an engine are replaced together, and only by the operator (OnDelete). The template does not depend on
`desiredState` or `replicas`, so no verb and no scaling ever restarts a pod.

`engine.podTemplate` may contain `$(ENGINE_INDEX)` and `$(ENGINE_NAME)`. A scheduler can then group the pods of one
engine, and each engine can have its own claims. The revision is the digest of the template before the placeholders are
replaced, because the revision must be the same for all engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_operator.render.context import (
    THREADS_ARGUMENT,
    InvalidPodTemplate,
    Manifest,
    RenderContext,
    UnsupportedByBackend,
    child,
    digest,
    once,
    seal,
    selector,
)
from megatron_operator.render.model_source import (
    cache_env,
    cache_mounts,
    cache_volumes,
    fetch_containers,
    model_argument,
    model_env,
    model_hash,
    model_mounts,
    model_volumes,
    weights_revision,
    without_weights,
)
from megatron_operator.render.options import SEQUENCE_LENGTH_OPTION, Option, command_line, of_field
from megatron_operator.render.pod import KEYS_DIR_OPTION, http_probe, pod_template, trainer_keys
from megatron_operator.render.vllm import VLLM_OPTIONS, engine_image, vllm_env
from megatron_operator.resource.accelerator import DEFAULT_RESOURCE, MIG_PREFIX
from megatron_operator.resource.engine import Backend, PrefixEviction
from megatron_operator.resource.names import (
    ANNOTATION_AVOIDED,
    ANNOTATION_MODEL,
    ENGINE,
    LABEL_ENGINE,
    LABEL_POD_INDEX,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_WEIGHTS,
    PORT_ENGINE,
    PORT_HEALTH,
    PORT_KV,
    PORT_RENDEZVOUS,
    PORT_WEIGHTS,
    PREFLIGHT,
)

KEYS = ("engine.key", "engine.pub", "server.pub")
STARTUP_PERIOD_SECONDS = 2
_PREFLIGHT_ENV = ("NODE_RANK", "NNODES", "MASTER_PORT")
_REVISION_FLAG = "--revision"
KUEUE = "kueue.x-k8s.io/"
LABEL_QUEUE = f"{KUEUE}queue-name"
"""Label of Kueue. Kueue groups the pods of a StatefulSet with this label automatically."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_EVICTION = {PrefixEviction.LRU: "lru", PrefixEviction.REF_ZERO: "ref_zero"}
INDEX_PLACEHOLDER, NAME_PLACEHOLDER = "$(ENGINE_INDEX)", "$(ENGINE_NAME)"
_CLAIM = "persistentVolumeClaim"
_PER_ENGINE_FIELDS = frozenset(
    {"affinity", "nodeSelector", "resourceClaims", "schedulingGates", "topologySpreadConstraints"}
)
"""Fields of a pod in which placeholders are replaced. In containers, the kubelet would replace `$(NAME)` by a
variable.
"""
_NCCL_ENV = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "^lo,docker"}
"""Settings of NCCL. NCCL logs failures, and uses any interface that connects to other pods."""


def _device(ctx: RenderContext, _name: str) -> str | None:
    """Return the value of `--device` for engines on GPUs.

    If an engine has this option and no working driver, it exits instead of using the CPU.

    Returns None for vLLM on other accelerators, because each image of vLLM is built for one kind of device.

    Raises:
        UnsupportedByBackend: native engines do not run on the accelerator.
    """
    engine = ctx.spec.engine
    accelerator = engine.accelerator
    if accelerator is None or accelerator.is_nvidia:
        return "cuda" if engine.gpus_per_pod else None
    if engine.backend is Backend.VLLM:
        return None
    if accelerator.resource is not None:
        raise UnsupportedByBackend(
            f"spec.engine.accelerator.resource: is {accelerator.resource!r}, and native engines run on GPUs of NVIDIA; "
            f"use {DEFAULT_RESOURCE} or a MIG profile such as {MIG_PREFIX}1g.10gb, or set spec.engine.backend to VLLM "
            "and spec.engine.vllm.image to an image for this accelerator"
        )
    return "cuda"


def _role(ctx: RenderContext) -> str | None:
    """Return the value of `--role` for engines, or None if the option is omitted."""
    return ctx.role if ctx.role in ctx.roles and ctx.spec.engine.roles is not None else None


OPTIONS = (
    Option("--coordinator", lambda ctx, _: ctx.coordinator_address(PORT_ENGINE)),
    Option("--name", lambda _, name: name),
    Option("--model", lambda ctx, _: model_argument(ctx)),
    Option("--model-hash", lambda ctx, _: model_hash(ctx)),
    of_field("--dtype", "model.dtype", write=str.lower),
    SEQUENCE_LENGTH_OPTION,
    Option("--kv-cache-memory", lambda ctx, _: ctx.spec.kv_cache_memory, "engine.batching.kv_cache_memory"),
    of_field("--block-size-tokens", "engine.batching.block_size_tokens"),
    Option("--health-port", lambda ctx, _: PORT_HEALTH),
    of_field("--drain-seconds", "lifecycle.drain_seconds"),
    Option("--threads", lambda ctx, _: THREADS_ARGUMENT),
    KEYS_DIR_OPTION,
    Option("--weights-port", lambda ctx, _: PORT_WEIGHTS if ctx.spec.has_trainer else None),
    Option("--device", _device),
    of_field("--max-requests", "engine.batching.max_requests"),
    of_field("--max-tokens", "engine.batching.max_tokens"),
    of_field("--no-prefix-caching", "engine.batching.prefix_caching"),
    of_field("--no-chunked-prefill", "engine.batching.chunked_prefill"),
    of_field("--max-prefill-tokens", "engine.batching.max_prefill_tokens"),
    of_field("--format", "model.format", unless_default=True),
    of_field("--kv-cache-mode", "engine.native.kv_cache_mode", write=str.lower, unless_default=True),
    of_field("--prefix-eviction", "engine.native.prefix_eviction", write=_EVICTION.__getitem__, unless_default=True),
    of_field("--step-timeout-seconds", "engine.native.step_timeout_seconds", unless_default=True),
    Option("--role", lambda ctx, _: _role(ctx)),
    Option("--kv-port", lambda ctx, _: PORT_KV if _role(ctx) else None),
    *VLLM_OPTIONS,
)
"""Options of `megatron engine`, except its revision, which is a hash of these options."""


def engine_args(ctx: RenderContext, index: int) -> list[str]:
    """Return the command-line arguments of an engine, except the revision.

    Raises:
        UnsupportedByBackend: the backend does not accept an argument of the spec.
    """
    return command_line("engine", OPTIONS, ctx, ctx.engine_name(index))


def engine_statefulset(ctx: RenderContext, index: int, *, pods: int, avoided: Sequence[str] = ()) -> Manifest:
    """Return the StatefulSet of engine `index` in the role of the context, with `pods` replicas.

    pods: 0, or all of `spec.pods_per_engine`.
    avoided: nodes on which the engine's pods must not run. The revision does not depend on them.
    """
    ctx = ctx.of_role(ctx.role)
    key = "engine", index, pods, *avoided
    return ctx.cached(key, lambda: _statefulset(ctx, index, pods=pods, avoided=avoided))


def _statefulset(ctx: RenderContext, index: int, *, pods: int, avoided: Sequence[str]) -> Manifest:
    template = _template(ctx, index, overlay=_of_engine(ctx, index))
    if avoided:
        template["spec"] = {**template["spec"], "affinity": _without_nodes(template["spec"].get("affinity"), avoided)}
        annotations = template["metadata"].get("annotations") or {}
        template["metadata"]["annotations"] = {**annotations, ANNOTATION_AVOIDED: ",".join(avoided)}
    revision = revision_of(ctx)
    template["metadata"]["labels"][LABEL_REVISION] = revision
    if weights_revision(ctx):
        template["metadata"]["labels"][LABEL_WEIGHTS] = weights_revision(ctx)
    # The template may contain objects of the overlay, so containers are copied, not changed.
    template["spec"] = {**template["spec"], "containers": _with_revision(template["spec"]["containers"], revision)}
    name = ctx.engine_name(index)
    spec = {
        "replicas": pods,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": {**selector(ctx, ENGINE), LABEL_ENGINE: name}},
        "template": template,
        "revisionHistoryLimit": 2,
    }
    manifest = child(ctx, "StatefulSet", name, api_version="apps/v1", component=ENGINE, spec=spec)
    manifest["metadata"]["labels"] = {**manifest["metadata"]["labels"], LABEL_ENGINE: name, **_role_label(ctx)}
    if LABEL_QUEUE in template["metadata"]["labels"]:
        manifest["metadata"]["labels"][LABEL_QUEUE] = template["metadata"]["labels"][LABEL_QUEUE]
    manifest["metadata"]["annotations"] = {ANNOTATION_MODEL: model_hash(ctx)}
    return seal(manifest)


def _role_label(ctx: RenderContext) -> dict[str, str]:
    return {LABEL_ROLE: ctx.role} if _role(ctx) else {}


def _with_revision(containers: list[dict[str, Any]], revision: str) -> list[dict[str, Any]]:
    return [
        {**entry, "args": [*entry.get("args", []), _REVISION_FLAG, revision]} if entry["name"] == ENGINE else entry
        for entry in containers
    ]


def _without_nodes(affinity: Any, nodes: Sequence[str]) -> Any:
    """Return the affinity of a pod, extended by a rule that excludes these nodes."""
    near = (affinity or {}).get("nodeAffinity") or {}
    required = near.get(_REQUIRED) or {}
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    alternatives: list[dict[str, Any]] = required.get("nodeSelectorTerms") or [{}]
    terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *excluded]} for term in alternatives]
    return {**(affinity or {}), "nodeAffinity": {**near, _REQUIRED: {**required, "nodeSelectorTerms": terms}}}


def engine_revision(manifest: Manifest) -> str:
    """Return the revision label of a rendered engine."""
    return str(manifest["spec"]["template"]["metadata"]["labels"][LABEL_REVISION])


@once
def revision_of(ctx: RenderContext) -> str:
    """Return the revision of all engines of a spec: the digest of the pod templates of engine 0 of each role.

    The digest excludes the weights. Weights are updated in place, so new weights do not change the revision, and pods
    that start later load the new weights. All roles have one revision, because only engines of the same revision
    exchange KV.
    """
    if ctx.resource is not None:
        return revision_of(ctx.resource)
    contexts = [ctx.of_role(role) for role in ctx.roles]
    templates = [_template(without_weights(each), 0, overlay=each.spec.engine.pod_template) for each in contexts]
    return digest(templates if len(templates) > 1 else templates[0])


def _template(ctx: RenderContext, index: int, *, overlay: dict[str, Any] | None) -> dict[str, Any]:
    """Return the pod template without the label of the revision.

    overlay: `engine.podTemplate`, with or without placeholders.
    """
    engine, drain = ctx.spec.engine, ctx.spec.lifecycle.drain_seconds
    volumes, mounts = (*model_volumes(ctx), *cache_volumes(ctx)), (*model_mounts(ctx), *cache_mounts(ctx))
    # The processes of an engine exchange data in shared memory. vLLM has several processes even for one rank.
    if ctx.spec.ranks_per_pod > 1 or engine.backend is Backend.VLLM:
        volumes = (*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts = (*mounts, {"name": "shm", "mountPath": "/dev/shm"})
    container: dict[str, Any] = {
        "name": ENGINE,
        "args": engine_args(ctx, index),
        "env": _env(ctx, index),
        "ports": [
            {"name": "health", "containerPort": PORT_HEALTH},
            *([{"name": "kv", "containerPort": PORT_KV}] if _role(ctx) else []),
        ],
        "resources": _resources(ctx),
        "startupProbe": http_probe(
            "/readyz",
            periodSeconds=STARTUP_PERIOD_SECONDS,
            failureThreshold=-(-engine.startup_seconds // STARTUP_PERIOD_SECONDS),
        ),
        "readinessProbe": http_probe("/readyz", periodSeconds=5, failureThreshold=2),
        "livenessProbe": http_probe("/livez", periodSeconds=10, failureThreshold=6),
    }
    preflight = (_preflight(ctx, index),) if ctx.spec.pods_per_engine > 1 else ()
    image = engine_image(ctx)
    if image is not None:
        for each in (container, *preflight):
            each["image"] = image
    template = pod_template(
        ctx,
        ENGINE,
        container=container,
        grace_seconds=drain + 15,
        keys=(*KEYS, *trainer_keys(ctx)),
        overlay=overlay,
        extra_labels={LABEL_ENGINE: ctx.engine_name(index), **_role_label(ctx)},
        volumes=volumes,
        mounts=mounts,
        init_containers=(*fetch_containers(ctx), *preflight),
        claims=_pod_claims(ctx),
    )
    spec = {**_placement(ctx, index), **template["spec"]}
    affinity = _packed(ctx, index, spec.get("affinity") or {})
    template["spec"] = {**spec, **({"affinity": affinity} if affinity else {})}
    return template


def _env(ctx: RenderContext, index: int) -> list[dict[str, Any]]:
    threads = {"resourceFieldRef": {"containerName": ENGINE, "resource": "limits.cpu", "divisor": "1"}}
    env = [{"name": "MEGATRON_THREADS", "valueFrom": threads}, *model_env(ctx), *cache_env(ctx), *vllm_env(ctx)]
    parallelism, name = ctx.spec.parallelism, ctx.engine_name(index)
    if parallelism.ranks == 1:
        return env
    node_rank = {"fieldRef": {"fieldPath": f"metadata.labels['{LABEL_POD_INDEX}']"}}
    fixed = {
        "MASTER_ADDR": f"{name}-0.{name}.{ctx.namespace}.svc",
        "MASTER_PORT": str(PORT_RENDEZVOUS),
        "WORLD_SIZE": str(parallelism.ranks),
        "NNODES": str(ctx.spec.pods_per_engine),
        "NPROC_PER_NODE": str(ctx.spec.ranks_per_pod),
        "TENSOR_PARALLEL_SIZE": str(parallelism.tensor),
        "PIPELINE_PARALLEL_SIZE": str(parallelism.pipeline),
        "EXPERT_PARALLEL_SIZE": str(parallelism.expert),
    }
    if parallelism.is_data_parallel:
        fixed["DATA_PARALLEL_SIZE"] = str(parallelism.data)
    if ctx.spec.engine.gpus_per_pod:
        fixed |= _NCCL_ENV
    env += [{"name": key, "value": value} for key, value in fixed.items()]
    return [*env, {"name": "NODE_RANK", "valueFrom": node_rank}]


def _preflight(ctx: RenderContext, index: int) -> dict[str, Any]:
    """Return the init container that checks the connections between all pods of an engine."""
    name = ctx.engine_name(index)
    return {
        "name": PREFLIGHT,
        "args": ["preflight", "--name", f"{name}-{{node}}.{name}.{ctx.namespace}.svc"],
        "env": [entry for entry in _env(ctx, index) if entry["name"] in _PREFLIGHT_ENV],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    }


def _resources(ctx: RenderContext) -> dict[str, Any]:
    requests = {"cpu": "250m", "memory": "512Mi"}
    engine = ctx.spec.engine
    if not engine.gpus_per_pod:
        return {"requests": requests}
    accelerator = engine.accelerator
    if accelerator is not None and accelerator.claims is not None:
        claims = [claim.model_dump(include={"name", "request"}, exclude_none=True) for claim in accelerator.claims]
        return {"requests": requests, "claims": claims}
    resource = (accelerator.resource if accelerator else None) or DEFAULT_RESOURCE
    return {"requests": requests, "limits": {resource: engine.gpus_per_pod}}


def _pod_claims(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    accelerator = ctx.spec.engine.accelerator
    claims = (accelerator.claims if accelerator else None) or ()
    return tuple(claim.model_dump(exclude={"request"}, exclude_none=True) for claim in claims)


def _placement(ctx: RenderContext, index: int) -> dict[str, Any]:
    """Return the default affinity of engines on GPUs.

    The pods of different engines prefer different nodes. The pods of one engine prefer one zone, because they
    communicate in every layer.
    """
    if not ctx.spec.engine.gpus_per_pod:
        return {}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(selector(ctx, ENGINE))},
    }
    found: dict[str, Any] = {"topologySpreadConstraints": [spread]}
    if ctx.spec.pods_per_engine > 1:
        ours = {"matchLabels": {**selector(ctx, ENGINE), LABEL_ENGINE: ctx.engine_name(index)}}
        term = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": ours}
        near = [{"weight": 100, "podAffinityTerm": term}]
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}
    return found


def _packed(ctx: RenderContext, index: int, affinity: Any) -> Any:
    """Return the affinity extended by the rule of `engine.topology.packBy`.

    With this rule, all pods of the engine run in one topology domain.

    Raises:
        InvalidPodTemplate: the affinity of the podTemplate is not an Affinity.
    """
    topology = ctx.spec.engine.topology
    if topology is None or ctx.spec.pods_per_engine == 1:
        return affinity
    ours = {"matchLabels": {**selector(ctx, ENGINE), LABEL_ENGINE: ctx.engine_name(index)}}
    near = (affinity.get("podAffinity") or {}) if isinstance(affinity, dict) else None
    rules = (near.get(_REQUIRED) or []) if isinstance(near, dict) else None
    if not isinstance(near, dict) or not isinstance(rules, list):
        field = f"{ctx.template_field(ENGINE)}.spec.affinity"
        raise InvalidPodTemplate(f"{field}: is {affinity!r}; give an Affinity, whose podAffinity.{_REQUIRED} is a list")
    rules = [*rules, {"topologyKey": topology.pack_by, "labelSelector": ours}]
    return {**affinity, "podAffinity": {**near, _REQUIRED: rules}}


def _of_engine(ctx: RenderContext, index: int) -> dict[str, Any] | None:
    """Return `engine.podTemplate` with the values of one engine instead of placeholders.

    Returns None if the spec has no `engine.podTemplate`. Placeholders are replaced in labels, annotations, claims of
    volumes and fields that affect placement.
    """
    overlay = ctx.spec.engine.pod_template
    if overlay is None:
        return None
    values = {INDEX_PLACEHOLDER: str(index), NAME_PLACEHOLDER: ctx.engine_name(index)}
    spec = overlay.get("spec")
    filled = {**overlay, **({"metadata": _filled(overlay["metadata"], values)} if "metadata" in overlay else {})}
    if isinstance(spec, dict):
        filled["spec"] = {
            key: _filled(value, values) if key in _PER_ENGINE_FIELDS else value for key, value in spec.items()
        }
        if isinstance(spec.get("volumes"), list):
            filled["spec"]["volumes"] = [_of_claim(volume, values) for volume in spec["volumes"]]
    return filled


def _of_claim(volume: Any, values: dict[str, str]) -> Any:
    """Return the volume with `values` instead of the placeholders in its claim.

    The name of the volume stays unchanged, because the pod policy has checked the mounts of volumes by their names.
    """
    if not isinstance(volume, dict) or _CLAIM not in volume:
        return volume
    return {**volume, _CLAIM: _filled(volume[_CLAIM], values)}


def _filled(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if isinstance(value, str):
        for placeholder, text in values.items():
            value = value.replace(placeholder, text)
    return value


def engines_differ(ctx: RenderContext) -> bool:
    """Return whether the podTemplate of any role has placeholders in its spec.

    If so, the pods of two engines can refer to different objects.
    """
    templates = (ctx.of_role(role).spec.engine.pod_template for role in ctx.roles)
    return any(has_placeholder((template or {}).get("spec")) for template in templates)


def volumes_of_one_engine(ctx: RenderContext) -> set[str]:
    """Return the names of the volumes of `engine.podTemplate` whose claims contain a placeholder."""
    spec = (ctx.spec.engine.pod_template or {}).get("spec") or {}
    return {volume["name"] for volume in spec.get("volumes") or () if has_placeholder(volume.get(_CLAIM))}


def has_placeholder(value: object) -> bool:
    """Return whether a string, or an object that contains strings, contains a placeholder."""
    return INDEX_PLACEHOLDER in str(value) or NAME_PLACEHOLDER in str(value)
