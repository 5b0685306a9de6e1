"""Engine states as events to wait for (Megatron-Core's): some stay set beyond the state that they are named after."""

from __future__ import annotations

import asyncio

from megatron_runtime.protocol.lifecycle import EngineState

_S = EngineState

SET_IN: dict[EngineState, frozenset[EngineState]] = {
    _S.RUNNING: frozenset({_S.RUNNING}),
    _S.PAUSED: frozenset(_S) - {_S.RUNNING, _S.PAUSING},
    _S.SUSPENDED: frozenset({_S.SUSPENDED}),
    _S.STOPPED: frozenset({_S.STOPPED}),
}
"""The states in which each event is set. RESUMED is set from the end of a RESUME, in PAUSED, to the next SUSPEND."""


LANDED: dict[tuple[EngineState, EngineState], EngineState] = {
    (_S.PAUSING, _S.PAUSED): _S.PAUSED,
    (_S.UNPAUSING, _S.RUNNING): _S.RUNNING,
    (_S.SUSPENDING, _S.SUSPENDED): _S.SUSPENDED,
    (_S.RESUMING, _S.PAUSED): _S.RESUMED,
    (_S.STOPPING, _S.STOPPED): _S.STOPPED,
}
"""The event that a change from one state to another reaches again."""


class StateEvents:
    """Follows the state of one engine. Belongs to one event loop."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._set: set[EngineState] = set()
        self._times = {name: 0 for name in (*SET_IN, _S.RESUMED)}
        self._changed = asyncio.Event()
        self.enter(state)

    def enter(self, state: EngineState) -> None:
        landed = LANDED.get((self._state, state))
        if landed is not None:
            self._times[landed] += 1
        if landed is _S.RESUMED:
            self._set.add(_S.RESUMED)
        elif state is _S.SUSPENDING:
            self._set.discard(_S.RESUMED)
        self._state = state
        for name, states in SET_IN.items():
            if state in states:
                self._set.add(name)
            else:
                self._set.discard(name)
        self._changed.set()
        self._changed = asyncio.Event()

    def is_set(self, state: EngineState) -> bool:
        return self._check(state) in self._set

    def times(self, state: EngineState) -> int:
        """How often a signal has led to `state`."""
        return self._times[self._check(state)]

    def has_reached(self, state: EngineState, *, times: int | None = None) -> bool:
        """Whether the event of `state` is set, or signals have led there so often. The second is for a caller that asks
        late, when later signals have changed the state again.
        """
        return self.is_set(state) or (times is not None and self._times[state] >= times)

    async def wait(self, state: EngineState, *, times: int | None = None) -> None:
        while not self.has_reached(state, times=times):
            await self._changed.wait()

    def _check(self, state: EngineState) -> EngineState:
        if state not in self._times:
            known = ", ".join(name.name for name in self._times)
            raise ValueError(f"{state.name} is passed through, not waited for: wait for one of {known}")
        return state
