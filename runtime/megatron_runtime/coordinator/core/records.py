"""Clients, engines, open requests and tenants, and the references between them.

The records are plain data. The registries (context.py) and tables (open_requests.py) keep the references consistent.
The client and the tenant of an open request refer to the request, and so does its engine after the dispatch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple, TypeAlias

from megatron_runtime.coordinator.environment import PeerId
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
    KVPort,
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

_RUNNING = EngineState.RUNNING  # a lookup of a global takes a tenth of the time of an Enum member (Python 3.11)
UNLIMITED_REQUESTS = 1 << 20
"""Capacity that is assumed for an engine that announces none, because it has its own queue."""
_NO_HEARTBEAT = Heartbeat(incarnation=0)
ENTRY_OVERHEAD_BYTES = 1024
"""Estimated memory, in bytes, of an open request in addition to its prompt, tokens and parameters."""
TOKEN_BYTES = 4
EPOCH_SPAN_BYTES = 128
"""Estimated memory, in bytes, of a pair of integers in Entry.epochs."""

TenantKey: TypeAlias = str | int
"""The tenant's id in the request, or the route number of the client that sent the request."""


@dataclass(slots=True, eq=False, repr=False)
class Client:
    """One registration of a client or an administrator.

    key:       public key of its connection; empty without keys.
    model:     model for which its requests are made; empty means any model.
    formats:   formats of answers that it reads; None if it is not an OpenAI server, or does not report them.
    route:     number by which engines group partials for this client.
    open:      its open requests by uid.
    answered:  the last few thousand uids whose final answer was sent on the current connection.
    outbox:    messages that the connection has not yet accepted, in order, each with the uid that it answers and its
               size in bytes. While the outbox is not empty, no partials are sent. The tokens stay in the journal and
               are sent later as one partial.
    outbox_bytes: total size of the outbox.
    behind:    whether some generated tokens have not yet been sent to it.
    stuck_since: time since which its connection is full; None while the connection accepts messages. Until has_room()
               is called, nothing is sent to the client. Its tokens stay in the journal, and other messages in the
               outbox.
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
        """Add a message to the outbox. first: add it ahead of all other messages."""
        add = self.outbox.appendleft if first else self.outbox.append
        size = size_of(message)
        add((uid, message, size))
        self.outbox_bytes += size

    def take_kept(self) -> tuple[bytes | None, Outgoing, int]:
        """Remove the first message from the outbox.

        Return the uid of the request that the message ends (None if there is none), the message, and its size in bytes.
        """
        uid, message, size = self.outbox.popleft()
        self.outbox_bytes -= size
        return uid, message, size


class RequestStage(StrEnum):
    """The stage of a request. Only the coordinator changes it (see the table of transitions in transfers.py).

    A request that is not split goes from QUEUED to DECODING.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    """A prefill engine computes the complete blocks of its prompt."""
    EXPORTED = "exported"
    """The prefill engine keeps the blocks. The request waits for an engine with room for them."""
    IMPORTING = "importing"
    """An engine receives the blocks."""
    DECODING = "decoding"
    """An engine computes the rest of the prompt and every token of the answer."""


class Export(NamedTuple):
    """The KV blocks of a prompt that a prefill engine keeps until a decode engine imports them.

    id:      dispatch id of the prefill.
    weights: text by which the engine identifies the weights that computed the blocks.
    handle:  of EXPORTED, for the importing engine.
    until:   time at which the coordinator releases the blocks if no decode engine has imported them.
    """

    engine: Engine
    id: int
    digests: bytes
    weights: str
    handle: bytes
    until: float


class CrashEvidence(Enum):
    """Whether the loss of an engine is evidence against the requests that it ran."""

    NONE = auto()
    """The engine left, was removed, or sent no heartbeats."""
    CUT = auto()
    """The engine's side closed the connection without a message, because the process exited or the network failed."""
    CERTAIN = auto()
    """The engine reported a failure, or a new process uses its name."""


@dataclass(slots=True, eq=False)
class Crash:
    """One crash of an engine. All requests that were in flight share this object.

    at:     time of the crash.
    counts: whether the crash counts against the requests that were in flight. It becomes False if only the connection
            was lost and the engine's process survived, or if the request that caused the crash is identified.
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
    model:     model that it serves; empty if not announced.
    source:    weights of the last UPDATE_WEIGHTS that the engine reported.
    adapters:  names of the LoRA adapters that it reported as loaded.
    adapter_errors: for each adapter that it could not load, the error.
    knows_adapters: whether it understands messages about adapters. Engines of earlier releases do not.
    draining:  whether it is excluded from routing until it registers again.
    digest:    digest of its weights; empty if not reported.
    tokenizes: whether it accepts text prompts.
    backend:   name of its backend; empty if not announced.
    lacks:     features that requests can need but that it announced as missing.
    parameters: sampling parameters that it supports.
    task:      what its pooling model computes instead of tokens; empty if it generates tokens.
    started_ms: start time of its process; 0 if unknown.
    weights_unavailable: why it waits for the weights of a trainer; None if it does not wait.
    copies:    addresses of its ranks that serve a trainer's weights to other engines; empty if it serves none.
    limits:    the limits that it announced (names in LIMITS), which STATUS reports.
    role:      "prefill" or "decode", the stage for which it is preferred; empty means both.
    kv:        address and layout for the exchange of KV blocks; None if it neither exports nor imports blocks.
    free_blocks: blocks that it reported as free, minus the blocks of later imports; None if unknown.
    full:      whether its connection is full. has_room() ends this state.
    suspect:   whether its heartbeats have been missing for some time, but not long enough to remove it.
    welcomed:  time at which it was last sent the state that it must adopt.
    owed:      the last commit that was sent to the engine, until a heartbeat shows that the engine has executed the
               commit.
    entered_during: operation that was in progress when this engine joined. The operation's outcome is sent to the
                    engine.
    in_flight: requests by dispatch id.
    queued:    uncached tokens that it must compute before all its requests can generate (the sum of Entry.uncached).
               This and the next two fields are 0 unless the policy or the split of requests needs them; see add_work().
    waiting:   number of its requests that have uncached tokens.
    held:      sum of the tokens of its requests at the time of their dispatch.
    step_tokens: maximum number of tokens that it computes in a step; 0 if not announced.
    prefill_cost, held_cost: seconds per token of `queued` and of `held`; 0 if requests are counted instead.
    heartbeat: the last heartbeat.
    last_work: (Heartbeat.last_dispatch, time since which it has this value).
    relieved:  requests that were moved away because it was suspect, until its next heartbeat.
    reserved:  whether it is reserved for the trial of one suspect request, so that it gets no other requests.
    unsettled: whether an abort was sent to it, and it has not reported since then that it is idle.
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
    weights_unavailable: str | None = None
    copies: tuple[str, ...] = ()
    max_requests: int = UNLIMITED_REQUESTS
    limits: Mapping[str, int] = field(default_factory=dict)
    block_size_tokens: int = 0
    role: str = ""
    kv: KVPort | None = None
    free_blocks: int | None = None
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
    heartbeat: Heartbeat = _NO_HEARTBEAT
    last_work: tuple[int | None, float] = (None, 0.0)
    relieved: list[Entry] = field(default_factory=list)
    reserved: bool = False
    unsettled: bool = False

    @property
    def does(self) -> str:
        """The task of the engine, under the name that clients see."""
        return self.task or GENERATE

    def available(self) -> bool:
        return self.serving and self.state is EngineState.RUNNING and not (self.draining or self.suspect or self.full)

    def has_room(self) -> bool:
        """Whether the engine accepts one more request now."""
        # This repeats available() inline, because it runs for every request.
        return (
            self.serving
            and self.state is _RUNNING
            and not (self.draining or self.suspect or self.full or self.reserved)
            and len(self.in_flight) < self.max_requests
        )

    def cost(self) -> float:
        """Return the cost of the engine's current work, in seconds.

        If the engine's prefill rate is unknown, return the number of its requests.
        """
        if not self.prefill_cost:
            return len(self.in_flight)
        return self.queued * self.prefill_cost + self.held * self.held_cost

    def cost_of(self, tokens: int) -> float:
        """Return the engine's cost if it receives another request with `tokens` uncached tokens (see EngineRouter)."""
        requests, ahead = len(self.in_flight), self.queued
        if not self.prefill_cost:
            return requests
        if (shared := self.waiting * tokens + self.step_tokens) < ahead:
            ahead = shared
        return (ahead + tokens + tokens * requests / self.max_requests) * self.prefill_cost + self.held * self.held_cost

    def add_work(self, entry: Entry, cached: int) -> None:
        """Count the tokens of a request that the engine received.

        cached: number of its tokens in the engine's cache.
        """
        size = entry.size = entry.num_tokens
        uncached = entry.uncached = max(0, size - cached)
        if uncached:
            self.queued += uncached
            self.waiting += 1
        self.held += size

    def take(self, dispatch_id: int) -> Entry | None:
        """Remove a request from the engine and return it. Return None for an unknown dispatch id."""
        entry = self.in_flight.pop(dispatch_id, None)
        if entry is not None and entry.size:
            self.held -= entry.size
            entry.size = 0
            if entry.uncached:
                self.queued -= entry.uncached
                self.waiting -= 1
                entry.uncached = 0
        return entry

    def computed(self, entry: Entry, tokens: int) -> None:
        """Record that the engine has computed `tokens` (at least 1) of the uncached tokens of a request."""
        entry.uncached -= tokens
        self.queued -= tokens
        self.waiting -= not entry.uncached

    def report(self, heartbeat: Heartbeat) -> bool:
        """Adopt the number of uncomputed prompt tokens that a heartbeat reports. Return whether `queued` changed.

        Tokens that the engine has computed are attributed to its oldest requests. If the engine sent the heartbeat
        before it received a request, the count of this request does not change.
        """
        self.heartbeat, before = heartbeat, self.queued
        self.free_blocks = heartbeat.free_blocks
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
        """Return whether the engine can answer requests for `model`.

        Returns True if `model` is empty or the engine's own model is unknown.
        """
        return not model or not self.model or model == self.model

    def runs(self, entry: Entry) -> bool:
        """Return whether the engine has the model, the adapter and every feature that a request needs."""
        return (
            self.has_model(entry.model)
            and (not entry.meta.adapter or entry.meta.adapter in self.adapters)
            and (not (entry.meta.needs or self.task) or not self.lacking(entry.meta.needs))
        )

    def lacking(self, needs: str) -> str:
        """Return the first feature in `needs` that the engine lacks, or an empty string if the engine has all of
        them.
        """
        if self.task and not asks_for_pooling(needs):
            return GENERATION
        return next((name for name in needs.split() if self._lacks(name)), "")

    def _lacks(self, need: str) -> bool:
        return need not in self.parameters if is_parameter(need) else need in self.lacks

    def forget_adapters(self) -> None:
        self.adapters, self.adapter_errors = frozenset(), {}

    def learn(self, hello: Hello) -> None:
        """Store the properties that an engine announces in its HELLO."""
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
        self.weights_unavailable = hello.weights_unavailable
        self.role = hello.engine_role or ""
        self.kv = hello.kv
        self.copies = hello.copies or ()
        if hello.state is not None:
            self.state = hello.state

    def describe(self, now: float, *, recomputes: str | None = None) -> EngineStatus:
        """Return the status of this engine at the time `now`. recomputes: value of EngineStatus.recomputes."""
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
            weights_unavailable=self.weights_unavailable,
            role=self.role or None,
            recomputes=recomputes,
            **self.limits,
        )


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Entry:
    """One open request.

    model:      model that the client requested, or that generated the first token. Only this model can answer. Empty
                means any.
    adapter:    adapter of its first dispatch. Only this adapter can continue it. None before the dispatch, or for the
                base model.
    generated:  tokens so far, little-endian int32. Tokens sent to the client never change.
    epochs:     epochs of the weights that sampled the tokens, by token index.
    details:    log-probabilities of the tokens, as pairs (offset of the first token, extras of the engine's message).
    num_indexed: number of leading `details` whose extras are parsed (Extras instead of bytes).
    forwarded:  number of tokens that were sent to the client.
    held:       number of tokens that the client has confirmed as received.
    dispatch_id, engine: the current dispatch; 0 and None while it waits.
    former:     earlier dispatch ids, under which a late final answer is still accepted from an engine that was lost.
    slot:       its slot in Deadlines; None while it has no deadline.
    crashes:    crashes of engines while they ran this request; emptied when the request passes a trial (quarantine.py).
    crash_position: number of generated tokens at the last crash; None if unknown.
    progress:   tokens that a reserved engine has reported for a request that does not stream.
    tenant:     the tenant whose share of the engines it counts against.
    admitted_bytes: its cost in the journal when it arrived.
    is_replay:  whether it waits because its engine was lost. It is then dispatched before other requests.
    moved_at:   time at which it last left an engine to make room for another tenant; None if this never happened.
    dispatched_at, dispatches: time of the first dispatch that an engine's connection accepted, None before; and the
        number of dispatches.
    media:      its images, audio and video, with all data. Requests of one client share them; see MediaStore.
    media_route: Client.route of the client that sent the media.
    uncached:   estimated number of tokens that its engine must compute before it generates a token; 0 after that token.
    size:       tokens of prompt and answer at its dispatch; text counts as one token per four bytes. 0 unless
                Engine.add_work() has counted the tokens.
    stage, export: the stage of a split request, and the KV blocks that a prefill engine keeps for it; see Transfers.
    promised:   number of free blocks that a decode engine will need for it. Set while its prompt is computed or
                exported.
    splits:     whether it may be split; False after an export or import has failed.
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
    epochs: list[tuple[int, int]] = field(default_factory=list)
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
    stage: RequestStage = RequestStage.QUEUED
    export: Export | None = None
    promised: int = 0
    splits: bool = True

    @property
    def tokens_so_far(self) -> int:
        return len(self.generated) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer. Text counts as one token per four bytes."""
        return (len(self.prompt) + len(self.generated)) // TOKEN_BYTES

    @property
    def is_open(self) -> bool:
        return self.client.open.get(self.uid) is self

    def cost(self) -> int:
        bodies = len(self.prompt) + len(self.params) + len(self.generated)
        if self.media is not None:
            bodies += len(self.media.template)  # MediaStore counts this data
        if self.epochs:
            bodies += EPOCH_SPAN_BYTES * len(self.epochs)
        return bodies + self.details_bytes + ENTRY_OVERHEAD_BYTES


@dataclass(slots=True, eq=False, repr=False)
class Tenant:
    """A tenant with open requests.

    order:     a counter value, set each time the number of its requests at engines changes. Lower values go first.
    in_flight: its requests at engines by dispatch id, the most recent last.
    lanes:     its waiting requests except replays, in order, for each band of the queue.
    num_open, open_bytes: number of its open requests, and their cost in the journal when they were admitted.
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
        """Return the tenant's last waiting request without generated tokens, or None if there is no such request."""
        for _, lane in sorted(self.lanes.items(), key=lambda item: item[0].priority, reverse=True):
            last = next(reversed(lane.values()))
            if not last.generated:
                return last
        return None


class Ended(NamedTuple):
    """A traced request that ended.

    engine: name of its last engine; empty if it had none.
    error:  why it ended without an answer; empty if an engine answered it.
    """

    entry: Entry
    engine: str
    at: float
    error: str

    @property
    def queue_seconds(self) -> float:
        """Seconds from arrival to the first dispatch, or to the end of a request that was never dispatched."""
        dispatched_at = self.entry.dispatched_at
        return (self.at if dispatched_at is None else dispatched_at) - self.entry.arrived


class Levels:
    """Tenants sorted by load.

    Tenants with equal load are in the order in which they were added with this load.
    """

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

    replays: requests of lost engines, in order. They are dispatched before the other requests of the band.
    tenants: tenants with other waiting requests in this band; see Tenant.lanes.
    """

    priority: int
    model: str
    adapter: str
    needs: str
    replays: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    tenants: Levels = field(default_factory=Levels)
