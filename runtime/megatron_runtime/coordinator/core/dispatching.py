"""The life of a request at the coordinator: admitted, queued, dispatched, dispatched anew, ended.

An engine gets at most as many requests as it runs at once; the rest wait here, so that an engine that joins finds work
and one that leaves has little to hand over. While requests of other tenants wait, a tenant keeps no more than its share
of the engines: requests beyond it are taken back and go on later.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_runtime.coordinator.core import plain
from megatron_runtime.coordinator.core.clients import ClientRegistry
from megatron_runtime.coordinator.core.clock import Clock
from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.coordinator.core.engines import EngineRegistry
from megatron_runtime.coordinator.core.journal import Journal
from megatron_runtime.coordinator.core.quarantine import Quarantine
from megatron_runtime.coordinator.core.records import Client, Engine, Entry
from megatron_runtime.coordinator.core.routing import Router
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.core.shares import Shares
from megatron_runtime.coordinator.core.tenants import TenantBook
from megatron_runtime.coordinator.core.waiting import Deadlines, WaitingQueue
from megatron_runtime.coordinator.transport import PeerId, Sent
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    Abort,
    Dispatch,
    Error,
    Frames,
    MalformedMessageError,
    RequestMeta,
    Submit,
    dispatch_frames,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
NO_ROUTE = 0
"""Route of partials that the coordinator keeps to itself; those of clients begin at 1."""
REMEMBERED_DISPATCHES = 4
"""Former dispatches of one request whose final is still accepted."""

_FULL, _GONE = Sent.FULL, Sent.GONE  # a name is found in a tenth of the time of a member of an Enum (Python 3.11)


@dataclass(frozen=True, slots=True)
class FormerDispatch:
    """A dispatch to an engine that has been removed since. `generated_bytes`: tokens that it was given."""

    peer: PeerId
    entry: Entry
    generated_bytes: int


class Dispatcher:
    """Owns the queue, the journal and the quarantine.

    may_dispatch: whether the coordinator's state lets requests go to engines.
    on_lost:      called with an engine that turned out to be unreachable.
    on_change:    called after requests were given out or ended.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        engines: EngineRegistry,
        clients: ClientRegistry,
        router: Router,
        counters: Counters,
        send: Callable[[PeerId, Frames], Sent],
        clock: Clock,
        may_dispatch: Callable[[], bool],
        on_lost: Callable[[Engine, str], None],
        on_change: Callable[[], None],
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self.journal = Journal(limit_bytes=settings.journal_bytes)
        self.queue = WaitingQueue()
        self.quarantine = Quarantine(
            engines=engines, counters=counters, clock=clock, wall_time=wall_time, surroundings=self
        )
        self.deadlines = Deadlines(clock, self._expire)
        self._settings = settings
        self._engines = engines
        self._clients = clients
        self._router = router
        self._counters = counters
        self._send = send
        self._may_dispatch = may_dispatch
        self._on_lost = on_lost
        self._on_change = on_change
        self._clock = clock
        self.tenants = TenantBook(is_shared=router.deterministic)
        self._shares = Shares(
            self.tenants,
            self.queue,
            clock=clock,
            may_dispatch=may_dispatch,
            dispatch=self._dispatch,
            take_back=self._take_back,
            refuse=self._refuse_full,
        )
        self._former: dict[int, FormerDispatch] = {}
        # Never used twice, not even by the coordinator after this one: an engine may still answer the one before.
        self.next_dispatch_id = (random.SystemRandom().getrandbits(28) << 24) + 1

    # --- admission ---------------------------------------------------------------------------------------------

    def submit(self, client: Client, message: Submit, *, plain_id: int | None = None) -> None:
        """Admit a request, or refuse it.

        A uid that is open already is the same request on another connection. One that was answered on this very
        connection was sent before the answer was read.
        """
        uid, meta, prompt, generated, params = message
        if uid in client.answered:
            return
        known = self.journal.get(uid)
        if known is not None:
            self._take_over(known, client, tokens_held=len(generated) // 4)
            return
        now = self._clock.time()
        deadline = now + meta.deadline_ms / 1000 if meta.deadline_ms is not None else None
        tenant = self.tenants.of(meta.tenant or client.route)
        entry = Entry(
            uid,
            client,
            tenant,
            meta,
            prompt,
            params,
            bytearray(generated),
            now,
            deadline,
            client.model,
            plain_id=plain_id,
        )
        if generated:
            entry.forwarded = entry.held = entry.tokens_so_far
        if self.queue.length >= self._settings.max_queued and not self._shares.drop_for(entry, by_bytes=False):
            self._refuse_full(entry, f"{self.queue.length} requests wait for an engine already")
            return
        while not self.journal.add(entry):
            if not self._shares.drop_for(entry, by_bytes=True):
                used = f"open requests take {self.journal.bytes} bytes of {self._settings.journal_bytes}"
                self._refuse_full(entry, used)
                return
        self.tenants.opened(entry)
        client.open[uid] = entry
        if meta.engine:
            self._dispatch_pinned(entry)
            return
        if not self.queue.length and self._may_dispatch() and (candidates := self._candidates()):
            self._offer(entry, candidates)  # who need not wait does not pass through the queue
            if entry.engine is not None:
                return
        if self.journal.get(uid) is entry:
            self._enqueue(entry)
            self.pump()
        if entry.engine is None and self.journal.get(uid) is entry:
            self.limit_wait(entry)

    def _refuse_full(self, entry: Entry, reason: str) -> None:
        if self.journal.get(entry.uid) is entry:
            self.forget(entry)
        self.answer_error(entry, ErrorCode.QUEUE_FULL, f"{reason}: try again", retry_after=RETRY_AFTER_SECONDS)

    def _take_over(self, entry: Entry, client: Client, *, tokens_held: int) -> None:
        if entry.client is not client:
            entry.client.open.pop(entry.uid, None)
            entry.client = client
            client.open[entry.uid] = entry
        entry.forwarded = entry.held = min(tokens_held, entry.tokens_so_far)
        if entry.meta.streaming and entry.forwarded < entry.tokens_so_far:
            client.behind = True

    def _dispatch_pinned(self, entry: Entry) -> None:
        """To the one engine that may answer, though it be draining or full; now or not at all, and never elsewhere."""
        engine = self._engines.named(entry.meta.engine)
        if engine is not None and engine.serving and not engine.reserved and self._may_dispatch():
            if engine.runs(entry.model):
                self._dispatch(entry, [engine])
            else:
                self.refuse_model(entry, [engine])
        if entry.engine is None and self.journal.get(entry.uid) is entry:
            self._refuse_pinned(entry)
        self._on_change()

    def _refuse_pinned(self, entry: Entry) -> None:
        self._leave_engine(entry)
        engine = self._engines.named(entry.meta.engine)
        why = "is reserved for a suspect request" if engine is not None and engine.reserved else "does not serve"
        self.fail(entry, ErrorCode.ENGINES_MISSING, f"engine {entry.meta.engine!r} {why}; only it may answer")

    # --- queue and dispatch ------------------------------------------------------------------------------------

    def _enqueue(self, entry: Entry, *, first: bool = False, moved: bool = False) -> None:
        self._leave_engine(entry)
        self.queue.add(entry, first=first, moved=moved)

    def _leave_engine(self, entry: Entry) -> None:
        """The request has no engine any more. The caller takes it out of the engine's own list."""
        if entry.engine is not None:
            self.tenants.returned(entry)
            entry.engine, entry.dispatch_id = None, 0

    @property
    def waiting(self) -> int:
        """Requests without an engine."""
        return self.queue.length + len(self.quarantine)

    def limit_wait(self, entry: Entry) -> None:
        until = self._clock.time() + self._settings.max_wait_seconds
        self.deadlines.set(entry, min(until, entry.deadline) if entry.deadline is not None else until)

    def pump(self) -> None:
        """Give engines what they have room for. Suspects come before all others."""
        if self.quarantine.active and self._may_dispatch():
            self.quarantine.run_next()
        while self.queue.length and self._may_dispatch():
            candidates = self._candidates()
            if not candidates or not any(self._offer(entry, candidates) for entry in self.queue.heads()):
                break
        if self.queue.length and len(self.tenants) > 1:
            self._shares.level()
        self._on_change()

    def _take_back(self, entry: Entry, engine: Engine) -> None:
        """Take a request from its engine, which stays, and let it wait before the others of its tenant."""
        del engine.in_flight[entry.dispatch_id]
        self.withdraw(entry)
        self._counters.moved += 1
        self._remember(entry, engine)
        entry.moved_at = self._clock.time()
        self._enqueue(entry, moved=True)
        self.limit_wait(entry)

    def _candidates(self) -> list[Engine]:
        return self._engines.available() if self._router.deterministic else self._engines.with_room()

    def _offer(self, entry: Entry, candidates: list[Engine]) -> bool:
        """Dispatch, or refuse, the first in a line. False when it has to wait for an engine of its model."""
        fitting = [engine for engine in candidates if engine.runs(entry.model)] if entry.model else candidates
        if fitting:
            self._dispatch(entry, fitting)
        elif any(engine.runs(entry.model) for engine in self._engines.serving()):
            return False
        else:
            self.refuse_model(entry, self._engines.serving())
        return True

    def refuse_model(self, entry: Entry, engines: list[Engine]) -> None:
        models = ", ".join(sorted({engine.model for engine in engines}))
        what = "it was begun by" if entry.generated else "it was made for"
        message = f"the request's model changed: {what} {entry.model}, the engines run {models}"
        self.fail(entry, ErrorCode.MODEL_CHANGED, f"{message}: submit it anew")

    def _dispatch(self, entry: Entry, candidates: list[Engine]) -> None:
        if entry.hashes is None and len(candidates) > 1:
            entry.hashes = self._hashes_of(entry, candidates)
        engine = self._router.select(candidates, entry.hashes or ())
        dispatch_id = self.next_dispatch_id
        self.next_dispatch_id += 1
        meta = entry.meta if entry.deadline is None else self._meta_now(entry, entry.deadline)
        route = entry.client.route
        if engine.reserved and not meta.streaming:
            # Partials that go to no client say how far it has come.
            entry.progress = 0
            meta, route = meta._replace(streaming=True), NO_ROUTE
        bodies = entry.prompt, bytes(entry.generated), entry.params
        try:
            if engine.plain:
                frames = plain.submit_frames(Dispatch(dispatch_id, entry.uid, entry.client.route, meta, *bodies))
            else:
                frames = dispatch_frames(dispatch_id, entry.uid, route, meta, *bodies)
        except MalformedMessageError as error:
            self.fail(entry, ErrorCode.INVALID_REQUEST, f"sampling parameters: {error}")
            return
        sent = self._send(engine.peer, frames)
        if sent is _GONE:
            self._on_lost(engine, "its connection is gone")
        elif sent is _FULL:
            engine.full = True
        else:
            if self.queue.length:
                self.queue.discard(entry)
            entry.engine, entry.dispatch_id = engine, dispatch_id
            self.tenants.dispatched(entry)
            entry.dispatched_bytes = len(entry.generated)
            engine.in_flight[dispatch_id] = entry
            if entry.hashes is None:  # where there was no choice, the request need not wait for them
                entry.hashes = self._hashes_of(entry, candidates)
            self._router.assigned(engine, entry.hashes, request=entry.uid)
            if entry.deadline is not None or entry.slot is not None:
                self.deadlines.set(entry, entry.deadline)

    def _hashes_of(self, entry: Entry, candidates: list[Engine]) -> list[int]:
        return self._router.hashes_of(entry.prompt, candidates, salt=entry.meta.cache_salt)

    def _meta_now(self, entry: Entry, deadline: float) -> RequestMeta:
        left = max(0, int((deadline - self._clock.time()) * 1000))
        return entry.meta._replace(deadline_ms=left)

    def release(self, engine: Engine) -> None:
        """Queue again what `engine` had in flight, before everything that came later."""
        self.quarantine.lost(engine)
        entries = sorted(engine.in_flight.values(), key=lambda entry: entry.arrived, reverse=True)
        engine.in_flight.clear()
        for entry in entries:
            if entry.meta.engine:
                self._refuse_pinned(entry)
                continue
            self._counters.replays += 1
            self._remember(entry, engine)
            self._put_back(entry)

    def _put_back(self, entry: Entry) -> None:
        """Queue a request that had an engine again, or hold it back as a suspect."""
        self._leave_engine(entry)
        if entry.crashes and self.quarantine.suspects(entry):
            self.quarantine.add(entry)
        else:
            self.wait_first(entry)

    def wait_first(self, entry: Entry) -> None:
        """Queue a request that has no engine before all others of its priority and model."""
        self._enqueue(entry, first=True)
        self.limit_wait(entry)

    def pull_back(self, entry: Entry) -> None:
        """Take an open request from the queue, or from its engine; the caller puts it somewhere else."""
        engine = entry.engine
        if engine is None:
            self.queue.discard(entry)
            return
        self.withdraw(entry)
        del engine.in_flight[entry.dispatch_id]
        self._remember(entry, engine)
        self._leave_engine(entry)

    def relieve(self, engine: Engine) -> None:
        """Give what a silent engine has to others, as far as they have room. What it answers later is its own."""
        for entry in sorted(engine.in_flight.values(), key=lambda entry: entry.arrived):
            if not self._may_dispatch():
                return
            if entry.meta.engine or not any(other.runs(entry.model) for other in self._engines.with_room()):
                continue
            del engine.in_flight[entry.dispatch_id]
            self._send(engine.peer, Abort(entry.dispatch_id).to_frames())
            engine.unsettled = not engine.plain
            engine.relieved.append(entry)
            self._counters.replays += 1
            self._remember(entry, engine)
            self._put_back(entry)
            self.pump()

    def _remember(self, entry: Entry, engine: Engine) -> None:
        self._former[entry.dispatch_id] = FormerDispatch(engine.peer, entry, entry.dispatched_bytes)
        entry.former.append(entry.dispatch_id)
        if len(entry.former) > REMEMBERED_DISPATCHES:
            del self._former[entry.former.pop(0)]

    # --- ends --------------------------------------------------------------------------------------------------

    def current(self, dispatch_id: int, uid: bytes, engine: Engine) -> Entry | None:
        """The open request that `engine` answers, if this dispatch is its current one."""
        entry = engine.in_flight.get(dispatch_id)
        return entry if entry is not None and entry.uid == uid else None

    def former(self, dispatch_id: int, peer: PeerId) -> FormerDispatch | None:
        """The dispatch of an open request to an engine that was removed, answered by that engine after all."""
        former = self._former.get(dispatch_id)
        return former if former is not None and former.peer == peer else None

    def withdraw(self, entry: Entry) -> None:
        """Take an open request from its engine, if it has one."""
        if entry.engine is not None:
            self._send(entry.engine.peer, Abort(entry.dispatch_id).to_frames())
            entry.engine.unsettled = not entry.engine.plain

    def forget(self, entry: Entry) -> None:
        """The request is over, whatever the reason. Does not pump: the caller may have more to end."""
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
        if entry.engine is not None:
            entry.engine.in_flight.pop(entry.dispatch_id, None)
            self.tenants.returned(entry)
            entry.engine = None
        self.journal.remove(entry)
        self.tenants.closed(entry)
        entry.client.open.pop(entry.uid, None)
        if entry.plain_id is not None:
            entry.client.plain_ids.pop(entry.plain_id, None)

    def abort(self, entry: Entry) -> None:
        """Forget a request nobody waits for, here and at its engine."""
        self.withdraw(entry)
        self.forget(entry)
        self._counters.aborted += 1

    def abort_all(self, client: Client) -> None:
        for entry in list(client.open.values()):
            self.abort(entry)
        self.pump()

    def fail(self, entry: Entry, code: ErrorCode, message: str, *, retry_after: float | None = None) -> None:
        """End an open request with an error."""
        self.withdraw(entry)
        self.forget(entry)
        self.answer_error(entry, code, message, retry_after=retry_after)

    def fail_all(self, entries: Iterable[Entry], code: ErrorCode, message: str) -> None:
        for entry in list(entries):
            self.fail(entry, code, message, retry_after=RETRY_AFTER_SECONDS)

    def answer_error(self, entry: Entry, code: ErrorCode, message: str, *, retry_after: float | None = None) -> None:
        self._counters.refused += 1
        if entry.client.plain:
            frames = plain.failed_reply(entry.plain_id or 0, code, message)
        else:
            frames = Error(code=code, message=message, uid=entry.uid, retry_after_seconds=retry_after).to_frames()
        self._clients.send(entry.client, frames, answers=entry.uid)

    def _expire(self, entry: Entry) -> None:
        waited = self._clock.time() - entry.arrived
        where = "for an engine" if entry.engine is None else "to be finished"
        self.fail(entry, ErrorCode.DEADLINE, f"the request waited {waited:.1f} s {where}: its time is up")
        self.pump()

    # --- what the quarantine asks for --------------------------------------------------------------------------

    def dispatch_to(self, entry: Entry, engine: Engine) -> None:
        self._dispatch(entry, [engine])

    def fail_poison(self, entry: Entry, message: str) -> None:
        self.fail(entry, ErrorCode.ENGINE_FAILED, message)

    def is_open(self, entry: Entry) -> bool:
        return self.journal.get(entry.uid) is entry

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        self.journal.check_integrity()
        self.quarantine.check_integrity()
        self.queue.check_integrity()
        self.tenants.check_integrity(list(self.journal))
        waiting = sum(entry.engine is None for entry in self.journal)
        assert self.waiting == waiting, "a request without an engine does not wait for one"
        for former in self._former.values():
            assert self.journal.get(former.entry.uid) is former.entry, "a former dispatch outlived its request"
