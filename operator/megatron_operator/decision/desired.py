"""Computes a resource's effective desired state, the operation towards it, and the desired generation of CURVE keys."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from megatron_operator.decision import operation as operations
from megatron_operator.decision.operation import Operation
from megatron_operator.decision.world import ChildRef, World
from megatron_operator.resource.lifecycle import SuspendLevel
from megatron_operator.resource.states import CoordinatorState, DesiredState, ResourceState, SignalKind
from megatron_operator.resource.text import parse, seconds_since

UNREACHABLE_GRACE_SECONDS = 30
STUCK_GRACE_SECONDS = 120
"""Time after the drain deadline for which a Stopped resource keeps its pods if the coordinator does not stop the
engines. The pods are then removed anyway, because Stopped must not depend on a healthy coordinator.
"""


@dataclass(frozen=True)
class Desired:
    """The desired state of the resource of a World."""

    world: World

    @cached_property
    def state(self) -> DesiredState:
        """The effective desired state.

        The state is `spec.desiredState`, with two exceptions. Zero replicas mean Suspended. If a request has woken the
        resource, the state is Running.
        """
        spec = self.world.resource.spec
        if spec.num_engines == 0 and spec.desired_state in (DesiredState.RUNNING, DesiredState.PAUSED):
            return DesiredState.SUSPENDED
        return DesiredState.RUNNING if self.woken else spec.desired_state

    @cached_property
    def woken(self) -> bool:
        """Whether a request has woken the suspended resource, and the resource has not been idle since then.

        Before the resource is idle, the value becomes False only if `desiredState` changes, `wakeOnRequest` becomes
        false, or the number of engines becomes 0. Other changes of the spec have no effect, because an autoscaler also
        changes the spec.
        """
        spec, coordinator = self.world.resource.spec, self.world.coordinator
        if spec.desired_state is not DesiredState.SUSPENDED or not spec.lifecycle.suspend.wake_on_request:
            return False
        if spec.num_engines == 0:
            return False
        already = bool(self.world.resource.lifecycle.get("woken"))
        if already and self.idle_in is not None and self.idle_in <= 0:
            return False
        suspended = coordinator.reachable and coordinator.state is CoordinatorState.SUSPENDED
        return already or (suspended and coordinator.queue_length > 0)

    @property
    def may_wake(self) -> bool:
        """Whether a request may wake the resource."""
        suspend = self.world.resource.spec.lifecycle.suspend
        return suspend.wake_on_request and self.state is DesiredState.SUSPENDED

    @cached_property
    def idle_in(self) -> float | None:
        """Seconds until a woken resource is suspended again if no request arrives.

        The value is None if the coordinator is unreachable.
        """
        coordinator, limit = self.world.coordinator, self.world.resource.spec.lifecycle.suspend.idle_seconds
        if not coordinator.reachable:
            return None
        busy = coordinator.queue_length > 0 or any(engine.in_flight for engine in coordinator.engines)
        return float(limit) if busy else limit - coordinator.idle_seconds

    @cached_property
    def requested_at(self) -> str | None:
        """Time at which the effective desired state was first observed, or None if the state is new."""
        lifecycle = self.world.resource.lifecycle
        return lifecycle.get("requestedAt") if lifecycle.get("desired") == self.state.value else None

    @cached_property
    def releases_pods(self) -> bool:
        """Whether the engine pods are removed while the resource is suspended (ReleasePods)."""
        spec = self.world.resource.spec
        if self.state is not DesiredState.SUSPENDED:
            return False
        if spec.lifecycle.suspend.level is SuspendLevel.RELEASE_PODS or spec.num_engines == 0:
            return True
        left = self.escalation_in
        return left is not None and left <= 0

    @cached_property
    def escalation_in(self) -> float | None:
        """Seconds until a suspended resource also releases its pods, or None if the resource keeps its pods."""
        after = self.world.resource.spec.lifecycle.suspend.escalate_after_seconds
        history = self.world.resource.status.get("history") or []
        if after is None or not history or history[-1]["to"] != ResourceState.SUSPENDED.value:
            return None
        return after - seconds_since(history[-1]["at"], self.world.now)

    @cached_property
    def operation(self) -> Operation | None:
        """The persisted operation, updated from this World.

        The value is None if no operation is persisted, or if its goal is no longer the desired state.
        """
        return operations.resolve(operations.from_status(self.world.resource.lifecycle), self.world, self.state)

    def _over(self, signal: SignalKind) -> bool:
        last = self.operation
        return last is not None and last.goal is self.state and last.over(signal)

    @cached_property
    def drained(self) -> bool:
        """Whether the last operation is a DRAIN of all engines towards the effective desired state, and has ended."""
        return self._over(SignalKind.DRAIN)

    @cached_property
    def stopped(self) -> bool:
        """Whether the engines need no further signal before their pods are removed."""
        if self.state is not DesiredState.STOPPED:
            return False
        overdue = self.overdue_in
        return self._over(SignalKind.STOP) or (overdue is not None and overdue <= 0)

    @cached_property
    def overdue_in(self) -> float | None:
        """Seconds until the operator removes the engine pods without the coordinator, if a stop makes no progress.

        The value is negative if this time has passed, and None if the resource is not being stopped.
        """
        if self.state is not DesiredState.STOPPED or self.requested_at is None:
            return None
        grace = STUCK_GRACE_SECONDS if self.world.coordinator.reachable else UNREACHABLE_GRACE_SECONDS
        limit = self.world.resource.spec.lifecycle.drain_seconds + grace
        return limit - seconds_since(self.requested_at, self.world.now)


@dataclass(frozen=True)
class Keys:
    """The generations of the CURVE keys of a World's resource."""

    world: World

    @cached_property
    def server_generation(self) -> int:
        """Generation of the coordinator's own key in the keys Secret.

        If there is no Secret, the value is the generation of the Secret that the operator will create.
        """
        if self.world.keys is not None:
            return self.world.keys.server_generation
        if ChildRef("Secret", f"{self.world.resource.name}-keys") in self.world.children:
            # The Secret exists but cannot be read, which must not restart anything.
            return int((self.world.resource.status.get("keys") or {}).get("generation", 1))
        return self.first_generation

    @cached_property
    def first_generation(self) -> int:
        """Generation of the keys of a new Secret. It is higher than all earlier generations."""
        lost = (self.world.resource.status.get("keys") or {}).get("generation", 0)
        return max(int(lost) + 1, self.world.resource.spec.keys.generation)

    @cached_property
    def wanted_generation(self) -> int | None:
        """The desired generation of the keys, from the spec or from the age of the current keys.

        The value never decreases. It is None if there are no keys.
        """
        spec, keys = self.world.resource.spec.keys, self.world.keys
        if keys is None:
            return None
        made = parse(keys.since)
        if spec.rotate_after_days is not None and made is not None:
            aged = self.world.now - made >= timedelta(days=spec.rotate_after_days)
            return max(spec.generation, keys.generation + aged)
        return max(spec.generation, keys.generation)
