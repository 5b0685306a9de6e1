"""A World put in order: one view of each engine, what is effectively wanted, what is observed, what was rendered.

Everything here is a function of the World; policies read it and never look at the World's raw lists themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.model.resource import SuspendLevel
from megatron_operator.model.states import CoordinatorState, DesiredState, LifecyclePhase, ResourceState, SignalKind
from megatron_operator.plan import operation as operations
from megatron_operator.plan.budget import engine_budget
from megatron_operator.plan.clock import seconds_since
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.operation import Operation
from megatron_operator.plan.rendered import APPS, Rendered
from megatron_operator.plan.rollout import Canary
from megatron_operator.plan.world import ChildRef, EngineReport, World
from megatron_operator.render.context import ENGINE, RenderContext
from megatron_operator.render.engine import engine_revision
from megatron_operator.render.model_source import model_hash
from megatron_runtime.protocol.lifecycle import STEADY_ENGINE_STATES

UNREACHABLE_GRACE_SECONDS = 30
STUCK_GRACE_SECONDS = 120
"""How long past the drain deadline a Stopped resource keeps its pods when no coordinator, or an unwilling one, stops
its engines. Then the pods go anyway: Stopped must not depend on a healthy coordinator."""


@dataclass(frozen=True)
class Scene:
    """A World with everything that policies ask of it, each worked out once."""

    world: World

    @cached_property
    def ctx(self) -> RenderContext:
        """The spec, with the weights that engines hold rather than those they are to get."""
        resource = self.world.resource
        spec, held = resource.spec, self.weights_held
        if held is not None and spec.weights is not None:
            spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"revision": held})})
        return RenderContext(
            resource.name, resource.namespace, resource.uid, spec, self.world.settings, self.server_key
        )

    @cached_property
    def rendered(self) -> Rendered:
        return Rendered(self.world, self.ctx, self.model_hash)

    @cached_property
    def server_key(self) -> int:
        """Generation of the coordinator's own key: as the Secret says, or as the Secret to be made will."""
        if self.world.keys is not None:
            return self.world.keys.server_generation
        if ChildRef("Secret", f"{self.world.resource.name}-keys") in self.world.children:
            # It is there and cannot be read: nothing is started anew for that.
            return int((self.status.get("keys") or {}).get("generation", 1))
        return self.next_keys

    @cached_property
    def next_keys(self) -> int:
        """Generation of keys that are made because there are none: another than any that was."""
        lost = (self.status.get("keys") or {}).get("generation", 0)
        return max(int(lost) + 1, self.world.resource.spec.keys.generation)

    @cached_property
    def weights_held(self) -> str | None:
        """Revision of the weights that engines serve with; None while none ever did, and pods start with the spec's."""
        found = self.operation
        if found is not None and found.weights is not None and found.phase is LifecyclePhase.CONFIRMED:
            return found.weights
        held = self.status.get("weights") or {}
        return held.get("revision") if held.get("model") == self.model_hash else None

    @cached_property
    def model_hash(self) -> str:
        resource = self.world.resource
        plain = RenderContext(resource.name, resource.namespace, resource.uid, resource.spec, self.world.settings)
        return model_hash(plain)

    @cached_property
    def weights_due(self) -> str | None:
        """Revision of the weights that engines are to be given in place; None when they hold it."""
        wanted, held = self.world.resource.spec.weights, self.weights_held
        return wanted.revision if wanted is not None and held not in (None, wanted.revision) else None

    @cached_property
    def status(self) -> Mapping[str, Any]:
        return self.world.resource.status

    @cached_property
    def lifecycle(self) -> Mapping[str, Any]:
        return self.status.get("lifecycle") or {}

    # --- What is wanted -----------------------------------------------------------------------------------------

    @cached_property
    def woken(self) -> bool:
        """A request woke the suspended resource, now or earlier at this generation of the spec."""
        spec, coordinator = self.world.resource.spec, self.world.coordinator
        if spec.desired_state is not DesiredState.SUSPENDED or not spec.lifecycle.suspend.wake_on_request:
            return False
        if spec.replicas == 0:
            return False
        already = self.lifecycle.get("wokenGeneration") == self.world.resource.generation
        if already and self.idle_in is not None and self.idle_in <= 0:
            return False
        suspended = coordinator.reachable and coordinator.state is CoordinatorState.SUSPENDED
        return already or (suspended and coordinator.queue_length > 0)

    @property
    def may_wake(self) -> bool:
        """A request may wake the resource at any moment."""
        suspend = self.world.resource.spec.lifecycle.suspend
        return suspend.wake_on_request and self.desired is DesiredState.SUSPENDED

    @cached_property
    def idle_in(self) -> float | None:
        """Seconds until a woken resource that gets no request sleeps again; None while that cannot be known."""
        coordinator = self.world.coordinator
        if not coordinator.reachable:
            return None
        return self.world.resource.spec.lifecycle.suspend.idle_seconds - coordinator.idle_seconds

    @cached_property
    def desired(self) -> DesiredState:
        """`spec.desiredState`, where no replicas means Suspended and a waking request means Running."""
        spec = self.world.resource.spec
        if spec.replicas == 0 and spec.desired_state in (DesiredState.RUNNING, DesiredState.PAUSED):
            return DesiredState.SUSPENDED
        return DesiredState.RUNNING if self.woken else spec.desired_state

    @cached_property
    def requested_at(self) -> str | None:
        """When the effective desired state was first seen; None if that is now."""
        same = self.lifecycle.get("desired") == self.desired.value
        return self.lifecycle.get("requestedAt") if same else None

    @cached_property
    def release(self) -> bool:
        """While suspended, engine pods are given back."""
        spec = self.world.resource.spec
        suspend = spec.lifecycle.suspend
        if self.desired is not DesiredState.SUSPENDED:
            return False
        if suspend.level is SuspendLevel.RELEASE_PODS or spec.replicas == 0:
            return True
        left = self.escalation_in
        return left is not None and left <= 0

    @cached_property
    def escalation_in(self) -> float | None:
        """Seconds until a suspended resource gives its pods back as well; None when it never will."""
        after = self.world.resource.spec.lifecycle.suspend.escalate_after_seconds
        history = self.status.get("history") or []
        if after is None or not history or history[-1]["to"] != ResourceState.SUSPENDED.value:
            return None
        return after - seconds_since(history[-1]["at"], self.world.now)

    # --- The operation ------------------------------------------------------------------------------------------

    @cached_property
    def operation(self) -> Operation | None:
        return operations.resolve(operations.from_status(self.lifecycle), self.world, self.desired)

    def _over(self, signal: SignalKind) -> bool:
        found = self.operation
        return found is not None and found.goal is self.desired and found.over(signal)

    @cached_property
    def drained(self) -> bool:
        return self._over(SignalKind.DRAIN)

    @cached_property
    def all_draining(self) -> bool:
        """All engines were told to drain, for something that is done or wanted no more; only UNPAUSE gives them, and
        those that register meanwhile, work again. Engines that hold another model go first."""
        found = self.operation
        if found is not None and found.open:
            return False
        told = found is not None and found.signal is SignalKind.DRAIN and found.engine is None
        if not (told or self.world.coordinator.drained_all):
            return False
        if told and found is not None and found.goal is not self.desired:
            return True
        leaving = any(engine.stale_pods for engine in self.engines)
        return not self.old_model and not leaving

    @cached_property
    def overdue_in(self) -> float | None:
        """Seconds until a stop that makes no progress goes on without its coordinator; None unless stopping."""
        if self.desired is not DesiredState.STOPPED or self.requested_at is None:
            return None
        grace = STUCK_GRACE_SECONDS if self.world.coordinator.reachable else UNREACHABLE_GRACE_SECONDS
        limit = self.world.resource.spec.lifecycle.drain_seconds + grace
        return limit - seconds_since(self.requested_at, self.world.now)

    @cached_property
    def stopped(self) -> bool:
        """Nothing more is to be said to the engines: their pods may go."""
        if self.desired is not DesiredState.STOPPED:
            return False
        overdue = self.overdue_in
        return self._over(SignalKind.STOP) or (overdue is not None and overdue <= 0)

    # --- Engines ------------------------------------------------------------------------------------------------

    @cached_property
    def engines(self) -> tuple[EngineView, ...]:
        """Every engine that is wanted or exists, by index."""
        world, ctx = self.world, self.ctx
        pattern = re.compile(re.escape(f"{ctx.name}-engine-") + r"(0|[1-9][0-9]*)")
        indexes = set(range(ctx.spec.replicas))
        for ref in world.children:
            match = pattern.fullmatch(ref.name) if ref.kind in ("StatefulSet", "Service") else None
            if match and world.children[ref].owned:
                indexes.add(int(match.group(1)))
        reports = {report.name: report for report in world.coordinator.engines if world.coordinator.reachable}
        return tuple(self._engine(index, reports) for index in sorted(indexes))

    def _engine(self, index: int, reports: Mapping[str, EngineReport]) -> EngineView:
        world, name = self.world, self.ctx.engine_name(index)
        pods = tuple(pod for pod in world.pods if pod.component == ENGINE and pod.engine == name)
        manifest = self.rendered.engine_manifest(index)
        revision = engine_revision(manifest) if manifest else ""
        return EngineView(
            index=index,
            name=name,
            surplus=index >= self.ctx.spec.replicas,
            statefulset=world.children.get(ChildRef("StatefulSet", name, APPS)),
            pods=pods,
            report=reports.get(name),
            rendered_revision=revision,
            budget=engine_budget(world, name, pods, revision=revision),
            **self._canary(name),
        )

    def _canary(self, name: str) -> dict[str, Any]:
        """Owed from the moment an engine's StatefulSet changes its revision under its pods."""
        before = self.engine_status(name)
        found = self.world.children.get(ChildRef("StatefulSet", name, APPS))
        if found is None or found.replicas == 0:
            return {}
        rolled = before.get("revision") not in (None, "", found.revision)
        canary = Canary.PENDING if rolled else Canary(before.get("canary", ""))
        if canary is not Canary.PENDING:
            return {"canary": canary, "canary_message": before.get("canaryMessage", "")}
        report = self.world.coordinator.canaries.get(name)
        if report is None or report.revision != found.revision:
            return {"canary": canary}
        answered = Canary.PASSED if report.ok else Canary.FAILED
        return {"canary": answered if report.supported else Canary.SKIPPED, "canary_message": report.message}

    def engine_status(self, name: str) -> Mapping[str, Any]:
        """What was persisted of an engine; empty when nothing was."""
        return next((entry for entry in self.status.get("engines") or () if entry["name"] == name), {})

    @cached_property
    def wanted(self) -> tuple[EngineView, ...]:
        return tuple(engine for engine in self.engines if not engine.surplus)

    @cached_property
    def serving(self) -> tuple[EngineView, ...]:
        return tuple(engine for engine in self.engines if engine.serving)

    @cached_property
    def old_model(self) -> tuple[EngineView, ...]:
        """Engines with pods that hold another model than the spec says."""
        return tuple(
            engine
            for engine in self.engines
            if engine.statefulset is not None and engine.scaled > 0 and engine.statefulset.model_hash != self.model_hash
        )

    @cached_property
    def engines_empty(self) -> bool:
        """No engine has a pod or is to get one without a further write."""
        return all(engine.empty for engine in self.engines)

    @cached_property
    def suspended(self) -> bool:
        """Coordinator and all serving engines are SUSPENDED, and nothing is under way."""
        return self.steady is CoordinatorState.SUSPENDED and not (self.operation and self.operation.open)

    def pods_for(self, engine: EngineView) -> int:
        """How many pods an engine is to have now: none, or all."""
        full = self.ctx.spec.pods_per_engine
        if engine.budget.exhausted is not None:
            return 0
        if self.desired is DesiredState.STOPPED:
            leave = self.stopped
        elif self.release:
            leave = self.suspended
        else:
            return full
        return 0 if leave or engine.scaled == 0 else full

    # --- What is observed ---------------------------------------------------------------------------------------

    @cached_property
    def steady(self) -> CoordinatorState | None:
        """The coordinator's state if it is steady and every serving engine agrees, else None."""
        coordinator = self.world.coordinator
        if not coordinator.reachable or coordinator.state not in STEADY_ENGINE_STATES:
            return None
        agreeing = STEADY_ENGINE_STATES[coordinator.state]
        reports = (report for report in coordinator.engines if report.serving)
        return coordinator.state if all(report.state in agreeing for report in reports) else None

    @cached_property
    def observed(self) -> ResourceState:
        """The state that coordinator, engines and pods are in together. Never claims what a rank has not reported."""
        if self.wanted and all(engine.budget.exhausted for engine in self.wanted):
            return ResourceState.FAILED
        if self.desired is DesiredState.STOPPED and self.engines_empty:
            return ResourceState.STOPPED
        if not self.world.coordinator.reachable:
            started = self.status.get("state") not in (None, ResourceState.PENDING.value)
            return ResourceState.UNKNOWN if started else ResourceState.PENDING
        some = bool(self.serving)
        if self.steady is CoordinatorState.RUNNING and some:
            return ResourceState.RUNNING
        if self.steady is CoordinatorState.PAUSED and some:
            return ResourceState.PAUSED
        if self.steady is CoordinatorState.SUSPENDED and (some or self.release):
            return ResourceState.SUSPENDED
        return ResourceState.PENDING

    @cached_property
    def state(self) -> ResourceState:
        """`status.state`: what is observed, or the verb that is on its way."""
        if self.observed in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.observed
        return self.state_with(self.operation)

    def state_with(self, operation: Operation | None) -> ResourceState:
        """`status.state` as it is once `operation` is the one under way."""
        if self.observed in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.observed
        if self.desired is DesiredState.STOPPED and (self.serving or not self.engines_empty):
            return ResourceState.STOPPING
        if operation is not None and operation.open and operation.phase is not LifecyclePhase.UNKNOWN:
            verb = VERB_STATE.get(operation.signal)
            if verb is not None:
                return verb
        return self.observed


VERB_STATE: dict[SignalKind, ResourceState] = {
    SignalKind.PAUSE: ResourceState.PAUSING,
    SignalKind.UNPAUSE: ResourceState.UNPAUSING,
    SignalKind.SUSPEND: ResourceState.SUSPENDING,
    SignalKind.RESUME: ResourceState.RESUMING,
    SignalKind.STOP: ResourceState.STOPPING,
}
"""What a resource is doing while a signal is under way. DRAIN of one engine does not change its state."""
