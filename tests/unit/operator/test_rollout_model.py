"""The rollout planner over every state it can meet, and planners with the mistakes of others, which must be caught.

`make soak` goes through a million states of four engines; here the search of the larger systems ends earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rollout_model import Model, Violation, explore, without

from megatron_operator.plan.rollout import Canary, Drain, EngineFacts, Replace, Step, next_step

LIMIT = 1_000_000 if os.environ.get("MEGATRON_SOAK") else 15_000


@pytest.mark.parametrize(
    ("revisions", "max_unavailable", "sizes"),
    [(3, 1, (1,)), (3, 1, (2, 1)), (3, 2, (3, 2)), (3, 1, (4, 3)), (3, 2, (4, 2))],
)
def test_no_reachable_state_breaks_an_invariant(
    revisions: int, max_unavailable: int, sizes: tuple[int, ...], record_property: Any
) -> None:
    states = explore(Model(next_step, revisions, max_unavailable, sizes), limit=LIMIT)
    record_property("states", states)
    seen = f"all {states} states" if states < LIMIT else f"the first {states} states, breadth first"
    print(f"\n{sizes[0]} engines, {revisions} revisions, maxUnavailable {max_unavailable}: {seen}, 0 violations")


Facts = Sequence[EngineFacts]


def rolls_the_serving_generation_on_revert(engines: Facts, **options: Any) -> Step:
    """Forgets that an engine may already have the wanted revision when edits are taken back."""
    step = next_step(engines, **options)
    touched = any(not engine.current for engine in engines) and all(engine.serving for engine in engines)
    current = [engine for engine in engines if engine.current and engine.drained]
    return Replace((current[-1].name,)) if touched and current else step


def counts_ready_instead_of_routed(engines: Facts, **options: Any) -> Step:
    """Takes the next engine although the one before has pods but no route yet."""
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
            (believed[index],) = without([engine], canary=Canary.PASSED)
    return next_step(believed, **options)


def forgets_pods_of_the_revision_before(engines: Facts, **options: Any) -> Step:
    """An operator that died between the template and the pods never deletes the pods."""
    return next_step(without(engines, leftover=False), **options)


def remembers_a_drain_for_ever(engines: Facts, **options: Any) -> Step:
    """Believes an engine drained that was started anew since."""
    believed = [*engines]
    for index, engine in enumerate(engines):
        if not engine.current and engine.serving and not engine.draining:
            (believed[index],) = without([engine], drained=True)
    return next_step(believed, **options)


def waits_for_a_lost_drain(engines: Facts, **options: Any) -> Step:
    """An operator that died after a DRAIN was over waits for it for ever."""
    step = next_step(engines, **options)
    named = {engine.name: engine for engine in engines}
    if isinstance(step, Drain) and named[step.name].draining:
        return next_step([], **options)
    return step


def _forgets_the_down(engine: EngineFacts) -> bool:
    return engine.current and (engine.leftover or engine.canary in (Canary.PENDING, Canary.FAILED))


def _forgets_the_pending(engine: EngineFacts) -> bool:
    return engine.current and (not engine.serving or engine.leftover or engine.canary is Canary.FAILED)


def _forgets_the_failed(engine: EngineFacts) -> bool:
    return engine.current and (not engine.serving or engine.leftover or engine.canary is Canary.PENDING)


@pytest.mark.parametrize("unproven", [_forgets_the_down, _forgets_the_pending, _forgets_the_failed])
def test_the_search_knows_by_itself_which_engines_are_unproven(
    monkeypatch: pytest.MonkeyPatch, unproven: Callable[[EngineFacts], bool]
) -> None:
    """What the planner says of its own facts is not taken for the truth."""
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
        forgets_pods_of_the_revision_before,
        remembers_a_drain_for_ever,
        waits_for_a_lost_drain,
    ],
    ids=lambda planner: planner.__name__,
)
def test_a_planner_with_a_known_mistake_is_caught(planner: Callable[..., Step]) -> None:
    with pytest.raises(Violation):
        explore(Model(planner, revisions=3, max_unavailable=1, sizes=(3, 2)), limit=30_000)
