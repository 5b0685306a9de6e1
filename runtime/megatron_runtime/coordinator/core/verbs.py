"""Control messages in two phases: signal every engine and collect acknowledgements, then commit.

The coordinator executes one operation at a time. protocol/lifecycle.py defines the effect of each message, and the
states in which the message is legal.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.records import Client, Engine, PeerId
from megatron_runtime.coordinator.core.routing import EngineRouter
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import PROFILER, SIGNALS, ErrorCode, Header
from megatron_runtime.protocol.lifecycle import LEGAL_SIGNALS, STEADY_ENGINE_STATES, TRANSITIONS, CoordinatorState
from megatron_runtime.protocol.messages import (
    AdapterStatus,
    Control,
    ControlAck,
    ControlCommit,
    EngineOutcome,
    Error,
    HelloAck,
    Operation,
)
from megatron_runtime.protocol.published_weights import is_published, names_same_weights

logger = logging.getLogger(__name__)

MAX_DEFERRED = 64
"""Maximum number of control messages without an operation id that wait for the operation in progress."""
REMEMBERED_OPERATIONS = 64

_STEADY = frozenset(STEADY_ENGINE_STATES)
LEGAL_STATES: dict[Header, frozenset[CoordinatorState]] = {
    **LEGAL_SIGNALS,
    Header.SET_GENERATION_EPOCH: _STEADY,
    **dict.fromkeys(PROFILER, _STEADY),
}
"""Coordinator states in which each control message is accepted. In other states it is rejected."""
REQUIRED_FIELDS: dict[Header, tuple[str, ...]] = {
    Header.SET_GENERATION_EPOCH: ("epoch",),
    Header.UPDATE_WEIGHTS: ("epoch", "source"),
    Header.SET_ADAPTERS: ("adapters",),
}
CANCELS_TRANSFERS = frozenset({Header.SUSPEND, Header.STOP, Header.UPDATE_WEIGHTS, Header.SET_GENERATION_EPOCH})
"""Control messages after which blocks in transfer between engines are useless."""
KEEPS_ENGINES = PROFILER | {Header.SET_ADAPTERS}
"""Control messages that fail as a whole if one engine fails. The failed engine keeps serving. UPDATE_WEIGHTS from a
trainer behaves in the same way, because an engine that cannot reach the trainer could not get the weights after a
restart either.
"""

_RUNNING = CoordinatorState.RUNNING  # see context.py


@dataclass(slots=True, eq=False)
class PendingOperation:
    """An operation whose acknowledgements are being collected.

    clients: clients that get the answer. A client that sends a control message with the same id is added.
    waiting: engines that have not answered.
    failed:  engines that did not execute the operation and keep serving. The operation succeeds only if no engine
             failed.
    must_load: for UPDATE_WEIGHTS, engines that have verified the weights and must still load them in a second step,
               during which they are paused.
    is_loading: whether the second step has begun. If an engine fails in this step, the other engines return to the old
                weights.
    unsupported: whether an engine failed because its backend lacks the feature.
    adapter_errors: for SET_ADAPTERS, why the first failed engine could not load an adapter, by adapter name.
    """

    control: Control
    operation_id: str
    clients: list[Client]
    waiting: dict[str, Engine] = field(default_factory=dict)
    signalled: list[Engine] = field(default_factory=list)
    succeeded: list[Engine] = field(default_factory=list)
    outcomes: dict[str, EngineOutcome] = field(default_factory=dict)
    evicted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    must_load: list[Engine] = field(default_factory=list)
    is_loading: bool = False
    unsupported: bool = False
    adapter_errors: dict[str, str] = field(default_factory=dict)
    total_ranks: int = 0

    @property
    def keeps_engines(self) -> bool:
        return self.control.kind in KEEPS_ENGINES or is_published(self.control.source)

    def answer(self, **fields: Any) -> ControlAck:
        """Return a CONTROL_ACK with the outcomes so far. fields: values of ok, state, code, error and fence."""
        return ControlAck(
            operation_id=self.operation_id,
            ranks=sum(outcome.ranks for outcome in self.outcomes.values() if outcome.ok),
            total_ranks=self.total_ranks,
            engines=self.outcomes,
            evicted=self.evicted,
            adapter_errors=self.adapter_errors or None,
            **fields,
        )


class Verbs:
    """The coordinator's state, epoch and fence, and the operations that change them.

    source:       weights that the last UPDATE_WEIGHTS named; None before the first UPDATE_WEIGHTS.
    adapters:     the list of LoRA adapters from the last SET_ADAPTERS.
    drained_all:  whether all engines were drained and no UNPAUSE or STOP has followed. If so, no request is dispatched.
    settled:      whether an operation has begun in this process. If so, engines that register later adopt the state of
                  this process.
    evict:        removes an engine, with a reason.
    stopped:      called after all engines were stopped.
    cancel_transfers: called before a message in CANCELS_TRANSFERS is sent to engines.
    adapters_changed: called after a new list of adapters is committed, before the engines get it.
    """

    def __init__(
        self,
        context: Context,
        router: EngineRouter,
        *,
        evict: Callable[[Engine, str], None],
        stopped: Callable[[], None],
        cancel_transfers: Callable[[], None],
        adapters_changed: Callable[[], None],
    ) -> None:
        self.state = CoordinatorState.RECOVERING if context.settings.timing.recovery > 0 else _RUNNING
        self.epoch = 0
        self.fence = 0
        self.source: str | None = None
        self.adapters = AdapterList()
        self.current: PendingOperation | None = None
        self.drained_all = False
        self.settled = False
        self._context = context
        self._engines = context.engines
        self._router = router
        self._evict = evict
        self._stopped = stopped
        self._cancel_transfers = cancel_transfers
        self._adapters_changed = adapters_changed
        self._source_revisions: set[str] = set()
        self._ended: OrderedDict[str, tuple[Control, ControlAck]] = OrderedDict()
        self._deferred: deque[tuple[Control, Client]] = deque()

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def may_dispatch(self) -> bool:
        if self.state is not _RUNNING or self.drained_all:
            return False
        return self.current is None or self.current.control.kind is not Header.PAUSE

    @property
    def holds(self) -> bool:
        """Whether a verb has paused or suspended the engines, or is about to pause them.

        New requests then wait or fail.
        """
        return self.state in (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED) or (
            self.current is not None and self.current.control.kind is Header.PAUSE
        )

    @property
    def target_state(self) -> CoordinatorState:
        """The state that an engine that joins now must enter. It is the state after the operation in progress."""
        if self.current is not None and self.current.control.kind in SIGNALS:
            return TRANSITIONS[self.current.control.kind].coordinator_after
        return self.state

    def waits_for(self, engine: Engine) -> bool:
        """Return whether the operation in progress waits for this engine."""
        return self.current is not None and self.current.waiting.get(engine.name) is engine

    def operations(self) -> list[Operation]:
        known = list(self._ended.values())
        if self.current is not None:
            known.append((self.current.control, self.current.answer(ok=False, state=self.state)))
        return [
            Operation(
                operation_id=ack.operation_id,
                signal=control.kind,
                phase="Confirmed" if ack.ok else "Failed" if ack.operation_id in self._ended else "InProgress",
                ranks=ack.ranks,
                total_ranks=ack.total_ranks,
                evicted=ack.evicted,
                code=ack.code,
                error=ack.error,
                adapter_errors=ack.adapter_errors if ack is known[-1][1] else None,
            )
            for control, ack in known
        ]

    def see_source(self, source: str | None, revision: str) -> None:
        """Record that the engines of `revision` have loaded their weights from `source`."""
        if source != self.source:
            self.source = source
            self._source_revisions.clear()
        self._source_revisions.add(revision)

    def source_for(self, engine: Engine) -> str | None:
        """Return the source of the weights that an engine must hold, or None if the engine keeps its own weights.

        Weights that a trainer publishes are for every engine. Other weights are only for engines of the revisions that
        have loaded them.
        """
        is_theirs = is_published(self.source) or engine.revision in self._source_revisions
        return self.source if is_theirs else None

    def _copies_for(self, engine: Engine) -> tuple[str, ...] | None:
        """Return the addresses at which another engine serves the weights that `engine` must hold.

        Returns None if no engine serves them.

        The other engine is registered and has the same revision and number of ranks.
        """
        holders = [
            other
            for other in self._engines.serving()
            if other is not engine
            and other.copies
            and names_same_weights(other.source, self.source)
            and (other.revision, other.ranks) == (engine.revision, engine.ranks)
        ]
        holder = min(holders, key=lambda other: (other.suspect, len(other.in_flight), other.name), default=None)
        return holder.copies if holder is not None else None

    def adapter_report(self) -> list[AdapterStatus]:
        serving = self._engines.serving()
        return [
            AdapterStatus(
                name=adapter.name,
                source=adapter.source,
                engines=sum(adapter.name in engine.adapters for engine in serving),
                error=next(
                    (
                        f"{engine.name}: {engine.adapter_errors[adapter.name]}"
                        for engine in serving
                        if adapter.name in engine.adapter_errors
                    ),
                    None,
                ),
            )
            for adapter in self.adapters.adapters
        ]

    def welcome(self, engine: Engine) -> None:
        """Send an engine the state, epoch, weights and adapters that it must adopt."""
        engine.welcomed = self._context.now
        size, source = limits.MAX_ENGINE_MESSAGE_BYTES, self.source_for(engine)
        copies = self._copies_for(engine) if is_published(source) else None
        self.acknowledge_hello(
            engine.peer, state=self.target_state, max_message_bytes=size, source=source, copies=copies
        )

    def acknowledge_hello(self, peer: PeerId, **fields: Any) -> None:
        """Send HELLO_ACK with `fields` and the fields that all peers receive."""
        ack = HelloAck(
            incarnation=self._context.incarnation,
            epoch=self.epoch,
            fence=self.fence,
            adapters=self.adapters,
            heartbeat_seconds=self._context.settings.timing.heartbeat,
            term=self._context.term,
            other=self._context.settings.other_host,
            **fields,
        )
        self._context.send(peer, ack.to_frames())

    # --- a control message arrives ------------------------------------------------------------------------------

    def handle(self, control: Control, client: Client) -> None:
        operation_id = control.operation_id or f"{self._context.randbits(128):032x}"
        if self.current is not None and self.current.operation_id == operation_id:
            if client not in self.current.clients:
                self.current.clients.append(client)
            return
        if operation_id in self._ended:
            self._answer(client, self._ended[operation_id][1], control)
            return
        if self.current is not None and control.operation_id is None and len(self._deferred) < MAX_DEFERRED:
            # Its sender does not wait for an answer, so it would not send the message again.
            self._deferred.append((control, client))
            return
        operation = PendingOperation(control, operation_id, [client])
        rejection = self._rejection(control)
        if rejection is not None:
            code, message = rejection
            fence = self.fence if code is ErrorCode.STALE_FENCE else None
            ack = operation.answer(ok=False, state=self.state, code=int(code), error=message, fence=fence)
            self._answer(client, ack, control)
            return
        self.fence = max(self.fence, control.fence or 0)
        transition = TRANSITIONS.get(control.kind)
        ends_drain = self._ends_drain(control)
        if ends_drain:
            self._undrain()
        is_published_again = self._is_published_again(control)
        if is_published_again:
            self.source = control.source  # the trainer may have another address
        if ends_drain or is_published_again or (transition is not None and self.state in transition.idempotent_in):
            self._conclude(operation, operation.answer(ok=True, state=self.state))
        else:
            self._start(operation)

    def _rejection(self, control: Control) -> tuple[ErrorCode, str] | None:
        """Return the error code and the reason why the operation `control` cannot begin, or None if it can begin."""
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
        have = ", ".join(serving) or "none"
        if control.expected_engines is not None and len(serving) < control.expected_engines:
            return ErrorCode.ENGINES_MISSING, f"{name} expects {control.expected_engines} engines; serving: {have}"
        is_from_trainer = control.kind is Header.UPDATE_WEIGHTS and is_published(control.source)
        if is_from_trainer and (control.epoch or 0) <= self.epoch and not self._is_published_again(control):
            message = f"{name}: epoch {control.epoch} is not above {self.epoch}, the epoch of the engines"
            return ErrorCode.INVALID_REQUEST, f"{message}: publish under a higher one"
        if control.kind is Header.DRAIN and control.engine is not None and self._engines.named(control.engine) is None:
            return ErrorCode.INVALID_REQUEST, f"DRAIN: no engine {control.engine!r} is registered; serving: {have}"
        return None

    def _ends_drain(self, control: Control) -> bool:
        """Return whether `control` is an UNPAUSE that only ends a DRAIN, because all engines run but are drained.

        The engines then receive requests again, and no signal is sent to them.
        """
        return control.kind is Header.UNPAUSE and self.state is _RUNNING and self.drained_all

    def _is_published_again(self, control: Control) -> bool:
        """Return whether `control` repeats the last committed update.

        A trainer sends the update again if it got no answer or was restarted.
        """
        is_update = control.kind is Header.UPDATE_WEIGHTS and is_published(control.source)
        return is_update and control.epoch == self.epoch and names_same_weights(control.source, self.source)

    def _answer(self, client: Client, ack: ControlAck, control: Control) -> None:
        if not ack.ok and control.operation_id is None:
            code = ErrorCode(ack.code) if ack.code is not None else ErrorCode.ENGINE_FAILED
            self._context.answer(client, Error(code=code, message=ack.error or "failed").to_frames())
        else:
            self._context.answer(client, ack.to_frames())

    # --- the two phases -----------------------------------------------------------------------------------------

    def _start(self, operation: PendingOperation) -> None:
        control = operation.control
        self.current = operation
        self.settled = True
        self._context.set_timer("operation", self._context.now + control.timeout_seconds, self._deadline)
        if control.kind in CANCELS_TRANSFERS:
            self._cancel_transfers()
        if control.kind is Header.DRAIN:
            engines = [engine for engine in self._engines if control.engine in (None, engine.name)]
            self.drained_all = self.drained_all or control.engine is None
        else:
            engines = self._engines.serving()
        update: dict[str, Any] = {"operation_id": operation.operation_id}
        if control.kind is Header.SET_ADAPTERS and control.adapters is not None:
            update["adapters"] = replace(control.adapters, generation=self.adapters.generation + 1)
        operation.control = control.model_copy(update=update)
        signal = operation.control.to_frames()
        for engine in engines:
            operation.signalled.append(engine)
            operation.waiting[engine.name] = engine
            operation.total_ranks += engine.ranks
            if control.kind is Header.DRAIN:
                engine.draining = True
            elif control.kind is Header.SET_ADAPTERS and not engine.knows_adapters:
                self._fail_engine(operation, engine, "it has no adapters: upgrade it", code=ErrorCode.UNSUPPORTED)
            else:
                self._context.send(engine.peer, signal)
        if not self.check_drained():
            self._finish_if_complete(operation)

    def check_drained(self) -> bool:
        """If a DRAIN is in progress, record the engines that are idle. Return True if this completes the DRAIN."""
        operation = self.current
        if operation is None or operation.control.kind is not Header.DRAIN:
            return False
        for engine in list(operation.waiting.values()):
            if not engine.in_flight:
                self._succeed(operation, engine, ranks=engine.ranks)
        self._finish_if_complete(operation)
        return self.current is not operation

    def acknowledged(self, engine: Engine, ack: ControlAck) -> bool:
        """Record the answer of an engine. Return False if no operation waits for this answer."""
        operation = self.current
        if operation is None or operation.operation_id != ack.operation_id:
            return False
        if operation.waiting.get(engine.name) is not engine or operation.control.kind is Header.DRAIN:
            return False
        if ack.ok and ack.must_load:
            if operation.is_loading:  # a repeated answer to the first step
                return False
            del operation.waiting[engine.name]
            operation.must_load.append(engine)
        elif ack.ok:
            self._succeed(operation, engine, ranks=ack.ranks)
        else:
            for name, error in (ack.adapter_errors or {}).items():
                operation.adapter_errors.setdefault(name, f"{engine.name}: {error}")
            self._fail_engine(operation, engine, ack.error or "failed", code=ack.code)
        self._finish_if_complete(operation)
        return True

    def engine_lost(self, engine: Engine, reason: str) -> None:
        """Stop waiting for an engine that was removed from the registry."""
        operation = self.current
        if operation is not None and operation.waiting.get(engine.name) is engine:
            del operation.waiting[engine.name]
            operation.outcomes[engine.name] = EngineOutcome(ok=False, error=f"lost: {reason}")
            if operation.is_loading:
                operation.failed.append(engine.name)
            self._finish_if_complete(operation)

    def _succeed(self, operation: PendingOperation, engine: Engine, *, ranks: int) -> None:
        del operation.waiting[engine.name]
        operation.outcomes[engine.name] = EngineOutcome(ok=True, ranks=ranks)
        operation.succeeded.append(engine)

    def _fail_engine(
        self, operation: PendingOperation, engine: Engine, reason: str, *, code: int | None = None
    ) -> None:
        del operation.waiting[engine.name]
        operation.outcomes[engine.name] = EngineOutcome(ok=False, error=reason)
        operation.unsupported = operation.unsupported or code == ErrorCode.UNSUPPORTED
        if operation.keeps_engines:
            operation.failed.append(engine.name)
        else:
            if operation.is_loading:
                operation.failed.append(engine.name)
            operation.evicted.append(engine.name)
            self._evict(engine, reason)

    def _deadline(self) -> None:
        operation = self.current
        if operation is None:
            return
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
        if operation.waiting or self.current is not operation or self._load(operation):
            return
        if operation.failed or (operation.signalled and not operation.succeeded):
            failures = {name: outcome.error for name, outcome in operation.outcomes.items() if not outcome.ok}
            details = "; ".join(f"{name}: {error}" for name, error in failures.items())
            which = "not every engine succeeded" if operation.succeeded else "no engine succeeded"
            code = ErrorCode.UNSUPPORTED if operation.unsupported else ErrorCode.ENGINE_FAILED
            if operation.control.kind not in PROFILER and (operation.keeps_engines or operation.is_loading):
                self._discard(operation)
            self._fail(operation, code, f"{which}: {details}")
        else:
            self._commit(operation)

    def _load(self, operation: PendingOperation) -> bool:
        """Begin the second step of UPDATE_WEIGHTS, in which the engines that must pause to load weights load them.

        Return False if no engine must load weights, or if the step has already begun.
        """
        loading = [engine for engine in operation.must_load if self._engines.is_registered(engine)]
        if operation.is_loading or not loading:
            return False
        operation.is_loading = True
        signal = operation.control.model_copy(update={"load": True}).to_frames()
        for engine in loading:
            operation.waiting[engine.name] = engine
            self._context.send(engine.peer, signal)
        return True

    def _discard(self, operation: PendingOperation) -> None:
        """Make the engines undo phase one.

        An engine that misses this message undoes phase one at the next control message.
        """
        kind, operation_id = operation.control.kind, operation.operation_id
        frames = ControlCommit(operation_id=operation_id, signal=kind, discard=True).to_frames()
        for engine in operation.signalled:
            if self._engines.is_registered(engine) and engine.knows_adapters:
                self._context.send(engine.peer, frames)

    def _commit(self, operation: PendingOperation) -> None:
        kind, epoch = operation.control.kind, operation.control.epoch
        transition = TRANSITIONS.get(kind)
        if kind in REQUIRED_FIELDS and epoch is not None:
            self.epoch = epoch
        if kind is Header.UPDATE_WEIGHTS:
            self.source = operation.control.source if is_published(operation.control.source) else None
            self._source_revisions.clear()
            for engine in operation.succeeded:
                self.see_source(operation.control.source, engine.revision)
            self._router.blocks.forget_all()
        if kind is Header.SET_ADAPTERS and operation.control.adapters is not None:
            self.adapters = operation.control.adapters
            self._adapters_changed()
        if kind is not Header.DRAIN:
            lands_in = transition.lands_in if transition is not None else None
            commit = ControlCommit(operation_id=operation.operation_id, signal=kind, state=lands_in, epoch=epoch)
            for engine in operation.succeeded:
                self._commit_engine(engine, commit)
        if transition is not None:
            self.state = transition.coordinator_after
        if kind in (Header.UNPAUSE, Header.STOP):
            self._undrain()
        if kind is Header.STOP:
            self._stopped()
        self._conclude(operation, operation.answer(ok=True, state=self.state))

    def _commit_engine(self, engine: Engine, commit: ControlCommit) -> None:
        if not self._engines.is_registered(engine):
            return
        engine.welcomed, engine.owed = self._context.now, commit
        self._context.send(engine.peer, commit.to_frames())
        if commit.state is not None:
            engine.state = commit.state
        if commit.epoch is not None:
            engine.epoch = commit.epoch
        if commit.signal is Header.UPDATE_WEIGHTS:
            engine.source, engine.digest = self.source, ""
        if commit.signal is Header.SET_ADAPTERS:
            engine.forget_adapters()  # its next HELLO reports the adapters that it has now
        if commit.signal is Header.STOP:
            engine.serving = False

    def _undrain(self) -> None:
        if self.drained_all:
            self.drained_all = False
            for engine in self._engines:
                engine.draining = False

    def _fail(self, operation: PendingOperation, code: ErrorCode, message: str) -> None:
        error = f"{operation.control.kind.name}: {message}"
        self._conclude(operation, operation.answer(ok=False, state=self.state, code=int(code), error=error))

    def _conclude(self, operation: PendingOperation, ack: ControlAck) -> None:
        """Record the answer of an operation, send it, and begin the next operation."""
        if self.current is operation:
            self.current = None
            self._context.cancel_timer("operation")
        self._ended[ack.operation_id] = operation.control, ack
        if len(self._ended) > REMEMBERED_OPERATIONS:
            self._ended.popitem(last=False)
        for client in operation.clients:
            self._answer(client, ack, operation.control)
        for engine in self._engines:
            if engine.entered_during == operation.operation_id:
                engine.entered_during = None
                self.welcome(engine)
        self._context.needs_pump = True
        while self._deferred and self.current is None:
            self.handle(*self._deferred.popleft())
