"""Engine states as events: which are set in each state, along a path of verbs."""

import asyncio

import pytest

from megatron_runtime.engine.lifecycle import StateEvents
from megatron_runtime.protocol.lifecycle import EngineState as S

PATH = [
    (S.RUNNING, {S.RUNNING}),
    (S.PAUSING, set()),
    (S.PAUSED, {S.PAUSED}),
    (S.SUSPENDING, {S.PAUSED}),
    (S.SUSPENDED, {S.PAUSED, S.SUSPENDED}),
    (S.RESUMING, {S.PAUSED}),
    (S.PAUSED, {S.PAUSED, S.RESUMED}),
    (S.UNPAUSING, {S.PAUSED, S.RESUMED}),
    (S.RUNNING, {S.RUNNING, S.RESUMED}),
    (S.PAUSING, {S.RESUMED}),
    (S.PAUSED, {S.PAUSED, S.RESUMED}),
    (S.SUSPENDING, {S.PAUSED}),
    (S.SUSPENDED, {S.PAUSED, S.SUSPENDED}),
    (S.STOPPING, {S.PAUSED}),
    (S.STOPPED, {S.PAUSED, S.STOPPED}),
]
WAITABLE = [S.RUNNING, S.PAUSED, S.SUSPENDED, S.RESUMED, S.STOPPED]


async def test_which_events_are_set_in_which_state() -> None:
    events = StateEvents(S.PAUSED)
    for state, expected in PATH:
        events.enter(state)
        assert {name for name in WAITABLE if events.is_set(name)} == expected, state


async def test_wait_returns_when_the_state_is_reached() -> None:
    events = StateEvents(S.RUNNING)
    waiting = asyncio.create_task(events.wait(S.SUSPENDED))
    for state in (S.PAUSING, S.PAUSED, S.SUSPENDING):
        events.enter(state)
        await asyncio.sleep(0)
        assert not waiting.done()
    events.enter(S.SUSPENDED)
    await waiting


async def test_a_counted_wait_returns_for_states_that_have_passed() -> None:
    events = StateEvents(S.RUNNING)
    for state in (S.PAUSING, S.PAUSED, S.UNPAUSING, S.RUNNING):
        events.enter(state)
    assert events.times(S.PAUSED) == 1
    await events.wait(S.PAUSED, times=1)
    second = asyncio.create_task(events.wait(S.PAUSED, times=2))
    await asyncio.sleep(0)
    assert not second.done()
    events.enter(S.PAUSING)
    events.enter(S.PAUSED)
    await second


async def test_transitional_states_are_rejected() -> None:
    with pytest.raises(ValueError, match="PAUSING is a transitional state"):
        await StateEvents(S.RUNNING).wait(S.PAUSING)
