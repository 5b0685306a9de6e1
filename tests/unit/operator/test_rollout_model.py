"""The rollout planner in every reachable state of a small model; planners with known mistakes must be caught.

`explore` visits every state that can be reached from a settled resource and checks each step of the planner there.
`make soak` visits a million states of four engines; otherwise the search of the larger systems stops earlier.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from soak import size

from megatron_operator.decision.rollout import (
    RULES,
    Await,
    Canary,
    Check,
    Drain,
    EngineFacts,
    Finished,
    Halt,
    Recreate,
    Replace,
    Situation,
    Step,
    Surge,
    keeps_revision,
    kept_extras,
    next_step,
    rule_for,
)

LIMIT = size(15_000, soak=1_000_000)
"""States of a search for a known mistake, which ends where it is found."""
REACH = size(2_500, soak=1_000_000)
"""States of a search that finds no mistake."""
Planner = Callable[..., Step]
NONE, PENDING, PASSED, FAILED = 0, 1, 2, 3
CANARY = (Canary.NONE, Canary.PENDING, Canary.PASSED, Canary.FAILED)
GONE = -1


class Engine(NamedTuple):
    """`template` is a revision, `pods` those of its pods by ordinal. A pod is GONE or missing at the end while the
    StatefulSet re-creates it."""

    template: int
    pods: tuple[int, ...]
    serving: bool
    draining: bool
    canary: int


class State(NamedTuple):
    wanted: int
    replicas: int
    engines: tuple[Engine, ...]
    """Those beyond `replicas` are surge engines, or are about to be removed."""
    drain: tuple[int, bool] | None
    """The engine of the recorded DRAIN, and whether the DRAIN is complete."""
    good: frozenset[int] = frozenset()
    """Revisions that passed their check, or of which an engine served."""
    check: tuple[int, bool] | None = None
    """The revision of the check pod, and whether its check has failed; None: there is no pod."""
    paused: bool = False


class Removal(NamedTuple):
    """The removal of engines beyond `replicas` (policy scale_down)."""

    indexes: tuple[int, ...]


class Violation(AssertionError):
    """A planner broke an invariant."""


@dataclass(frozen=True)
class Model:
    """A rollout as a finite system: engines, their pods and canaries, an operator that may crash, and user edits.

    It leaves out what the planner cannot observe, so that all states can be visited.
    """

    planner: Planner
    revisions: int
    max_unavailable: int
    sizes: tuple[int, ...]
    """Numbers of engines that a user may scale to; the first is the initial one."""
    pods: tuple[int, ...] = (1, 1, 1)
    """Number of pods of an engine of each revision."""
    max_surge: int = 0
    kept: Callable[..., tuple[str, ...]] = kept_extras
    """The rule of scale_down: which engines beyond `replicas` stay."""
    pauses: bool = False
    """Whether users pause and continue the rollout."""
    keeps: Callable[..., bool] = keeps_revision
    """The rule of upkeep: whether an engine keeps template and number of pods of its own revision."""

    def settled(self) -> State:
        engine = Engine(0, (0,) * self.pods[0], True, False, NONE)
        return State(0, self.sizes[0], (engine,) * self.sizes[0], None, frozenset({0}))

    def facts(self, state: State) -> list[EngineFacts]:
        return [
            EngineFacts(
                name=str(index),
                current=engine.template == state.wanted,
                leftover=self.has_old_pods(engine),
                serving=self.is_serving(state, engine),
                draining=engine.draining,
                drained=not engine.serving or (engine.draining and state.drain == (index, True)),
                canary=CANARY[engine.canary],
            )
            for index, engine in enumerate(state.engines)
        ]

    # --- the operator ---

    def step(self, state: State) -> tuple[Step | Removal | None, State]:
        """One pass. None: an operation is open, or an obsolete drain is undone."""
        if state.check is not None and (state.check[0] != state.wanted or state.wanted in state.good):
            state = state._replace(check=None)
        state = self._upkeep(state)
        if state.drain is not None and not state.drain[1]:
            return None, state
        undone = self._undrain(state)
        if undone is not None:
            return None, undone
        facts = self.facts(state)
        surplus = self._surplus(state, facts)
        removable = tuple(index for index in surplus if facts[index].drained)
        if removable:
            left = tuple(engine for index, engine in enumerate(state.engines) if index not in removable)
            return Removal(removable), state._replace(engines=left, drain=None)
        if surplus:
            return Drain(str(surplus[-1])), self._act(state, Drain(str(surplus[-1])))
        found = self.planner(
            facts[: state.replicas],
            extras=facts[state.replicas :],
            max_unavailable=self.max_unavailable,
            max_surge=self.max_surge,
            running=True,
            checked=not self.is_check_due(state),
            paused=state.paused,
        )
        return found, self._act(state, found)

    def _surplus(self, state: State, facts: list[EngineFacts]) -> list[int]:
        """The engines beyond `replicas` that are to be removed."""
        extras = facts[state.replicas :]
        kept = self.kept(facts[: state.replicas], extras, max_unavailable=self.max_unavailable)
        return [int(fact.name) for fact in extras if fact.name not in kept]

    def _upkeep(self, state: State) -> State:
        """Scale each StatefulSet to the number of pods of the revision that the rule chooses. Its engine restarts."""
        for index, engine in enumerate(state.engines):
            keeps = self.keeps(current=engine.template == state.wanted, has_pods=True, wants_pods=True)
            count = self.pods[engine.template if keeps else state.wanted]
            if count != self.pods[engine.template]:
                pods = (*engine.pods, engine.template)[:count]
                state = _with(state, index, engine._replace(pods=pods, serving=False, draining=False))
        return state

    def is_check_due(self, state: State) -> bool:
        outdated = [engine for engine in state.engines if engine.template != state.wanted]
        if all(engine.template == state.wanted for engine in state.engines[: state.replicas]):
            return False
        begun = state.check is not None and state.check[0] == state.wanted
        return state.wanted not in state.good and (begun or any(self.is_serving(state, each) for each in outdated))

    def is_held(self, state: State) -> bool:
        """A paused rollout keeps engines of another revision."""
        base = state.engines[: state.replicas]
        return state.paused and any(engine.template != state.wanted for engine in base)

    def has_failed_check(self, state: State) -> bool:
        return self.is_check_due(state) and state.check == (state.wanted, True)

    def _undrain(self, state: State) -> State | None:
        for index, engine in enumerate(state.engines[: state.replicas]):
            right = engine.template == state.wanted and not self.has_old_pods(engine)
            right |= self.has_failed_check(state) or self.is_held(state)
            if engine.serving and engine.draining and right and engine.canary != FAILED:
                return _with(state, index, _lost(engine))._replace(drain=None)
        return None

    def _act(self, state: State, step: Step) -> State:
        match step:
            case Check():
                return state._replace(check=state.check or (state.wanted, False))
            case Replace(names):
                for name in names:
                    state = _with(state, int(name), _replaced(state.engines[int(name)], state.wanted, pods=True))
                return state._replace(drain=None)
            case Recreate(names):
                for name in names:
                    state = _with(state, int(name), _lost(state.engines[int(name)]))
                return state._replace(drain=None)
            case Surge():
                added = Engine(state.wanted, (), False, False, PENDING)
                return state._replace(engines=(*state.engines, added))
            case Drain(name) | Halt(name, drain=True):
                engine = state.engines[int(name)]
                return _with(state, int(name), engine._replace(draining=engine.serving))._replace(
                    drain=(int(name), False)
                )
            case _:
                return state

    # --- the environment ---

    def progress(self, state: State) -> Iterator[State]:
        """State changes that happen without the operator."""
        if state.drain is not None and not state.drain[1]:
            yield state._replace(drain=(state.drain[0], True))
        if state.check is not None and not state.check[1] and state.check[0] not in state.good:
            yield state._replace(good=state.good | {state.check[0]})
        for index, engine in enumerate(state.engines):
            count = self.pods[engine.template]
            kept = tuple(engine.template if pod == GONE else pod for pod in engine.pods[:count])
            pods = kept + (engine.template,) * (count - len(kept))
            if len(engine.pods) > count:  # a rank of the process group ends, and so all do
                yield _with(state, index, engine._replace(pods=pods, serving=False, draining=False))
            elif engine.serving and pods != engine.pods:
                yield _with(state, index, engine._replace(pods=pods))
            elif not engine.serving and len(set(pods)) == 1:  # pods of two revisions form no process group
                up = Engine(engine.template, pods, True, False, engine.canary)
                good = {engine.template} & set(pods)
                yield _with(state, index, up)._replace(good=state.good | good)
            elif pods != engine.pods:
                yield _with(state, index, engine._replace(pods=pods))
            elif self.to_prove(state, engine):
                yield _with(state, index, engine._replace(canary=PASSED))

    def trouble(self, state: State) -> Iterator[State]:
        """Changes that users, nodes and crashes may cause at any moment."""
        for revision in range(self.revisions):
            if revision != state.wanted:
                yield state._replace(wanted=revision)
        if self.pauses:
            yield state._replace(paused=not state.paused)
        yield from self._scaled(state)
        for index, engine in enumerate(state.engines):
            for ordinal, pod in enumerate(engine.pods):
                if pod != GONE:
                    yield _with(state, index, _lost(engine, ordinal))
            if engine.serving:
                yield _with(state, index, engine._replace(serving=False, draining=False))
            if self.to_prove(state, engine):
                yield _with(state, index, engine._replace(canary=FAILED))
        if state.check is not None:
            yield state._replace(check=(state.check[0], True))
            yield state._replace(check=None)
        yield from self._crashes(state)

    def _scaled(self, state: State) -> Iterator[State]:
        for count in self.sizes:
            if count < state.replicas:
                engines = state.engines[: count + self.max_surge]
                kept = state.drain if state.drain is None or state.drain[0] < len(engines) else None
                yield state._replace(replicas=count, engines=engines, drain=kept)
            elif count > state.replicas:
                outdated = [engine for engine in state.engines[: state.replicas] if engine.template != state.wanted]
                keeps = self.is_check_due(state) or self.is_held(state)
                template = outdated[-1].template if keeps else state.wanted
                missing = max(0, count - len(state.engines))
                added = (Engine(template, (), False, False, NONE),) * missing
                yield state._replace(replicas=count, engines=state.engines + added)

    def _crashes(self, state: State) -> Iterator[State]:
        """The operator dies after it persisted its decision, before or while it acts on it."""
        step, _ = self.step(state)
        if not isinstance(step, Replace):
            return
        yield state._replace(drain=None)
        for name in step.names:
            half = _replaced(state.engines[int(name)], state.wanted, pods=False)
            yield _with(state, int(name), half)._replace(drain=None)

    # --- the invariants ---

    def is_serving(self, state: State, engine: Engine) -> bool:
        """A process of an earlier revision does not count as serving the wanted revision."""
        return engine.serving and (engine.template != state.wanted or not self.has_old_pods(engine))

    def has_old_pods(self, engine: Engine) -> bool:
        return any(pod not in (GONE, engine.template) for pod in engine.pods)

    def to_prove(self, state: State, engine: Engine) -> bool:
        """Its canary may be answered."""
        right = engine.template == state.wanted and not self.has_old_pods(engine)
        return engine.canary == PENDING and engine.serving and right

    def is_available(self, state: State, engine: Engine) -> bool:
        return self.is_serving(state, engine) and not engine.draining

    def is_unproven(self, state: State, engine: Engine) -> bool:
        """It has the wanted template but has not proved that this revision works. Independent of the planner."""
        if engine.template != state.wanted:
            return False
        return not self.is_serving(state, engine) or engine.canary in (PENDING, FAILED)

    def check(self, before: State, step: Step | Removal | None, after: State) -> None:
        taken = step.names if isinstance(step, Replace | Recreate) else ()
        gone = step.indexes if isinstance(step, Removal) else ()
        left_over = [(index, engine) for index, engine in enumerate(before.engines) if index not in gone]
        _hold(all(index >= before.replicas for index in gone), "a desired engine was removed", before, step)
        for (index, old), new in zip(left_over, after.engines, strict=not isinstance(step, Surge)):
            untouched = (old.template, len(old.pods)) == (new.template, len(new.pods))
            reverted = old.template == before.wanted or self.has_failed_check(before) or self.is_held(before)
            undrained = old.draining and reverted and not new.pods
            _hold(untouched or undrained or str(index) in taken, "pods were changed before their turn", before, step)
        if step is None:
            return
        facts = self.facts(before)
        floor = before.replicas - self.max_unavailable
        left = sum(self.is_available(after, engine) for engine in after.engines)
        had = sum(self.is_available(before, engine) for engine in before.engines)
        wrong_one = isinstance(step, Halt)
        _hold(left >= min(had, floor) or wrong_one, "capacity was taken below replicas - maxUnavailable", before, step)
        outdated = [engine for engine in before.engines if engine.template != before.wanted]
        serve = any(self.is_serving(before, engine) for engine in outdated)
        names = step.names if isinstance(step, Replace) else (step.name,) if isinstance(step, Drain | Surge) else ()
        base = [int(name) for name in names if int(name) < before.replicas]
        touched = any(before.engines[index].template != before.wanted for index in base)
        unchecked = before.wanted not in before.good and serve
        _hold(not (touched and unchecked), "an engine was taken before the check has passed", before, step)
        _hold(not (touched and before.paused), "an engine was taken while the rollout is paused", before, step)
        extras = len(after.engines) - after.replicas
        _hold(not isinstance(step, Surge) or extras <= self.max_surge, "too many engines were added", before, step)
        unproven = sum(self.is_unproven(before, engine) for engine in before.engines)
        current = sum(engine.template == before.wanted for engine in before.engines)
        replaced = step.names if isinstance(step, Replace) else ()
        given = sum(before.engines[int(name)].template != before.wanted for name in replaced) + isinstance(step, Surge)
        spreads = given and current == unproven and unproven + given > max(1, self.max_unavailable)
        _hold(not spreads, "an unproven revision spread", before, step)
        for name in taken:
            fact, engine = facts[int(name)], before.engines[int(name)]
            finishes = isinstance(step, Recreate) and fact.leftover
            _hold(not fact.current or finishes, "an engine of the wanted revision was touched", before, step)
            idle = not engine.serving or (engine.draining and fact.drained) or (finishes and fact.current)
            _hold(idle, "a serving engine lost its pods", before, step)

    def ends(self, state: State, *, known: set[State]) -> None:
        """Without further changes, the rollout ends: every engine has the wanted revision, or it halts at a bad one."""
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
                    base, held = state.engines[: state.replicas], self.is_held(state)
                    serve = all(self.is_available(state, each) or (held and each.canary == FAILED) for each in base)
                    right = serve and (held or all(each.template == state.wanted for each in base))
                    done = isinstance(step, Finished) and right and (held or base == state.engines)
                    blocked = isinstance(step, Check) and state.check == (state.wanted, True)
                    blocked &= all(engine.canary == FAILED for engine in state.engines if engine.draining)
                    _hold(done or blocked or isinstance(step, Halt), "the rollout waits forever", state, step)
                    break
            state = moved
        known.update(path)


def _hold(condition: bool, what: str, state: State, step: Step | Removal | None) -> None:
    if not condition:
        raise Violation(f"{what}: {step} in {state}")


def _with(state: State, index: int, engine: Engine) -> State:
    return state._replace(engines=(*state.engines[:index], engine, *state.engines[index + 1 :]))


def _lost(engine: Engine, ordinal: int | None = None) -> Engine:
    """Without all its pods, or without one; then the others end, too."""
    pods = () if ordinal is None else (*engine.pods[:ordinal], GONE, *engine.pods[ordinal + 1 :])
    while pods and pods[-1] == GONE:
        pods = pods[:-1]
    return engine._replace(pods=pods, serving=False, draining=False)


def _replaced(engine: Engine, revision: int, *, pods: bool) -> Engine:
    """A changed template requires a new canary; without its old pods the engine does not serve."""
    canary = PENDING if engine.template != revision else engine.canary
    changed = engine._replace(template=revision, canary=canary)
    return _lost(changed) if pods else changed


@dataclass
class Recorded:
    """The planner, which counts the rules that gave its steps, by name."""

    rules: Counter[str] = field(default_factory=Counter)

    def __call__(self, engines: Sequence[EngineFacts], **options: Any) -> Step:
        situation = Situation(engines=engines, **options)
        rule = rule_for(situation)
        self.rules[rule.name] += 1
        return rule.step(situation)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_unavailable", "sizes", "pods"),
    [
        (1, (1,), (1, 1, 1)),
        (1, (2, 1), (1, 1, 1)),
        (2, (3, 2), (1, 1, 1)),
        (1, (4, 3), (1, 1, 1)),
        (2, (4, 2), (1, 1, 1)),
        (1, (1,), (1, 2, 3)),
        (1, (2, 1), (2, 1, 2)),
        (2, (3, 2), (1, 2, 2)),
    ],
)
def test_no_reachable_state_breaks_an_invariant(
    max_unavailable: int, sizes: tuple[int, ...], pods: tuple[int, ...], record_property: Any
) -> None:
    revisions = len(pods)
    planner = Recorded()
    states = explore(Model(planner, revisions, max_unavailable, sizes, pods), limit=REACH)
    record_property("states", states)
    seen = f"all {states} states" if states < REACH else f"the first {states} states, breadth first"
    what = f"{sizes[0]} engines, {revisions} revisions of {pods} pods, maxUnavailable {max_unavailable}"
    print(f"\n{what}: {seen}, 0 violations; steps by rule: {dict(planner.rules)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_unavailable", "max_surge", "sizes", "pods"),
    [
        (0, 1, (1,), (1, 1, 1)),
        (1, 1, (2, 1), (1, 1)),
        (0, 1, (1, 2), (1, 2)),
        (0, 2, (2, 3), (1, 1, 1)),
        (1, 2, (3, 1), (1, 1)),
    ],
)
def test_no_reachable_state_breaks_an_invariant_with_surge_engines_and_pauses(
    max_unavailable: int, max_surge: int, sizes: tuple[int, ...], pods: tuple[int, ...]
) -> None:
    planner = Recorded()
    model = Model(planner, len(pods), max_unavailable, sizes, pods, max_surge=max_surge, pauses=True)
    states = explore(model, limit=REACH)
    what = f"{sizes[0]} engines, {len(pods)} revisions, maxUnavailable {max_unavailable}, maxSurge {max_surge}"
    print(f"\n{what}: {states} states, 0 violations; steps by rule: {dict(planner.rules)}")


def test_the_search_reaches_each_rule() -> None:
    """Two are missing, because the resources of the model always run, and its pods end at once."""
    planner = Recorded()
    explore(Model(planner, 2, 1, (2, 1), (1, 2), max_surge=1, pauses=True), limit=4_000)
    missing = {"wait for old pods", "leave serving engines while not running"}
    assert {rule.name for rule in RULES} - {*planner.rules} == missing


def removes_surge_engines_at_once(engines: Sequence[EngineFacts], extras: Any, **_: Any) -> tuple[str, ...]:
    return ()


def ignores_the_capacity_of_an_earlier_surge_engine(
    engines: Sequence[EngineFacts], extras: Sequence[EngineFacts], **options: Any
) -> tuple[str, ...]:
    """A surge engine of the revision before the last edit is removed while nothing else serves."""
    kept = kept_extras(engines, extras, **options)
    return tuple(extra.name for extra in extras if extra.name in kept and extra.current)


def keeps_a_surge_engine_for_ever(
    engines: Sequence[EngineFacts], extras: Sequence[EngineFacts], **options: Any
) -> tuple[str, ...]:
    return tuple(extra.name for extra in extras)


@pytest.mark.parametrize(
    "kept",
    [
        removes_surge_engines_at_once,
        ignores_the_capacity_of_an_earlier_surge_engine,
        keeps_a_surge_engine_for_ever,
    ],
    ids=lambda kept: kept.__name__,
)
def test_the_search_finds_a_known_mistake_in_the_removal_of_surge_engines(kept: Callable[..., tuple[str, ...]]) -> None:
    with pytest.raises(Violation):
        explore(Model(next_step, 3, 0, (1,), max_surge=1, kept=kept), limit=30_000)


@pytest.mark.parametrize("pods", [(2, 1), (1, 2)])
def test_the_search_finds_pods_that_are_changed_before_their_turn(pods: tuple[int, ...]) -> None:
    """Upkeep that scales to the pods of the desired revision at once is an outage of every engine."""
    at_once = Model(next_step, 2, 1, (2,), pods, keeps=lambda **_: False)
    with pytest.raises(Violation, match="before their turn"):
        explore(at_once, limit=LIMIT)


class LooksAtTheFirstPod(Model):
    """Believes that an engine has the revision of its first pod."""

    def facts(self, state: State) -> list[EngineFacts]:
        return [
            replace(fact, leftover=fact.leftover and engine.pods[0] != engine.template)
            for fact, engine in zip(super().facts(state), state.engines, strict=True)
        ]


def test_the_search_finds_an_engine_with_pods_of_two_revisions() -> None:
    with pytest.raises(Violation, match="waits forever"):
        explore(LooksAtTheFirstPod(next_step, 2, 1, (1,), (2, 2)), limit=LIMIT)


Facts = Sequence[EngineFacts]


def rolls_the_serving_generation_on_revert(engines: Facts, **options: Any) -> Step:
    """Ignores that an engine may already have the wanted revision when an edit is reverted."""
    step = next_step(engines, **options)
    touched = any(not engine.current for engine in engines) and all(engine.serving for engine in engines)
    current = [engine for engine in engines if engine.current and engine.drained]
    return Replace((current[-1].name,)) if touched and current else step


def counts_ready_instead_of_routed(engines: Facts, **options: Any) -> Step:
    """Drains the next engine although the previous one has pods but no route yet."""
    outdated = [engine for engine in engines if not engine.current and engine.serving and not engine.draining]
    step = next_step(engines, **options)
    return Drain(outdated[-1].name) if outdated and not isinstance(step, Replace | Drain) else step


def replaces_without_draining(engines: Facts, **options: Any) -> Step:
    step = next_step(engines, **options)
    return Replace((step.name,)) if isinstance(step, Drain) else step


def restarts_whatever_is_down(engines: Facts, **options: Any) -> Step:
    """Gives every engine that is down the new revision, proven or not: a bad one spreads by each lost pod."""
    down = tuple(engine.name for engine in engines if not engine.current and not engine.serving)
    return Replace(down) if down else next_step(engines, **options)


def does_not_wait_for_the_canary(engines: Facts, **options: Any) -> Step:
    believed = [*engines]
    for index, engine in enumerate(engines):
        if engine.canary in (Canary.PENDING, Canary.FAILED):
            believed[index] = replace(engine, canary=Canary.PASSED)
    return next_step(believed, **options)


def forgets_pods_of_the_revision_before(engines: Facts, **options: Any) -> Step:
    """An operator that died between the template and the pods never deletes the pods."""
    return next_step([replace(engine, leftover=False) for engine in engines], **options)


def remembers_a_drain_forever(engines: Facts, **options: Any) -> Step:
    """Believes that an engine is still drained after a restart."""
    believed = [*engines]
    for index, engine in enumerate(engines):
        if not engine.current and engine.serving and not engine.draining:
            believed[index] = replace(engine, drained=True)
    return next_step(believed, **options)


def does_not_wait_for_the_check(engines: Facts, **options: Any) -> Step:
    return next_step(engines, **{**options, "checked": True})


def replaces_the_down_before_the_check(engines: Facts, **options: Any) -> Step:
    step = next_step(engines, **options)
    down = [engine.name for engine in engines if not engine.current and not engine.serving]
    return Replace((down[-1],)) if isinstance(step, Check) and down else step


def waits_for_a_lost_drain(engines: Facts, **options: Any) -> Step:
    """An operator that died after a DRAIN was complete waits for it forever."""
    step = next_step(engines, **options)
    named = {engine.name: engine for engine in engines}
    if isinstance(step, Drain) and named[step.name].draining:
        return next_step([], **options)
    return step


def counts_a_surge_engine_that_does_not_serve(engines: Facts, *, extras: Facts, **options: Any) -> Step:
    return next_step(engines, extras=[replace(extra, serving=True) for extra in extras], **options)


def adds_a_surge_engine_for_each_pass(engines: Facts, *, extras: Facts, **options: Any) -> Step:
    step = next_step(engines, extras=extras, **options)
    return Surge(step.names[0]) if isinstance(step, Await) and options["max_surge"] else step


def adds_an_engine_before_the_check(engines: Facts, **options: Any) -> Step:
    step = next_step(engines, **options)
    return Surge(step.name) if isinstance(step, Check) and not options["extras"] else step


def rolls_although_paused(engines: Facts, **options: Any) -> Step:
    return next_step(engines, **{**options, "paused": False})


@pytest.mark.parametrize(
    "planner",
    [
        counts_a_surge_engine_that_does_not_serve,
        adds_a_surge_engine_for_each_pass,
        adds_an_engine_before_the_check,
        rolls_although_paused,
    ],
    ids=lambda planner: planner.__name__,
)
def test_the_search_finds_a_known_mistake_of_a_planner_with_surge_and_pause(planner: Callable[..., Step]) -> None:
    with pytest.raises(Violation):
        explore(Model(planner, 2, 0, (1,), (1, 1), max_surge=1, pauses=True), limit=30_000)


def _forgets_the_down(engine: EngineFacts) -> bool:
    return engine.current and (engine.leftover or engine.canary in (Canary.PENDING, Canary.FAILED))


def _forgets_the_pending(engine: EngineFacts) -> bool:
    return engine.current and (not engine.serving or engine.leftover or engine.canary is Canary.FAILED)


def _forgets_the_failed(engine: EngineFacts) -> bool:
    return engine.current and (not engine.serving or engine.leftover or engine.canary is Canary.PENDING)


@pytest.mark.parametrize("unproven", [_forgets_the_down, _forgets_the_pending, _forgets_the_failed])
def test_the_search_computes_unproven_engines_independently_of_the_planner(
    monkeypatch: pytest.MonkeyPatch, unproven: Callable[[EngineFacts], bool]
) -> None:
    """The search does not trust the `unproven` property of the planner's facts."""
    monkeypatch.setattr(EngineFacts, "unproven", property(unproven))
    with pytest.raises(Violation, match="an unproven revision spread"):
        explore(Model(next_step, revisions=3, max_unavailable=1, sizes=(3, 2)), limit=30_000)


@pytest.mark.parametrize(
    "planner",
    [
        rolls_the_serving_generation_on_revert,
        counts_ready_instead_of_routed,
        replaces_without_draining,
        restarts_whatever_is_down,
        does_not_wait_for_the_canary,
        does_not_wait_for_the_check,
        replaces_the_down_before_the_check,
        forgets_pods_of_the_revision_before,
        remembers_a_drain_forever,
        waits_for_a_lost_drain,
    ],
    ids=lambda planner: planner.__name__,
)
def test_the_search_finds_a_known_mistake_of_a_planner(planner: Callable[..., Step]) -> None:
    with pytest.raises(Violation):
        explore(Model(planner, revisions=3, max_unavailable=1, sizes=(3, 2)), limit=30_000)
