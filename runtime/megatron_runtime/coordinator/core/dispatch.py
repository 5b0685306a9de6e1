"""The lifecycle of a request at the coordinator: accepted, queued, dispatched, possibly dispatched again, ended.

An engine gets at most as many requests as it can run at the same time. The other requests wait in the coordinator. An
engine that joins therefore gets work immediately, and few requests must be dispatched again when an engine leaves.

Tenants share the engines. The load of a tenant is the number of its requests at engines. The shares are max-min fair if
the load of each tenant with waiting requests is at least the highest load minus one. The dispatcher moves requests from
engines back to the queue until the shares are fair. Each move brings the loads of two tenants closer together, so no
request moves back and forth. While only one tenant has requests, no request is moved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from megatron_runtime.coordinator.core import rejections
from megatron_runtime.coordinator.core.admission import LATER, AdmissionControl
from megatron_runtime.coordinator.core.context import Context
from megatron_runtime.coordinator.core.handoffs import Handoffs
from megatron_runtime.coordinator.core.open_requests import Deadlines, Journal, Tenants, WaitingQueue
from megatron_runtime.coordinator.core.placement import Placement
from megatron_runtime.coordinator.core.quarantine import Quarantine
from megatron_runtime.coordinator.core.records import Client, Ended, Engine, Entry, PeerId, RequestStage
from megatron_runtime.coordinator.core.rejections import Rejection
from megatron_runtime.coordinator.core.routing import EngineRouter
from megatron_runtime.coordinator.core.transfers import CHANGED_BY_VERBS, KEEPS_BLOCKS, Transfers
from megatron_runtime.coordinator.core.verbs import Verbs
from megatron_runtime.coordinator.environment import PromptReader
from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import (
    Abort,
    Dispatch,
    Error,
    Exported,
    Imported,
    MalformedMessageError,
    PackedTokens,
    Prefill,
    Submit,
)

logger = logging.getLogger(__name__)

_QUEUED, _PREFILLING, _EXPORTED, _IMPORTING, _DECODING = RequestStage  # see records.py
NO_ROUTE = 0
"""Route of partials that the coordinator does not forward. The routes of clients begin at 1."""
REMEMBERED_DISPATCHES = 4
"""Maximum number of earlier dispatches of a request from which a final answer is still accepted."""
MOVE_AGAIN_SECONDS = 2.0
"""Minimum time between two moves of a request from an engine back to the queue."""
SEARCH_AGAIN_SECONDS = 0.1
"""Time until the next search for a request to move, after a search without a result."""


class Dispatcher:
    """The dispatcher of requests, which owns the tables of open requests and the quarantine."""

    def __init__(self, context: Context, router: EngineRouter, verbs: Verbs, prompts: PromptReader) -> None:
        self.journal = Journal(limit_bytes=context.settings.journal_bytes)
        self.queue = WaitingQueue()
        self.tenants = Tenants(is_shared=router.deterministic)
        self.deadlines = Deadlines(context, self._expire)
        self.quarantine = Quarantine(
            context, requeue=self._requeue, fail=self.fail, reject_unanswerable=self._reject_unanswerable
        )
        self.transfers = Transfers(context, router, requeue=lambda entry: self._requeue(entry, first=entry.is_replay))
        self.handoffs = Handoffs(context, self.transfers.release)
        self._admission = AdmissionControl(
            context=context,
            verbs=verbs,
            journal=self.journal,
            queue=self.queue,
            tenants=self.tenants,
            fail=self.fail,
        )
        self.next_search = 0.0
        # Ids are never reused, not even by the next coordinator, because an engine may still answer a dispatch of the
        # previous coordinator.
        self.next_dispatch_id = (context.randbits(28) << 24) + 1
        self._settings = context.settings
        self._context = context
        self._engines = context.engines
        self._router = router
        self._placement = Placement(context, router, verbs, self.transfers)
        self._verbs = verbs
        self._prompts = prompts
        self._counters = context.counters
        self._former: dict[int, tuple[PeerId, Entry]] = {}

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return self.queue.length + len(self.quarantine)

    # --- arrival -----------------------------------------------------------------------------------------------

    def submit(self, client: Client, submit: Submit) -> None:
        """Accept a request from a client, or reject the request.

        If a request with this uid is already open, the client has sent it again on another connection, and this method
        continues the request. If the uid was already answered on this connection, this method ignores the request,
        because the client sent the request before it read the answer.
        """
        uid, meta, prompt, generated, params, media, epochs, handoff = submit
        if uid in client.answered:
            return
        known = self.journal.get(uid)
        if known is not None:
            self._take_over(known, client, tokens_held=len(generated) // 4)
            return
        if media is not None and (media := self._complete_media(client, uid, media)) is None:
            return
        now = self._context.now
        entry = Entry(  # at most 15 arguments: Python would put more into a dictionary
            uid=uid,
            client=client,
            tenant=self.tenants.of(meta.tenant or client.route),
            meta=meta,
            prompt=prompt,
            params=params,
            generated=bytearray(generated),
            arrived=now,
            deadline=now + meta.deadline_ms / 1000 if meta.deadline_ms is not None else None,
            model=client.model,
            hashes=None if self._router.by_prefix else {},
        )
        if generated:
            entry.forwarded = entry.held = entry.tokens_so_far
            entry.epochs.extend(epochs)
        if media is not None:
            entry.media, entry.media_route = media, client.route
        entry.admitted_bytes = entry.cost() + self.journal.media.added_bytes(entry)
        verdict = self._admission.decide(entry)
        if isinstance(verdict, Rejection):
            self._trace(entry, error=verdict.message)
            self._answer_error(entry, verdict)
            return
        self.journal.add(entry)
        self.tenants.opened(entry)
        client.open[uid] = entry
        if handoff and (kept := self.handoffs.take(entry, handoff)) is not None:
            self.transfers.keep(entry, kept.engine, kept.exported)
            self.transfers.move(entry, _EXPORTED)
        if verdict is LATER or not self._begin(entry):
            self._wait(entry)

    def _complete_media(self, client: Client, uid: bytes, media: Media) -> Media | None:
        """Return the media of a request, with the data that the client omitted because it sent them before.

        If data is missing or too large, reject the request and return None.
        """
        completed = self.journal.media.completed(client.route, media)
        if completed is None:
            message = "the coordinator lacks data of its images, audio or video: submit it again with all data"
            error = Error(code=ErrorCode.MEDIA_MISSING, message=message, uid=uid)
            self._context.answer(
                client, error.to_frames()
            )  # without the uid, because the client may submit the request again
            return None
        if (size := completed.data_bytes) > limits.MAX_MEDIA_BYTES:
            message = f"images, audio and video of the request take {size} bytes: at most {limits.MAX_MEDIA_BYTES}"
            error = Error(code=ErrorCode.TOO_LARGE, message=message, uid=uid)
            self._context.answer(client, error.to_frames(), uid=uid)
            return None
        return completed

    def _begin(self, entry: Entry) -> bool:
        """Dispatch or reject a request that has not been in the queue.

        Return True if the request was dispatched or rejected. Return False if the request must wait, because all
        engines that can answer it are at capacity.
        """
        if entry.meta.engine:
            pinned = self._engines.named(entry.meta.engine)
            chosen = None if pinned is None else (pinned, _DECODING)
        else:
            chosen = self._placement.choose(entry)
        if chosen is not None:
            engine, stage = chosen
            self._dispatch(entry, engine, stage)
            return True
        return self._placement.has_room() and self._reject_unanswerable(entry)

    def _take_over(self, entry: Entry, client: Client, *, tokens_held: int) -> None:
        if entry.client is not client:
            entry.client.open.pop(entry.uid, None)
            entry.client = client
            client.open[entry.uid] = entry
        entry.forwarded = entry.held = min(tokens_held, entry.tokens_so_far)
        if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
            client.behind = True

    def _reject_pinned(self, entry: Entry) -> None:
        self._leave_engine(entry)
        self.fail(entry, rejections.engine_missing(entry, self._engines.named(entry.meta.engine)))

    # --- queue and dispatch ------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Dispatch waiting requests to engines with free capacity. Suspected poison requests come first."""
        self._context.needs_pump = False
        if self.quarantine.active and self._verbs.may_dispatch:
            self._dispatch_suspect()
        while self.queue.length and self._verbs.may_dispatch:
            if not self._placement.has_room() or not any(self._offer(entry) for entry in self.queue.heads()):
                break
        if self.queue.length and len(self.tenants) > 1:
            self._balance()

    def _wait(self, entry: Entry, *, first: bool = False, moved: bool = False) -> None:
        """Add a request to the queue, or to the quarantine if it is a suspect.

        `first` and `moved`: see WaitingQueue.add().

        The caller must have removed the request from the table of its engine.
        """
        self._leave_engine(entry)
        if entry.stage is _IMPORTING:
            self.transfers.interrupted(entry)
        stage = _QUEUED if entry.export is None else _EXPORTED
        if entry.stage is not stage:
            self.transfers.move(entry, stage)
        if entry.crashes and self.quarantine.suspects(entry):
            self.quarantine.add(entry)
        else:
            self.queue.add(entry, first=first, moved=moved)
        until = self._context.now + self._settings.max_wait_seconds
        self.deadlines.set(entry, until if entry.deadline is None else min(until, entry.deadline))
        self._context.needs_pump = True

    def _leave_engine(self, entry: Entry) -> None:
        if entry.engine is not None:
            self.tenants.returned(entry)
            entry.engine, entry.dispatch_id = None, 0

    def _offer(self, entry: Entry) -> bool:
        """Dispatch or reject a request at the head of the queue.

        Return False if the request must wait for an engine.
        """
        if entry.meta.adapter and self._reject(entry, rejections.adapter_changed(entry, self._verbs.adapters)):
            return True
        chosen = self._placement.choose(entry)
        if chosen is None:
            return self._reject_unanswerable(entry)
        engine, stage = chosen
        self._dispatch(entry, engine, stage)
        return True

    def _reject_unanswerable(self, entry: Entry) -> bool:
        """Reject a request if no serving engine can answer it. Return True if it was rejected, False if it can wait."""
        rejection = rejections.adapter_changed(entry, self._verbs.adapters)
        return self._reject(entry, rejection or rejections.unanswerable(entry, self._engines.serving()))

    def _reject(self, entry: Entry, rejection: Rejection | None) -> bool:
        if rejection is not None:
            self.fail(entry, rejection)
        return rejection is not None

    def _dispatch(self, entry: Entry, engine: Engine, stage: RequestStage = _DECODING) -> None:
        """Send a request to an engine, where it begins in `stage`.

        If `stage` is IMPORTING, Transfers.begin() sends the message.
        """
        if not self._is_readable(entry, engine) and not self._tokenize(entry, engine):
            return
        dispatch_id = self.next_dispatch_id
        self.next_dispatch_id += 1
        meta = entry.meta
        if meta.adapter and not entry.generated:
            entry.adapter = self._verbs.adapters.find(meta.adapter)
        if entry.deadline is not None:
            meta = meta._replace(deadline_ms=max(0, int((entry.deadline - self._context.now) * 1000)))
        route = entry.client.route
        if engine.reserved and not meta.streaming:
            # These partials are not forwarded, because they only report the suspect's progress.
            entry.progress = 0
            meta, route = meta._replace(streaming=True), NO_ROUTE
        if stage is not _IMPORTING:
            generated, epochs = bytes(entry.generated), tuple(entry.epochs) if entry.epochs else ()
            bodies = entry.prompt, generated, entry.params, entry.media, epochs
            dispatch = Dispatch(dispatch_id, entry.uid, route, meta, *bodies)
            self._context.effects.append((engine.peer, dispatch if stage is _DECODING else Prefill(dispatch)))
        if logger.isEnabledFor(logging.DEBUG):
            extra = of_request(meta.request_id)
            logger.debug("request %s dispatched to engine %s", entry.uid.hex(), engine.name, extra=extra)
        if self.queue.length:
            self.queue.discard(entry)
        former = entry.dispatch_id  # at the engine of the previous stage; 0 without one
        entry.engine, entry.dispatch_id = engine, dispatch_id
        entry.dispatches += 1
        if stage is not entry.stage:
            self.transfers.move(entry, stage)
        if entry.export is not None and stage is _DECODING:
            self.transfers.drop(entry)
        if entry.dispatched_at is None:
            entry.dispatched_at = self._context.now
        self.tenants.dispatched(entry, former=former)
        if entry.deadline is not None or entry.slot is not None:
            self.deadlines.set(entry, entry.deadline)
        if engine.in_flight.pop(former, None) is not None:  # it has imported the blocks
            engine.in_flight[dispatch_id] = entry
            return
        self._account(entry, engine, stage)

    def _account(self, entry: Entry, engine: Engine, stage: RequestStage) -> None:
        """Count a dispatched request at its engine, and start the transfer of its blocks."""
        if entry.hashes is None:  # not needed for the choice, so the dispatch did not wait for them
            entry.hashes = self._placement.hashes_of(entry)
        cached = self._router.assigned(engine, entry.hashes, request=entry.uid, session=entry.meta.session)
        if stage is _IMPORTING:
            cached = max(cached, self.transfers.begin(entry, engine))
        engine.in_flight[entry.dispatch_id] = entry
        if self._router.by_cost or self._engines.has_roles:
            engine.add_work(entry, cached)
        self._engines.load_changed(engine)

    def _is_readable(self, entry: Entry, engine: Engine) -> bool:
        """Return whether the engine can read the prompt in the form in which the coordinator stores it."""
        if entry.meta.text:
            return engine.tokenizes
        return type(entry.prompt) is not PackedTokens or engine.peer in self._context.translated

    def _tokenize(self, entry: Entry, engine: Engine) -> bool:
        """Replace the text of the prompt by its tokens.

        If tokenization fails, reject the request and return False.
        """
        try:
            prompt = self._prompts.tokens_of(entry.meta, entry.prompt)
        except MalformedMessageError as error:
            message = f"engine {engine.name} cannot tokenize the prompt, and {error}" if entry.meta.text else str(error)
            self.fail(entry, Rejection(ErrorCode.INVALID_REQUEST, message))
            return False
        self.journal.replace_prompt(entry, prompt)
        entry.meta = entry.meta._replace(text=False)
        return True

    def not_dispatched(self, engine: Engine, dispatch_id: int) -> None:
        """Put a request back in the queue, or reject it if it names an engine.

        Call this method if the connection of `engine` did not accept the dispatch.
        """
        entry = engine.take(dispatch_id)
        if entry is None:
            return
        self._engines.load_changed(engine)
        entry.dispatches -= 1
        if not entry.dispatches:
            entry.dispatched_at = None
        if entry.meta.engine:
            self._reject_pinned(entry)
        else:
            self._wait(entry, first=entry.is_replay, moved=True)

    # --- stages of split requests ------------------------------------------------------------------------------

    def exported(self, engine: Engine, message: Exported) -> None:
        """Handle the end of a prefill.

        The engine has computed the KV blocks of the prompt and keeps them, or the prefill has failed.
        """
        entry = engine.in_flight.get(message.dispatch_id)
        if entry is not None and entry.stage is _DECODING and KEEPS_BLOCKS in entry.meta.needs:
            self.handoffs.keep(entry, engine, message)
        elif (entry := self.transfers.at_stage(_PREFILLING, engine, message.dispatch_id)) is not None:
            engine.take(message.dispatch_id)
            self._engines.load_changed(engine)
            entry.splits = bool(message.digests)
            if entry.splits:
                self.transfers.keep(entry, engine, message)
            may_go_on = entry.splits and self._verbs.may_dispatch and not self.queue.length
            if may_go_on and (chosen := self._placement.choose(entry)) is not None:
                self._dispatch(entry, *chosen)
            else:
                self._wait(entry, first=entry.is_replay, moved=True)

    def imported(self, engine: Engine, message: Imported) -> None:
        """Dispatch a request to the engine that has imported its blocks, or handle the failed import."""
        if (entry := self.transfers.at_stage(_IMPORTING, engine, message.dispatch_id)) is None:
            return
        if message.has_room:
            self.transfers.imported(entry, engine, message)
        else:
            engine.free_blocks = 0  # until its next heartbeat
        goes_on = message.has_room and self._verbs.may_dispatch and engine.available() and not engine.reserved
        if not (goes_on and message.ok):
            engine.take(message.dispatch_id)
            self._engines.load_changed(engine)
            self._leave_engine(entry)
        if goes_on:
            self._dispatch(entry, engine)
        else:
            self._wait(entry, first=entry.is_replay, moved=True)

    def cancel_transfers(self) -> None:
        """Requeue every request whose KV blocks are being transferred, because a verb is about to change weights or
        caches.
        """
        self.handoffs.clear()
        for entry in self.journal:
            if entry.stage in CHANGED_BY_VERBS:
                self.transfers.drop(entry)
                self._requeue(entry, first=entry.is_replay)

    # --- shares of tenants -------------------------------------------------------------------------------------

    def _balance(self) -> None:
        """Move requests back to the queue until the shares of the tenants are fair (see the module's description)."""
        now = self._context.now
        while now >= self.next_search and self.queue.length and self._verbs.may_dispatch:
            maximum = self.tenants.busy.highest_load
            short = [entry for entry in self.queue.heads() if entry.tenant.load + 2 <= maximum]
            if not short:
                return
            if not any(self._make_room(entry, now) for entry in short):
                self.next_search = now + SEARCH_AGAIN_SECONDS

    def _make_room(self, entry: Entry, now: float) -> bool:
        """Move a running request of another tenant back to the queue, so that the waiting request `entry` can run.

        The moved request is the newest request of a tenant that has at least two more requests at engines than the
        tenant of `entry`. Return whether a request was moved.
        """
        for tenant in self.tenants.busy.from_highest():
            if tenant.load < entry.tenant.load + 2:
                return False
            for other in reversed(tenant.in_flight.values()):
                engine = other.engine
                if engine is not None and self.may_move(other, engine, entry, now):
                    self._counters.moved += 1
                    self._recall(other)
                    other.moved_at = now
                    self._wait(other, moved=True)
                    self._dispatch(entry, engine, self.transfers.stage_at(engine, entry))
                    return True
        return False

    @staticmethod
    def may_move(other: Entry, engine: Engine, entry: Entry, now: float) -> bool:
        """Return whether `other`, which runs at `engine`, may move back to the queue so that `entry` can run there."""
        return (
            engine.available()
            and not engine.reserved
            and other.stage is _DECODING
            and engine.runs(entry)
            and len(engine.in_flight) <= engine.max_requests
            and not other.meta.engine
            and other.meta.priority >= entry.meta.priority
            and (other.moved_at is None or now - other.moved_at >= MOVE_AGAIN_SECONDS)
        )

    # --- engines end -------------------------------------------------------------------------------------------

    def release(self, engine: Engine) -> None:
        """Requeue the requests that `engine` had in flight, ahead of the other requests of their priority.

        Requests that name this engine are rejected.
        """
        self.quarantine.lost(engine)
        self.transfers.engine_lost(engine)
        self.handoffs.engine_lost(engine)
        entries = sorted(engine.in_flight.values(), key=lambda entry: entry.arrived, reverse=True)
        for entry in entries:
            engine.take(entry.dispatch_id)
        self._engines.load_changed(engine)
        for entry in entries:
            if entry.meta.engine:
                self._reject_pinned(entry)
            else:
                self._remember(entry, engine)
                self._replay(entry)
        self._context.needs_pump = True

    def relieve(self, engine: Engine) -> None:
        """Move the requests of an engine whose heartbeats are missing to other engines that have capacity.

        If the silent engine still answers one of these requests, the answer is accepted.
        """
        for entry in sorted(engine.in_flight.values(), key=lambda entry: entry.arrived):
            if not self._verbs.may_dispatch:
                return
            if entry.meta.engine or not any(other.runs(entry) for other in self._engines.with_room()):
                continue
            self._recall(entry)
            engine.relieved.append(entry)
            self._replay(entry)
            self.pump()

    def _replay(self, entry: Entry) -> None:
        self._counters.replays += 1
        self._wait(entry, first=True)

    def _recall(self, entry: Entry) -> None:
        """Remove an open request from the queue or from its engine. The caller must queue or dispatch it again."""
        engine = entry.engine
        if engine is None:
            self.queue.discard(entry)
            return
        self.withdraw(entry)
        engine.take(entry.dispatch_id)
        self._engines.load_changed(engine)
        self._remember(entry, engine)
        self._leave_engine(entry)

    def _remember(self, entry: Entry, engine: Engine) -> None:
        self._former[entry.dispatch_id] = engine.peer, entry
        entry.former.append(entry.dispatch_id)
        if len(entry.former) > REMEMBERED_DISPATCHES:
            del self._former[entry.former.pop(0)]

    def former(self, dispatch_id: int, peer: PeerId) -> Entry | None:
        """Return the open request to which `peer` refers by the id of an earlier dispatch.

        Return None if there is no such request.
        """
        to, entry = self._former.get(dispatch_id, (None, None))
        return entry if to == peer else None

    # --- suspects ----------------------------------------------------------------------------------------------

    def _dispatch_suspect(self) -> None:
        trial = self.quarantine.next_trial()
        if trial is not None:
            entry, engine = trial
            self._dispatch(entry, engine)
            if entry.engine is engine:
                self.quarantine.begin(entry)

    def begun(self, entry: Entry, engine: Engine) -> None:
        """Record that the engine has computed the prompt of a request and sent its first token."""
        engine.computed(entry, entry.uncached)
        self._engines.load_changed(engine)

    def check_trial(self, engine: Engine) -> None:
        """Acquit the suspect that `engine` is reserved for if it has generated enough tokens.

        quarantine.py explains suspects and reserved engines.
        """
        if self.quarantine.advanced(engine):
            self._context.needs_pump = True

    def _requeue(self, entry: Entry, *, first: bool = True) -> None:
        self._recall(entry)
        self._wait(entry, first=first, moved=True)

    # --- ends --------------------------------------------------------------------------------------------------

    def withdraw(self, entry: Entry) -> None:
        """Abort an open request at its engine, if an engine has it."""
        if entry.engine is not None:
            self._context.send(entry.engine.peer, Abort(entry.dispatch_id).to_frames())
            entry.engine.unsettled = True

    def forget(self, entry: Entry, *, error: str = "") -> None:
        """Remove a request that has ended from every table.

        error: why no engine answered the request; empty if an engine answered it.
        """
        self._trace(entry, error=error)
        if self.queue.length:
            self.queue.discard(entry)
        if entry.slot is not None:
            self.deadlines.set(entry, None)
        if entry.former:
            for dispatch_id in entry.former:
                del self._former[dispatch_id]
            entry.former.clear()
        if entry.crashes:
            self.quarantine.forget(entry)
        if entry.stage is not _DECODING:
            self.transfers.drop(entry)
            self.transfers.move(entry, _QUEUED)
        if entry.engine is not None:
            entry.engine.take(entry.dispatch_id)
            self._engines.load_changed(entry.engine)
            self.tenants.returned(entry)
            entry.engine = None
        self.journal.remove(entry)
        self.tenants.closed(entry)
        entry.client.open.pop(entry.uid, None)
        if self.queue.length or self.quarantine.active:
            self._context.needs_pump = True

    def abort(self, entries: Iterable[Entry]) -> None:
        """Remove requests for which no client waits, and abort them at their engines."""
        for entry in list(entries):
            self.withdraw(entry)
            self.forget(entry, error="aborted")
            self._counters.aborted += 1

    def fail(self, entry: Entry, rejection: Rejection) -> None:
        """End an open request with an error."""
        self.withdraw(entry)
        self.forget(entry, error=rejection.message)
        self._answer_error(entry, rejection)

    def _trace(self, entry: Entry, *, error: str) -> None:
        if self._context.ended is not None and entry.meta.traceparent:
            engine = entry.engine.name if entry.engine is not None else ""
            self._context.ended.append(Ended(entry, engine, self._context.now, error))

    def _answer_error(self, entry: Entry, rejection: Rejection) -> None:
        code, message, retry_after, field = rejection
        self._counters.error_answers += 1
        if logger.isEnabledFor(logging.DEBUG):
            extra = of_request(entry.meta.request_id)
            logger.debug("request %s rejected: %s %s", entry.uid.hex(), code.name, message, extra=extra)
        error = Error(code=code, message=message, uid=entry.uid, retry_after_seconds=retry_after, field=field)
        self._context.answer(entry.client, error.to_frames(), uid=entry.uid)

    def _expire(self, entry: Entry) -> None:
        waited = self._context.now - entry.arrived
        where = "to be finished" if entry.engine is not None else f"for {rejections.awaited_engine(entry)}"
        message = f"the request waited {waited:.1f} s {where}: deadline exceeded"
        self.fail(entry, Rejection(ErrorCode.DEADLINE, message))
