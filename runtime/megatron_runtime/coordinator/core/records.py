"""The three things a coordinator keeps books on, and how they refer to each other: clients, engines, open requests.

Plain data. The registries beside it keep the references right: an open request is known to its client and, once
dispatched, to its engine.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from megatron_runtime.coordinator.core.tenants import Tenant
from megatron_runtime.coordinator.transport import PeerId
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import ControlCommit, EngineStatus, Frames, Hello, RequestMeta

UNLIMITED_REQUESTS = 1 << 20
"""Capacity of an engine that announced none: it queues by itself."""
ENTRY_OVERHEAD_BYTES = 1024
"""Estimate of what an open request costs beside its bodies."""
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Client:
    """One registration of a client or an administrator.

    key:       the public key that its connection was admitted with; empty without keys.
    model:     what its requests are made for; empty: whatever engines run.
    route:     the number by which engines group partials for it.
    open:      its open requests by uid.
    plain_ids: uid by request number, for a plain client.
    answered:  uids whose final answer went out on the present connection, and thus arrives; the last few thousand.
    outbox:    messages that could not be sent yet, in order, each with the uid it answers for good. While it is not
               empty, partials are not sent at all: the tokens wait in the journal and go out as one.
    behind:    partials are owed.
    stuck_since: when sending first failed; None while it succeeds.
    """

    name: str
    peer: PeerId
    role: Role
    incarnation: int
    route: int
    heard: float
    plain: bool = False
    key: bytes = b""
    model: str = ""
    open: dict[bytes, Entry] = field(default_factory=dict)
    plain_ids: dict[int, bytes] = field(default_factory=dict)
    outbox: deque[tuple[bytes | None, Frames]] = field(default_factory=deque)
    answered: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    behind: bool = False
    stuck_since: float | None = None
    reachable: bool = True

    @property
    def blocked(self) -> bool:
        return bool(self.outbox) or self.behind or not self.reachable


class CrashEvidence(Enum):
    """How an engine ended, as far as it says something about the requests that it ran."""

    NONE = auto()
    """It left, was removed, or fell silent."""
    CUT = auto()
    """Its side ended the connection without a word: its process ended, or the network between."""
    CERTAIN = auto()
    """It says that it failed, or a new process has taken its name."""


@dataclass(slots=True, eq=False)
class Crash:
    """One crash of an engine, shared by the requests that were in flight.

    at:     when, by the coordinator's clock.
    counts: False once the crash is explained: the engine had not ended, or the request that ended it was found.
    """

    engine: str
    at: float
    counts: bool = True


@dataclass(slots=True, eq=False)
class Engine:
    """One registration of one engine.

    index:     order of registration; breaks ties in routing.
    key:       the public key that its connection was admitted with; empty without keys.
    model:     what it runs; empty: it did not say.
    source:    weights that an UPDATE_WEIGHTS named, as far as the engine said.
    draining:  gets no new work until it registers anew.
    digest:    of its weights; empty: it did not say.
    full:      its socket's buffer was full; cleared at the next heartbeat.
    told:      when it was last told the state to be in.
    owed:      the last commit sent to it, until a heartbeat was heard a while later.
    entered_during: operation under way when this engine joined: told the outcome when it ends.
    in_flight: requests by dispatch id.
    relieved:  requests that were taken from it because it was silent, until it is heard again.
    reserved:  it runs one suspect request alone, or empties for one: it gets no other work.
    unsettled: it was sent an abort, and has not shown since that it runs nothing.
    was_cut:   its connection was ended by its side; for a plain engine, which is kept until a send fails.
    """

    name: str
    peer: PeerId
    incarnation: int
    index: int
    heard: float
    plain: bool = False
    key: bytes = b""
    serving: bool = False
    state: EngineState = EngineState.PAUSED
    epoch: int = 0
    ranks: int = 1
    revision: str = ""
    model: str = ""
    source: str | None = None
    digest: str = ""
    max_requests: int = UNLIMITED_REQUESTS
    block_size_tokens: int = 0
    busy_until: float = 0.0
    draining: bool = False
    full: bool = False
    suspect: bool = False
    told: float = 0.0
    owed: ControlCommit | None = None
    entered_during: str | None = None
    in_flight: dict[int, Entry] = field(default_factory=dict)
    relieved: list[Entry] = field(default_factory=list)
    reserved: bool = False
    unsettled: bool = False
    was_cut: bool = False

    def available(self) -> bool:
        return (
            self.serving
            and self.state is EngineState.RUNNING
            and not self.draining
            and not self.suspect
            and not self.full
        )

    def runs(self, model: str) -> bool:
        """Whether it may answer requests for `model`; where one of the two is not known, it may."""
        return not model or not self.model or model == self.model

    def learn(self, hello: Hello) -> None:
        """Take over what the engine says about itself."""
        self.serving = hello.serving
        self.epoch = hello.epoch
        self.ranks = max(1, hello.ranks)
        self.revision = hello.revision
        self.model = hello.model
        self.source = hello.source
        self.max_requests = hello.max_requests if hello.max_requests > 0 else UNLIMITED_REQUESTS
        self.block_size_tokens = max(0, hello.block_size_tokens)
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
            plain=self.plain,
            draining=self.draining,
            digest=self.digest,
        )


@dataclass(slots=True, eq=False)
class Entry:
    """One open request.

    model:      what it was made for, or what its first token came from; only that may answer. Empty: anything.
    generated:  tokens so far, little-endian int32. What the client was sent is fixed for ever.
    details:    what came with them (log-probs), as `(offset of the first token, the message's extras)`; unparsed.
    forwarded:  how many of the tokens the client was sent.
    held:       how many of them the client is known to have, by its own word.
    dispatched_bytes: length of `generated` when it was last dispatched.
    dispatch_id, engine: the current dispatch; 0 and None while it waits.
    former:     dispatch ids of engines that are gone, whose late final is still welcome.
    plain_id:   the request's number at a plain client.
    slot:       where the deadlines keep it; None while its time is not limited.
    crashes:    crashes of engines while it was in flight there; empty again once it has been acquitted.
    crash_position: generated tokens at the last of them; None where they are not known.
    progress:   tokens that a reserved engine reports of a request that does not stream.
    tenant:     whose share of the engines it counts against.
    admitted_bytes: what it took of the journal when it was admitted.
    is_replay:  it waits because its engine was lost, and goes before others.
    moved_at:   when it was last taken from an engine to make room for another tenant; None: never.
    """

    uid: bytes
    client: Client
    tenant: Tenant
    meta: RequestMeta
    prompt: bytes
    params: bytes
    generated: bytearray
    arrived: float
    deadline: float | None = None
    model: str = ""
    details: list[tuple[int, bytes]] = field(default_factory=list)
    details_bytes: int = 0
    forwarded: int = 0
    held: int = 0
    dispatched_bytes: int = 0
    dispatch_id: int = 0
    engine: Engine | None = None
    former: list[int] = field(default_factory=list)
    plain_id: int | None = None
    hashes: list[int] | None = None
    slot: int | None = None
    crashes: Sequence[Crash] = ()
    crash_position: int | None = None
    progress: int = 0
    admitted_bytes: int = 0
    is_replay: bool = False
    moved_at: float | None = None

    @property
    def tokens_so_far(self) -> int:
        return len(self.generated) // TOKEN_BYTES

    def cost(self) -> int:
        bodies = len(self.prompt) + len(self.params) + len(self.generated)
        return bodies + self.details_bytes + ENTRY_OVERHEAD_BYTES
