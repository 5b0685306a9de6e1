"""The verb path planner, walked exhaustively against a coordinator that knows nothing but the protocol's table."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

import pytest

from megatron_operator.decision.verbs import GOAL, Reached, Send, Step, Wait, next_step
from megatron_operator.resource.states import LEGAL_SIGNALS, CoordinatorState, DesiredState, EngineState, SignalKind
from megatron_runtime.protocol.lifecycle import NEXT_SIGNAL, STEADY_ENGINE_STATES

C, D, E, S = CoordinatorState, DesiredState, EngineState, SignalKind

MIXES = [mix for count in range(3) for mix in itertools.combinations_with_replacement(EngineState, count)]
WORK: dict[SignalKind, tuple[EngineState, EngineState, CoordinatorState]] = {
    S.PAUSE: (E.PAUSING, E.PAUSED, C.PAUSED),
    S.UNPAUSE: (E.UNPAUSING, E.RUNNING, C.RUNNING),
    S.SUSPEND: (E.SUSPENDING, E.SUSPENDED, C.SUSPENDED),
    S.RESUME: (E.RESUMING, E.RESUMED, C.PAUSED),
    S.STOP: (E.STOPPING, E.STOPPED, C.RUNNING),
}
TRANSIENT = {E.PAUSING: E.PAUSED, E.UNPAUSING: E.RUNNING, E.SUSPENDING: E.SUSPENDED, E.RESUMING: E.RESUMED}


@dataclass(frozen=True)
class Peer:
    """A coordinator with its engines, and what the planner remembers of this goal."""

    coordinator: CoordinatorState
    engines: tuple[EngineState, ...]
    desired: DesiredState
    drained: bool = False
    stopped: bool = False
    all_draining: bool = False

    def plan(self) -> Step:
        return next_step(
            coordinator=self.coordinator,
            engines=[(f"engine-{index}", state) for index, state in enumerate(self.engines)],
            desired=self.desired,
            drained=self.drained,
            all_draining=self.all_draining,
            stopped=self.stopped,
        )

    def receive(self, signal: SignalKind) -> Peer:
        assert signal in LEGAL_SIGNALS[self.coordinator], f"illegal: {signal} in {self.coordinator}"
        assert all(state in STEADY_ENGINE_STATES[self.coordinator] for state in self.engines), (
            f"{signal} between two states"
        )
        if signal is S.DRAIN:
            return replace(self, drained=True, all_draining=True)
        _, lands, state = WORK[signal]
        engines = () if signal is S.STOP else (lands,) * len(self.engines)
        draining = self.all_draining and signal is not S.UNPAUSE
        return replace(
            self,
            coordinator=state,
            engines=engines,
            drained=self.drained,
            stopped=signal is S.STOP,
            all_draining=draining,
        )

    def settle(self) -> Peer:
        """What happens by itself: engines finish what they began, leave, and follow their coordinator."""
        coordinator = {C.RECOVERING: C.RUNNING, C.STOPPING: C.RUNNING}.get(self.coordinator, self.coordinator)
        staying = (state for state in self.engines if state not in (E.STOPPING, E.STOPPED))
        engines = tuple(TRANSIENT.get(state, state) for state in staying)
        if engines == self.engines and coordinator is self.coordinator:
            follow = next(iter(STEADY_ENGINE_STATES[coordinator] - {E.RESUMED}))
            engines = tuple(state if state in STEADY_ENGINE_STATES[coordinator] else follow for state in engines)
        if not engines:
            engines = (next(iter(STEADY_ENGINE_STATES[coordinator] - {E.RESUMED})),)
        return replace(self, coordinator=coordinator, engines=engines)


def _walk(peer: Peer, *, limit: int = 30) -> tuple[Peer, list[SignalKind]]:
    sent: list[SignalKind] = []
    for _ in range(limit):
        step = peer.plan()
        if isinstance(step, Reached):
            return peer, sent
        if isinstance(step, Send):
            sent.append(step.signal)
            peer = peer.receive(step.signal)
        else:
            peer = peer.settle()
    raise AssertionError(f"{peer} never reaches its goal; sent {sent}")


def _shortest(coordinator: CoordinatorState, goal: CoordinatorState) -> int:
    """Signals on the shortest legal way between two coordinator states, not through STOP."""
    queue, seen = deque([(coordinator, 0)]), {coordinator}
    while queue:
        state, length = queue.popleft()
        if state is goal:
            return length
        for signal in LEGAL_SIGNALS[state] - {S.STOP, S.DRAIN, S.UPDATE_WEIGHTS, S.SET_ADAPTERS}:
            after = WORK[signal][2]
            if signal is S.PAUSE and state is not C.RUNNING:
                continue
            if after not in seen:
                seen.add(after)
                queue.append((after, length + 1))
    raise AssertionError(f"no way from {coordinator} to {goal}")


@pytest.mark.parametrize("coordinator", CoordinatorState)
@pytest.mark.parametrize("desired", DesiredState)
def test_every_observation_leads_to_the_goal_by_legal_signals(
    coordinator: CoordinatorState, desired: DesiredState
) -> None:
    for mix in MIXES:
        end, sent = _walk(Peer(coordinator, mix, desired))
        if desired is D.STOPPED:
            assert end.stopped
            assert sent[-1] is S.STOP
        else:
            assert end.coordinator is GOAL[desired]
            assert all(state in STEADY_ENGINE_STATES[end.coordinator] for state in end.engines)


@pytest.mark.parametrize("coordinator", sorted(STEADY_ENGINE_STATES))
@pytest.mark.parametrize("desired", DesiredState)
def test_the_path_is_a_shortest_one(coordinator: CoordinatorState, desired: DesiredState) -> None:
    state = next(iter(STEADY_ENGINE_STATES[coordinator] - {E.RESUMED}))
    _, sent = _walk(Peer(coordinator, (state, state), desired))
    if desired is D.STOPPED:
        drain = [S.DRAIN, S.PAUSE] if coordinator is C.RUNNING else []
        assert sent == [*drain, S.STOP]
    else:
        assert len(sent) == _shortest(coordinator, GOAL[desired])


@pytest.mark.slow
def test_two_changes_of_the_goal_at_any_step_stay_legal_and_reach_the_last_goal() -> None:
    for coordinator, mix in itertools.product(CoordinatorState, MIXES):
        for first, second, third in itertools.product(DesiredState, repeat=3):
            for moment in range(4):
                peer = Peer(coordinator, mix, first)
                for goal in (second, third):
                    peer = _advance(peer, moment)
                    memory = {} if goal is peer.desired else {"drained": False, "stopped": False}
                    peer = replace(peer, desired=goal, **memory)
                end, _ = _walk(peer)
                assert end.stopped if third is D.STOPPED else end.coordinator is GOAL[third]
                if third is D.RUNNING:
                    assert not end.all_draining


def _advance(peer: Peer, steps: int) -> Peer:
    for _ in range(steps):
        step = peer.plan()
        if isinstance(step, Send):
            peer = peer.receive(step.signal)
        elif isinstance(step, Wait):
            peer = peer.settle()
    return peer


@pytest.mark.parametrize("coordinator", [C.RECOVERING, C.STOPPING])
@pytest.mark.parametrize("desired", DesiredState)
def test_no_signal_is_sent_to_a_coordinator_between_two_states(
    coordinator: CoordinatorState, desired: DesiredState
) -> None:
    assert isinstance(Peer(coordinator, (E.RUNNING,), desired).plan(), Wait)


def test_zero_engines_do_not_count_as_all_engines() -> None:
    assert isinstance(Peer(C.RUNNING, (), D.PAUSED).plan(), Wait)
    absent = next_step(coordinator=C.RUNNING, engines=[], desired=D.PAUSED, engines_expected=False)
    assert absent == Send(S.PAUSE)


def test_without_engines_a_stop_neither_drains_nor_waits() -> None:
    for coordinator, signal in ((C.RUNNING, S.PAUSE), (C.PAUSED, S.STOP), (C.SUSPENDED, S.STOP)):
        for expected in (True, False):
            step = next_step(coordinator=coordinator, engines=[], desired=D.STOPPED, engines_expected=expected)
            assert step == Send(signal)


def test_the_table_is_complete_and_legal() -> None:
    pairs = {(state, GOAL[desired]) for state, desired in itertools.product(STEADY_ENGINE_STATES, DesiredState)}
    assert set(NEXT_SIGNAL) == {(state, goal) for state, goal in pairs if state is not goal}
    for (coordinator, _), signal in NEXT_SIGNAL.items():
        assert S[signal.name] in LEGAL_SIGNALS[coordinator]
