"""The input of all builders of children, and the names, labels and references that children share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar

from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.names import (
    ANNOTATION_HASH,
    ANNOTATION_INPUTS,
    ANNOTATION_RELEASE,
    API_VERSION,
    APP_NAME,
    COORDINATOR,
    DECODE,
    ENGINE,
    FIELD_MANAGER,
    KIND,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_POD_INDEX,
    LABEL_ROLE,
    PREFILL,
    STANDBY,
)
from megatron_operator.resource.release import Release
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import MegatronInferenceSpec
from megatron_runtime.protocol import strict_json as json

Manifest = dict[str, Any]
T = TypeVar("T")

MODEL_CACHE = "model-cache"
"""Name of the volume for spec.model.cache."""

PORT_HUB = 443
PORT_PLAIN_HTTP = 80
PORTS_DNS = (53, 5353)
"""Ports of cluster DNS Services, and of OpenShift's DNS pods."""


class RenderError(ValueError):
    """The spec cannot be rendered. The message names the field, the value and the remedy."""

    reason: ClassVar[Reason]
    """Reason of the resource's conditions."""


class InvalidPodTemplate(RenderError):
    """The podTemplate cannot be merged into the rendered pod template."""

    reason = Reason.INVALID_POD_TEMPLATE


class NotAllowed(RenderError):
    """The operator's pod policy does not allow the spec."""

    reason = Reason.NOT_ALLOWED


class UnsupportedByBackend(RenderError):
    """The backend of the engines cannot run the spec."""

    reason = Reason.UNSUPPORTED_BY_BACKEND


@dataclass(frozen=True, slots=True)
class RenderContext:
    """The facts about a custom resource on which its children depend."""

    name: str
    namespace: str
    uid: str
    spec: MegatronInferenceSpec
    settings: Settings
    server_key: int = 1
    """Generation of the coordinator's own key. The coordinator reads the key at its start, so a new key restarts it."""
    former_scheme: str = ""
    """Scheme of servers that still exist from an earlier spec, if it differs from the scheme of the spec."""
    former_downloads: bool = False
    """Whether pods of an earlier revision of the engines may download their model."""
    role: str = DECODE
    """Role of the engines that are rendered. Engines of a spec without roles are rendered as decode engines."""
    resource: RenderContext | None = field(default=None, repr=False, compare=False)
    """The context from which `of_role` made this context, with the spec as it is stored."""
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `once`, `cached` and `of_role`."""

    def of_role(self, role: str) -> RenderContext:
        """Return the context for the engines of a role. Its spec includes the overrides of the role."""
        whole = self.resource or self
        if role == DECODE and whole.spec.engine.roles is None:
            return whole
        if role not in whole.known:
            spec = whole.spec.model_copy(update={"engine": whole.spec.engine.of_role(role)})
            whole.known[role] = replace(whole, spec=spec, role=role, resource=whole)
        found: RenderContext = whole.known[role]
        return found

    def cached(self, key: tuple[Any, ...], work: Callable[[], T]) -> T:
        """Return the result of `work`, which depends only on this context and on `key`. The result is not changed."""
        if key not in self.known:
            self.known[key] = work()
        found: T = self.known[key]
        return found

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the engines that the spec defines."""
        return (DECODE,) if self.spec.engine.roles is None else (DECODE, PREFILL)

    def template_field(self, component: str) -> str:
        """Return the path of the podTemplate of a component, for messages."""
        roles = self.spec.engine.roles
        own = getattr(roles, self.role) if component == ENGINE and roles is not None else None
        section = f"engine.roles.{self.role}" if own is not None and own.pod_template is not None else component
        return f"spec.{section}.podTemplate"

    @property
    def coordinator_name(self) -> str:
        return f"{self.name}-coordinator"

    @property
    def standby_name(self) -> str:
        """Name of the second coordinator of a pair."""
        return f"{self.name}-standby"

    @property
    def has_standby(self) -> bool:
        return self.spec.coordinator.replicas > 1

    @property
    def server_name(self) -> str:
        return f"{self.name}-server"

    @property
    def keys_name(self) -> str:
        return f"{self.name}-keys"

    @property
    def engines_name(self) -> str:
        """Name of the objects that all engines share."""
        return f"{self.name}-engines"

    @property
    def prefill_name(self) -> str:
        """Name of the objects that all prefill engines share."""
        return f"{self.name}-prefill"

    def engine_name(self, index: int) -> str:
        """Return the name of the engine with this index and the role of this context."""
        return f"{self.name}-engine-{index}" if self.role == DECODE else f"{self.prefill_name}-{index}"

    @property
    def model_name(self) -> str:
        return self.spec.model.name or self.name

    @property
    def scheme(self) -> str:
        """URL scheme of the servers (`http` or `https`), which is also the name of their port."""
        return "http" if self.spec.server.tls is None else "https"

    @property
    def endpoint(self) -> str:
        """Base URL of the OpenAI API inside the cluster."""
        return f"{self.scheme}://{self.name}.{self.namespace}.svc/v1"

    def coordinator_address(self, port: int) -> str:
        return f"tcp://{self.coordinator_name}.{self.namespace}.svc:{port}"


RECENT_CONTEXTS = 16
"""Number of contexts that `recent` keeps. A resource that changes is rendered many times within seconds."""
_recent: OrderedDict[str, tuple[str, RenderContext]] = OrderedDict()
"""The most recently used context of each resource by UID, the newest last, with the JSON of its spec."""


def recent(ctx: RenderContext) -> RenderContext:
    """Return the equal context of an earlier pass, with everything that was rendered from it; otherwise `ctx`."""
    try:
        spec = ctx.spec.model_dump_json()  # 1, 1.0 and true are equal, and differ in a manifest
    except ValueError:  # text that is not valid Unicode
        return ctx
    found = _recent.pop(ctx.uid, None)
    if found is None or found[0] != spec or replace(found[1], spec=ctx.spec) != ctx:
        found = spec, ctx
    _recent[ctx.uid] = found
    if len(_recent) > RECENT_CONTEXTS:
        _recent.popitem(last=False)
    return found[1]


def release_annotations(ctx: RenderContext, inputs: Any) -> dict[str, str]:
    """Return the annotations of a Deployment that record its release and the spec fields that its pod template uses.

    An operator of another release renders the template differently, and needs these annotations to know whether the
    spec has changed.

    inputs: the spec fields that the pod template uses. Fields with their defaults are omitted, because a later operator
            may have further fields.
    """
    release = Release.of(ctx.settings, ctx.spec.engine.backend)
    return {ANNOTATION_RELEASE: release.to_annotation(), ANNOTATION_INPUTS: digest([ctx.settings.security, inputs])}


def once(work: Callable[[RenderContext], T]) -> Callable[[RenderContext], T]:
    """Return a function that caches the result of `work` in the context, because many children share the same parts."""

    @wraps(work)
    def worked_out(ctx: RenderContext) -> T:
        if work not in ctx.known:
            ctx.known[work] = work(ctx)
        found: T = ctx.known[work]
        return found

    return worked_out


def selector(ctx: RenderContext, component: str) -> dict[str, str]:
    """Return the labels by which the pods of one component of this resource are selected."""
    return {LABEL_NAME: APP_NAME, LABEL_INSTANCE: ctx.name, LABEL_COMPONENT: component}


def pods_of(ctx: RenderContext, *components: str) -> dict[str, Any]:
    """Return the label selector of the pods of several components of this resource."""
    others = {LABEL_NAME: APP_NAME, LABEL_INSTANCE: ctx.name}
    either = {"key": LABEL_COMPONENT, "operator": "In", "values": list(components)}
    return {"matchLabels": others, "matchExpressions": [either]}


def decode_pods(ctx: RenderContext) -> dict[str, Any]:
    """Return the label selector of the pods of the engines that spec.replicas counts.

    Pods that were created before the spec had roles have no role label. The selector also matches these pods.
    """
    others: dict[str, Any] = {"matchLabels": selector(ctx, ENGINE)}
    if PREFILL in ctx.roles:
        others["matchExpressions"] = [{"key": LABEL_ROLE, "operator": "NotIn", "values": [PREFILL]}]
    return others


def coordinator_pods(ctx: RenderContext) -> dict[str, Any]:
    """Return the label selector of the coordinator's pods, including the standby's pods."""
    return pods_of(ctx, COORDINATOR, STANDBY) if ctx.has_standby else {"matchLabels": selector(ctx, COORDINATOR)}


def labels(ctx: RenderContext, component: str | None = None) -> dict[str, str]:
    """Return the labels of a child."""
    found = {LABEL_NAME: APP_NAME, LABEL_INSTANCE: ctx.name, LABEL_MANAGED_BY: FIELD_MANAGER}
    if component is not None:
        found[LABEL_COMPONENT] = component
    return found


def scale_selector(ctx: RenderContext) -> str:
    """Return the selector of the scale subresource, which matches one pod of each engine that spec.replicas counts.

    The selector uses no !=, because the API server does not accept it here.
    """
    wanted = {**selector(ctx, ENGINE), LABEL_POD_INDEX: "0"}
    parts = [f"{key}={value}" for key, value in sorted(wanted.items())]
    return ",".join([*parts, *([f"{LABEL_ROLE} notin ({PREFILL})"] if PREFILL in ctx.roles else [])])


def owner_reference(ctx: RenderContext) -> dict[str, Any]:
    """Return the owner reference from a child to its resource."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": ctx.name,
        "uid": ctx.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def child(
    ctx: RenderContext, kind: str, name: str, *, api_version: str = "v1", component: str | None = None, **body: Any
) -> Manifest:
    """Return the manifest of a child with its identity, its labels, an owner reference and the fields in `body`.

    The owner reference never blocks the deletion of the resource.
    """
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": ctx.namespace,
            "labels": labels(ctx, component),
            "ownerReferences": [owner_reference(ctx)],
        },
        **body,
    }


THREADS_ARGUMENT = "$(MEGATRON_THREADS)"
"""The only argument that the kubelet replaces by a variable."""


def literal_args(args: Sequence[str]) -> list[str]:
    """Return container arguments, escaped so that the kubelet passes them on unchanged.

    Without the escape, the kubelet replaces `$(NAME)` by the value of a variable. The value may come from a Secret, and
    an error of the process could quote it.
    """
    return [arg if arg == THREADS_ARGUMENT else arg.replace("$", "$$") for arg in args]


def digest(value: Any, *, length: int = 10) -> str:
    """Return a short hash of plain data. The hash is the same in every process."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:length]


def seal(manifest: Manifest) -> Manifest:
    """Return the manifest with an annotation that contains the hash of the manifest.

    The hash excludes the replicas of a StatefulSet, because they depend on the lifecycle and not on the spec.
    """
    hashed = manifest
    if manifest["kind"] == "StatefulSet":
        hashed = {**manifest, "spec": {key: value for key, value in manifest["spec"].items() if key != "replicas"}}
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_HASH: digest(hashed, length=16)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
