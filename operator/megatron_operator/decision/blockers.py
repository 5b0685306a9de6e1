"""Determines from pods and rejected children why a component is not ready."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.decision.diagnosis import References, creation_error, first_diagnosis
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import MAX_STARTING, Engines
from megatron_operator.decision.losses import Losses
from megatron_operator.decision.rendered import APPS, Rendered
from megatron_operator.decision.world import ChildRef, Manifest, World
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.conditions import Finding, Reason
from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER, STANDBY


@dataclass(frozen=True)
class Blockers:
    """The reasons why components of a World are not ready, and messages about them."""

    world: World
    ctx: RenderContext
    references: References
    rendered: Rendered
    engines: Engines
    losses: Losses

    def rejection(self, *, name: str | None = None) -> Finding | None:
        """Return why a child cannot be rendered, or why the API server rejected it. Returns None if there is no such
        child.

        name: consider only the child with this name; None means all children.
        """
        unrendered = self.rendered.template_error if name is None else self.rendered.shared[1].get(name)
        if unrendered is not None:
            return unrendered
        manifests = [*self.rendered.shared[0], *self.rendered.engine_policies]
        for engine in self.engines.all:
            manifest = self._manifest(engine)
            if manifest is not None:
                manifests.append(manifest)
        for manifest in manifests:
            rejection = self.rendered.rejected(manifest)
            if rejection is not None and name in (None, ChildRef.of(manifest).name):
                return rejection
        return None

    def _manifest(self, engine: EngineView) -> Manifest | None:
        return self.rendered.engine_manifest(engine.index, role=engine.role, pods=self.engines.pods_for(engine))

    def component(self, component: str) -> Finding | None:
        """Return why the pods of a component fail or cannot be created. Returns None if there is no such error.

        component: COORDINATOR, STANDBY or SERVER.
        """
        pods = self.world.component_pods(component)
        diagnosis = first_diagnosis(pods, self.references)
        if diagnosis is not None:
            return diagnosis
        ctx = self.ctx
        names = {COORDINATOR: ctx.coordinator_name, STANDBY: ctx.standby_name, SERVER: ctx.server_name}
        name = names[component]
        view = self.world.children.get(ChildRef("Deployment", name, APPS))
        if view is None or view.rolled_out:
            return None
        if view.creation_error:
            return creation_error("its pods", view.creation_error, component=component)
        if view.stuck:
            return Reason.ROLLOUT_STUCK, f"Deployment {name}: {view.stuck}; inspect its pods, and correct the spec"
        return None

    def coordinator(self) -> Finding:
        """Return why the coordinator does not answer, as a reason and a description of what the operator waits for."""
        finding = self.rejection(name=self.ctx.coordinator_name)
        pods = [pod for pod in self.world.component_pods(COORDINATOR, STANDBY) if not pod.deleting]
        finding = finding or self.component(COORDINATOR)
        if finding is not None:
            return finding[0], f"the coordinator: {finding[1]}"
        if any(pod.ready for pod in pods):
            why = f" ({self.world.coordinator.error})" if self.world.coordinator.error else ""
            return Reason.COORDINATOR_UNREACHABLE, f"the coordinator to answer{why}"
        return Reason.COORDINATOR_STARTING, "the coordinator's pod to become ready"

    def server(self) -> Finding | None:
        """Return why no OpenAI server is ready, or None if a server is ready."""
        pods = self.world.component_pods(SERVER)
        if any(pod.ready and not pod.deleting for pod in pods):
            return None
        finding = self.rejection(name=self.ctx.server_name) or self.component(SERVER)
        if finding is not None:
            return finding[0], f"a server: {finding[1]}"
        return Reason.SERVER_STARTING, "a server's pod to become ready"

    def engine(self, engine: EngineView) -> Finding | None:
        """Return the error of one engine, or None while it starts or serves."""
        if engine.budget.exhausted is not None:
            return Reason.RESTART_BUDGET_EXHAUSTED, engine.budget.exhausted
        manifest = self._manifest(engine)
        if manifest is not None:
            rejected = self.rendered.rejected(manifest)
            if rejected is not None:
                return rejected
        diagnosis = first_diagnosis(engine.pods, self.references)
        if diagnosis is not None:
            return diagnosis
        failed = self.world.failed_creations.get(engine.name)
        if failed is not None and engine.incomplete:
            return creation_error("its pods", failed, component=ENGINE)
        if engine.report is not None and engine.report.suspect and not any(pod.deleting for pod in engine.pods):
            message = f"engine {engine.name} sends no heartbeats; its requests are routed to other engines"
            return Reason.ENGINE_UNRESPONSIVE, message
        if engine.report is not None and engine.report.weights_unavailable:
            return Reason.WEIGHTS_UNAVAILABLE, f"engine {engine.name}: {engine.report.weights_unavailable}"
        if self.losses.is_lost(engine):
            message = f"the pods of engine {engine.name} run, but it is not registered with the coordinator"
            return Reason.ENGINE_LOST, message
        return None

    def desired_engines(self, *roles: str) -> Finding:
        """Return why desired engines do not serve, as a reason and a description of what the operator waits for.

        roles: consider only engines of these roles; without `roles`, consider all engines.
        """
        if self.rendered.engine_error is not None:
            reason, message = self.rendered.engine_error
            return reason, f"the engines: {message}"
        every = self.engines.absent or [engine for engine in self.engines.wanted if not engine.responsive]
        absent = [engine for engine in every if not roles or engine.role in roles]
        for engine in absent:
            finding = self.engine(engine)
            if finding is not None:
                return finding[0], f"engine {engine.name}: {finding[1]}"
        incomplete = next((engine for engine in absent if engine.incomplete), None)
        if incomplete is not None:
            return Reason.ENGINES_STARTING, f"the StatefulSet of {incomplete.name} to create its pods"
        held_back = self.engines.held_back
        started = [engine for engine in absent if engine.name not in held_back] or absent
        names = ", ".join(engine.name for engine in started[:8])
        loading = [engine for engine in absent if engine.report is not None and not engine.superseded]
        verb = "load its weights" if loading else "download the model" if self.world.downloads else "register"
        later = f"; {len(held_back)} more start then, at most {MAX_STARTING} at a time" if held_back else ""
        return Reason.ENGINES_STARTING, f"{names or 'the engines'} to {verb}{later}"
