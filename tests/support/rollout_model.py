"""A rollout as a finite system: engines, their pods and canaries, one operator that may die, users who change their
mind.

`explore` visits every state that can be reached from a settled resource and checks each step of the planner there. What
the planner cannot see is left out, so that the states are few enough to be all visited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_operator.plan.rollout import (
    Await,
    Canary,
    Drain,
    EngineFacts,
    Finished,
    Halt,
    Prove,
    Replace,
    Step,
)

Planner = Callable[..., Step]
NONE, PENDING, PASSED, FAILED = 0, 1, 2, 3
CANARY = (Canary.NONE, Canary.PENDING, Canary.PASSED, Canary.FAILED)
GONE = -1


class Engine(NamedTuple):
    """`template` and `pod` are revisions; `pod` is GONE while the StatefulSet makes it anew."""

    template: int
    pod: int
    serving: bool
    draining: bool
    canary: int


class State(NamedTuple):
    wanted: int
    engines: tuple[Engine, ...]
    drain: tuple[int, bool] | None
    """The engine of the DRAIN that is recorded, and whether it is over."""


class Violation(AssertionError):
    pass


@dataclass(frozen=True)
class Model:
    planner: Planner
    revisions: int
    max_unavailable: int
    sizes: tuple[int, ...]
    """Numbers of engines that a user may scale to; the first is the initial one."""

    def settled(self) -> State:
        engine = Engine(0, 0, True, False, NONE)
        return State(0, (engine,) * self.sizes[0], None)

    def facts(self, state: State) -> list[EngineFacts]:
        return [
            EngineFacts(
                name=str(index),
                current=engine.template == state.wanted,
                leftover=engine.template == state.wanted and engine.pod not in (GONE, engine.template),
                serving=self.is_serving(state, engine),
                draining=engine.draining,
                drained=not engine.serving or (engine.draining and state.drain == (index, True)),
                canary=CANARY[engine.canary],
            )
            for index, engine in enumerate(state.engines)
        ]

    # --- the operator ---

    def step(self, state: State) -> tuple[Step | None, State]:
        """One pass. None: an operation is open, or a drain that nobody wants any more is undone."""
        if state.drain is not None and not state.drain[1]:
            return None, state
        undone = self._undrain(state)
        if undone is not None:
            return None, undone
        found = self.planner(self.facts(state), max_unavailable=self.max_unavailable, running=True)
        return found, self._act(state, found)

    def _undrain(self, state: State) -> State | None:
        for index, engine in enumerate(state.engines):
            right = engine.template == engine.pod == state.wanted and engine.canary != FAILED
            if engine.serving and engine.draining and right:
                return _with(state, index, _lost(engine))._replace(drain=None)
        return None

    def _act(self, state: State, step: Step) -> State:
        match step:
            case Replace(names):
                for name in names:
                    state = _with(state, int(name), _replaced(state.engines[int(name)], state.wanted, pods=True))
                return state._replace(drain=None)
            case Drain(name) | Halt(name, drain=True):
                engine = state.engines[int(name)]
                return _with(state, int(name), engine._replace(draining=engine.serving))._replace(
                    drain=(int(name), False)
                )
            case _:
                return state

    # --- everything else ---

    def progress(self, state: State) -> Iterator[State]:
        """What happens by itself, sooner or later."""
        if state.drain is not None and not state.drain[1]:
            yield state._replace(drain=(state.drain[0], True))
        for index, engine in enumerate(state.engines):
            if engine.pod == GONE or not engine.serving:
                up = Engine(engine.template, engine.template, True, False, engine.canary)
                yield _with(state, index, up)
            elif engine.canary == PENDING and engine.template == engine.pod == state.wanted:
                yield _with(state, index, engine._replace(canary=PASSED))

    def trouble(self, state: State) -> Iterator[State]:
        """What users, nodes and crashes may do at any moment."""
        for revision in range(self.revisions):
            if revision != state.wanted:
                yield state._replace(wanted=revision)
        for size in self.sizes:
            if size < len(state.engines):
                kept = state.drain if state.drain is None or state.drain[0] < size else None
                yield state._replace(engines=state.engines[:size], drain=kept)
            elif size > len(state.engines):
                added = (Engine(state.wanted, GONE, False, False, NONE),) * (size - len(state.engines))
                yield state._replace(engines=state.engines + added)
        for index, engine in enumerate(state.engines):
            if engine.pod != GONE:
                yield _with(state, index, _lost(engine))
            if engine.serving:
                yield _with(state, index, engine._replace(serving=False, draining=False))
            if engine.canary == PENDING and engine.serving and engine.template == engine.pod == state.wanted:
                yield _with(state, index, engine._replace(canary=FAILED))
        yield from self._crashes(state)

    def _crashes(self, state: State) -> Iterator[State]:
        """The operator dies after it persisted and before or amid its acts."""
        step, _ = self.step(state)
        if not isinstance(step, Replace):
            return
        yield state._replace(drain=None)
        for name in step.names:
            half = _replaced(state.engines[int(name)], state.wanted, pods=False)
            yield _with(state, int(name), half)._replace(drain=None)

    # --- what must hold ---

    def is_serving(self, state: State, engine: Engine) -> bool:
        """A process of an earlier revision does not speak for the wanted one."""
        return engine.serving and (engine.template != state.wanted or engine.pod == engine.template)

    def is_available(self, state: State, engine: Engine) -> bool:
        return self.is_serving(state, engine) and not engine.draining

    def is_unproven(self, state: State, engine: Engine) -> bool:
        """It has the wanted template and has not shown that this revision works. Computed here, not by the planner."""
        if engine.template != state.wanted:
            return False
        has_old_pod = engine.pod not in (GONE, engine.template)
        return has_old_pod or not self.is_serving(state, engine) or engine.canary in (PENDING, FAILED)

    def check(self, before: State, step: Step | None, after: State) -> None:
        if step is None:
            return
        facts = self.facts(before)
        floor = len(facts) - self.max_unavailable
        left = sum(self.is_available(after, engine) for engine in after.engines)
        had = sum(self.is_available(before, engine) for engine in before.engines)
        wrong_one = isinstance(step, Halt)
        _hold(left >= min(had, floor) or wrong_one, "capacity was taken below replicas - maxUnavailable", before, step)
        if not isinstance(step, Replace):
            return
        for name in step.names:
            fact, engine = facts[int(name)], before.engines[int(name)]
            _hold(not fact.current or fact.leftover, "an engine of the wanted revision was touched", before, step)
            idle = not engine.serving or (engine.draining and fact.drained) or fact.leftover
            _hold(idle, "an engine that serves lost its pods", before, step)
        given = sum(before.engines[int(name)].template != before.wanted for name in step.names)
        unproven = sum(self.is_unproven(before, engine) for engine in before.engines)
        current = sum(engine.template == before.wanted for engine in before.engines)
        proven = current > unproven
        spreads = given and not proven and unproven + given > self.max_unavailable
        _hold(not spreads, "an unproven revision spread", before, step)

    def ends(self, state: State, *, known: set[State]) -> None:
        """Left alone, the rollout ends: with every engine at the wanted revision, or halted at a wrong one."""
        path: list[State] = []
        seen: set[State] = set()
        while state not in known:
            if state in seen:
                raise Violation(f"no end: {state}")
            path.append(state)
            seen.add(state)
            moved = next(self.progress(state), None)
            if moved is None:
                step, moved = self.step(state)
                if moved == state:
                    done = isinstance(step, Finished) and all(e.template == state.wanted for e in state.engines)
                    _hold(done or isinstance(step, Halt), "the rollout waits for ever", state, step)
                    break
            state = moved
        known.update(path)


def _hold(condition: bool, what: str, state: State, step: Step | None) -> None:
    if not condition:
        raise Violation(f"{what}: {step} in {state}")


def _with(state: State, index: int, engine: Engine) -> State:
    return state._replace(engines=(*state.engines[:index], engine, *state.engines[index + 1 :]))


def _lost(engine: Engine) -> Engine:
    return engine._replace(pod=GONE, serving=False, draining=False)


def _replaced(engine: Engine, revision: int, *, pods: bool) -> Engine:
    """A template that changes makes a canary due; without its old pods the engine serves nobody."""
    canary = PENDING if engine.template != revision else engine.canary
    changed = engine._replace(template=revision, canary=canary)
    return _lost(changed) if pods else changed


def explore(model: Model, *, limit: int | None = None) -> int:
    """Visit every reachable state, breadth first; the number of states.

    Raises:
        Violation: naming the invariant, the step and the state.
    """
    start = model.settled()
    seen = {start}
    ended: set[State] = set()
    queue = deque([start])
    while queue:
        state = queue.popleft()
        step, after = model.step(state)
        model.check(state, step, after)
        model.ends(state, known=ended)
        for following in (after, *model.progress(state), *model.trouble(state)):
            if following not in seen and (limit is None or len(seen) < limit):
                seen.add(following)
                queue.append(following)
    return len(seen)


def without(facts: Sequence[EngineFacts], **changes: object) -> list[EngineFacts]:
    """The facts as a planner that ignores some of them sees them."""
    from dataclasses import replace

    return [replace(fact, **changes) for fact in facts]


__all__ = ["Await", "Model", "Prove", "Violation", "explore", "without"]
