"""The engine's state machine: what a control message does, and when its state counts as reached.

Every signal has two phases: the work, then an acknowledgement; the state is entered when the coordinator commits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from megatron_runtime.backends.native.dynamic_engine import SUSPEND_TAGS
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.engine.engine_thread import EngineThread
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


class Ranks(Protocol):
    """The ranks of an engine, beside the thread that schedules."""

    count: int

    async def confirm(self, control: Control) -> None:
        """Return when every rank has done the work of `control`. Raises, naming the rank, when one failed."""


class SingleRank:
    """Implements Ranks: the engine's thread is the only one."""

    count = 1

    async def confirm(self, control: Control) -> None:
        """The thread has done all there is."""


class Lifecycle:
    """State, epoch and fence of one engine. Not thread-safe: used from the event loop, one control message at a time.

    source: the weights of `epoch`, where an UPDATE_WEIGHTS or the coordinator named them.
    acted: how often each signal did its work; a repeated operation id does not count.
    seconds: how long each signal's work took, in all.
    """

    def __init__(self, thread: EngineThread, *, ranks: Ranks | None = None) -> None:
        self.events = StateEvents(EngineState.PAUSED)
        self._state = EngineState.PAUSED
        self.epoch = 0
        self.fence = 0
        self.source: str | None = None
        self._ranks = ranks or SingleRank()
        self.acted: dict[Header, int] = {}
        self.seconds: dict[Header, float] = {}
        self.stopped = asyncio.Event()
        self._thread = thread
        self._answers: dict[str, ControlAck] = {}
        self._acknowledged = ""
        """The operation whose commit is waited for: the last one that was acknowledged."""
        self._staged: Control | None = None
        """The UPDATE_WEIGHTS whose weights are staged and wait for their commit."""
        self._work: dict[Header, Callable[[Control], Awaitable[None]]] = {
            Header.PAUSE: lambda _control: thread.pause(),
            Header.SUSPEND: self._suspend,
            Header.RESUME: lambda _control: self._resume(),
            Header.UPDATE_WEIGHTS: self._stage,
            Header.START_CUDA_PROFILER: lambda _control: thread.call(lambda engine: engine.executor.profile(True)),
            Header.STOP_CUDA_PROFILER: lambda _control: thread.call(lambda engine: engine.executor.profile(False)),
        }
        self._undo: dict[Header, Callable[[], Awaitable[None]]] = {
            Header.PAUSE: thread.unpause,
            Header.SUSPEND: self._resume,
            Header.RESUME: lambda: self._suspend(Control(kind=Header.SUSPEND)),
            Header.UPDATE_WEIGHTS: self._drop_staged,
        }

    @property
    def state(self) -> EngineState:
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        self.events.enter(state)

    @property
    def ranks(self) -> int:
        return self._ranks.count

    @property
    def settled_state(self) -> EngineState:
        return SETTLED_ENGINE_STATE.get(self.state, self.state)

    async def handle(self, control: Control) -> ControlAck:
        """Do the work of `control` and return the acknowledgement. A failure is undone, and is an answer; only a
        failure of the undoing is raised.
        """
        operation_id = control.operation_id or ""
        known = self._answers.get(operation_id)
        if known is not None:
            return known
        self.fence = max(self.fence, control.fence or 0)
        await self._drop_staged()  # their operation has ended without a commit
        error = await self._act(control)
        ack = ControlAck(
            operation_id=operation_id or "-", ok=error is None, state=self.state, ranks=self.ranks, error=error
        )
        self._acknowledged = ack.operation_id if ack.ok else ""
        if operation_id:
            self._answers[operation_id] = ack
            while len(self._answers) > 64:
                del self._answers[next(iter(self._answers))]
        return ack

    async def _act(self, control: Control) -> str | None:
        kind = control.kind
        if kind is Header.SET_GENERATION_EPOCH:
            return None
        if kind not in ENGINE_LEGAL_FROM:
            return f"{kind.name} is not supported by this engine"
        state = self.settled_state
        if state not in ENGINE_LEGAL_FROM[kind]:
            return f"{kind.name} is not legal in engine state {state.value}"
        if kind is Header.PAUSE and state is not EngineState.RUNNING:
            return None
        if kind in TRANSITIONS:
            self.state = TRANSITIONS[kind].passing
        self.acted[kind] = self.acted.get(kind, 0) + 1
        begun = time.monotonic()
        done = False
        try:
            work = self._work.get(kind)
            if work is not None:
                await work(control)
            done = True
            await self._ranks.confirm(control)
        except Exception as error:
            logger.exception("%s failed", kind.name)
            undo = self._undo.get(kind) if done else None
            if undo is not None:
                await undo()
            self.state = state
            return f"{kind.name} failed: {error}"
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - begun
        return None

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
            await self._swap(commit)
            return
        transition = TRANSITIONS.get(commit.signal)
        if transition is None or self.state is not transition.passing:
            return
        await self._land(commit.signal)

    async def converge(self, target: CoordinatorState) -> None:
        """Reach `target` without a coordinator's two phases: an engine that joins enters the state it is told."""
        self.state = self.settled_state
        for signal in signals_to_join(self.state, target):
            error = await self._act(Control(kind=signal))
            if error is not None:
                raise RuntimeError(error)
            await self._land(signal)

    async def _land(self, signal: Header) -> None:
        if signal is Header.UNPAUSE:
            await self._thread.unpause()
        self.state = TRANSITIONS[signal].lands_in
        if self.state is EngineState.STOPPED:
            self.stopped.set()

    async def _suspend(self, control: Control) -> None:
        tags = SUSPEND_TAGS if control.tags is None else control.tags
        await self._thread.call(lambda engine: engine.suspend(tags))

    async def _resume(self) -> None:
        await self._thread.call(lambda engine: engine.resume())

    # --- weights ------------------------------------------------------------------------------------------------

    async def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        await self._thread.call(lambda engine: engine.set_epoch(epoch))

    async def adopt(self, source: str | None, epoch: int) -> None:
        """Have the weights and the epoch that the coordinator names to an engine that registers.

        Weights that are not loaded are not loaded by this: the next load reads those of `source`.
        """
        if source is not None and source != self.source:
            await self._drop_staged()
            self._acknowledged = ""  # a commit that is still on its way says nothing new
            executor = await self._executor()
            if executor.has_weights:
                await asyncio.to_thread(executor.stage_weights, source)
                await self._thread.call(lambda engine: engine.swap_weights(epoch))
            else:
                await self._thread.call(lambda engine: engine.executor.use_source(source))
            self.source = source
        if epoch != self.epoch:
            await self.set_epoch(epoch)

    async def _executor(self) -> Executor:
        return await self._thread.call(lambda engine: engine.executor)

    async def _stage(self, control: Control) -> None:
        """Read and verify the new weights, beside the steps that go on."""
        if control.source is None or control.epoch is None:
            raise ValueError("source and epoch are wanted")
        executor = await self._executor()
        await asyncio.to_thread(executor.stage_weights, control.source)
        self._staged = control

    async def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged = None
            await self._thread.call(lambda engine: engine.executor.drop_staged())

    async def _swap(self, commit: ControlCommit) -> None:
        staged, self._staged = self._staged, None
        if staged is None or staged.operation_id != commit.operation_id or staged.epoch is None:
            raise RuntimeError(f"UPDATE_WEIGHTS {commit.operation_id} is committed, but its weights are not staged")
        epoch = staged.epoch
        await self._thread.call(lambda engine: engine.swap_weights(epoch))
        self.epoch, self.source = epoch, staged.source
