"""The engine's state machine: what each signal has the backend do, and when the engine enters the next state.

Every signal has two phases: the work and its acknowledgement; then, as the coordinator commits, the new state. The
tables of states are in protocol/lifecycle.py, the table of work is `WORK`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megatron_runtime.engine.backend import Capability, EngineBackend, RankResults, UnsupportedByBackendError
from megatron_runtime.engine.state_events import StateEvents
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import (
    ENGINE_LEGAL_FROM,
    SETTLED_ENGINE_STATE,
    TRANSITIONS,
    CoordinatorState,
    EngineState,
    signals_to_join,
)
from megatron_runtime.protocol.messages import Control, ControlAck, ControlCommit

logger = logging.getLogger(__name__)

REMEMBERED_ANSWERS = 64
"""Operations whose answer is repeated when they come again."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one signal has the backend do.

    prepare: phase one. Then every rank confirms the signal, whether there is anything to prepare or not.
    undo:    takes phase one back, if a rank did not confirm.
    commit:  phase two.
    needs:   what the backend must be capable of.
    """

    prepare: Callable[[EngineBackend, Control], Awaitable[RankResults]] | None = None
    undo: Callable[[EngineBackend], Awaitable[RankResults | None]] | None = None
    commit: Callable[[EngineBackend], Awaitable[RankResults]] | None = None
    needs: Capability | None = None


async def _stage(backend: EngineBackend, control: Control) -> RankResults:
    if control.source is None or control.epoch is None:
        raise ValueError("source and epoch are wanted")
    return await backend.stage_weights(control.source, control.epoch)


WORK: dict[Header, Work] = {
    Header.PAUSE: Work(lambda backend, _: backend.pause(), undo=lambda backend: backend.unpause()),
    Header.UNPAUSE: Work(commit=lambda backend: backend.unpause()),
    Header.SUSPEND: Work(
        lambda backend, control: backend.release_memory(control.tags),
        undo=lambda backend: backend.restore_memory(),
        needs=Capability.SUSPEND,
    ),
    Header.RESUME: Work(
        lambda backend, _: backend.restore_memory(),
        undo=lambda backend: backend.release_memory(),
        needs=Capability.SUSPEND,
    ),
    Header.STOP: Work(),
    Header.UPDATE_WEIGHTS: Work(
        _stage,
        undo=lambda backend: backend.discard_weights(),
        commit=lambda backend: backend.commit_weights(),
        needs=Capability.UPDATE_WEIGHTS,
    ),
    Header.START_CUDA_PROFILER: Work(lambda backend, _: backend.profile(True), needs=Capability.PROFILER),
    Header.STOP_CUDA_PROFILER: Work(lambda backend, _: backend.profile(False), needs=Capability.PROFILER),
}


class Lifecycle:
    """State, epoch and fence of one engine. Not thread-safe: used from the event loop, one control message at a time.

    source: the weights of `epoch`, where an UPDATE_WEIGHTS or the coordinator named them.
    acted: how often each signal did its work; a repeated operation id does not count.
    seconds: how long each signal's work took, in all.
    """

    def __init__(self, backend: EngineBackend) -> None:
        self.events = StateEvents(EngineState.PAUSED)
        self._state = EngineState.PAUSED
        self.epoch = 0
        self.fence = 0
        self.source: str | None = None
        self.acted: dict[Header, int] = {}
        self.seconds: dict[Header, float] = {}
        self.stopped = asyncio.Event()
        self._backend = backend
        self._answers: dict[str, ControlAck] = {}
        self._acknowledged = ""
        """The operation whose commit is awaited: the last one that was acknowledged."""
        self._staged: Control | None = None
        """The UPDATE_WEIGHTS whose weights are staged and await their commit."""

    @property
    def state(self) -> EngineState:
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self.events.enter(state)

    @property
    def settled_state(self) -> EngineState:
        return SETTLED_ENGINE_STATE.get(self.state, self.state)

    async def handle(self, control: Control) -> ControlAck:
        """Do the work of `control` and return the acknowledgement. A failure is undone and answered; only a failure of
        the undoing is raised.
        """
        operation_id = control.operation_id or ""
        known = self._answers.get(operation_id)
        if known is not None:
            return known
        self.fence = max(self.fence, control.fence or 0)
        await self._discard_staged()  # their operation has ended without a commit
        error = await self._act(control)
        ack = ControlAck(
            operation_id=operation_id or "-",
            ok=error is None,
            state=self.state,
            ranks=self._backend.info.ranks,
            error=error,
        )
        self._acknowledged = ack.operation_id if ack.ok else ""
        if operation_id:
            self._answers[operation_id] = ack
            while len(self._answers) > REMEMBERED_ANSWERS:
                del self._answers[next(iter(self._answers))]
        return ack

    async def _act(self, control: Control) -> str | None:
        """Check and do phase one of `control`. Return why it failed, if it did: the state is then as before."""
        kind = control.kind
        if kind is Header.SET_GENERATION_EPOCH:
            return None
        work = WORK.get(kind)
        if work is None:
            return f"{kind.name} is not supported by this engine"
        state = self.settled_state
        if state not in ENGINE_LEGAL_FROM[kind]:
            return f"{kind.name} is not legal in engine state {state.value}"
        if kind is Header.PAUSE and state is not EngineState.RUNNING:
            return None
        try:
            self._backend.info.require(kind.name, work.needs)
        except UnsupportedByBackendError as error:
            return str(error)
        if kind in TRANSITIONS:
            self.state = TRANSITIONS[kind].passing
        self.acted[kind] = self.acted.get(kind, 0) + 1
        begun = time.monotonic()
        try:
            cause = await self._prepare(work, control)
            if cause is not None:
                logger.error("%s failed: %s", kind.name, cause)
                self.state = state
                return f"{kind.name} failed: {cause}"
            if kind is Header.UPDATE_WEIGHTS:
                self._staged = control
            return None
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - begun

    async def _prepare(self, work: Work, control: Control) -> str | None:
        """Do phase one on every rank, or on none. Return why it failed, if it did."""
        backend = self._backend
        try:
            results = await work.prepare(backend, control) if work.prepare is not None else None
        except Exception as error:
            return str(error)
        if results is not None and results.failed:
            return results.error
        confirmed = await backend.confirm(control.kind)
        if confirmed.failed and work.undo is not None:
            undone = await work.undo(backend)
            if undone is not None:
                undone.require(f"undoing {control.kind.name}")
        return confirmed.error

    async def commit(self, commit: ControlCommit) -> None:
        """Enter the state that the acknowledged work leads to. A commit that comes twice, or late, changes nothing."""
        if commit.operation_id != self._acknowledged:
            logger.warning("ignored the commit of %s: another operation came since", commit.operation_id)
            return
        self._acknowledged = ""
        if commit.signal is Header.SET_GENERATION_EPOCH:
            if commit.epoch is not None:
                await self.set_epoch(commit.epoch)
            return
        if commit.signal is Header.UPDATE_WEIGHTS:
            staged, self._staged = self._staged, None
            if staged is None or staged.operation_id != commit.operation_id or staged.epoch is None:
                raise RuntimeError(f"UPDATE_WEIGHTS {commit.operation_id} is committed, but its weights are not staged")
            await self._commit_work(commit.signal)
            self.epoch, self.source = staged.epoch, staged.source
            return
        transition = TRANSITIONS.get(commit.signal)
        if transition is not None and self.state is transition.passing:
            await self._land(commit.signal)

    async def converge(self, target: CoordinatorState) -> None:
        """Reach `target` without a coordinator's two phases: an engine that joins enters the coordinator's state."""
        self.state = self.settled_state
        for signal in signals_to_join(self.state, target):
            error = await self._act(Control(kind=signal))
            if error is not None:
                raise RuntimeError(error)
            await self._land(signal)

    async def _land(self, signal: Header) -> None:
        await self._commit_work(signal)
        self.state = TRANSITIONS[signal].lands_in
        if self.state is EngineState.STOPPED:
            self.stopped.set()

    async def _commit_work(self, signal: Header) -> None:
        commit = WORK[signal].commit
        if commit is not None:
            (await commit(self._backend)).require(f"the commit of {signal.name}")

    # --- weights ------------------------------------------------------------------------------------------------

    async def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        await self._backend.set_epoch(epoch)

    async def adopt(self, source: str | None, epoch: int) -> None:
        """Have the weights and the epoch that the coordinator names to an engine that registers."""
        if source is not None and source != self.source:
            await self._discard_staged()
            self._acknowledged = ""  # a commit that is still on its way has no effect any more
            await self._backend.adopt_weights(source, epoch)
            self.source = source
        if epoch != self.epoch:
            await self.set_epoch(epoch)

    async def _discard_staged(self) -> None:
        if self._staged is not None:
            self._staged = None
            await self._backend.discard_weights()
