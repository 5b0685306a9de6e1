"""The desired children of a World's resource, and the API server's rejections of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_operator.decision.causes import MALFORMED_OBJECT
from megatron_operator.decision.diagnosis import MissingObject, References, pod_template
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.references import CLAIM, PodReference, pod_references
from megatron_operator.decision.restarts import avoided_in
from megatron_operator.decision.world import ANY_KEY, ApplyRejection, ChildRef, Manifest, World, manifest_hash
from megatron_operator.render import revision as revision_render
from megatron_operator.render.children import other_children, plain_children
from megatron_operator.render.context import RenderContext, RenderError, digest
from megatron_operator.render.engine import engine_statefulset, engines_differ
from megatron_operator.render.front_door import HTTP_ROUTE, INFERENCE_POOL
from megatron_operator.render.guards import engine_policy
from megatron_operator.resource.conditions import Finding, Reason
from megatron_operator.resource.names import DECODE, ENGINE, LABEL_COMPONENT, LABEL_ROLE, SERVER

APPS = "apps/v1"
REJECTION_RETRY_SECONDS = 15
"""Interval at which a rejected child is applied again, because quotas and admission rules change without an event."""


@dataclass(frozen=True)
class Rendered:
    """The rendered children of a World's resource. Each manifest is rendered at most once.

    ctx:        render context with the current weights of the engines.
    model_hash: hash of the model of the spec.
    references: the objects that the fields of the spec name.
    """

    world: World
    ctx: RenderContext
    model_hash: str
    references: References

    @cached_property
    def shared(self) -> tuple[list[Manifest], dict[str, Finding]]:
        """The manifests of the children that all engines share, and the errors of children that cannot be rendered.

        The keys of the errors are the names of the children. If a child cannot be rendered, the operator leaves the
        existing child unchanged.
        """
        manifests, findings = [*plain_children(self.ctx)], {}
        server = self.ctx.server_name
        builds = other_children(self.ctx) | {server: other_children(self._server_ctx)[server]}
        for name, build in builds.items():
            try:
                manifests.append(build())
            except RenderError as error:
                findings[name] = _finding(error)
        return manifests, findings

    @cached_property
    def engine_policies(self) -> tuple[Manifest, ...]:
        """The NetworkPolicies of the desired engines."""
        contexts = [self.ctx.of_role(role) for role in self.ctx.roles]
        return tuple(engine_policy(ctx, index) for ctx in contexts for index in range(ctx.spec.engines_of(ctx.role)))

    @cached_property
    def front_door_waits(self) -> bool:
        """Whether the operator must not change the objects by which clients reach the servers.

        This is the case while existing servers differ from the spec in scheme or model name, and no server that matches
        the spec is ready.
        """
        wanted = (self.ctx.scheme, self.ctx.model_name)

        def differs(offer: tuple[str, str]) -> bool:
            return any(part not in ("", own) for part, own in zip(offer, wanted, strict=True))

        servers = self.world.component_pods(SERVER)
        if any(pod.ready and not pod.deleting and not differs(pod.offer) for pod in servers):
            return False
        return any(differs(offer) for offer in _offers(self.world))

    def missing(self, manifest: Manifest) -> Finding | None:
        """Return an error if the pods of a manifest need an object, or a key of an object, that does not exist.

        Returns None if nothing is missing.
        """
        labels, name = manifest["metadata"]["labels"], manifest["metadata"]["name"]
        component, role = labels[LABEL_COMPONENT], labels.get(LABEL_ROLE, DECODE)
        index = int(name.rpartition("-")[2]) if component == ENGINE and engines_differ(self.ctx) else 0
        key = component, role, index
        if key not in self._missing:
            whole = self.engine_manifest(index, role=role) if component == ENGINE else manifest
            self._missing[key] = None if whole is None else self._first_missing(whole, component)
        return self._missing[key]

    @cached_property
    def _missing(self) -> dict[tuple[str, str, int], Finding | None]:
        return {}

    def _first_missing(self, manifest: Manifest, component: str) -> Finding | None:
        for reference in self._references_of(manifest):
            ref, named = reference.ref, (reference.ref.kind.lower(), reference.ref.name)
            if (reference.optional and named not in self.references) or ref not in self.world.objects:
                continue
            keys = self.world.objects[ref]
            key = "" if reference.optional or keys is None else reference.key
            if keys is not None and (not key or key in keys or ANY_KEY in keys):
                continue
            reason = Reason.VOLUME_MISSING if ref.kind == CLAIM else Reason.CONTAINER_CONFIG_ERROR
            field = self.references.get(named, pod_template(component))
            what = f"has no key {key}, or an empty one" if key else "does not exist"
            remedy = MissingObject(*named, key).remedy(self.references, component=component)
            return reason, f"{field}: {ref} {what}; {remedy}"
        return None

    @cached_property
    def workloads(self) -> list[Manifest]:
        """The desired Deployments and StatefulSets. Their pods refer to all objects that the spec names.

        If all engines of a role refer to the same objects, the list has only the first engine of the role.
        """
        found: list[Manifest | None] = [manifest for manifest in self.shared[0] if manifest["kind"] == "Deployment"]
        for role in self.ctx.roles:
            count = self.ctx.spec.engines_of(role)
            indexes = range(count if engines_differ(self.ctx) else min(1, count))
            found += [self.engine_manifest(index, role=role) for index in indexes]
        return [manifest for manifest in found if manifest is not None]

    @cached_property
    def named_objects(self) -> frozenset[ChildRef]:
        """The objects that the pods of the resource need and that the operator does not create."""
        return frozenset(each.ref for manifest in self.workloads for each in self._references_of(manifest))

    def _references_of(self, manifest: Manifest) -> list[PodReference]:
        key = "references", manifest_hash(manifest)
        return self.ctx.cached(key, lambda: pod_references(self.ctx, manifest))

    @property
    def server(self) -> Manifest | None:
        """The Deployment of the OpenAI servers, or None if it cannot be rendered."""
        return self._deployment(self.ctx.server_name)

    @property
    def standby(self) -> Manifest | None:
        """The Deployment of the second coordinator.

        The value is None if the spec has no second coordinator, or if the Deployment cannot be rendered.
        """
        return self._deployment(self.ctx.standby_name)

    def _deployment(self, named: str) -> Manifest | None:
        manifests, _ = self.shared
        name = ("Deployment", named)
        return next((each for each in manifests if (each["kind"], each["metadata"]["name"]) == name), None)

    @cached_property
    def _server_ctx(self) -> RenderContext:
        """The render context of the OpenAI servers.

        Its weights revision is the revision with which the running servers were started, unless the model has changed.
        New weights therefore do not change the pod template of running servers.
        """
        pods = [pod for pod in self.world.pods if pod.component == SERVER and pod.ready and not pod.deleting]
        view = self.world.children.get(ChildRef("Deployment", self.ctx.server_name, APPS))
        weights = self.ctx.spec.weights
        if weights is None or weights.revision is None:
            return self.ctx
        if not pods or view is None or view.model_hash != self.model_hash:
            return self.ctx
        started = weights.model_copy(update={"revision": pods[-1].weights or weights.revision})
        return replace(self.ctx, spec=self.ctx.spec.model_copy(update={"weights": started}))

    def engine_manifest(self, index: int, *, role: str = DECODE, pods: int | None = None) -> Manifest | None:
        """Return the StatefulSet of an engine, or None if it cannot be rendered.

        pods: number of pods; None means all pods of an engine. With 0, the StatefulSet can also be rendered if the
              podTemplate is invalid.
        """
        count = self.ctx.spec.pods_per_engine if pods is None else pods
        key = role, index, count
        if key not in self._engine_manifests:
            self._engine_manifests[key] = self._render_engine(*key)
        return self._engine_manifests[key]

    @cached_property
    def _engine_manifests(self) -> dict[tuple[str, int, int], Manifest | None]:
        return {}

    def avoided(self, name: str) -> tuple[str, ...]:
        """Return the nodes that the pods of an engine avoid, because a device failed on them."""
        return avoided_in(self.world.resource.engine_status(name), self.world.now).get("avoided", ())

    def own_manifest(self, engine: EngineView, *, pods: int) -> Manifest | None:
        """Return the manifest of an engine with its current revision, rendered from the revision's recorded inputs.

        Returns None if the inputs are unknown, or if this operator renders them to another revision. The caller then
        leaves the engine unchanged.

        pods: 0 for a StatefulSet without pods. Any other value stands for all pods of the revision.
        """
        found = engine.statefulset
        entries = self.world.resource.status.get("engines") or ()
        before = next((entry.get("revision", "") for entry in entries if entry["name"] == engine.name), "")
        return self.recorded_manifest(engine, found.revision if found is not None else before, pods=pods)

    def recorded_manifest(self, engine: EngineView, revision: str, *, pods: int) -> Manifest | None:
        """Return the manifest of an engine with the revision `revision`, rendered from the revision's recorded inputs.

        Returns None if the inputs are unknown, if this operator renders them to another revision, or if the revision
        has no engines of the role of `engine`.

        pods: 0 for a StatefulSet without pods. Any other value stands for all pods of the revision.
        """
        stored = self._stored_context(revision)
        if stored is None or engine.role not in stored.roles:
            return None
        count = stored.spec.pods_per_engine if pods else 0
        ctx = stored.of_role(engine.role)
        return engine_statefulset(ctx, engine.index, pods=count, avoided=self.avoided(engine.name))

    def is_recorded(self, revision: str) -> bool:
        """Return whether the inputs of a revision are recorded and still produce the same revision when rendered."""
        return self._stored_context(revision) is not None

    def _stored_context(self, revision: str) -> RenderContext | None:
        if revision not in self._stored_contexts:
            ref = ChildRef(revision_render.KIND, revision_render.revision_name(self.ctx, revision), APPS)
            view = self.world.children.get(ref)
            usable = view is not None and view.owned and view.data is not None
            data = view.data if view is not None and usable else None
            self._stored_contexts[revision] = None if data is None else self._recorded_context(revision, data)
        return self._stored_contexts[revision]

    def _recorded_context(self, revision: str, data: Mapping[str, Any]) -> RenderContext | None:
        key = "revision", revision, digest(data)
        return self.ctx.cached(key, lambda: revision_render.context_of(self.ctx, data, revision=revision))

    @cached_property
    def _stored_contexts(self) -> dict[str, RenderContext | None]:
        return {}

    def _render_engine(self, role: str, index: int, count: int) -> Manifest | None:
        ctx = self.ctx.of_role(role)
        try:
            manifest = engine_statefulset(ctx, index, pods=count, avoided=self.avoided(ctx.engine_name(index)))
        except RenderError:
            manifest = None
        if count == 0 and (manifest is None or self.rejected_by_server(manifest) is not None):
            return engine_statefulset(self._bare_ctx.of_role(role), index, pods=0)
        return manifest

    @cached_property
    def _bare_ctx(self) -> RenderContext:
        spec = self.ctx.spec
        nothing = {"pod_template": None, "image": None, "vllm": None, "roles": None}
        bare = spec.model_copy(update={"engine": spec.engine.model_copy(update=nothing)})
        return replace(self.ctx, spec=bare)

    @cached_property
    def template_error(self) -> Finding | None:
        """The error of a podTemplate that cannot be merged or is not allowed, or None if there is no error."""
        return next(iter(self.shared[1].values()), self.engine_error)

    @cached_property
    def engine_error(self) -> Finding | None:
        """The error that prevents the rendering of engines, or None if they can be rendered."""
        if self.ctx.spec.num_engines == 0 or self.engine_manifest(0) is not None:
            return None
        try:
            engine_statefulset(self.ctx, 0, pods=0)
        except RenderError as error:
            return _finding(error)
        return None

    def rejected(self, manifest: Manifest) -> Finding | None:
        """Return why a manifest cannot be applied, or None if it can be applied.

        The reason is a missing object that the manifest's pods need, or a rejection by the API server.
        """
        has_pods = manifest["kind"] in ("Deployment", "StatefulSet")
        return (self.missing(manifest) if has_pods else None) or self.rejected_by_server(manifest)

    def rejected_by_server(self, manifest: Manifest) -> Finding | None:
        """Return the API server's last rejection if it concerns exactly this manifest, otherwise None."""
        ref = ChildRef.of(manifest)
        rejection = self.world.rejections.get(ref)
        if rejection is None or rejection.hash != manifest_hash(manifest):
            return None
        if ref.kind in _OPTIONAL and rejection.code == 404:
            reason, field, crds = _OPTIONAL[ref.kind]
            message = f"the API server does not serve {ref.api_version} {ref.kind}; install the CRDs of {crds}"
            return reason, f"{field}: {message}, or remove the field"
        malformed = rejection.code in (400, 422) or MALFORMED_OBJECT in rejection.message
        template = ref.kind in ("Deployment", "StatefulSet") and malformed
        reason = Reason.INVALID_POD_TEMPLATE if template else Reason.CHILD_REFUSED
        return reason, f"the API server rejects {ref} ({rejection.code}): {rejection.message}"

    def may_offer(self, manifest: Manifest) -> bool:
        """Return whether `manifest` may be applied now.

        A rejected manifest may be applied again only after a wait. An existing Deployment is not updated while an
        object that its pods need is missing. A new Deployment may be created before such objects exist.
        """
        ref = ChildRef.of(manifest)
        if ref.kind == "Deployment" and ref in self.world.children and self.missing(manifest) is not None:
            return False
        return self.rejected_by_server(manifest) is None or self.just_rejected(ref) is None

    def just_rejected(self, ref: ChildRef) -> ApplyRejection | None:
        """Return the last rejection of a child, or None if the child may be applied again."""
        rejection = self.world.rejections.get(ref)
        if rejection is None or (self.world.now - rejection.at).total_seconds() >= REJECTION_RETRY_SECONDS:
            return None
        return rejection

    @cached_property
    def rejection_retry_in(self) -> float | None:
        """Seconds until the next rejected child is applied again, or None if no child waits for its retry."""
        ages = [(self.world.now - rejection.at).total_seconds() for rejection in self.world.rejections.values()]
        return min((REJECTION_RETRY_SECONDS - age for age in ages if age < REJECTION_RETRY_SECONDS), default=None)


def former_scheme(world: World) -> str:
    """Return the URL scheme of servers that still exist from an earlier spec.

    Returns an empty string if all servers have the scheme of the spec.
    """
    wanted = "http" if world.resource.spec.server.tls is None else "https"
    return next((scheme for scheme, _ in sorted(_offers(world)) if scheme not in ("", wanted)), "")


def former_downloads(world: World) -> bool:
    """Return whether any recorded revision of the engines downloads its model.

    The record of a revision is deleted when no engine has the revision.
    """
    found = (view.data for ref, view in world.children.items() if ref.kind == revision_render.KIND and view.owned)
    return any(revision_render.downloads(data) for data in found if data is not None)


def _offers(world: World) -> set[tuple[str, str]]:
    """Return the pairs of URL scheme and model name that the existing server pods and the servers' Deployment offer."""
    views = (view for ref, view in world.children.items() if ref.kind == "Deployment" and view.owned)
    return {view.offer for view in views} | {pod.offer for pod in world.component_pods(SERVER)}


def _finding(error: RenderError) -> Finding:
    return error.reason, str(error)


_OPTIONAL = {
    HTTP_ROUTE: (Reason.GATEWAY_API_MISSING, "spec.server.httpRoute", "the Gateway API"),
    INFERENCE_POOL: (
        Reason.INFERENCE_EXTENSION_MISSING,
        "spec.server.inferencePool",
        "the Gateway API Inference Extension",
    ),
}
"""Reason, field and origin of each kind that a cluster may lack."""
