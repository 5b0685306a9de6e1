"""Every extended message as a typed value, and its frames.

Two shapes. Control messages are one frame, `[header, map]`, read by name and validated here. Messages of the request
path are a small header frame followed by opaque body frames, so that a coordinator forwards them without parsing.
`decode` never raises anything but MalformedMessageError, whatever the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_runtime.wire import limits
from megatron_runtime.wire.headers import CONTROLS, PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.wire.states import CoordinatorState, EngineState

Frames: TypeAlias = list[bytes]
Tokens: TypeAlias = npt.NDArray[np.int32]

U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_BYTES)]
OperationId = Annotated[str, Field(min_length=1, max_length=limits.MAX_OPERATION_ID_BYTES)]

_EMPTY = np.empty(0, dtype=np.int32)


class MalformedMessageError(ValueError):
    """The frames are not a message of this protocol. The message says what is wrong and where."""


def pack(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)


def unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessageError(f"frame of {len(data)} bytes is not msgpack: {error}") from error


def tokens_to_bytes(tokens: Sequence[int] | Tokens) -> bytes:
    """Token ids, shape [n], as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def tokens_from_bytes(data: bytes) -> Tokens:
    if len(data) % 4:
        raise MalformedMessageError(f"token frame of {len(data)} bytes: want a multiple of 4 (int32)")
    return np.frombuffer(data, dtype="<i4")


# --- control messages: one frame, [header, map] ---------------------------------------------------------------


class ControlMessage(BaseModel):
    """Base of the messages that travel as `[header, map]`. Unknown keys are ignored: a newer peer may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore")
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
    version: int = PROTOCOL_VERSION
    serving: bool = False
    """Engines: weights are loaded, or the engine waits SUSPENDED; it takes part in verbs from here on."""
    state: EngineState | None = None
    epoch: int = 0
    fence: int = 0
    """The highest fence this engine has been told; a recovering coordinator takes the highest of all."""
    ranks: int = 1
    revision: str = ""
    max_requests: int = 0
    max_sequence_length: int = 0
    block_size_tokens: int = 0


class HelloAck(ControlMessage):
    """The coordinator's answer to HELLO: the state and epoch an engine enters before it serves."""

    header = Header.HELLO_ACK
    incarnation: U64
    version: int = PROTOCOL_VERSION
    state: CoordinatorState
    epoch: int = 0
    fence: int = 0
    route: U32 = 0
    """Clients: the number by which engines group partials."""
    heartbeat_seconds: float = limits.HEARTBEAT_SECONDS
    max_message_bytes: int = limits.MAX_CLIENT_MESSAGE_BYTES


class Heartbeat(ControlMessage):
    """Both ways. From an engine: its load; from a coordinator: its incarnation, so that a new one is noticed."""

    header = Header.HEARTBEAT
    incarnation: U64
    state: EngineState | CoordinatorState | None = None
    running: int = 0
    waiting: int = 0
    steps: int = 0
    """Engine steps so far: unchanged while `running` > 0 means that it is stuck."""
    busy_for: float = 0.0
    """Seconds for which silence is expected (load, capture, compile)."""


class Control(ControlMessage):
    """A verb: PAUSE, UNPAUSE, SUSPEND, RESUME, STOP, SET_GENERATION_EPOCH, UPDATE_WEIGHTS or DRAIN.

    The same operation id never acts twice: it joins the running operation or gets the answer given before.
    """

    operation_id: OperationId | None = None
    fence: int | None = None
    timeout_seconds: float = Field(default=60.0, gt=0, le=86400)
    expected_engines: int | None = None
    """Refuse (ENGINES_MISSING) if fewer engines are registered: none must not pass for all."""
    engine: str | None = None
    """DRAIN: the name of one engine; None means all."""
    epoch: int | None = None
    """SET_GENERATION_EPOCH and UPDATE_WEIGHTS: the absolute target."""
    source: str | None = None
    """UPDATE_WEIGHTS: where the new weights are."""

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
    model_config = ConfigDict(frozen=True, extra="ignore")
    ok: bool
    ranks: int = 0
    error: str | None = None


class ControlAck(ControlMessage):
    """Engine to coordinator: the work of a control message is done (or failed). Coordinator to sender: the outcome."""

    header = Header.CONTROL_ACK
    operation_id: OperationId
    ok: bool
    state: EngineState | CoordinatorState
    ranks: int = 0
    """Engine: its ranks that confirmed. Coordinator: all that did."""
    total_ranks: int = 0
    engines: dict[str, EngineOutcome] = Field(default_factory=dict)
    evicted: list[str] = Field(default_factory=list)
    """Engines that failed or missed the deadline and were removed; the rest committed."""
    code: int | None = None
    error: str | None = None
    fence: int | None = None
    """The highest fence seen, in a STALE_FENCE refusal."""


class ControlCommit(ControlMessage):
    """Coordinator to engines: all acknowledged; enter `state`."""

    header = Header.CONTROL_COMMIT
    operation_id: OperationId
    signal: Header
    state: EngineState | None = None
    epoch: int | None = None


class Status(ControlMessage):
    header = Header.STATUS


class EngineStatus(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str
    state: EngineState
    serving: bool = False
    epoch: int = 0
    ranks: int = 1
    revision: str = ""
    in_flight: int = 0
    silent_seconds: float = 0.0
    plain: bool = False
    draining: bool = False


class Operation(BaseModel):
    """One control operation as the coordinator remembers it."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    operation_id: str
    signal: Header
    phase: Literal["InProgress", "Confirmed", "Failed"]
    ranks: int = 0
    total_ranks: int = 0
    evicted: list[str] = Field(default_factory=list)
    code: int | None = None
    error: str | None = None


class StatusReply(ControlMessage):
    header = Header.STATUS_REPLY
    incarnation: U64
    state: CoordinatorState
    epoch: int = 0
    fence: int = 0
    queued: int = 0
    in_flight: int = 0
    engines: list[EngineStatus] = Field(default_factory=list)
    operations: list[Operation] = Field(default_factory=list)
    """The last ones, oldest first."""
    rejected_frames: int = 0


class Error(ControlMessage):
    """A refusal. With a `uid` it is the final answer to that request."""

    header = Header.ERROR
    code: ErrorCode
    message: str
    uid: Annotated[bytes, Field(min_length=limits.UID_BYTES, max_length=limits.UID_BYTES)] | None = None
    retry_after_seconds: float | None = None
    incarnation: U64 | None = None


class Disconnect(ControlMessage):
    """The peer leaves. What it had is handed over at once."""

    header = Header.DISCONNECT
    reason: str = ""


# --- request path: a header frame and opaque bodies -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestMeta:
    """What the coordinator reads of a request; all else stays in the body frames."""

    streaming: bool = False
    seed: int = 0
    deadline_ms: int | None = None
    """Time left at this hop; None means no deadline."""
    text: bool = False
    """The prompt frame is UTF-8 text, not tokens; only a coordinator with a tokenizer accepts it."""

    def to_list(self) -> list[Any]:
        return [self.streaming, self.seed, self.deadline_ms, self.text]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        match value:
            case [bool(streaming), int(seed), (int() | None) as deadline, bool(text), *_] if 0 <= seed < 1 << 64:
                return cls(streaming, seed, deadline, text)
        raise MalformedMessageError(f"request meta {value!r:.80}: want [streaming, seed, deadline_ms, text]")


@dataclass(frozen=True, slots=True)
class Submit:
    """SUBMIT: client to coordinator. `generated` is what the client already holds, when it submits again."""

    uid: bytes
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes

    def to_frames(self) -> Frames:
        head = pack([int(Header.SUBMIT), self.uid, self.meta.to_list()])
        return [head, self.prompt, self.generated, self.params]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """DISPATCH: coordinator to engine. The three bodies are those of SUBMIT; `generated` may have grown."""

    dispatch_id: int
    uid: bytes
    route: int
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes

    def to_frames(self) -> Frames:
        head = pack([int(Header.DISPATCH), self.dispatch_id, self.uid, self.route, self.meta.to_list()])
        return [head, self.prompt, self.generated, self.params]


@dataclass(frozen=True, slots=True)
class PartialEntry:
    """`count` new tokens of one request, the first of which is generated token number `offset`."""

    uid: bytes
    dispatch_id: int
    offset: int
    count: int


_ENTRY = struct.Struct("<16sQII")


@dataclass(frozen=True, slots=True)
class Partial:
    """PARTIAL: all new tokens of one engine step for one client. Forwarded to the client unchanged."""

    route: int
    entries: list[PartialEntry]
    tokens: bytes
    """The entries' tokens one after the other, little-endian int32."""
    extras: bytes = b""
    """msgpack `{uid: {"log_probs": […], …}}`, or empty."""

    def to_frames(self) -> Frames:
        index = b"".join(_ENTRY.pack(e.uid, e.dispatch_id, e.offset, e.count) for e in self.entries)
        return [pack([int(Header.PARTIAL), self.route]), index, self.tokens, self.extras]


@dataclass(frozen=True, slots=True)
class Final:
    """FINAL: the authoritative end of a request: all generated tokens, and the reply map. Forwarded unchanged."""

    dispatch_id: int
    uid: bytes
    tokens: bytes
    """Every generated token from the first, including those that came in DISPATCH."""
    reply: bytes
    """msgpack map; see docs/protocol.md."""

    def to_frames(self) -> Frames:
        return [pack([int(Header.FINAL), self.dispatch_id, self.uid]), self.tokens, self.reply]


@dataclass(frozen=True, slots=True)
class Abort:
    """ABORT_REQUEST: by uid from a client, by dispatch id to an engine, by integer id from a plain client."""

    id: bytes | int

    def to_frames(self) -> Frames:
        return [pack([int(Header.ABORT_REQUEST), self.id])]


@dataclass(frozen=True, slots=True)
class Plain:
    """A message of the plain protocol, as its list; `[]` is the empty frame by which a plain engine registers."""

    items: list[Any]


Message: TypeAlias = ControlMessage | Submit | Dispatch | Partial | Final | Abort | Plain

_CONTROL_MESSAGES: dict[int, type[ControlMessage]] = {
    int(kind.header): kind
    for kind in (Hello, HelloAck, Heartbeat, ControlAck, ControlCommit, Status, StatusReply, Error)
}
_CONTROL_HEADERS = frozenset(int(header) for header in CONTROLS)


def decode(frames: Sequence[bytes]) -> Message:
    """The message of `frames` (routing identity already taken off).

    Raises:
        MalformedMessageError: for anything that is not a message, and for nothing else.
    """
    if not 1 <= len(frames) <= limits.MAX_FRAMES:
        raise MalformedMessageError(f"{len(frames)} frames: want 1 to {limits.MAX_FRAMES}")
    head = frames[0]
    if not head:
        return Plain([])
    if len(head) > limits.MAX_HEADER_BYTES and len(frames) > 1:
        raise MalformedMessageError(f"header frame of {len(head)} bytes: at most {limits.MAX_HEADER_BYTES}")
    items = unpack(head)
    if not isinstance(items, list) or not items or type(items[0]) is not int:
        raise MalformedMessageError(f"first frame {items!r:.80}: want a list that begins with an integer header")
    number = items[0]
    if number in _CONTROL_MESSAGES or number in _CONTROL_HEADERS or number == Header.DISCONNECT:
        return _decode_control(number, items)
    path = _REQUEST_PATH.get(number)
    if path is not None:
        return path(items, frames)
    if number >= Header.HELLO:
        raise MalformedMessageError(f"unknown header {number}")
    return Plain(items)


def _decode_control(number: int, items: list[Any]) -> ControlMessage:
    body: Any = items[1] if len(items) > 1 else {}
    extra: dict[str, Any] = {}
    kind: type[ControlMessage]
    if number == Header.DISCONNECT:
        kind = Disconnect
    elif number in _CONTROL_HEADERS:
        kind = Control
        extra["kind"] = number
        if number == Header.SET_GENERATION_EPOCH:
            extra["epoch"] = body
            body = items[2] if len(items) > 2 else {}
            if type(extra["epoch"]) is not int:
                raise MalformedMessageError(f"SET_GENERATION_EPOCH {extra['epoch']!r:.80}: want an integer epoch")
    else:
        kind = _CONTROL_MESSAGES[number]
    if not isinstance(body, dict):
        raise MalformedMessageError(f"body of header {number} is {type(body).__name__}: want a map")
    try:
        return kind.model_validate({**body, **extra})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise MalformedMessageError(f"header {number}, field {field}: {first['msg']}") from error


def _expect_frames(name: str, frames: Sequence[bytes], count: int) -> None:
    if len(frames) != count:
        raise MalformedMessageError(f"{name} of {len(frames)} frames: want {count}")


def _uid(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != limits.UID_BYTES:
        raise MalformedMessageError(f"uid {value!r:.60}: want {limits.UID_BYTES} bytes")
    return value


def _u64(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise MalformedMessageError(f"{name} {value!r:.60}: want an unsigned 64-bit integer")
    return value


def _check_tokens(*frames: bytes) -> None:
    for frame in frames:
        if len(frame) % 4:
            raise MalformedMessageError(f"token frame of {len(frame)} bytes: want a multiple of 4 (int32)")


def _decode_submit(items: list[Any], frames: Sequence[bytes]) -> Submit:
    _expect_frames("SUBMIT", frames, 4)
    match items:
        case [_, uid, meta, *_]:
            request_meta = RequestMeta.from_list(meta)
            _check_tokens(*(() if request_meta.text else (frames[1],)), frames[2])
            return Submit(_uid(uid), request_meta, frames[1], frames[2], frames[3])
    raise MalformedMessageError("SUBMIT header: want [114, uid, meta]")


def _decode_dispatch(items: list[Any], frames: Sequence[bytes]) -> Dispatch:
    _expect_frames("DISPATCH", frames, 4)
    match items:
        case [_, dispatch_id, uid, route, meta, *_]:
            _check_tokens(frames[1], frames[2])
            return Dispatch(
                _u64("dispatch id", dispatch_id),
                _uid(uid),
                _u64("route", route),
                RequestMeta.from_list(meta),
                frames[1],
                frames[2],
                frames[3],
            )
    raise MalformedMessageError("DISPATCH header: want [111, dispatch_id, uid, route, meta]")


def _decode_partial(items: list[Any], frames: Sequence[bytes]) -> Partial:
    _expect_frames("PARTIAL", frames, 4)
    if len(items) < 2:
        raise MalformedMessageError("PARTIAL header: want [112, route]")
    if len(frames[1]) % _ENTRY.size:
        raise MalformedMessageError(f"PARTIAL index of {len(frames[1])} bytes: want a multiple of {_ENTRY.size}")
    entries = [PartialEntry(*fields) for fields in _ENTRY.iter_unpack(frames[1])]
    total = sum(entry.count for entry in entries)
    if len(frames[2]) != 4 * total:
        raise MalformedMessageError(f"PARTIAL carries {len(frames[2])} token bytes: its index says {4 * total}")
    return Partial(_u64("route", items[1]), entries, frames[2], frames[3])


def _decode_final(items: list[Any], frames: Sequence[bytes]) -> Final:
    _expect_frames("FINAL", frames, 3)
    match items:
        case [_, dispatch_id, uid, *_]:
            _check_tokens(frames[1])
            return Final(_u64("dispatch id", dispatch_id), _uid(uid), frames[1], frames[2])
    raise MalformedMessageError("FINAL header: want [113, dispatch_id, uid]")


def _decode_abort(items: list[Any], frames: Sequence[bytes]) -> Abort:
    _expect_frames("ABORT_REQUEST", frames, 1)
    if len(items) < 2:
        raise MalformedMessageError("ABORT_REQUEST: want [23, id]")
    if isinstance(items[1], bytes):
        return Abort(_uid(items[1]))
    return Abort(_u64("id", items[1]))


_REQUEST_PATH: dict[int, Any] = {
    int(Header.SUBMIT): _decode_submit,
    int(Header.DISPATCH): _decode_dispatch,
    int(Header.PARTIAL): _decode_partial,
    int(Header.FINAL): _decode_final,
    int(Header.ABORT_REQUEST): _decode_abort,
}
