"""Clients, engines, open requests and tenants, and how they refer to each other.

Plain data. The registries (context.py) and tables (open_requests.py) keep the references consistent: an open request
is known to its client, to its tenant and, once dispatched, to its engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from megatron_runtime.coordinator.environment import PeerId
from megatron_runtime.process.metrics import counter
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.extras import Extras
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import (
    AnswerFormats,
    ControlCommit,
    EngineStatus,
    Heartbeat,
    Hello,
    Outgoing,
    RequestMeta,
    size_of,
)
from megatron_runtime.requests.capabilities import (
    FIRST_PARAMETERS,
    GENERATE,
    GENERATION,
    asks_for_pooling,
    is_parameter,
)

_RUNNING = EngineState.RUNNING  # a global is found in a tenth of the time of a member of an Enum (Python 3.11)
UNLIMITED_REQUESTS = 1 << 20
"""Capacity of an engine that announced none: it has a queue of its own."""
_NO_HEARTBEAT = Heartbeat(incarnation=0)
ENTRY_OVERHEAD_BYTES = 1024
"""Estimate of what an open request costs beside its bodies."""
TOKEN_BYTES = 4

TenantKey: TypeAlias = str | int
"""The id that the request names, or the route number of the client that sent it."""


@dataclass(slots=True, eq=False, repr=False)
class Client:
    """One registration of a client or an administrator.

    key:       public key of its connection; empty without keys.
    model:     model that its requests are made for; empty: any.
    formats:   formats of answers that it reads; None: it is no OpenAI server, or does not report them.
    route:     number by which engines group partials for it.
    open:      its open requests by uid.
    answered:  uids whose final answer was sent on the present connection; the last few thousand.
    outbox:    messages that the connection did not accept yet, in order, each with the uid that it answers and its
               size in bytes. While it is not empty, no partials are sent: the tokens stay in the journal and are sent
               as one partial later.
    outbox_bytes: the sum of these sizes.
    behind:    some of its tokens were not sent to it.
    stuck_since: since when its connection is full; None while it accepts messages. Until the shell reports room, it is
               sent nothing: what is owed to it is in the journal and in the outbox.
    """

    name: str
    peer: PeerId
    role: Role
    incarnation: int
    route: int
    heard: float
    key: bytes = b""
    model: str = ""
    formats: AnswerFormats | None = None
    open: dict[bytes, Entry] = field(default_factory=dict)
    outbox: deque[tuple[bytes | None, Outgoing, int]] = field(default_factory=deque)
    outbox_bytes: int = 0
    answered: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    behind: bool = False
    stuck_since: float | None = None
    reachable: bool = True

    @property
    def blocked(self) -> bool:
        return bool(self.outbox) or self.behind or not self.reachable

    def keep(self, uid: bytes | None, message: Outgoing, *, first: bool = False) -> None:
        """Add a message to the outbox. first: before all others."""
        add = self.outbox.appendleft if first else self.outbox.append
        size = size_of(message)
        add((uid, message, size))
        self.outbox_bytes += size

    def take_kept(self) -> tuple[bytes | None, Outgoing, int]:
        """Remove the first message from the outbox and return it, with its size."""
        uid, message, size = self.outbox.popleft()
        self.outbox_bytes -= size
        return uid, message, size


class CrashEvidence(Enum):
    """Whether the way in which an engine ended is evidence against the requests that it ran."""

    NONE = auto()
    """It left, was removed, or sent no heartbeats."""
    CUT = auto()
    """Its side ended the connection without a message: the process ended, or the network failed."""
    CERTAIN = auto()
    """It reported a failure, or a new process uses its name."""


@dataclass(slots=True, eq=False)
class Crash:
    """One crash of an engine, shared by the requests that were in flight.

    at:     time of the event.
    counts: False once the crash is explained: the engine had not ended, or the request that ended it was found.
    """

    engine: str
    at: float
    counts: bool = True


LIMITS = ("max_requests", "max_sequence_length", "max_tokens", "kv_cache_bytes")
"""Fields of HELLO that EngineStatus repeats."""


@dataclass(slots=True, eq=False, repr=False)
class Engine:
    """One registration of one engine.

    index:     order of registration; breaks ties in routing.
    key:       public key of its connection; empty without keys.
    model:     model that it serves; empty: not announced.
    source:    weights named by an UPDATE_WEIGHTS, as far as the engine reported them.
    adapters:  names of the adapters that it reported as loaded.
    adapter_errors: why others are not loaded, by name.
    knows_adapters: its release has adapters.
    draining:  gets no new work until it registers again.
    digest:    digest of its weights; empty: not reported.
    tokenizes: it accepts text prompts.
    backend:   name of its backend; empty: not announced.
    lacks:     features that requests may need and that it announced not to have.
    parameters: sampling parameters that it knows.
    task:      what its pooling model computes in place of tokens; empty: it generates tokens.
    started_ms: when its process started; 0: unknown.
    limits:    those of LIMITS that it announced, for STATUS.
    full:      its connection accepted no more, and the shell has not reported room since.
    suspect:   no heartbeat came for a while.
    welcomed:  when the state to be in was last sent to it.
    owed:      the last commit sent to it, until a later heartbeat shows its state.
    entered_during: operation under way when this engine joined; it is sent the outcome.
    in_flight: requests by dispatch id; changed by give() and take().
    queued:    tokens that it has to compute before its requests have their next token; those of Entry.uncached.
    waiting:   its requests that have such tokens.
    held:      tokens of its requests, when they were dispatched.
    step_tokens: the most tokens that it computes in a step; 0: it did not announce them.
    prefill_cost, held_cost: seconds per token of `queued` and of `held`; 0: requests are counted.
    load:      its place among the engines, which EnginesByLoad sets.
    heartbeat: the last one.
    relieved:  requests that were taken from it because it was suspect, until its next heartbeat.
    reserved:  it runs one suspect request alone, or empties for one: it gets no other work.
    unsettled: it was sent an abort, and has not reported since that it runs nothing.
    """

    name: str
    peer: PeerId
    incarnation: int
    index: int
    heard: float
    key: bytes = b""
    serving: bool = False
    state: EngineState = EngineState.PAUSED
    epoch: int = 0
    ranks: int = 1
    revision: str = ""
    model: str = ""
    source: str | None = None
    adapters: frozenset[str] = frozenset()
    adapter_errors: Mapping[str, str] = field(default_factory=dict)
    knows_adapters: bool = False
    digest: str = ""
    tokenizes: bool = False
    backend: str = ""
    lacks: frozenset[str] = frozenset()
    parameters: frozenset[str] = FIRST_PARAMETERS
    task: str = ""
    started_ms: int = 0
    max_requests: int = UNLIMITED_REQUESTS
    limits: Mapping[str, int] = field(default_factory=dict)
    block_size_tokens: int = 0
    busy_until: float = 0.0
    draining: bool = False
    full: bool = False
    suspect: bool = False
    welcomed: float = 0.0
    owed: ControlCommit | None = None
    entered_during: str | None = None
    in_flight: dict[int, Entry] = field(default_factory=dict)
    queued: int = 0
    waiting: int = 0
    held: int = 0
    step_tokens: int = 0
    prefill_cost: float = 0.0
    held_cost: float = 0.0
    load: float = 0.0
    heartbeat: Heartbeat = _NO_HEARTBEAT
    relieved: list[Entry] = field(default_factory=list)
    reserved: bool = False
    unsettled: bool = False

    @property
    def does(self) -> str:
        """The name of its task for clients."""
        return self.task or GENERATE

    def available(self) -> bool:
        return self.serving and self.state is EngineState.RUNNING and not (self.draining or self.suspect or self.full)

    def has_room(self) -> bool:
        """Whether it takes one more request now."""
        # available() spelled out: this runs for every request.
        return (
            self.serving
            and self.state is _RUNNING
            and not (self.draining or self.suspect or self.full or self.reserved)
            and len(self.in_flight) < self.max_requests
        )

    def cost(self) -> float:
        """Return the seconds of work that it has; without rates, the number of its requests."""
        if not self.prefill_cost:
            return len(self.in_flight)
        return self.queued * self.prefill_cost + self.held * self.held_cost

    def cost_of(self, tokens: int) -> float:
        """Return the cost of a request with `tokens` uncached tokens, as of EngineRouter."""
        if not self.prefill_cost:
            return len(self.in_flight)
        queued = self.queued
        if queued > tokens:
            queued = min(queued, self.waiting * tokens + self.step_tokens)
        used = len(self.in_flight) / self.max_requests
        return (queued + tokens + tokens * used) * self.prefill_cost + self.held * self.held_cost

    def give(self, entry: Entry, cached: int) -> None:
        """Add a request under its dispatch id, of whose tokens it has cached some."""
        self.in_flight[entry.dispatch_id] = entry
        size = entry.size = entry.num_tokens
        uncached = entry.uncached = max(0, size - cached)
        if uncached:
            self.queued += uncached
            self.waiting += 1
        self.held += size

    def take(self, dispatch_id: int) -> Entry | None:
        """Remove a request."""
        entry = self.in_flight.pop(dispatch_id, None)
        if entry is not None:
            self.held -= entry.size
            self.computed(entry, entry.uncached)
        return entry

    def computed(self, entry: Entry, tokens: int) -> None:
        """It computed `tokens` of those of a request."""
        if tokens:
            entry.uncached -= tokens
            self.queued -= tokens
            self.waiting -= not entry.uncached

    def report(self, heartbeat: Heartbeat) -> bool:
        """Take over what it reports of its queue. Return whether `queued` changed.

        The tokens that it has computed are counted for its oldest requests. Requests that it had not received when it
        sent the heartbeat stay as they are.
        """
        self.heartbeat, before = heartbeat, self.queued
        if heartbeat.queued_tokens is None or not before:
            return False
        last = heartbeat.last_dispatch or 0
        received = [entry for number, entry in self.in_flight.items() if number <= last and entry.uncached]
        done = sum(entry.uncached for entry in received) - heartbeat.queued_tokens
        for entry in received:
            if done <= 0:
                break
            tokens = min(done, entry.uncached)
            self.computed(entry, tokens)
            done -= tokens
        return self.queued != before

    def has_model(self, model: str) -> bool:
        """Whether it may answer requests for `model`; if one of the two is unknown, it may."""
        return not model or not self.model or model == self.model

    def runs(self, entry: Entry) -> bool:
        """Whether it may answer a request: it has the model, the adapter and every feature that the request needs."""
        return (
            self.has_model(entry.model)
            and (not entry.meta.adapter or entry.meta.adapter in self.adapters)
            and (not (entry.meta.needs or self.task) or not self.lacking(entry.meta.needs))
        )

    def lacking(self, needs: str) -> str:
        """Return the first of the `needs` of a request that it lacks; empty: it has all."""
        if self.task and not asks_for_pooling(needs):
            return GENERATION
        return next((name for name in needs.split() if self._lacks(name)), "")

    def _lacks(self, need: str) -> bool:
        return need not in self.parameters if is_parameter(need) else need in self.lacks

    def forget_adapters(self) -> None:
        self.adapters, self.adapter_errors = frozenset(), {}

    def learn(self, hello: Hello) -> None:
        """Take over what the engine announces."""
        self.serving = hello.serving
        self.epoch = hello.epoch
        self.ranks = max(1, hello.ranks)
        self.revision = hello.revision
        self.model = hello.model
        self.source = hello.source
        self.knows_adapters = hello.adapters is not None
        self.adapter_errors = hello.adapter_errors or {}
        names = {adapter.name for adapter in hello.adapters.adapters} if hello.adapters is not None else set()
        self.adapters = frozenset(names - self.adapter_errors.keys())
        self.max_requests = hello.max_requests if hello.max_requests > 0 else UNLIMITED_REQUESTS
        limits = {name: getattr(hello, name) for name in LIMITS}
        self.limits = {name: value for name, value in limits.items() if value}
        self.step_tokens = self.limits.get("max_tokens", 0)
        self.block_size_tokens = max(0, hello.block_size_tokens)
        self.tokenizes = hello.tokenizes
        self.backend = hello.backend or ""
        self.lacks = frozenset(hello.lacks or ())
        self.parameters = FIRST_PARAMETERS if hello.parameters is None else frozenset(hello.parameters)
        self.task = hello.task or ""
        self.started_ms = hello.started_ms or 0
        if hello.state is not None:
            self.state = hello.state

    def describe(self, now: float) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            state=self.state,
            serving=self.serving,
            epoch=self.epoch,
            ranks=self.ranks,
            revision=self.revision,
            in_flight=len(self.in_flight),
            silent_seconds=round(max(0.0, now - self.heard), 3),
            suspect=self.suspect and now > self.busy_until,
            draining=self.draining,
            digest=self.digest,
            source=self.source or "",
            **self.limits,
        )


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Entry:
    """One open request.

    model:      model that it was made for, or that its first token came from; only that may answer. Empty: any.
    adapter:    adapter of its first dispatch; only that may continue it. None: the base model, or not dispatched yet.
    generated:  tokens so far, little-endian int32. Tokens sent to the client never change.
    details:    log-probs that came with them, as `(offset of the first token, the message's extras)`; unparsed.
    num_indexed: the number of `details`, from the first on, whose extras are Extras and no longer bytes.
    forwarded:  number of the tokens that the client was sent.
    held:       number of them that the client confirmed to have.
    dispatch_id, engine: the current dispatch; 0 and None while it waits.
    former:     dispatch ids of engines that are gone, whose late final is still accepted.
    slot:       its slot in Deadlines; None while its time is not limited.
    crashes:    crashes of engines while it was in flight there; empty again once it is acquitted.
    crash_position: generated tokens at the last of them; None if unknown.
    progress:   tokens that a reserved engine reports of a request that does not stream.
    tenant:     the tenant whose share of the engines it counts against.
    admitted_bytes: its cost in the journal when it arrived.
    is_replay:  it waits because its engine was lost, and is dispatched before others.
    moved_at:   when it was last taken from an engine to make room for another tenant; None: never.
    dispatched_at, dispatches: its first dispatch that an engine's connection accepted, None before, and their number.
    media:      its images, audio and video, with all data. Requests of one client share them; see MediaStore.
    media_route: route of the client that sent them.
    uncached:   tokens that its engine has to compute before its next token, as estimated; 0 after that token.
    size:       tokens of prompt and answer when it was dispatched. A text counts a token for four bytes.
    """

    uid: bytes
    client: Client
    tenant: Tenant
    meta: RequestMeta
    prompt: bytes
    params: bytes
    generated: bytearray
    arrived: float
    deadline: float | None
    model: str
    adapter: Adapter | None = None
    details: list[tuple[int, bytes | Extras]] = field(default_factory=list)
    details_bytes: int = 0
    forwarded: int = 0
    held: int = 0
    dispatch_id: int = 0
    engine: Engine | None = None
    former: list[int] = field(default_factory=list)
    hashes: Mapping[int, Sequence[int]] | None = None
    slot: int | None = None
    crashes: Sequence[Crash] = ()
    crash_position: int | None = None
    progress: int = 0
    admitted_bytes: int = 0
    is_replay: bool = False
    moved_at: float | None = None
    dispatched_at: float | None = None
    dispatches: int = 0
    num_indexed: int = 0
    media: Media | None = None
    media_route: int = 0
    uncached: int = 0
    size: int = 0

    @property
    def tokens_so_far(self) -> int:
        return len(self.generated) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer. A text counts a token for four bytes."""
        return (len(self.prompt) + len(self.generated)) // TOKEN_BYTES

    @property
    def is_open(self) -> bool:
        return self.client.open.get(self.uid) is self

    def cost(self) -> int:
        bodies = len(self.prompt) + len(self.params) + len(self.generated)
        if self.media is not None:
            bodies += len(self.media.template)  # MediaStore counts the data
        return bodies + self.details_bytes + ENTRY_OVERHEAD_BYTES


@dataclass(slots=True, eq=False, repr=False)
class Tenant:
    """A tenant with open requests.

    order:     a counter, set each time the number of its requests at engines changes; the lower goes first.
    in_flight: its requests at engines by dispatch id, the most recent last.
    lanes:     its waiting requests that are no replays, in order, for each band of the queue.
    num_open, open_bytes: its open requests, and their cost in the journal when they were admitted.
    """

    key: TenantKey
    order: int
    in_flight: dict[int, Entry] = field(default_factory=dict)
    lanes: dict[Band, OrderedDict[bytes, Entry]] = field(default_factory=dict)
    num_open: int = 0
    open_bytes: int = 0

    @property
    def load(self) -> int:
        return len(self.in_flight)

    @property
    def num_waiting(self) -> int:
        return self.num_open - len(self.in_flight)

    def last_waiting(self) -> Entry | None:
        """The request that is last in line, of those that wait and have no tokens yet."""
        for _, lane in sorted(self.lanes.items(), key=lambda item: item[0].priority, reverse=True):
            last = next(reversed(lane.values()))
            if not last.generated:
                return last
        return None


class Ended(NamedTuple):
    """A traced request that ended.

    engine: name of its last engine; empty: it had none.
    error:  why it ended without an answer; empty: an engine answered it.
    """

    entry: Entry
    engine: str
    at: float
    error: str

    @property
    def queue_seconds(self) -> float:
        """From its arrival to its first dispatch, or to its end without one."""
        dispatched_at = self.entry.dispatched_at
        return (self.at if dispatched_at is None else dispatched_at) - self.entry.arrived


class Levels:
    """Tenants by load; those of one load in the order in which they reached it or began to wait."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[Tenant, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)

    def add(self, tenant: Tenant, load: int) -> None:
        self._levels.setdefault(load, OrderedDict())[tenant] = None

    def discard(self, tenant: Tenant, load: int) -> None:
        level = self._levels.get(load)
        if level is not None and tenant in level:
            del level[tenant]
            if not level:
                del self._levels[load]

    def lowest(self) -> Tenant:
        return next(iter(self._levels[min(self._levels)]))

    @property
    def highest_load(self) -> int:
        return max(self._levels, default=0)

    def from_highest(self) -> Iterator[Tenant]:
        for load in sorted(self._levels, reverse=True):
            yield from self._levels[load]


@dataclass(slots=True, eq=False, repr=False)
class Band:
    """Waiting requests of one priority, model, adapter and set of needed features.

    replays: requests of lost engines, in order; they are dispatched before all others.
    tenants: tenants whose other requests wait; their lanes are in Tenant.lanes.
    """

    priority: int
    model: str
    adapter: str
    needs: str
    replays: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    tenants: Levels = field(default_factory=Levels)


LOSSES = "Replays and engines lost"
"""Title of a panel of the dashboard."""


@dataclass(slots=True)
class Counters:
    """Event counts for metrics. Plain integers: they cost little on the request path."""

    rejected: Counter[str] = field(default_factory=Counter)
    """Frames dropped, by reason: malformed, wrong_role, unknown_peer, unexpected."""
    replays: int = counter("replays", "Requests dispatched again because their engine was lost.", panel=LOSSES)
    moved: int = counter("moved_requests", "Requests taken from an engine to make room for another tenant.")
    stale: int = counter("stale_answers", "Answers of engines that were not the next of their request.")
    late: int = counter("late_answers", "Final answers of engines that had been removed, delivered.")
    evicted_blocks: int = counter("evicted_blocks", "Prefix blocks that engines reported as evicted.")
    completed: int = counter("completed_requests", "Requests that got their final answer from an engine.")
    error_answers: int = counter("refused_requests", "Requests that the coordinator answered with an error.")
    aborted: int = counter("aborted_requests", "Requests aborted by their client, or because it left.")
    over_limit: int = counter("over_limit_requests", "Requests rejected because of the limits of their API key.")
    partials: int = counter("partials", "Partial answers received from engines.")
    engines_lost: int = counter(
        "engines_lost", "Engines removed because they left, failed or sent no heartbeat.", panel=LOSSES
    )
    engine_crashes: int = counter("engine_crashes", "Engines that crashed while they had requests.")
    suspects: int = counter("suspect_requests", "Requests in flight at two crashes, held back to run alone.")
    acquitted: int = counter("acquitted_requests", "Suspect requests that ran alone past their last crash.")
    poison_requests: int = counter("poison_requests", "Requests failed because they end engines.")
