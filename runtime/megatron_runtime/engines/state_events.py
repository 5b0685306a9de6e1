"""Engine states as events to wait for (Megatron-Core's): some stay set beyond the state that they are named after."""

from __future__ import annotations

import asyncio

from megatron_runtime.wire.states import EngineState

_S = EngineState

SET_IN: dict[EngineState, frozenset[EngineState]] = {
    _S.RUNNING: frozenset({_S.RUNNING}),
    _S.PAUSED: frozenset(_S) - {_S.RUNNING, _S.PAUSING},
    _S.SUSPENDED: frozenset({_S.SUSPENDED}),
    _S.STOPPED: frozenset({_S.STOPPED}),
}
"""The states in which each event is set. RESUMED is set from the end of a RESUME, in PAUSED, to the next SUSPEND."""


class StateEvents:
    """Follows the state of one engine. Belongs to one event loop."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._events = {name: asyncio.Event() for name in (*SET_IN, _S.RESUMED)}
        self.enter(state)

    def enter(self, state: EngineState) -> None:
        if self._state is _S.RESUMING and state is _S.PAUSED:
            self._events[_S.RESUMED].set()
        elif state is _S.SUSPENDING:
            self._events[_S.RESUMED].clear()
        self._state = state
        for name, states in SET_IN.items():
            if state in states:
                self._events[name].set()
            else:
                self._events[name].clear()

    def is_set(self, state: EngineState) -> bool:
        return self._event(state).is_set()

    async def wait(self, state: EngineState) -> None:
        """Return when the event of `state` is set."""
        await self._event(state).wait()

    def _event(self, state: EngineState) -> asyncio.Event:
        event = self._events.get(state)
        if event is None:
            raise ValueError(f"{state.name} is passed through, not waited for: wait for {self._waitable()}")
        return event

    def _waitable(self) -> str:
        return ", ".join(name.name for name in self._events)
