"""What is observed: the common state of coordinator, engines and pods."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engines import Engines
from megatron_operator.decision.operation import Operation
from megatron_operator.decision.world import World
from megatron_operator.resource.states import CoordinatorState, DesiredState, LifecyclePhase, ResourceState, SignalKind

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
        """The common state of coordinator, engines and pods, as reported by every rank."""
        engines, steady = self.engines, self.world.coordinator.steady
        if engines.wanted and all(engine.budget.exhausted for engine in engines.wanted):
            return ResourceState.FAILED
        if self.desired.state is DesiredState.STOPPED and engines.empty:
            return ResourceState.STOPPED
        if not self.world.coordinator.reachable:
            started = self.world.resource.status.get("state") not in (None, ResourceState.PENDING.value)
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
        """Whether the resource runs as desired, so that single engines may be drained."""
        return self.desired.state is DesiredState.RUNNING and self.state is ResourceState.RUNNING

    def state_with(self, operation: Operation | None) -> ResourceState:
        """Return `status.state`: the verb that `operation` carries out, or the observed state."""
        if self.state in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.state
        if self.desired.state is DesiredState.STOPPED and (self.engines.serving or not self.engines.empty):
            return ResourceState.STOPPING
        if operation is not None and operation.open and operation.phase is not LifecyclePhase.UNKNOWN:
            verb = VERB_STATE.get(operation.signal)
            if verb is not None:
                return verb
        return self.state
