"""The engines of a resource, from StatefulSets, pods and the coordinator's reports, and the state of the resource."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.decision.coordinator_snapshot import EngineReport
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.operation import Operation
from megatron_operator.decision.rendered import APPS, Rendered
from megatron_operator.decision.restarts import engine_budget
from megatron_operator.decision.rollout import Canary
from megatron_operator.decision.update import Update
from megatron_operator.decision.world import EVENT_SECONDS, UNKNOWN_SECONDS, ChildRef, World
from megatron_operator.render.context import RenderContext, digest
from megatron_operator.render.engine import engine_revision
from megatron_operator.render.revision import KIND as REVISION_KIND
from megatron_operator.render.revision import has_inputs, revision_name
from megatron_operator.resource.names import DECODE, ENGINE, PREFILL
from megatron_operator.resource.states import (
    CoordinatorState,
    DesiredState,
    EngineState,
    LifecyclePhase,
    ResourceState,
    SignalKind,
)
from megatron_operator.resource.text import seconds_since

_ROLES = (DECODE, PREFILL)
_ENGINE_KINDS = ("StatefulSet", "Service", "NetworkPolicy")
"""Kinds of the children of one engine. They can remain if the operator is killed while it removes the engine."""
MAX_STARTING = 256
"""Limit of engines that start at the same time, so that a mistaken number of replicas can be undone. It is also the
load that the scheduler, the nodes and the source of the weights get from one resource.
"""
LOST, UNKNOWN, UNRESPONSIVE = "Lost", "Unknown", "Unresponsive"
"""States of an engine in the status that engines themselves do not report."""
REPORTED_STATES = frozenset(state.value for state in EngineState)


@dataclass(frozen=True)
class Engines:
    """The engines of a World's resource.

    ctx: the render context with the weights that the engines last confirmed.
    """

    world: World
    ctx: RenderContext
    desired: Desired
    update: Update
    rendered: Rendered

    @cached_property
    def all(self) -> tuple[EngineView, ...]:
        """Every engine that is desired or exists.

        The engines that spec.replicas counts come first, by index, then prefill engines.
        """
        world = self.world
        reports = {report.name: report for report in world.coordinator.engines if world.coordinator.reachable}
        return tuple(self._engine(role, index, reports) for role in _ROLES for index in sorted(self._indexes(role)))

    def _indexes(self, role: str) -> set[int]:
        """Return the indexes of the engines of a role that are desired or exist."""
        prefix = self.ctx.of_role(role).engine_name(0).removesuffix("0")
        pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]*)")
        indexes = set(range(self.ctx.spec.engines_of(role)))
        for ref, view in self.world.children.items():
            match = pattern.fullmatch(ref.name) if ref.kind in _ENGINE_KINDS else None
            if match and view.owned:
                indexes.add(int(match.group(1)))
        return indexes

    @cached_property
    def wanted(self) -> tuple[EngineView, ...]:
        """The engines that the spec requests."""
        return tuple(engine for engine in self.all if not engine.surplus)

    def of_role(self, role: str) -> tuple[EngineView, ...]:
        """Return the desired engines of a role."""
        return tuple(engine for engine in self.wanted if engine.role == role)

    @cached_property
    def serving(self) -> tuple[EngineView, ...]:
        return tuple(engine for engine in self.all if engine.serving)

    @cached_property
    def old_model(self) -> tuple[EngineView, ...]:
        """Engines with pods of a model other than the spec's."""
        return tuple(
            engine
            for engine in self.all
            if engine.statefulset is not None
            and engine.scaled > 0
            and engine.statefulset.model_hash != self.rendered.model_hash
        )

    @cached_property
    def held_back(self) -> frozenset[str]:
        """Names of the engines whose pods are created later, because MAX_STARTING other engines are starting."""
        free = max(0, MAX_STARTING - sum(engine.starting for engine in self.all))
        without_pods = [engine.name for engine in self.wanted if engine.scaled == 0 and self.pods_for(engine) > 0]
        return frozenset(without_pods[free:])

    @cached_property
    def empty(self) -> bool:
        """Whether the engines have no pods, and will get pods only if the operator writes to the API server."""
        return all(engine.empty for engine in self.all)

    @cached_property
    def absent(self) -> tuple[EngineView, ...]:
        """The desired engines that should have pods but do not serve with their revision."""
        return tuple(
            engine
            for engine in self.wanted
            if (engine.superseded or not engine.responsive) and self.pods_for(engine) > 0
        )

    @cached_property
    def suspended(self) -> bool:
        """Whether the coordinator and all serving engines are SUSPENDED and no operation is in progress."""
        operation = self.desired.operation
        steady = self.world.coordinator.steady is CoordinatorState.SUSPENDED
        return steady and not (operation is not None and operation.open)

    @cached_property
    def attempt(self) -> str:
        """Digest of the engines' inputs and of the last restart command. A new digest resets the restart budgets."""
        resource = self.world.resource
        manifest = self.rendered.engine_manifest(0)
        return digest(
            [
                engine_revision(manifest) if manifest is not None else "",
                resource.spec.weights_revision,
                resource.spec.lifecycle.restart_budget.model_dump(mode="json"),
                resource.restarted_at,
            ]
        )

    @cached_property
    def retry_in(self) -> float | None:
        """Seconds until the next engine with an exhausted restart budget is started again.

        The value is None if no such start is planned.
        """
        times = [engine.budget.retry_at for engine in self.wanted if engine.budget.exhausted is not None]
        return min((-seconds_since(time, self.world.now) for time in times if time is not None), default=None)

    @cached_property
    def avoided_in(self) -> float | None:
        """Seconds until the next engine may again use the node of a failed device.

        The value is None if no engine avoids a node.
        """
        times = [engine.budget.avoided_until for engine in self.wanted]
        return min((-seconds_since(time, self.world.now) for time in times if time is not None), default=None)

    @cached_property
    def events_due_in(self) -> float | None:
        """Seconds until Events are read again.

        Events are read while a StatefulSet lacks pods, or a pod's status does not say why the pod does not run.
        Otherwise, the value is None.
        """
        incomplete = any(engine.incomplete for engine in self.all)
        return EVENT_SECONDS if incomplete or any(pod.unexplained for pod in self.world.pods) else None

    def may_surge(self, role: str, index: int) -> bool:
        """Return whether an index belongs to a surge engine.

        During a rollout, surge engines have the indexes that follow the indexes of the role's configured engines.
        """
        count = self.ctx.spec.engines_of(role)
        return role in self.ctx.roles and count <= index < count + self.ctx.spec.rollout.max_surge

    def is_drained(self, engine: EngineView) -> bool:
        """Return whether an engine needs no DRAIN, because it has no requests or its DRAIN is complete.

        An engine that has restarted since its DRAIN gets requests again, so it needs another DRAIN.
        """
        if engine.report is None or not engine.serving:
            return True
        operation = self.desired.operation
        over = operation is not None and operation.over(SignalKind.DRAIN, engine=engine.name)
        return over and engine.report.draining

    def serves(self, engine: EngineView) -> bool:
        """Return whether an engine serves and responds.

        While the coordinator does not know its engines, an engine counts as serving for UNKNOWN_SECONDS if its pods run
        and the last status has a state that the coordinator reported.
        """
        if self.world.membership_known or engine.serving:
            return engine.responsive
        recent = self.world.coordinator.unknown_seconds < UNKNOWN_SECONDS
        state = self.world.resource.engine_status(engine.name).get("state")
        return recent and engine.whole and state in REPORTED_STATES

    def pods_for(self, engine: EngineView) -> int:
        """Return how many pods an engine should have. The result is either 0 or the number of all its pods."""
        full = self.ctx.spec.pods_per_engine
        if engine.budget.exhausted is not None:
            return 0
        if self.desired.state is DesiredState.STOPPED:
            leave = self.desired.stopped
        elif self.desired.releases_pods:
            leave = self.suspended
        else:
            return full
        return 0 if leave or engine.scaled == 0 else full

    def _engine(self, role: str, index: int, reports: Mapping[str, EngineReport]) -> EngineView:
        world, name = self.world, self.ctx.of_role(role).engine_name(index)
        pods = tuple(pod for pod in world.pods if pod.component == ENGINE and pod.engine == name)
        manifest = self.rendered.engine_manifest(index, role=role)
        revision = engine_revision(manifest) if manifest else ""
        statefulset = world.children.get(ChildRef("StatefulSet", name, APPS))
        report = reports.get(name)
        return EngineView(
            role=role,
            index=index,
            name=name,
            surplus=index >= self.ctx.spec.engines_of(role),
            held=statefulset is not None and statefulset.revision != revision and self._is_held(statefulset.revision),
            statefulset=statefulset,
            pods=pods,
            report=report,
            rendered_revision=revision,
            budget=engine_budget(
                world,
                name,
                pods,
                revision=revision,
                attempt=self.attempt,
                served=self._served(name, report),
            ),
            **self._canary(role, index, name),
        )

    def _served(self, name: str, report: EngineReport | None) -> bool:
        """Return whether an engine serves, or served when the status was last written."""
        serving = report is not None and report.serving and not report.suspect
        return serving or self.world.resource.engine_status(name).get("state") in REPORTED_STATES

    def _is_held(self, revision: str) -> bool:
        """Return whether engines keep this revision until the resource is updated.

        This is the case if the revision differs from the desired revision only because this version of the operator
        renders pods differently.
        """
        if not self.update.available:
            return False
        record = self.world.children.get(ChildRef(REVISION_KIND, revision_name(self.ctx, revision), APPS))
        return record is not None and record.data is not None and has_inputs(self.ctx, record.data)

    def _canary(self, role: str, index: int, name: str) -> dict[str, Any]:
        """Return the fields of EngineView about the canary.

        A canary is due when a StatefulSet with pods changes its revision, and when a surge engine is added.
        """
        before = self.world.resource.engine_status(name)
        statefulset = self.world.children.get(ChildRef("StatefulSet", name, APPS))
        if statefulset is None or statefulset.replicas == 0:
            return {}
        rolled = before.get("revision") not in (None, "", statefulset.revision)
        rolled |= self.may_surge(role, index) and not before.get("revision")
        canary = Canary.PENDING if rolled else Canary(before.get("canary", ""))
        if canary is not Canary.PENDING:
            return {"canary": canary, "canary_message": before.get("canaryMessage", "")}
        report = self.world.coordinator.canaries.get(name)
        if report is None or report.revision != statefulset.revision:
            return {"canary": canary}
        answered = Canary.PASSED if report.ok else Canary.FAILED
        return {"canary": answered if report.supported else Canary.SKIPPED, "canary_message": report.message}


VERB_STATE: dict[SignalKind, ResourceState] = {
    SignalKind.PAUSE: ResourceState.PAUSING,
    SignalKind.UNPAUSE: ResourceState.UNPAUSING,
    SignalKind.SUSPEND: ResourceState.SUSPENDING,
    SignalKind.RESUME: ResourceState.RESUMING,
    SignalKind.STOP: ResourceState.STOPPING,
}
"""State of a resource while a signal is in progress. DRAIN of one engine does not change it."""


@dataclass(frozen=True)
class Observed:
    """The observed state of a World."""

    world: World
    desired: Desired
    engines: Engines

    @cached_property
    def state(self) -> ResourceState:
        """The observed state of the resource.

        The value is Running, Paused or Suspended only if the coordinator and all serving engines report this state.
        """
        engines, steady = self.engines, self.world.coordinator.steady
        if engines.wanted and all(engine.budget.exhausted for engine in engines.wanted):
            return ResourceState.FAILED
        if self.desired.state is DesiredState.STOPPED and engines.empty:
            return ResourceState.STOPPED
        if not self.world.coordinator.reachable:
            started = self.world.resource.lifecycle.get("observed") not in (None, ResourceState.PENDING.value)
            return ResourceState.UNKNOWN if started else ResourceState.PENDING
        some = bool(engines.serving)
        if steady is CoordinatorState.RUNNING and some:
            return ResourceState.RUNNING
        if steady is CoordinatorState.PAUSED and some:
            return ResourceState.PAUSED
        if steady is CoordinatorState.SUSPENDED and (some or self.desired.releases_pods):
            return ResourceState.SUSPENDED
        return ResourceState.PENDING

    @property
    def running(self) -> bool:
        """Whether the resource runs as desired, so that an engine may be drained."""
        return self.desired.state is DesiredState.RUNNING and self.state is ResourceState.RUNNING

    def state_with(self, operation: Operation | None) -> ResourceState:
        """Return the value of `status.state`.

        If `operation` executes a verb, the value names this verb. Otherwise the value is the observed state.
        """
        if self.state in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.state
        if self.desired.state is DesiredState.STOPPED and (self.engines.serving or not self.engines.empty):
            return ResourceState.STOPPING
        if operation is not None and operation.open and operation.phase is not LifecyclePhase.UNKNOWN:
            verb = VERB_STATE.get(operation.signal)
            if verb is not None:
                return verb
        return self.state
