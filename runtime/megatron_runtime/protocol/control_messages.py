"""Messages that travel as one frame, `[header, map]`: registration, liveness, verbs, STATUS, ERROR.

Read by name and validated here; unknown keys are ignored. Every number, text and list has a bound.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames, MalformedMessageError, pack, shown
from megatron_runtime.protocol.headers import CONTROLS, PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState

U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_BYTES)]
OperationId = Annotated[str, Field(min_length=1, max_length=limits.MAX_OPERATION_ID_BYTES)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Fence = Annotated[int, Field(ge=0, le=limits.MAX_FENCE)]
Epoch = Annotated[int, Field(ge=0, le=limits.MAX_EPOCH)]
Seconds = Annotated[float, Field(ge=0, le=86400)]
Text = Annotated[str, Field(max_length=limits.MAX_TEXT_CHARACTERS)]
Label = Annotated[str, Field(max_length=limits.MAX_NAME_BYTES)]
Key = Annotated[str, Field(max_length=64)]
Words = Annotated[str, AfterValidator(lambda text: text[: limits.MAX_TEXT_CHARACTERS])]
"""An error or a reason: cut, never refused for its length."""
PeerName = Annotated[str, AfterValidator(lambda text: text[:255])]
"""A registered peer as a coordinator reports it; that of a plain engine is its routing id."""


class ControlMessage(BaseModel):
    """Base of the messages that travel as `[header, map]`. Unknown keys are ignored: a newer peer may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    header: ClassVar[Header]

    def to_frames(self) -> Frames:
        return [pack([int(self.header), self.model_dump(exclude_none=True)])]


class Hello(ControlMessage):
    """A peer introduces itself, or an engine says that it is now loaded (`serving`). Answered by HELLO_ACK."""

    header = Header.HELLO
    role: Role
    name: Name
    """Stable identity: the same after a restart."""
    incarnation: U64
    """Random, new at each start of the process and each reopening of its socket."""
    version: Count = PROTOCOL_VERSION
    serving: bool = False
    """Engines: weights are loaded, or the engine waits SUSPENDED; it takes part in verbs from here on."""
    state: EngineState | None = None
    epoch: Epoch = 0
    fence: Fence = 0
    """The highest fence this engine has been told; a recovering coordinator takes the highest of all."""
    ranks: Count = 1
    revision: Text = ""
    model: Label = ""
    """Hash of the model that an engine runs, or a client makes its requests for. Empty: not said, goes with all."""
    max_requests: Count = 0
    max_sequence_length: Count = 0
    block_size_tokens: Count = 0
    source: Text | None = None
    """Where the weights in use came from, when an UPDATE_WEIGHTS named it; a recovering coordinator learns it here."""


class HelloAck(ControlMessage):
    """The coordinator's answer to HELLO: the state and epoch an engine enters before it serves."""

    header = Header.HELLO_ACK
    incarnation: U64
    version: Count = PROTOCOL_VERSION
    state: CoordinatorState
    epoch: Epoch = 0
    fence: U64 = 0
    """Engines take one of at most MAX_FENCE. The operator registers whatever it is, and judges that of STATUS."""
    route: U32 = 0
    """Clients: the number by which engines group partials."""
    heartbeat_seconds: Annotated[float, Field(ge=0.001, le=3600)] = limits.HEARTBEAT_SECONDS
    max_message_bytes: Annotated[int, Field(ge=1, le=limits.MAX_ENGINE_MESSAGE_BYTES)] = limits.MAX_CLIENT_MESSAGE_BYTES
    """What the peer may send at most: the bytes of one message."""
    source: Text | None = None
    """Engines: the weights of `epoch`, to be loaded in place of those configured; None when none were ever updated."""


class Heartbeat(ControlMessage):
    """Both ways. From an engine: its load; from a coordinator: its incarnation, so that a new one is noticed."""

    header = Header.HEARTBEAT
    incarnation: U64
    state: EngineState | CoordinatorState | None = None
    epoch: Epoch | None = None
    """Engines: the epoch they are in; one that came back behind the others enters it by HELLO_ACK, unasked."""
    source: Text | None = None
    """Engines: where their weights came from, when an UPDATE_WEIGHTS or HELLO_ACK named it."""
    running: Count = 0
    waiting: Count = 0
    steps: U64 = 0
    """Engine steps so far: unchanged while `running` > 0 means that it is stuck."""
    busy_for: Seconds = 0.0
    """Seconds for which silence is expected (load, capture, compile)."""
    digest: Label = ""
    """Engines: of the weights in use, so that one can see that all hold the same. Empty: not known."""


class Control(ControlMessage):
    """A verb: PAUSE, UNPAUSE, SUSPEND, RESUME, STOP, SET_GENERATION_EPOCH, UPDATE_WEIGHTS, DRAIN,
    START_CUDA_PROFILER or STOP_CUDA_PROFILER.

    The same operation id never acts twice: it joins the running operation or gets the answer given before.
    """

    operation_id: OperationId | None = None
    fence: Fence | None = None
    timeout_seconds: float = Field(default=60.0, gt=0, le=86400)
    expected_engines: Count | None = None
    """Refuse (ENGINES_MISSING) if fewer engines are registered: none must not pass for all."""
    engine: Text | None = None
    """DRAIN: the name of one engine; None means all."""
    epoch: Epoch | None = None
    """SET_GENERATION_EPOCH and UPDATE_WEIGHTS: the absolute target."""
    source: Text | None = None
    """UPDATE_WEIGHTS: where the new weights are."""
    tags: Annotated[tuple[Label, ...], Field(max_length=16)] | None = None
    """SUSPEND: what to give back, "weights" and "kv_cache"; None means both."""

    kind: Header = Header.PAUSE
    """Which control message this is; travels as the header, not in the map."""

    def to_frames(self) -> Frames:
        body = self.model_dump(exclude_none=True, exclude={"kind", "epoch"})
        if self.kind is Header.SET_GENERATION_EPOCH:
            return [pack([int(self.kind), self.epoch, body])]
        if self.epoch is not None:
            body["epoch"] = self.epoch
        return [pack([int(self.kind), body])]


class EngineOutcome(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    ok: bool
    ranks: Count = 0
    error: Words | None = None


class ControlAck(ControlMessage):
    """Engine to coordinator: the work of a control message is done (or failed). Coordinator to sender: the outcome."""

    header = Header.CONTROL_ACK
    operation_id: OperationId
    ok: bool
    state: EngineState | CoordinatorState
    ranks: U64 = 0
    """Engine: its ranks that confirmed. Coordinator: all that did."""
    total_ranks: U64 = 0
    engines: dict[PeerName, EngineOutcome] = Field(default_factory=dict, max_length=limits.MAX_ENGINES)
    evicted: list[PeerName] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    """Engines that failed or missed the deadline and were removed; the rest committed."""
    code: Count | None = None
    error: Words | None = None
    fence: U64 | None = None
    """The highest fence seen, in a STALE_FENCE refusal."""


class ControlCommit(ControlMessage):
    """Coordinator to engines: all acknowledged; enter `state`."""

    header = Header.CONTROL_COMMIT
    operation_id: OperationId
    signal: Header
    state: EngineState | None = None
    epoch: Epoch | None = None


class Status(ControlMessage):
    header = Header.STATUS


class EngineStatus(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    name: PeerName
    state: EngineState
    serving: bool = False
    epoch: Epoch = 0
    ranks: Count = 1
    revision: Text = ""
    in_flight: Count = 0
    silent_seconds: float = 0.0
    plain: bool = False
    draining: bool = False
    digest: Label = ""
    """Of its weights, as it last said."""


class KeyReport(BaseModel):
    """Public keys, Z85. What a rotation needs to know before it goes on."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    server: Key
    """The coordinator's own, in use since its start."""
    admitted: list[Key] = Field(default_factory=list, max_length=1024)
    """Whose holders may connect to some port."""
    connected: list[Key] = Field(default_factory=list, max_length=1024)
    """Those that registered engines and clients came with, each once."""


class FailedRequest(BaseModel):
    """A request that the coordinator failed because it ends engines."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    uid: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * limits.UID_BYTES}}}$")]
    """In hexadecimal digits."""
    engines: Annotated[list[Name], Field(max_length=16)] = Field(default_factory=list)
    """Those that it ended, the first first."""
    at: float = Field(default=0.0, ge=0, le=1e11)
    """When it was failed, in seconds since 1970."""


class Operation(BaseModel):
    """One control operation as the coordinator remembers it."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    operation_id: OperationId
    signal: Header
    phase: Literal["InProgress", "Confirmed", "Failed"]
    ranks: U64 = 0
    total_ranks: U64 = 0
    evicted: list[PeerName] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    code: Count | None = None
    error: Words | None = None


class StatusReply(ControlMessage):
    header = Header.STATUS_REPLY
    incarnation: U64
    state: CoordinatorState
    epoch: Epoch = 0
    fence: U64 = 0
    """An admin that finds one above MAX_FENCE, or far above its own, does not follow it."""
    queued: Count = 0
    in_flight: Count = 0
    engines: list[EngineStatus] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    operations: list[Operation] = Field(default_factory=list, max_length=256)
    """The last ones, oldest first."""
    rejected_frames: U64 = 0
    drained_all: bool = False
    """All engines were drained: nothing is dispatched to any, those that come later too, until UNPAUSE or STOP."""
    keys: KeyReport | None = None
    """None: without encryption."""
    failed_requests: Annotated[list[FailedRequest], Field(max_length=16)] | None = None
    """The last requests that were failed because they end engines, oldest first; None when there are none."""


class Error(ControlMessage):
    """A refusal. With a `uid` it is the final answer to that request."""

    header = Header.ERROR
    code: ErrorCode
    message: Words
    uid: Annotated[bytes, Field(min_length=limits.UID_BYTES, max_length=limits.UID_BYTES)] | None = None
    retry_after_seconds: Seconds | None = None
    incarnation: U64 | None = None


ENGINE_FAILED = "engine failed"
"""Reason of the DISCONNECT of an engine that ends because of what it ran: a step raised, or a rank ended."""


class Disconnect(ControlMessage):
    """The peer leaves. What it had is handed over at once."""

    header = Header.DISCONNECT
    reason: Words = ""


_KINDS: dict[int, type[ControlMessage]] = {
    int(kind.header): kind
    for kind in (Hello, HelloAck, Heartbeat, ControlAck, ControlCommit, Status, StatusReply, Error, Disconnect)
}
_VERBS = frozenset(int(header) for header in CONTROLS)
HEADERS = frozenset(_KINDS) | _VERBS
"""Headers of the messages that `decode_control` reads."""


def decode_control(number: int, items: list[Any]) -> ControlMessage:
    """The message of a decoded frame whose header is in HEADERS. Raises MalformedMessageError."""
    body: Any = items[1] if len(items) > 1 else {}
    extra: dict[str, Any] = {}
    kind = _KINDS.get(number, Control)
    if kind is Control:
        extra["kind"] = number
        if number == Header.SET_GENERATION_EPOCH:
            extra["epoch"] = body
            body = items[2] if len(items) > 2 else {}
            if type(extra["epoch"]) is not int:
                raise MalformedMessageError(f"SET_GENERATION_EPOCH {shown(extra['epoch'])}: want an integer epoch")
    if not isinstance(body, dict):
        raise MalformedMessageError(f"body of header {number} is {type(body).__name__}: want a map")
    try:
        return kind.model_validate({**body, **extra})
    except ValidationError as error:
        first = error.errors()[0]
        field, found = ".".join(str(part) for part in first["loc"]), shown(first["input"])
        raise MalformedMessageError(f"header {number}, field {field} {found}: {first['msg']}") from error
