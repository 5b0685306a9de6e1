"""A coordinator that comes back takes state, epoch and fence from the engines that outlived the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_runtime.coordinator.core.clock import Clock, Timer
from megatron_runtime.coordinator.core.records import Engine
from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.transport import PeerId
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.messages import Hello

logger = logging.getLogger(__name__)

_AS_COORDINATOR: dict[EngineState, CoordinatorState] = {
    EngineState.RUNNING: CoordinatorState.RUNNING,
    EngineState.UNPAUSING: CoordinatorState.PAUSED,
    EngineState.PAUSING: CoordinatorState.PAUSED,
    EngineState.PAUSED: CoordinatorState.PAUSED,
    EngineState.RESUMING: CoordinatorState.SUSPENDED,
    EngineState.RESUMED: CoordinatorState.PAUSED,
    EngineState.SUSPENDING: CoordinatorState.SUSPENDED,
    EngineState.SUSPENDED: CoordinatorState.SUSPENDED,
}
_DISTANCE = {CoordinatorState.RUNNING: 0, CoordinatorState.PAUSED: 1, CoordinatorState.SUSPENDED: 2}


class Recovery:
    """on_known: called when state, epoch and weights are known, and again when an engine that comes late knows newer
    weights."""

    def __init__(self, verbs: Verbs, timing: Timing, *, clock: Clock, on_known: Callable[[], None]) -> None:
        self._verbs = verbs
        self._timing = timing
        self._clock = clock
        self._on_known = on_known
        self._adopted: CoordinatorState | None = None
        self._unregistered: set[PeerId] = set()
        self._settled = False
        self._timers: list[Timer] = []

    @property
    def under_way(self) -> bool:
        return self._verbs.state is CoordinatorState.RECOVERING

    def start(self) -> None:
        if not self.under_way:
            return
        now = self._clock.time()
        settle = min(self._timing.recovery_settle, self._timing.recovery)
        self._timers = [
            self._clock.call_at(now + settle, self._settle),
            self._clock.call_at(now + self._timing.recovery, self._end),
        ]

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def heard_of(self, peer: PeerId) -> None:
        """An engine that is not registered spoke: it is waited for."""
        if self.under_way:
            self._unregistered.add(peer)

    def registered(self, engine: Engine, hello: Hello, *, survivor: bool) -> None:
        """An engine said HELLO. `survivor`: it served before this coordinator knew it."""
        self._unregistered.discard(engine.peer)
        self._verbs.see_fence(hello.fence)
        state = _AS_COORDINATOR.get(hello.state) if hello.state is not None else None
        if survivor and state is not None:
            self._adopt(state, hello)
        if self.under_way:
            self._end_if_complete()

    def _adopt(self, state: CoordinatorState, hello: Hello) -> None:
        if self.under_way:
            if self._adopted is None or _DISTANCE[state] > _DISTANCE[self._adopted]:
                self._adopted = state
            self._take_epoch(hello)
        elif not self._verbs.settled:
            self._adopt_late(state, hello)

    def _adopt_late(self, state: CoordinatorState, hello: Hello) -> None:
        """Nothing has happened since recovery ended. Where nobody was heard of in time, the first engine that outlived
        knows better. Of weights the newest are right, whoever was first: an update that was confirmed stays."""
        if self._adopted is None:
            self._adopted = state
            self._verbs.state = state
        before = self._verbs.epoch
        self._take_epoch(hello)
        if self._verbs.epoch > before:
            self._on_known()

    def _take_epoch(self, hello: Hello) -> None:
        """The highest epoch, and the weights that belong to it."""
        if hello.source is not None and hello.epoch >= self._verbs.epoch:
            self._verbs.see_source(hello.source, hello.revision)
        self._verbs.epoch = max(self._verbs.epoch, hello.epoch)

    def _settle(self) -> None:
        self._settled = True
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._settled and not self._unregistered:
            self._end()

    def _end(self) -> None:
        if not self.under_way:
            return
        self.stop()
        self._verbs.state = self._adopted or CoordinatorState.RUNNING
        logger.info("recovered: state %s, epoch %d", self._verbs.state.value, self._verbs.epoch)
        self._on_known()
