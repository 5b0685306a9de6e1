"""Control messages in two phases: signal every engine, collect acknowledgements, commit. One operation at a time."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable
from typing import Protocol

from megatron_runtime.coordinator.core.clock import Clock
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.operations import (
    LEGAL_STATES,
    REQUIRED_FIELDS,
    EndedOperations,
    PendingOperation,
    plain_signal,
)
from megatron_runtime.coordinator.core.records import Client, Engine
from megatron_runtime.coordinator.transport import PeerId, Sent
from megatron_runtime.protocol.headers import PROFILER, SIGNALS, ErrorCode, Header
from megatron_runtime.protocol.lifecycle import TRANSITIONS, CoordinatorState
from megatron_runtime.protocol.messages import Control, ControlAck, ControlCommit, EngineOutcome, Frames, Operation

logger = logging.getLogger(__name__)

_RUNNING = CoordinatorState.RUNNING  # see dispatching.py
MOST_LATER = 64
"""Control messages of plain clients that wait for the operation under way."""


class Surroundings(Protocol):
    """What an operation does to the rest of the coordinator."""

    def evict(self, engine: Engine, reason: str) -> None: ...

    def stop_requests(self) -> None:
        """Answer everything open with 503."""

    def welcome(self, engine: Engine) -> None:
        """Tell an engine the state of this moment."""

    def weights_changed(self) -> None:
        """What engines were known to hold was computed with other weights."""

    def pump(self) -> None: ...


class Verbs:
    """The coordinator's state, epoch and fence, and the operations that change them.

    source: the weights that the last UPDATE_WEIGHTS named; None before the first.
    """

    def __init__(
        self,
        engines: EngineRegistry,
        *,
        send: Callable[[PeerId, Frames], Sent],
        answer: Callable[[Client, ControlAck, Control], None],
        surroundings: Surroundings,
        state: CoordinatorState,
        clock: Clock,
    ) -> None:
        self.state = state
        self.epoch = 0
        self.fence = 0
        self.source: str | None = None
        self._source_revisions: set[str] = set()
        self.current: PendingOperation | None = None
        self.drained_all = False
        """Nothing is dispatched to anyone: all engines were drained, and no UNPAUSE or STOP has come since."""
        self.settled = False
        """An operation was begun in this process: engines that come later take the state from here."""
        self._engines = engines
        self._send = send
        self._answer = answer
        self._surroundings = surroundings
        self._clock = clock
        self._ended = EndedOperations()
        self._later: deque[tuple[Control, Client]] = deque()

    # --- what others ask ----------------------------------------------------------------------------------------

    @property
    def may_dispatch(self) -> bool:
        if self.state is not _RUNNING or self.drained_all:
            return False
        return self.current is None or self.current.control.kind is not Header.PAUSE

    @property
    def holds(self) -> bool:
        """Whether engines are stopped on purpose, or are about to be: new requests wait or are rejected."""
        return self.state in (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED) or (
            self.current is not None and self.current.control.kind is Header.PAUSE
        )

    @property
    def target_state(self) -> CoordinatorState:
        """What an engine that joins now has to enter: the state after the operation under way."""
        if self.current is not None and self.current.control.kind in SIGNALS:
            return TRANSITIONS[self.current.control.kind].coordinator_after
        return self.state

    def waits_for(self, engine: Engine) -> bool:
        """Whether the operation under way waits for this engine."""
        return self.current is not None and self.current.waiting.get(engine.name) is engine

    def operations(self) -> list[Operation]:
        known = self._ended.describe()
        if self.current is not None:
            known.append(self.current.describe())
        return known

    def see_fence(self, fence: int) -> None:
        self.fence = max(self.fence, fence)

    def see_source(self, source: str | None, revision: str) -> None:
        """Engines of `revision` have their weights from `source`."""
        if source != self.source:
            self.source = source
            self._source_revisions.clear()
        self._source_revisions.add(revision)

    def source_for(self, engine: Engine) -> str | None:
        """The weights that an engine has to hold. An engine of another revision was made for weights of its own."""
        return self.source if engine.revision in self._source_revisions else None

    # --- a control message arrives ------------------------------------------------------------------------------

    def handle(self, control: Control, asker: Client) -> None:
        operation_id = control.operation_id or uuid.uuid4().hex
        if self.current is not None and self.current.operation_id == operation_id:
            if asker not in self.current.askers:
                self.current.askers.append(asker)
            return
        known = self._ended.answer_to(operation_id)
        if known is not None:
            self._answer(asker, known, control)
            return
        if self.current is not None and asker.plain and len(self._later) < MOST_LATER:
            # It is told nothing, so it can neither wait for the end nor try again.
            self._later.append((control, asker))
            return
        refusal = self._refusal(control)
        if refusal is not None:
            code, message = refusal
            self._answer(asker, self._refused(operation_id, code, message), control)
            return
        self.see_fence(control.fence or 0)
        operation = PendingOperation(control, operation_id, [asker])
        transition = TRANSITIONS.get(control.kind)
        ends_drain = self._ends_drain(control)
        if ends_drain:
            self._undrain()
        if ends_drain or (transition is not None and self.state in transition.idempotent_in):
            self._conclude(operation, ControlAck(operation_id=operation_id, ok=True, state=self.state))
            return
        self._start(operation)

    def _refusal(self, control: Control) -> tuple[ErrorCode, str] | None:
        """The first reason why `control` is not begun."""
        name = control.kind.name
        if control.fence is not None and control.fence < self.fence:
            return ErrorCode.STALE_FENCE, f"fence {control.fence} is lower than {self.fence}, seen before"
        if self.current is not None:
            busy = f"{self.current.control.kind.name} {self.current.operation_id}"
            return ErrorCode.IN_PROGRESS, f"{busy} is under way: try again when it has ended"
        if control.kind not in LEGAL_STATES:
            return ErrorCode.INVALID_REQUEST, f"this coordinator does not take {name}"
        absent = [field for field in REQUIRED_FIELDS.get(control.kind, ()) if getattr(control, field) is None]
        if absent:
            return ErrorCode.INVALID_REQUEST, f"{name} needs {' and '.join(absent)}"
        if self.state not in LEGAL_STATES[control.kind] and not self._ends_drain(control):
            return ErrorCode.ILLEGAL_SIGNAL, f"{name} is not legal in state {self.state.value}"
        serving = sorted(engine.name for engine in self._engines.serving())
        if control.expected_engines is not None and len(serving) < control.expected_engines:
            have = ", ".join(serving) or "none"
            return ErrorCode.ENGINES_MISSING, f"{name} expects {control.expected_engines} engines; serving: {have}"
        if control.kind is Header.DRAIN and control.engine is not None and self._engines.named(control.engine) is None:
            have = ", ".join(serving) or "none"
            return ErrorCode.INVALID_REQUEST, f"DRAIN: no engine {control.engine!r} is registered; serving: {have}"
        return None

    def _ends_drain(self, control: Control) -> bool:
        """Engines run, but were all drained: UNPAUSE lets them have work again, and is nothing to them."""
        return control.kind is Header.UNPAUSE and self.state is CoordinatorState.RUNNING and self.drained_all

    def _refused(self, operation_id: str, code: ErrorCode, message: str) -> ControlAck:
        fence = self.fence if code is ErrorCode.STALE_FENCE else None
        return ControlAck(
            operation_id=operation_id, ok=False, state=self.state, code=int(code), error=message, fence=fence
        )

    # --- the two phases -----------------------------------------------------------------------------------------

    def _start(self, operation: PendingOperation) -> None:
        self.current = operation
        self.settled = True
        until = self._clock.time() + operation.control.timeout_seconds
        operation.timer = self._clock.call_at(until, self._deadline, operation)
        if operation.control.kind is Header.DRAIN:
            self._start_drain(operation)
            return
        signal = operation.control.model_copy(update={"operation_id": operation.operation_id})
        for engine in self._engines.serving():
            operation.asked.append(engine)
            operation.total_ranks += engine.ranks
            if engine.plain:
                self._start_plain(operation, engine)
            else:
                operation.waiting[engine.name] = engine
        for engine in list(operation.waiting.values()):
            if self._send(engine.peer, signal.to_frames()) is Sent.GONE:
                self._surroundings.evict(engine, "its connection is gone")
        self._finish_if_complete(operation)

    def _start_plain(self, operation: PendingOperation, engine: Engine) -> None:
        """A plain engine acknowledges nothing: what was sent counts as done."""
        if operation.control.kind is Header.UPDATE_WEIGHTS:
            operation.waiting[engine.name] = engine
            self._fail_engine(operation, engine, "a plain engine cannot update its weights")
        else:
            self._send(engine.peer, plain_signal(operation.control))
            self._succeed(operation, engine, ranks=engine.ranks)

    def _start_drain(self, operation: PendingOperation) -> None:
        name = operation.control.engine
        for engine in self._engines:
            if name is None or engine.name == name:
                engine.draining = True
                operation.asked.append(engine)
                operation.total_ranks += engine.ranks
                operation.waiting[engine.name] = engine
        if name is None:
            self.drained_all = True
        self.check_drained()

    def check_drained(self) -> None:
        """Called whenever an engine may have become idle."""
        operation = self.current
        if operation is None or operation.control.kind is not Header.DRAIN:
            return
        for engine in list(operation.waiting.values()):
            if not engine.in_flight:
                self._succeed(operation, engine, ranks=engine.ranks)
        self._finish_if_complete(operation)

    def acknowledged(self, engine: Engine, ack: ControlAck) -> bool:
        """An engine answers. False when nobody waits for this answer."""
        operation = self.current
        if operation is None or operation.operation_id != ack.operation_id:
            return False
        if operation.waiting.get(engine.name) is not engine or operation.control.kind is Header.DRAIN:
            return False
        if ack.ok:
            self._succeed(operation, engine, ranks=ack.ranks)
        else:
            self._fail_engine(operation, engine, ack.error or "failed")
        self._finish_if_complete(operation)
        return True

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """An engine left the registry: it is not waited for."""
        operation = self.current
        if operation is None or operation.waiting.get(engine.name) is not engine:
            return
        del operation.waiting[engine.name]
        operation.outcomes[engine.name] = EngineOutcome(ok=False, error=f"lost: {reason}")
        self._finish_if_complete(operation)

    def _succeed(self, operation: PendingOperation, engine: Engine, *, ranks: int) -> None:
        operation.waiting.pop(engine.name, None)
        operation.outcomes[engine.name] = EngineOutcome(ok=True, ranks=ranks)
        operation.succeeded.append(engine)

    def _fail_engine(self, operation: PendingOperation, engine: Engine, reason: str) -> None:
        del operation.waiting[engine.name]
        operation.outcomes[engine.name] = EngineOutcome(ok=False, error=reason)
        if operation.control.kind in PROFILER:
            operation.refused.append(engine.name)
            return
        operation.evicted.append(engine.name)
        self._surroundings.evict(engine, reason)

    def _deadline(self, operation: PendingOperation) -> None:
        operation.timer = None
        seconds = operation.control.timeout_seconds
        if operation.control.kind is Header.DRAIN:
            busy = {name: len(engine.in_flight) for name, engine in operation.waiting.items()}
            for name, number in busy.items():
                operation.outcomes[name] = EngineOutcome(ok=False, error=f"{number} requests in flight")
            message = f"not idle within {seconds:g} s: " + ", ".join(f"{name} ({n})" for name, n in busy.items())
            self._fail(operation, ErrorCode.DEADLINE, message)
            return
        for engine in list(operation.waiting.values()):
            self._fail_engine(operation, engine, f"no answer within {seconds:g} s")
        self._finish_if_complete(operation)

    def _finish_if_complete(self, operation: PendingOperation) -> None:
        if operation.waiting or self.current is not operation:
            return
        if operation.refused or (operation.asked and not operation.succeeded):
            failures = {name: outcome.error for name, outcome in operation.outcomes.items() if not outcome.ok}
            details = "; ".join(f"{name}: {error}" for name, error in failures.items())
            who = "not every engine succeeded" if operation.succeeded else "no engine succeeded"
            self._fail(operation, ErrorCode.ENGINE_FAILED, f"{who}: {details}")
        else:
            self._commit(operation)

    def _commit(self, operation: PendingOperation) -> None:
        kind, epoch = operation.control.kind, operation.control.epoch
        transition = TRANSITIONS.get(kind)
        if kind is not Header.DRAIN:
            lands_in = transition.lands_in if transition is not None else None
            commit = ControlCommit(operation_id=operation.operation_id, signal=kind, state=lands_in, epoch=epoch)
            for engine in operation.succeeded:
                self._commit_engine(engine, commit)
        if kind in REQUIRED_FIELDS and epoch is not None:
            self.epoch = epoch
        if kind is Header.UPDATE_WEIGHTS:
            self.source = None
            for engine in operation.succeeded:
                self.see_source(operation.control.source, engine.revision)
            self._surroundings.weights_changed()
        if transition is not None:
            self.state = transition.coordinator_after
        if kind in (Header.UNPAUSE, Header.STOP):
            self._undrain()
        if kind is Header.STOP:
            self._surroundings.stop_requests()
        self._conclude(operation, operation.answer(ok=True, state=self.state))

    def _commit_engine(self, engine: Engine, commit: ControlCommit) -> None:
        if not self._engines.is_registered(engine):
            return
        if not engine.plain:
            engine.told, engine.owed = self._clock.time(), commit
            self._send(engine.peer, commit.to_frames())
        if commit.state is not None:
            engine.state = commit.state
        if commit.epoch is not None:
            engine.epoch = commit.epoch
        if commit.signal is Header.UPDATE_WEIGHTS:
            engine.source = self.source
        if commit.signal is Header.STOP:
            engine.serving = False

    def _undrain(self) -> None:
        if self.drained_all:
            self.drained_all = False
            for engine in self._engines:
                engine.draining = False

    def _fail(self, operation: PendingOperation, code: ErrorCode, message: str) -> None:
        error = f"{operation.control.kind.name}: {message}"
        self._conclude(operation, operation.answer(ok=False, state=self.state, code=code, error=error))

    def _conclude(self, operation: PendingOperation, ack: ControlAck) -> None:
        """Remember the answer, give it, and let the others go on."""
        if operation.timer is not None:
            operation.timer.cancel()
        if self.current is operation:
            self.current = None
        self._ended.add(operation.control, ack)
        for asker in operation.askers:
            self._answer(asker, ack, operation.control)
        for engine in self._engines:
            if engine.entered_during == operation.operation_id:
                engine.entered_during = None
                self._surroundings.welcome(engine)
        self._surroundings.pump()
        while self._later and self.current is None:
            self.handle(*self._later.popleft())
