"""The children of a World's resource as they are to be, and what the API server said of them when it said no."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_operator.model.conditions import Reason
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.reduce import child_ref
from megatron_operator.plan.world import ChildRef, Manifest, Refusal, World
from megatron_operator.render import revision as revision_render
from megatron_operator.render.children import plain_children
from megatron_operator.render.context import SERVER, InvalidPodTemplate, NotAllowed, RenderContext, manifest_hash
from megatron_operator.render.coordinator import coordinator_deployment
from megatron_operator.render.engine import engine_statefulset
from megatron_operator.render.server import server_deployment

Finding = tuple[Reason, str]

APPS = "apps/v1"
REFUSAL_RETRY_SECONDS = 15
"""A refused child is offered again this often: quotas and admission rules change without an event for us."""


@dataclass(frozen=True)
class Rendered:
    """Each manifest is rendered once.

    ctx: with the weights that engines hold. model_hash: of the model that the spec asks for.
    """

    world: World
    ctx: RenderContext
    model_hash: str

    @cached_property
    def shared(self) -> tuple[list[Manifest], dict[str, Finding]]:
        """The shared children that can be rendered, and by name why others cannot. Those are left as they are."""
        manifests, findings = plain_children(self.ctx), {}
        for name, build, ctx in (
            (self.ctx.coordinator_name, coordinator_deployment, self.ctx),
            (self.ctx.server_name, server_deployment, self._server_ctx),
        ):
            try:
                manifests.append(build(ctx))
            except InvalidPodTemplate as error:
                findings[name] = _finding(error)
        return manifests, findings

    @cached_property
    def server(self) -> Manifest | None:
        """The front end's Deployment among the shared children; None when they cannot be rendered."""
        manifests, _ = self.shared
        name = ("Deployment", self.ctx.server_name)
        return next((each for each in manifests if (each["kind"], each["metadata"]["name"]) == name), None)

    @cached_property
    def _server_ctx(self) -> RenderContext:
        """Front ends that serve keep the tokenizer they started with when only the weights changed."""
        pods = [pod for pod in self.world.pods if pod.component == SERVER and pod.ready and not pod.deleting]
        view = self.world.children.get(ChildRef("Deployment", self.ctx.server_name, APPS))
        weights = self.ctx.spec.weights
        if not pods or weights is None or view is None or view.model_hash != self.model_hash:
            return self.ctx
        started = weights.model_copy(update={"revision": pods[-1].weights or weights.revision})
        return replace(self.ctx, spec=self.ctx.spec.model_copy(update={"weights": started}))

    def engine_manifest(self, index: int, *, pods: int | None = None) -> Manifest | None:
        """The StatefulSet of an engine. One that shall have no pods never fails for its podTemplate."""
        count = self.ctx.spec.pods_per_engine if pods is None else pods
        if (index, count) not in self._engine_manifests:
            self._engine_manifests[index, count] = self._render_engine(index, count)
        return self._engine_manifests[index, count]

    @cached_property
    def _engine_manifests(self) -> dict[tuple[int, int], Manifest | None]:
        return {}

    def own_manifest(self, engine: EngineView, *, pods: int) -> Manifest | None:
        """An engine rendered from the inputs of the revision it has now, which is not the wanted one: with no pods, or
        with as many as that revision has. None when the inputs are not known, or not rendered that way any more: then
        it is left as it is."""
        found = engine.statefulset
        entries = self.world.resource.status.get("engines") or ()
        before = next((entry.get("revision", "") for entry in entries if entry["name"] == engine.name), "")
        revision = found.revision if found is not None else before
        stored = self._stored_context(revision)
        if stored is None:
            return None
        return engine_statefulset(stored, engine.index, pods=stored.spec.pods_per_engine if pods else 0)

    def _stored_context(self, revision: str) -> RenderContext | None:
        if revision not in self._stored_contexts:
            ref = ChildRef(revision_render.KIND, revision_render.revision_name(self.ctx, revision), APPS)
            view = self.world.children.get(ref)
            usable = view is not None and view.owned and view.data is not None
            data = view.data if view is not None and usable else None
            found = None if data is None else revision_render.context_of(self.ctx, data, revision=revision)
            self._stored_contexts[revision] = found
        return self._stored_contexts[revision]

    @cached_property
    def _stored_contexts(self) -> dict[str, RenderContext | None]:
        return {}

    def _render_engine(self, index: int, count: int) -> Manifest | None:
        try:
            manifest = engine_statefulset(self.ctx, index, pods=count)
        except InvalidPodTemplate:
            manifest = None
        if count == 0 and (manifest is None or self.refused(manifest) is not None):
            return engine_statefulset(self._bare_ctx, index, pods=0)
        return manifest

    @cached_property
    def _bare_ctx(self) -> RenderContext:
        spec = self.ctx.spec
        bare = spec.model_copy(update={"engine": spec.engine.model_copy(update={"pod_template": None, "image": None})})
        return replace(self.ctx, spec=bare)

    @cached_property
    def template_error(self) -> Finding | None:
        """Why a podTemplate cannot be merged or is not allowed, if so."""
        return next(iter(self.shared[1].values()), self.engine_error)

    @cached_property
    def engine_error(self) -> Finding | None:
        """Why the engines cannot be rendered, if so."""
        if self.ctx.spec.replicas == 0 or self.engine_manifest(0) is not None:
            return None
        try:
            engine_statefulset(self.ctx, 0, pods=0)
        except InvalidPodTemplate as error:
            return _finding(error)
        return None

    def refused(self, manifest: Manifest) -> tuple[Reason, str] | None:
        """The API server's last answer to this very manifest, if it was an error."""
        ref = child_ref(manifest)
        refusal = self.world.refusals.get(ref)
        if refusal is None or refusal.hash != manifest_hash(manifest):
            return None
        template = ref.kind in ("Deployment", "StatefulSet") and refusal.code in (400, 422)
        reason = Reason.INVALID_POD_TEMPLATE if template else Reason.CHILD_REFUSED
        return reason, f"the API server refuses {ref} ({refusal.code}): {refusal.message}"

    def may_offer(self, manifest: Manifest) -> bool:
        """It was not refused, or so long ago that it is time to offer it again."""
        return self.refused(manifest) is None or self.just_refused(child_ref(manifest)) is None

    def just_refused(self, ref: ChildRef) -> Refusal | None:
        """The last answer about a child, while it is not yet time to try again."""
        refusal = self.world.refusals.get(ref)
        if refusal is None or (self.world.now - refusal.at).total_seconds() >= REFUSAL_RETRY_SECONDS:
            return None
        return refusal

    @cached_property
    def refusal_retry_in(self) -> float | None:
        """Seconds until the next refused child is offered again; None while none is refused."""
        ages = [(self.world.now - refusal.at).total_seconds() for refusal in self.world.refusals.values()]
        return min((REFUSAL_RETRY_SECONDS - age for age in ages if age < REFUSAL_RETRY_SECONDS), default=None)


def _finding(error: InvalidPodTemplate) -> Finding:
    return (Reason.NOT_ALLOWED if isinstance(error, NotAllowed) else Reason.INVALID_POD_TEMPLATE), str(error)
