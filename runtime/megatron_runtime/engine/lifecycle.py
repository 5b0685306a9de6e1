"""The engine's state machine: the backend calls of each signal, and the transitions between states.

Every signal has two phases. In phase one, the engine does the work and acknowledges the signal. In phase two, the
coordinator commits and the engine enters the new state. protocol/lifecycle.py has the state tables, and `WORK` has the
backend calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_runtime.engine.adapters import AdapterSet
from megatron_runtime.engine.backend import Capability, EngineBackend, RankResults, UnsupportedVerbError
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import (
    ENGINE_LEGAL_FROM,
    SETTLED_ENGINE_STATE,
    TRANSITIONS,
    CoordinatorState,
    EngineState,
    signals_to_join,
)
from megatron_runtime.protocol.messages import Control, ControlAck, ControlCommit
from megatron_runtime.protocol.published_weights import with_copies

logger = logging.getLogger(__name__)

REMEMBERED_ANSWERS = 64
"""Maximum number of operations whose acknowledgement is kept, so that it can be repeated if the operation is sent
again.
"""


# --- states as events -------------------------------------------------------------------------------------------------

_S = EngineState

SET_IN: dict[EngineState, frozenset[EngineState]] = {
    _S.RUNNING: frozenset({_S.RUNNING}),
    _S.PAUSED: frozenset(_S) - {_S.RUNNING, _S.PAUSING},
    _S.SUSPENDED: frozenset({_S.SUSPENDED}),
    _S.STOPPED: frozenset({_S.STOPPED}),
}
"""States in which each event is set. RESUMED is set when a RESUME ends (in state PAUSED), and cleared by the next
SUSPEND."""

LANDED: dict[tuple[EngineState, EngineState], EngineState] = {
    **{(change.passing, change.lands_in): change.lands_in for change in TRANSITIONS.values()},
    (_S.RESUMING, _S.PAUSED): _S.RESUMED,
}
"""The event that each transition (from, to) sets."""


class StateEvents:
    """The state of one engine, with one event for each state that a program can wait for.

    As in Megatron-Core, some events stay set after the engine has left the state. Use each object on only one event
    loop.
    """

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.on_enter: Callable[[EngineState], object] = lambda state: None
        self._resumed = False
        self._times = dict.fromkeys((*SET_IN, _S.RESUMED), 0)
        self._changed = asyncio.Event()

    def enter(self, state: EngineState) -> None:
        landed = LANDED.get((self.state, state))
        self.state = state
        self._resumed = landed is _S.RESUMED or (self._resumed and state is not _S.SUSPENDING)
        if landed is not None:
            self._times[landed] += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_enter(state)

    def is_set(self, state: EngineState) -> bool:
        return self._resumed if self._check(state) is _S.RESUMED else self.state in SET_IN[state]

    def times(self, state: EngineState) -> int:
        """Return how many times a signal has brought the engine to `state`."""
        return self._times[self._check(state)]

    def has_reached(self, state: EngineState, *, times: int | None = None) -> bool:
        """Return whether the engine has reached `state`.

        times: None checks whether the event of `state` is set. A number checks whether signals have brought the engine
               to `state` at least this many times. The number is for callers that may start to wait after the engine
               has left `state` again.
        """
        return self.is_set(state) or (times is not None and self._times[state] >= times)

    async def wait(self, state: EngineState, *, times: int | None = None) -> None:
        while not self.has_reached(state, times=times):
            await self._changed.wait()

    def _check(self, state: EngineState) -> EngineState:
        if state not in self._times:
            known = ", ".join(name.name for name in self._times)
            raise ValueError(f"{state.name} is a transitional state: wait for one of {known}")
        return state


# --- signals ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an engine for one signal.

    prepare: phase one. Every rank confirms the signal afterwards, even if `prepare` is None.
    undo:    reverts phase one if a rank did not confirm.
    commit:  phase two.
    needs:   capability that the backend must declare.
    """

    prepare: Callable[[Lifecycle, Control], Awaitable[RankResults]] | None = None
    undo: Callable[[Lifecycle], Awaitable[RankResults | None]] | None = None
    commit: Callable[[Lifecycle], Awaitable[RankResults | None]] | None = None
    needs: Capability | None = None


async def _stage(engine: Lifecycle, control: Control) -> RankResults:
    if control.source is None or control.epoch is None:
        raise ValueError("source and epoch are required")
    return await engine.backend.stage_weights(control.source, control.epoch)


async def _stage_adapters(engine: Lifecycle, control: Control) -> RankResults:
    if control.adapters is None:
        raise ValueError("adapters are required")
    return await engine.adapters.stage(control.adapters)


WORK: dict[Header, Work] = {
    Header.PAUSE: Work(lambda engine, _: engine.backend.pause(), undo=lambda engine: engine.backend.unpause()),
    Header.UNPAUSE: Work(commit=lambda engine: engine.backend.unpause()),
    Header.SUSPEND: Work(
        lambda engine, control: engine.backend.release_memory(control.tags),
        undo=lambda engine: engine.backend.restore_memory(),
        needs=Capability.SUSPEND,
    ),
    Header.RESUME: Work(
        lambda engine, _: engine.backend.restore_memory(),
        undo=lambda engine: engine.backend.release_memory(),
        needs=Capability.SUSPEND,
    ),
    Header.STOP: Work(),
    Header.UPDATE_WEIGHTS: Work(
        _stage,
        undo=lambda engine: engine.backend.discard_weights(),
        commit=lambda engine: engine.backend.commit_weights(),
        needs=Capability.UPDATE_WEIGHTS,
    ),
    # An empty list needs no capability.
    Header.SET_ADAPTERS: Work(
        _stage_adapters,
        undo=lambda engine: engine.adapters.discard(),
        commit=lambda engine: engine.adapters.commit(),
    ),
    Header.START_CUDA_PROFILER: Work(lambda engine, _: engine.backend.profile(True), needs=Capability.PROFILER),
    Header.STOP_CUDA_PROFILER: Work(lambda engine, _: engine.backend.profile(False), needs=Capability.PROFILER),
}


class Lifecycle:
    """The state, epoch and fence of one engine. Use it on the event loop, with one control message at a time.

    source: where the weights in use come from, as named by UPDATE_WEIGHTS or HELLO_ACK; None if neither has named it.
    adapters: the LoRA adapters.
    acted: how many times the engine has done the work of each signal. A repeated operation id does not count.
    seconds: total duration of the work of each signal.
    """

    def __init__(self, backend: EngineBackend) -> None:
        self.events = StateEvents(EngineState.PAUSED)
        self.epoch = 0
        self.fence = 0
        self.source: str | None = None
        self.acted: dict[Header, int] = {}
        self.seconds: dict[Header, float] = {}
        self.backend: EngineBackend = backend
        self.adapters: AdapterSet = AdapterSet(backend)
        self._answers: dict[str, ControlAck] = {}
        self._acknowledged: Control | None = None
        """The last operation, if it was acknowledged and is not yet committed. If it sets weights or adapters, they are
        staged. If its field `load` is set, the weights are loaded.
        """
        self.unknown_weights: str | None = None
        """Why the weights in use are unknown. If it is set, the engine must exit."""

    @property
    def state(self) -> EngineState:
        return self.events.state

    @property
    def settled_state(self) -> EngineState:
        return SETTLED_ENGINE_STATE.get(self.state, self.state)

    async def handle(self, control: Control) -> ControlAck:
        """Execute phase one of `control`, and return the acknowledgement. A failure is also reported in an
        acknowledgement.

        Raises an error only if a failed phase one cannot be undone.
        """
        operation_id = control.operation_id or ""
        answered = f"{operation_id} load" if control.load else operation_id
        known = self._answers.get(answered)
        if known is not None:
            return known
        self.fence = max(self.fence, control.fence or 0)
        error: UnsupportedVerbError | str | None
        if control.load:
            error = await self._load_staged(control)
        else:
            await self._end_uncommitted()
            error = await self._act(control)
        rejected = self.adapters.rejected if error is not None and control.kind is Header.SET_ADAPTERS else {}
        ack = ControlAck(
            operation_id=operation_id or "-",
            ok=error is None,
            state=self.state,
            ranks=self.backend.info.ranks,
            code=int(ErrorCode.UNSUPPORTED) if isinstance(error, UnsupportedVerbError) else None,
            error=None if error is None else str(error),
            adapter_errors=rejected or None,
            must_load=self._must_load(control) or None,
        )
        self._acknowledged = control if ack.ok else None
        if operation_id:
            self._answers[answered] = ack
            if len(self._answers) > REMEMBERED_ANSWERS:
                del self._answers[next(iter(self._answers))]
        return ack

    def _must_load(self, control: Control) -> bool:
        is_update = control.kind is Header.UPDATE_WEIGHTS and not control.load
        return is_update and self.backend.info.loads_under_pause

    async def _load_staged(self, control: Control) -> str | None:
        """Load the staged weights of this operation while paused.

        Return the error if loading failed, otherwise None.
        """
        acknowledged = self._acknowledged
        if acknowledged is None or acknowledged.operation_id != control.operation_id:
            return f"{control.kind.name} {control.operation_id}: its weights are not staged"
        results = await self.backend.load_staged_weights()
        if results.error is not None:
            self.unknown_weights = f"{control.kind.name}: loading {control.source} failed: {results.error}"
        return self.unknown_weights

    async def _act(self, control: Control) -> UnsupportedVerbError | str | None:
        """Check `control` and execute phase one. Return the error if this failed, otherwise None.

        After an error, the state is unchanged.
        """
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
            self.backend.info.require(kind.name, work.needs)
        except UnsupportedVerbError as error:
            return error
        if kind in TRANSITIONS:
            self.events.enter(TRANSITIONS[kind].passing)
        self.acted[kind] = self.acted.get(kind, 0) + 1
        begun = time.monotonic()
        try:
            cause = await self._prepare(work, control)
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - begun
        if cause is not None:
            logger.error("%s failed: %s", kind.name, cause)
            self.events.enter(state)
            return cause if isinstance(cause, UnsupportedVerbError) else f"{kind.name} failed: {cause}"
        return None

    async def _prepare(self, work: Work, control: Control) -> UnsupportedVerbError | str | None:
        """Execute phase one on every rank. If a rank fails, undo phase one on all ranks. Return the error, or None."""
        try:
            results = await work.prepare(self, control) if work.prepare is not None else None
        except UnsupportedVerbError as error:
            return error
        except Exception as error:
            return str(error)
        if results is not None and results.failed:
            return results.error
        confirmed = await self.backend.confirm(control.kind)
        if confirmed.failed and work.undo is not None:
            undone = await work.undo(self)
            if undone is not None:
                undone.require(f"undoing {control.kind.name}")
        return confirmed.error

    async def commit(self, commit: ControlCommit) -> None:
        """Enter the state of the acknowledged operation, or discard the operation.

        A repeated or late commit changes nothing.
        """
        acknowledged = self._acknowledged
        is_known = acknowledged is not None and (acknowledged.operation_id or "-") == commit.operation_id
        if commit.discard:
            if is_known:
                await self._end_uncommitted()
            return
        if acknowledged is None or not is_known:
            logger.warning("ignored the commit of %s: it is not the last acknowledged operation", commit.operation_id)
            return
        self._acknowledged = None
        if commit.signal is Header.SET_GENERATION_EPOCH:
            if commit.epoch is not None:
                await self.set_epoch(commit.epoch)
            return
        if commit.signal is Header.UPDATE_WEIGHTS:
            if acknowledged.kind is not commit.signal or acknowledged.epoch is None:
                raise RuntimeError(f"UPDATE_WEIGHTS {commit.operation_id} is committed, but its weights are not staged")
            await self._commit_work(commit.signal)
            self.epoch, self.source = acknowledged.epoch, acknowledged.source
            return
        if commit.signal is Header.SET_ADAPTERS:
            await self._commit_work(commit.signal)
            return
        transition = TRANSITIONS.get(commit.signal)
        if transition is not None and self.state is transition.passing:
            await self._land(commit.signal)

    async def converge(self, target: CoordinatorState) -> None:
        """Enter `target`, the coordinator's state, in one phase. An engine that joins calls this method."""
        self.events.enter(self.settled_state)
        for signal in signals_to_join(self.state, target):
            error = await self._act(Control(kind=signal))
            if error is not None:
                raise RuntimeError(str(error))
            await self._land(signal)

    async def _land(self, signal: Header) -> None:
        await self._commit_work(signal)
        self.events.enter(TRANSITIONS[signal].lands_in)

    async def _commit_work(self, signal: Header) -> None:
        commit = WORK[signal].commit
        results = await commit(self) if commit is not None else None
        if results is not None:
            results.require(f"the commit of {signal.name}")

    # --- weights and adapters -----------------------------------------------------------------------------------

    async def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        await self.backend.set_epoch(epoch)

    async def adopt(
        self, source: str | None, epoch: int, *, copies: Sequence[str] = (), is_loaded: bool = True
    ) -> None:
        """Use the weights and the epoch of the coordinator's HELLO_ACK.

        source:    source of the weights; None: the engine keeps its own weights.
        copies:    addresses at which the ranks of another engine serve these weights.
        is_loaded: whether this engine has loaded weights. If not, it loads the weights of HELLO_ACK later.
        """
        loaded = self._acknowledged
        if loaded is not None and loaded.load and loaded.source == source:  # the commit was lost
            self._acknowledged = None
            await self._commit_work(Header.UPDATE_WEIGHTS)
            self.source = source
        elif loaded is not None and loaded.load:
            await self._end_uncommitted()
        if source is not None and (source != self.source or (copies and not is_loaded)):
            await self._end_uncommitted()
            await self.backend.adopt_weights(with_copies(source, copies), epoch)
            self.source = source
        if epoch != self.epoch:
            await self.set_epoch(epoch)

    async def adopt_adapters(self, wanted: AdapterList) -> bool:
        """Load the adapters of the coordinator's HELLO_ACK, and return whether the list changed."""
        staged = self._acknowledged is not None and self._acknowledged.kind is Header.SET_ADAPTERS
        if staged and wanted != self.adapters.current:
            await self._end_uncommitted()
        return await self.adapters.adopt(wanted)

    async def _end_uncommitted(self) -> None:
        """Discard staged weights and adapters. A commit that arrives afterwards has no effect."""
        ended, self._acknowledged = self._acknowledged, None
        if ended is not None and ended.kind is Header.UPDATE_WEIGHTS:
            await self.backend.discard_weights()
        elif ended is not None and ended.kind is Header.SET_ADAPTERS:
            await self.adapters.discard()
