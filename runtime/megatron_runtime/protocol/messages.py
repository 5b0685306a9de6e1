"""All message types of docs/reference/protocol.md, and `decode`, which decodes any message.

A message is one frame that contains a list. Control messages (registration, liveness, verbs, STATUS, ERROR) are
`[header, map]`. This module validates them. Unknown keys are ignored, and every number, text and list has a limit.
Messages of the request path are lists of small fields and of bodies, which are opaque bytes that a coordinator forwards
without parsing. These messages are named tuples, because creating a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import MAX_ADAPTER_NAME_CHARACTERS, MAX_ADAPTERS, AdapterList
from megatron_runtime.protocol.codec import (
    CONTROL,
    Frames,
    MalformedMessageError,
    UnpackLimits,
    header_of,
    pack,
    unpack,
    unpack_request,
)
from megatron_runtime.protocol.codec import DETAILS as DETAILS
from megatron_runtime.protocol.codec import PARAMETERS as PARAMETERS
from megatron_runtime.protocol.codec import PLAIN as PLAIN
from megatron_runtime.protocol.codec import REPLIES as REPLIES
from megatron_runtime.protocol.codec import PackedTokens as PackedTokens
from megatron_runtime.protocol.codec import block_hashes_from_bytes as block_hashes_from_bytes
from megatron_runtime.protocol.codec import checked_tokens as checked_tokens
from megatron_runtime.protocol.codec import extended_map as extended_map
from megatron_runtime.protocol.codec import joined_list as joined_list
from megatron_runtime.protocol.codec import split_list as split_list
from megatron_runtime.protocol.codec import token_list_from_bytes as token_list_from_bytes
from megatron_runtime.protocol.codec import tokens_from_bytes as tokens_from_bytes
from megatron_runtime.protocol.codec import tokens_to_bytes as tokens_to_bytes
from megatron_runtime.protocol.codec import unpack_tokens as unpack_tokens
from megatron_runtime.protocol.codec import values_of_map as values_of_map
from megatron_runtime.protocol.epochs import TokenEpochs, epochs_from_bytes, epochs_to_bytes
from megatron_runtime.protocol.headers import CONTROLS, PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.request_meta import RequestMeta as RequestMeta
from megatron_runtime.protocol.text import shown

# --- control messages -------------------------------------------------------------------------------------------------

U32 = Annotated[int, Field(ge=0, lt=1 << 32)]
U64 = Annotated[int, Field(ge=0, lt=1 << 64)]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_BYTES)]
OperationId = Annotated[str, Field(min_length=1, max_length=limits.MAX_OPERATION_ID_BYTES)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Fence = Annotated[int, Field(ge=0, le=limits.MAX_FENCE)]
Epoch = Annotated[int, Field(ge=0, le=limits.MAX_EPOCH)]
Seconds = Annotated[float, Field(ge=0, le=86400)]
Rate = Annotated[float, Field(gt=0, le=1e15)]
"""Tokens per second."""
Text = Annotated[str, Field(max_length=limits.MAX_TEXT_CHARACTERS)]
Label = Annotated[str, Field(max_length=limits.MAX_NAME_BYTES)]
Key = Annotated[str, Field(max_length=64)]
Uid = Annotated[bytes, Field(min_length=limits.UID_BYTES, max_length=limits.UID_BYTES)]
TenantName = Annotated[str, Field(min_length=1, max_length=limits.MAX_TENANT_CHARACTERS)]
PerMinute = Annotated[int, Field(ge=1, lt=1 << 31)]
Words = Annotated[str, AfterValidator(lambda text: text[: limits.MAX_TEXT_CHARACTERS])]
"""An error or a reason. A longer text is not rejected but truncated."""
Cause = Annotated[str, AfterValidator(lambda text: text[: limits.MAX_CAUSE_CHARACTERS])]
"""The error of one adapter. A longer text is not rejected but truncated."""
Tasks = Annotated[tuple[Label, ...], Field(max_length=limits.MAX_TASKS)]
Addresses = Annotated[tuple[Label, ...], Field(max_length=limits.MAX_RANKS)]
"""`tcp://HOST:PORT` of each rank of an engine."""
AdapterErrors = Annotated[dict[str, Cause], Field(max_length=MAX_ADAPTERS)]
"""Error of each adapter, by its name."""
PeerName = Annotated[str, AfterValidator(lambda text: text[:255])]
"""The name of a registered peer in a coordinator's reports. A plain engine's name is its routing id."""


class _Map(BaseModel):
    """A map of named fields. Unknown keys are ignored, because a newer peer can send additional keys."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ControlMessage(_Map):
    """Base of the messages that travel as `[header, map]`."""

    header: ClassVar[Header]

    def to_frames(self) -> Frames:
        return [pack([int(self.header), self.model_dump(exclude_none=True)])]


class AnswerFormats(_Map):
    """The names of the answer formats that an OpenAI server parses. protocol/answer_formats.py lists all names."""

    tool_calls: Label = ""
    """Format of tool calls. Empty if it is unknown, or if tools are not offered, so that calls that the model makes on
    its own are text.
    """
    reasoning: Label = ""
    """Format of reasoning. Empty if reasoning is part of the text."""


class KVPort(_Map):
    """The port at which an engine exports blocks of its prefix cache.

    Engines exchange blocks only if their layouts are equal.
    """

    address: Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_BYTES)]
    """`tcp://HOST:PORT`."""
    layout: Label
    """Data type, sizes and block size of its KV cache, and how it divides the model."""
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 40)]


class Hello(ControlMessage):
    """HELLO, which registers a peer. An engine also sends HELLO when it has loaded its weights (`serving`).

    The coordinator answers with HELLO_ACK.
    """

    header = Header.HELLO
    role: Role
    name: Name
    """The identity of the peer, which stays the same after a restart."""
    incarnation: U64
    """A random number that is new for each start of the process and for each socket that it opens."""
    version: Count = PROTOCOL_VERSION
    serving: bool = False
    """Engines: whether the weights are loaded, or the engine waits SUSPENDED. If so, the engine takes part in verbs."""
    state: EngineState | None = None
    epoch: Epoch = 0
    fence: Fence = 0
    """The highest fence that this engine has received. A recovering coordinator adopts the maximum over all engines."""
    ranks: Count = 1
    revision: Text = ""
    model: Label = ""
    """Hash of the model that an engine runs or for which a client makes its requests. Empty means compatible with every
    model.
    """
    max_requests: Count = 0
    max_sequence_length: Count = 0
    max_tokens: Count | None = None
    """Engines: limit of tokens of one step. None if unknown."""
    kv_cache_bytes: U64 | None = None
    """Engines: size of each rank's KV cache, in bytes. None if unknown."""
    block_size_tokens: Count = 0
    source: Text | None = None
    """Source of the weights in use, if an UPDATE_WEIGHTS set it. A recovering coordinator adopts it."""
    adapters: AdapterList | None = None
    """Engines: the list of adapters that was last set. A recovering coordinator adopts it. None if the engine's release
    does not support adapters.
    """
    adapter_errors: AdapterErrors | None = None
    """Engines: for each adapter that is not loaded, the reason."""
    term: U64 | None = None
    """The highest term of a coordinator with which this peer has been registered. None if it knows no term."""
    tokenizes: bool = False
    """Engines: whether a DISPATCH may have a text prompt."""
    started_ms: U64 | None = None
    """Engines: when the process started, in milliseconds since 1970. None if unknown."""
    backend: Label | None = None
    """Engines: name of the backend, for errors."""
    lacks: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_LACKS)] | None = None
    """Engines: names of the features that requests can need and that the engine lacks. None if it lacks none, or if its
    release does not announce them.
    """
    parameters: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_PARAMETERS)] | None = None
    """Engines: names of the sampling parameters that the engine supports. None means the parameters of release 0.1."""
    task: Label | None = None
    """Engines: what its pooling model computes instead of tokens. None if it generates tokens."""
    weights_unavailable: Words | None = None
    """Engines: why the weights of a trainer that HELLO_ACK named cannot be loaded. The engine serves as soon as they
    are loaded.
    """
    engine_role: Literal["prefill", "decode"] | None = None
    """Engines: the stage of requests for which the engine is preferred. None means both stages."""
    kv: KVPort | None = None
    """Engines: the port of the engine's KV cache. None if the backend has none."""
    formats: AnswerFormats | None = None
    """OpenAI servers: the formats of answers that the server parses. None for another client, or a release that does
    not report them.
    """
    copies: Addresses | None = None
    """Engines: the address of each rank from which other engines can get the trainer's weights in use. None if the
    engine offers no weights.
    """


class HelloAck(ControlMessage):
    """HELLO_ACK, the coordinator's answer to HELLO.

    The message has the state and the epoch that an engine must enter before it serves.
    """

    header = Header.HELLO_ACK
    incarnation: U64
    version: Count = PROTOCOL_VERSION
    state: CoordinatorState
    epoch: Epoch = 0
    fence: U64 = 0
    """Engines ignore a fence above MAX_FENCE. The operator ignores this fence and reads the fence in STATUS_REPLY."""
    route: U32 = 0
    """Clients: the number by which engines group partials."""
    heartbeat_seconds: Annotated[float, Field(ge=0.001, le=3600)] = limits.HEARTBEAT_SECONDS
    max_message_bytes: Annotated[int, Field(ge=1, le=limits.MAX_ENGINE_MESSAGE_BYTES)] = limits.MAX_CLIENT_MESSAGE_BYTES
    """Maximum size, in bytes, of a message from the peer."""
    source: Text | None = None
    """Engines: load the weights of `epoch` from this source, not from the configured one. None if there was no
    update.
    """
    adapters: AdapterList | None = None
    """Engines: the adapters to load before they serve. Clients: the adapters that requests may name. None if there are
    none.
    """
    term: U64 | None = None
    """The term of a pair of coordinators. None if there is no other coordinator."""
    other: Text | None = None
    """Host of the other coordinator of a pair, which has the same port. None if there is no other coordinator."""
    tasks: Tasks | None = None
    """Clients: the tasks of the serving engines. Engines that announce none have the task "generate"."""
    copies: Addresses | None = None
    """Engines: `copies` in the HELLO of an engine that offers the weights of `source`. If None, the receiver gets the
    weights from the trainer.
    """


class Heartbeat(ControlMessage):
    """HEARTBEAT, which the coordinator and its peers send to each other. An engine reports its load.

    A coordinator reports its incarnation, so that peers detect a restart.
    """

    header = Header.HEARTBEAT
    incarnation: U64
    state: EngineState | CoordinatorState | None = None
    epoch: Epoch | None = None
    """Engines: the current epoch. The coordinator sends HELLO_ACK to an engine whose epoch is not the latest."""
    source: Text | None = None
    """Engines: source of the weights in use, if an UPDATE_WEIGHTS or HELLO_ACK set it."""
    running: Count = 0
    waiting: Count = 0
    steps: U64 = 0
    """Number of engine steps so far. If it does not increase while `running` > 0, the engine is stalled."""
    busy_for: Seconds = 0.0
    """Number of seconds for which the engine may send no heartbeat, because of a load, a capture or a compilation."""
    digest: Label = ""
    """Engines: digest of the weights in use, by which the coordinator checks that all engines have the same weights.
    Empty if unknown.
    """
    adapters: U64 | None = None
    """Generation of the list of adapters. The coordinator sends HELLO_ACK to an engine with an older list. A client
    with an older list sends HELLO.
    """
    tasks: Tasks | None = None
    """From the coordinator: the same as in HELLO_ACK."""
    prefill_rate: Rate | None = None
    """Engines: prompt tokens that the engine computes per second. None if unknown."""
    decode_rate: Rate | None = None
    """Engines: number of tokens in the KV cache, divided by the seconds that these tokens add to a step. None if
    unknown.
    """
    queued_tokens: Count | None = None
    """Engines: prompt tokens of open requests that are neither computed nor in the prefix cache. None if not
    counted.
    """
    last_dispatch: U64 | None = None
    """Engines: the highest dispatch id that `queued_tokens` includes."""
    free_blocks: Count | None = None
    """Engines: blocks that an import can use now, which are free blocks and cached blocks that no request holds. None
    if not counted.
    """


class Control(ControlMessage):
    """A verb: PAUSE, UNPAUSE, SUSPEND, RESUME, STOP, SET_GENERATION_EPOCH, UPDATE_WEIGHTS, SET_ADAPTERS, DRAIN,
    START_CUDA_PROFILER or STOP_CUDA_PROFILER.

    An operation id takes effect once. If a control message with the same id arrives again, its sender gets the answer
    of the first operation, after this operation has ended.
    """

    operation_id: OperationId | None = None
    fence: Fence | None = None
    timeout_seconds: float = Field(default=60.0, gt=0, le=86400)
    expected_engines: Count | None = None
    """Reject the verb (ENGINES_MISSING) if fewer engines are registered, because without engines any verb would
    succeed.
    """
    engine: Text | None = None
    """DRAIN: the name of one engine; None means all."""
    epoch: Epoch | None = None
    """SET_GENERATION_EPOCH and UPDATE_WEIGHTS: the new epoch."""
    source: Text | None = None
    """UPDATE_WEIGHTS: the source of the new weights."""
    load: bool | None = None
    """UPDATE_WEIGHTS, to an engine that acknowledged with `must_load`: pause, and load the weights that it verified."""
    adapters: AdapterList | None = None
    """SET_ADAPTERS: the complete list of adapters of the engines. The coordinator assigns the generation."""
    tags: Annotated[tuple[Label, ...], Field(max_length=16)] | None = None
    """SUSPEND: kinds of memory to release, "weights" and "kv_cache". None means both."""

    kind: Header = Header.PAUSE
    """The kind of this control message. It is the header of the message, not an entry of the map."""

    def to_frames(self) -> Frames:
        body = self.model_dump(exclude_none=True, exclude={"kind", "epoch"})
        if self.kind is Header.SET_GENERATION_EPOCH:
            return [pack([int(self.kind), self.epoch, body])]
        if self.epoch is not None:
            body["epoch"] = self.epoch
        return [pack([int(self.kind), body])]


class EngineOutcome(_Map):
    ok: bool
    ranks: Count = 0
    error: Words | None = None


class ControlAck(ControlMessage):
    """CONTROL_ACK, which acknowledges a control message.

    An engine reports that its work is done or has failed. The coordinator reports the result of the whole operation.
    """

    header = Header.CONTROL_ACK
    operation_id: OperationId
    ok: bool
    state: EngineState | CoordinatorState
    ranks: U64 = 0
    """From an engine: the number of its ranks that confirmed. From the coordinator: the sum over all engines."""
    total_ranks: U64 = 0
    engines: dict[PeerName, EngineOutcome] = Field(default_factory=dict, max_length=limits.MAX_ENGINES)
    evicted: list[PeerName] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    """Engines that failed or missed the deadline and were removed. The other engines committed."""
    code: Count | None = None
    error: Words | None = None
    fence: U64 | None = None
    """With STALE_FENCE: the highest fence that the coordinator has received."""
    adapter_errors: AdapterErrors | None = None
    """If SET_ADAPTERS failed: for each adapter that could not be loaded, the reason."""
    must_load: bool | None = None
    """From an engine, in answer to UPDATE_WEIGHTS: the weights are verified, but loading them will overwrite the
    weights in use. When every engine has acknowledged, the coordinator sends the message again with `load`.
    """


class ControlCommit(ControlMessage):
    """CONTROL_COMMIT, from coordinator to engines, after all acknowledgements. Each engine enters `state`.

    If `discard` is true, an engine has failed, and the other engines discard the operation.
    """

    header = Header.CONTROL_COMMIT
    operation_id: OperationId
    signal: Header
    state: EngineState | None = None
    epoch: Epoch | None = None
    discard: bool | None = None
    """After a failed SET_ADAPTERS, unload the adapters that were loaded for it. After a failed UPDATE_WEIGHTS, use the
    old weights.
    """


class Status(ControlMessage):
    header = Header.STATUS


class EngineStatus(_Map):
    name: PeerName
    state: EngineState
    serving: bool = False
    epoch: Epoch = 0
    ranks: Count = 1
    revision: Text = ""
    in_flight: Count = 0
    silent_seconds: float = 0.0
    suspect: bool = False
    """Whether the engine has sent no heartbeat for SUSPECT_SECONDS and announced no long step, so that it gets no new
    requests.
    """
    draining: bool = False
    digest: Label = ""
    """Digest of the engine's weights, from its last heartbeat.

    Empty if unknown, for example until the first heartbeat after an update.
    """
    source: Text | None = None
    """Source of the engine's weights, if an UPDATE_WEIGHTS or HELLO_ACK has set it, otherwise "". None if unknown."""
    max_requests: Count | None = None
    max_sequence_length: Count | None = None
    max_tokens: Count | None = None
    kv_cache_bytes: U64 | None = None
    """Size of each rank's KV cache, in bytes, from the engine's HELLO. None if unknown."""
    weights_unavailable: Words | None = None
    """Reason why the engine waits for the weights of a trainer, from its HELLO. None if it does not wait."""
    role: Label | None = None
    """The `engine_role` in the engine's HELLO."""
    recomputes: Words | None = None
    """Why the engine cannot import the KV of prompts from any prefill engine. None if it can import KV, or if there is
    no prefill engine.
    """


class AdapterStatus(_Map):
    name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME_CHARACTERS)]
    source: Text
    engines: Count = 0
    """Number of serving engines that have loaded the adapter."""
    error: Cause | None = None
    """Why the first engine without this adapter has not loaded it."""


class KeyReport(_Map):
    """The public keys that the coordinator, its engines and its clients use, in Z85. They show the progress of a key
    rotation.
    """

    server: Key
    """The coordinator's own public key, which it has used since its start."""
    admitted: list[Key] = Field(default_factory=list, max_length=1024)
    """Keys that the coordinator accepts on at least one of its ports."""
    connected: list[Key] = Field(default_factory=list, max_length=1024)
    """Keys of the registered engines and clients, without duplicates."""


class FailedRequest(_Map):
    """A request that the coordinator failed because engines crashed while they ran the request."""

    uid: Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * limits.UID_BYTES}}}$")]
    """The uid of the request, in hexadecimal digits."""
    engines: Annotated[list[Name], Field(max_length=16)] = Field(default_factory=list)
    """Names of the engines that crashed while they ran the request, in the order of the crashes."""
    at: float = Field(default=0.0, ge=0, le=1e11)
    """Time of the failure, in seconds since 1970."""


class Operation(_Map):
    """The coordinator's record of one control operation."""

    operation_id: OperationId
    signal: Header
    phase: Literal["InProgress", "Confirmed", "Failed"]
    ranks: U64 = 0
    total_ranks: U64 = 0
    evicted: list[PeerName] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    code: Count | None = None
    error: Words | None = None
    adapter_errors: AdapterErrors | None = None
    """The `adapter_errors` of CONTROL_ACK, for the last operation only."""


class StatusReply(ControlMessage):
    header = Header.STATUS_REPLY
    incarnation: U64
    state: CoordinatorState
    epoch: Epoch = 0
    fence: U64 = 0
    """The operator ignores a fence above MAX_FENCE or far above its own."""
    queued: Count = 0
    in_flight: Count = 0
    engines: list[EngineStatus] = Field(default_factory=list, max_length=limits.MAX_ENGINES)
    operations: list[Operation] = Field(default_factory=list, max_length=256)
    """Records of the last operations, oldest first."""
    rejected_frames: U64 = 0
    drained_all: bool = False
    """Whether all engines were drained. If True, no engine gets a request until UNPAUSE or STOP, not even an engine
    that registers later.
    """
    keys: KeyReport | None = None
    """The keys in use. None if connections are not encrypted."""
    failed_requests: Annotated[list[FailedRequest], Field(max_length=16)] | None = None
    """The last requests that failed because engines crashed, oldest first; None if there are none."""
    adapters: Annotated[list[AdapterStatus], Field(max_length=MAX_ADAPTERS)] | None = None
    """The adapters of the pool. None if the coordinator's release does not support adapters."""
    formats: AnswerFormats | None = None
    """The formats of the OpenAI server that registered last. None if no registered server reports them."""


class Error(ControlMessage):
    """ERROR, which rejects a message. An ERROR with a `uid` is the final answer to the request with this uid."""

    header = Header.ERROR
    code: ErrorCode
    message: Words
    uid: Uid | None = None
    retry_after_seconds: Seconds | None = None
    incarnation: U64 | None = None
    other: Text | None = None
    """STANDBY: host of the other coordinator, with the same port."""
    field: Label | None = None
    """INVALID_REQUEST: the invalid sampling parameter."""


class PairState(ControlMessage):
    """PAIR_STATE, the state of one coordinator of a pair.

    The message is sent to the other coordinator as a heartbeat and after each change.
    """

    header = Header.PAIR_STATE
    incarnation: U64
    """Number that decides between two coordinators that became active in the same term."""
    term: U64 = 0
    """If the coordinator is active, its term; otherwise the highest term that it knows."""
    active: bool = False


class Reserve(ControlMessage):
    """RESERVE, which counts requests and tokens of a tenant against its limits. The reservation is counted as a whole
    or rejected as a whole.

    The coordinator answers with QUOTA. With zero requests and tokens, the message only queries the remaining amounts.
    """

    header = Header.RESERVE
    uid: Uid
    """Id of the reservation. If several messages have the same id, the reservation is counted once."""
    tenant: TenantName
    requests_per_minute: PerMinute | None = None
    """Limit per minute. None means that there is no limit and nothing is counted."""
    tokens_per_minute: PerMinute | None = None
    """Limit per minute. None means that there is no limit and nothing is counted."""
    requests: Count = 0
    """Number of requests to count. If it is at least one, a tenant that has no tokens left is also rejected."""
    tokens: Count = 0


class Quota(ControlMessage):
    """QUOTA, the answer to RESERVE.

    The message has the remaining amount of each limit, and the seconds until each limit is fully available again.
    """

    header = Header.QUOTA
    uid: Uid
    accepted: bool
    window: U64 = 0
    """The minute in which the tokens were counted. CHARGE can return tokens only to this minute."""
    requests_left: Count | None = None
    requests_reset_seconds: Seconds = 0.0
    tokens_left: Count | None = None
    tokens_reset_seconds: Seconds = 0.0
    retry_after_seconds: Seconds | None = None
    """Seconds until a rejected reservation fits the limit, if nothing else is counted until then."""


class Charge(ControlMessage):
    """CHARGE, which counts tokens of a tenant, even beyond its limit, or returns unused tokens of a reservation.

    The coordinator does not answer.
    """

    header = Header.CHARGE
    tenant: TenantName
    tokens_per_minute: PerMinute
    tokens: Annotated[int, Field(gt=-(1 << 31), lt=1 << 31)]
    """Number of tokens to count. A negative number returns tokens of a reservation that were not used."""
    window: U64 | None = None
    """With negative tokens, `window` of the QUOTA that reserved them. Tokens of an earlier minute are not returned."""


ENGINE_FAILED = "engine failed"
"""Reason in the DISCONNECT of an engine that exits because a step raised an exception or a rank was lost."""
ENGINE_LEAVES, ENGINE_STOPPED = "engine leaves", "stopped"
ORDERLY_GOODBYES = frozenset({ENGINE_LEAVES, ENGINE_STOPPED, "it left"})
"""Reasons of an engine that exits in an orderly way: after SIGTERM, after STOP, or without giving a reason."""


class Disconnect(ControlMessage):
    """DISCONNECT, which reports that the sender leaves.

    The coordinator immediately dispatches the requests of a leaving engine to other engines, and aborts the requests of
    a leaving client.
    """

    header = Header.DISCONNECT
    reason: Words = ""


# --- the request path -------------------------------------------------------------------------------------------------

_SUBMIT, _DISPATCH, _PREFILL = int(Header.SUBMIT), int(Header.DISPATCH), int(Header.PREFILL)
_PARTIAL, _FINAL = int(Header.PARTIAL), int(Header.FINAL)


class Submit(NamedTuple):
    """SUBMIT, from client to coordinator.

    generated: tokens that the client already has, if it submits the request again.
    epochs:    epochs of the weights that sampled the tokens in `generated`.
    handoff:   authentication token from an earlier answer, with which the request can use the KV blocks of the earlier
               prompt.
    """

    uid: bytes
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes
    media: Media | None = None
    epochs: TokenEpochs = ()
    handoff: bytes = b""

    def to_frames(self) -> Frames:
        uid, meta, prompt, generated, params, media, epochs, handoff = self
        last: tuple[Any, ...] = _optional(media, epochs)
        if handoff:
            last = None if media is None else media.to_list(), epochs_to_bytes(epochs), handoff
        return [pack((_SUBMIT, uid, meta.items(), prompt, generated, params, *last))]


class Dispatch(NamedTuple):
    """DISPATCH, from coordinator to engine. The message contains the bodies that the client sent in SUBMIT.

    `generated` can be longer than in SUBMIT, and `media` has all data. `epochs` covers all tokens in `generated`. In
    a message for the translator of a plain engine (coordinator/plain), the prompt can also be PackedTokens.
    """

    dispatch_id: int
    uid: bytes
    route: int
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes
    media: Media | None = None
    epochs: TokenEpochs = ()

    def to_frames(self) -> Frames:
        dispatch_id, uid, route, meta, prompt, generated, params, media, epochs = self
        items = dispatch_id, uid, route, meta.items(), prompt, generated, params, *_optional(media, epochs)
        return [pack((_DISPATCH, *items))]


class Prefill(NamedTuple):
    """PREFILL, from coordinator to engine.

    The message has the fields of a DISPATCH. The engine computes only the prompt's complete blocks.
    """

    dispatch: Dispatch

    @property
    def dispatch_id(self) -> int:
        return self.dispatch.dispatch_id

    def to_frames(self) -> Frames:
        dispatch_id, uid, route, meta, prompt, generated, params, media, epochs = self.dispatch
        items = dispatch_id, uid, route, meta.items(), prompt, generated, params, *_optional(media, epochs)
        return [pack((_PREFILL, *items))]


def _optional(media: Media | None, epochs: TokenEpochs) -> tuple[list[bytes] | bytes | None, ...]:
    if epochs:
        return None if media is None else media.to_list(), epochs_to_bytes(epochs)
    return () if media is None else (media.to_list(),)


class PartialEntry(NamedTuple):
    """`count` new tokens of one request. The first of them is the generated token with index `offset`."""

    uid: bytes
    dispatch_id: int
    offset: int
    count: int  # type: ignore[assignment]  # the name in the protocol; tuple.count() is not used


_ENTRY = struct.Struct("<16sQII")
DIGEST_BYTES = 32
"""Size of the digest of a block of the prefix cache."""


class Partial(NamedTuple):
    """PARTIAL, which has the new tokens of one engine step for all requests of one client.

    The coordinator forwards the message to the client unchanged.
    """

    route: int
    entries: list[PartialEntry]
    tokens: bytes
    """Tokens of all entries in their order, little-endian int32."""
    extras: bytes = b""
    """msgpack `{uid: {"log_probs": […], …}}`, or empty."""
    epochs: TokenEpochs = ()
    """Epochs of the weights that sampled `tokens`, by the index of the token in this message."""

    def to_frames(self) -> Frames:
        index = b"".join(_ENTRY.pack(e.uid, e.dispatch_id, e.offset, e.count) for e in self.entries)
        optional = (epochs_to_bytes(self.epochs),) if self.epochs else ()
        return [pack((_PARTIAL, self.route, index, self.tokens, self.extras, *optional))]


class Final(NamedTuple):
    """FINAL, the result of a request. The coordinator forwards `tokens` and `reply` unchanged."""

    dispatch_id: int
    uid: bytes
    tokens: bytes
    """All generated tokens, including the tokens that came with DISPATCH."""
    reply: Any
    """A packed map; see docs/reference/protocol.md. In a message from the translator of a plain engine to the
    translator of a plain client (coordinator/plain), the map is not packed.
    """

    def to_frames(self) -> Frames:
        dispatch_id, uid, tokens, reply = self
        return [pack((_FINAL, dispatch_id, uid, tokens, reply if type(reply) is bytes else pack(reply)))]


class Exported(NamedTuple):
    """EXPORTED, from engine to coordinator, after PREFILL has ended.

    The engine keeps the blocks until RELEASE, or until the engine's deadline for exports.

    digests: digests of the kept blocks, 32 bytes each, in the order of the prompt; empty if the engine could not
             compute or keep any block.
    weights: text that identifies the weights that computed the blocks, and the epoch of these weights. Engines import
             only blocks that were computed with their current weights.
    handle:  data with which the importing engine's backend finds the blocks, for example the addresses that vLLM needs.
             The coordinator forwards it in TRANSFER, once. Empty for native engines.
    """

    dispatch_id: int
    digests: bytes = b""
    weights: str = ""
    handle: bytes = b""

    def to_frames(self) -> Frames:
        return [pack((int(Header.EXPORTED), *(self if self.handle else self[:-1])))]


class Transfer(NamedTuple):
    """TRANSFER, from coordinator to the exporting and to the importing engine.

    export_id:   dispatch id of the PREFILL.
    dispatch_id: dispatch id of the import.
    ticket:      gives access to the blocks once, within `seconds`.
    key:         public key of the other engine, Z85; empty if connections are not encrypted.
    address:     address of the exporting engine's KV port; empty in the message to the exporting engine.
    handle:      of EXPORTED; empty in the message to the exporting engine.
    """

    export_id: int
    dispatch_id: int
    ticket: bytes
    digests: bytes
    weights: str
    key: str
    seconds: float
    address: str = ""
    handle: bytes = b""

    def to_frames(self) -> Frames:
        return [pack((int(Header.TRANSFER), *(self if self.handle else self[:-1])))]


class Imported(NamedTuple):
    """IMPORTED, from engine to coordinator, after an import has ended.

    ok:       whether the import succeeded. If so, the engine keeps the blocks until it starts a request that begins
              with these blocks, until RELEASE, or until the engine's deadline for imports.
    has_room: whether the engine had enough free blocks. If not, it requested no blocks.
    seconds:  time in which the blocks were received.
    """

    dispatch_id: int
    ok: bool
    has_room: bool = True
    received_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    def to_frames(self) -> Frames:
        return [pack((int(Header.IMPORTED), *self))]


class ReleaseBlocks(NamedTuple):
    """RELEASE, which drops kept KV blocks. The receiver ignores an unknown id.

    From coordinator to engine, RELEASE drops the blocks of an export or an import. From client to coordinator, RELEASE
    drops the blocks of a handoff.
    """

    dispatch_id: int

    def to_frames(self) -> Frames:
        return [pack((int(Header.RELEASE), self.dispatch_id))]


@dataclass(frozen=True, slots=True)
class Abort:
    """ABORT_REQUEST, which aborts one request.

    id: uid of the request in a message from a client, dispatch id in a message to an engine, or integer id in a message
        from a plain client.
    """

    id: bytes | int

    def to_frames(self) -> Frames:
        return [pack([int(Header.ABORT_REQUEST), self.id])]


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """CACHED_BLOCKS, from engine to coordinator, which reports the changes of the engine's prefix cache.

    evicted: hashes of removed blocks, little-endian int64.
    stored:  hashes of added blocks, in the order of the prompt, little-endian int64.
    cleared: whether all earlier blocks were removed, because weights changed or memory was released.
    """

    evicted: bytes = b""
    stored: bytes = b""
    cleared: bool = False

    def to_frames(self) -> Frames:
        fields: dict[str, Any] = {"cleared": self.cleared}
        if self.stored:
            fields["stored"] = self.stored
        return [pack((int(Header.CACHED_BLOCKS), fields, self.evicted))]


def _uid(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != limits.UID_BYTES:
        raise MalformedMessageError(f"uid {shown(value)}: want {limits.UID_BYTES} bytes")
    return value


def _u64(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise MalformedMessageError(f"{name} {shown(value)}: want an unsigned 64-bit integer")
    return value


def _array(name: str, value: Any, item_bytes: int) -> bytes:
    if type(value) is not bytes or len(value) % item_bytes:
        raise MalformedMessageError(f"{name} {shown(value)}: want bytes, a multiple of {item_bytes} of them")
    return value


def _body(name: str, value: Any) -> bytes:
    if type(value) is not bytes:
        raise MalformedMessageError(f"{name} is {type(value).__name__}: want bytes")
    return value


def _decode_submit(items: list[Any]) -> Submit:
    meta = RequestMeta.from_list(items[2])
    prompt = _array("prompt", items[3], 1 if meta.text else 4)
    bodies = prompt, _array("generated", items[4], 4), _body("params", items[5])
    if len(items) == 6:
        return Submit(_uid(items[1]), meta, *bodies)
    handoff = _body("handoff", items[8]) if len(items) > 8 else b""
    if len(handoff) > limits.MAX_HANDOFF_BYTES:
        raise MalformedMessageError(f"handoff of {len(handoff)} bytes: at most {limits.MAX_HANDOFF_BYTES}")
    return Submit(_uid(items[1]), meta, *bodies, _media(items[6:], meta, prompt), _epochs(items[7:]), handoff)


def _decode_dispatch(items: list[Any]) -> Dispatch:
    _, number, uid, route, meta, prompt, generated, params = items[:8]
    request = RequestMeta.from_list(meta)
    bodies = _array("prompt", prompt, 1 if request.text else 4), _array("generated", generated, 4)
    head = _u64("dispatch id", number), _uid(uid), _u64("route", route)
    media, epochs = _media(items[8:], request, prompt), _epochs(items[9:])
    return Dispatch(*head, request, *bodies, _body("params", params), media, epochs)


def _decode_prefill(items: list[Any]) -> Prefill:
    return Prefill(_decode_dispatch(items))


def _media(rest: list[Any], meta: RequestMeta, prompt: bytes) -> Media | None:
    """Return the media of a request, or None if the message has no media.

    Raises MalformedMessageError if the tokens of an item are not within the prompt.
    """
    if not rest or rest[0] is None:
        return None
    media = Media.from_list(rest[0])
    last, length = media.items[-1], 0 if meta.text else len(prompt) // 4
    if last.offset + last.length > length:
        raise MalformedMessageError(
            f"media item of tokens {last.offset} to {last.offset + last.length}: the prompt has {length}"
        )
    return media


def _epochs(rest: list[Any]) -> TokenEpochs:
    """Return the epochs of tokens, which are the optional last element of a message.

    Returns an empty sequence if the message does not have this element.
    """
    return epochs_from_bytes(rest[0]) if rest else ()


def _decode_partial(items: list[Any]) -> Partial:
    index, tokens = _array("index", items[2], _ENTRY.size), _body("tokens", items[3])
    entries = list(map(PartialEntry._make, _ENTRY.iter_unpack(index)))
    total = sum([entry[3] for entry in entries])
    if len(tokens) != 4 * total:
        raise MalformedMessageError(f"PARTIAL carries {len(tokens)} token bytes: its index says {4 * total}")
    return Partial(_u64("route", items[1]), entries, tokens, _body("extras", items[4]), _epochs(items[5:]))


def _decode_final(items: list[Any]) -> Final:
    return Final(_u64("dispatch id", items[1]), _uid(items[2]), _array("tokens", items[3], 4), _body("reply", items[4]))


def _decode_abort(items: list[Any]) -> Abort:
    return Abort(_uid(items[1]) if isinstance(items[1], bytes) else _u64("id", items[1]))


def _digests(value: Any) -> bytes:
    digests = _array("digests", value, DIGEST_BYTES)
    if len(digests) > limits.MAX_TRANSFER_BLOCKS * DIGEST_BYTES:
        raise MalformedMessageError(f"{len(digests) // DIGEST_BYTES} digests: at most {limits.MAX_TRANSFER_BLOCKS}")
    return digests


def _short(name: str, value: Any, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        raise MalformedMessageError(f"{name} {shown(value)}: want a text of at most {limit} characters")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 86400:
        raise MalformedMessageError(f"seconds {shown(value)}: want 0 to 86400")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise MalformedMessageError(f"{name} {shown(value)}: want true or false")
    return value


def _decode_exported(items: list[Any]) -> Exported:
    number, weights = _u64("dispatch id", items[1]), _short("weights", items[3], 128)
    return Exported(number, _digests(items[2]), weights, _handle(items[4:]))


def _handle(rest: list[Any]) -> bytes:
    """Return the handle of an export, which is the optional last element of EXPORTED and TRANSFER."""
    handle = _body("handle", rest[0]) if rest else b""
    if len(handle) > limits.MAX_HANDLE_BYTES:
        raise MalformedMessageError(f"handle of {len(handle)} bytes: at most {limits.MAX_HANDLE_BYTES}")
    return handle


def _decode_transfer(items: list[Any]) -> Transfer:
    _, export, dispatch, ticket, digests, weights, key, seconds, address = items[:9]
    if len(_body("ticket", ticket)) != limits.TICKET_BYTES:
        raise MalformedMessageError(f"ticket of {len(ticket)} bytes: want {limits.TICKET_BYTES}")
    ids = _u64("export id", export), _u64("dispatch id", dispatch)
    texts = _short("weights", weights, 128), _short("key", key, 64)
    origin = _short("address", address, 4096), _handle(items[9:])
    return Transfer(*ids, ticket, _digests(digests), *texts, _seconds(seconds), *origin)


def _decode_imported(items: list[Any]) -> Imported:
    _, number, ok, has_room, received, seconds, error = items[:7]
    return Imported(
        _u64("dispatch id", number),
        _flag("ok", ok),
        _flag("has_room", has_room),
        _u64("received bytes", received),
        _seconds(seconds),
        _short("error", error, limits.MAX_TEXT_CHARACTERS),
    )


def _decode_release(items: list[Any]) -> ReleaseBlocks:
    return ReleaseBlocks(_u64("dispatch id", items[1]))


def _decode_cached(items: list[Any]) -> CachedBlocks:
    fields = items[1]
    if type(fields) is not dict or type(fields.get("cleared", False)) is not bool:
        raise MalformedMessageError("CACHED_BLOCKS: want fields with cleared as true or false")
    stored = _array("stored", fields.get("stored", b""), 8)
    return CachedBlocks(_array("evicted", items[2], 8), stored, fields.get("cleared", False))


# --- decoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plain:
    """A message of the Megatron protocol as a list. `[]` is the empty frame with which a plain engine registers."""

    items: list[Any]


StageMessage: TypeAlias = Prefill | Exported | Transfer | Imported | ReleaseBlocks
"""The messages of requests whose prompt another engine computes."""
RequestMessage: TypeAlias = Submit | Dispatch | StageMessage | Partial | Final | Abort | CachedBlocks
NativeMessage: TypeAlias = ControlMessage | RequestMessage
Message: TypeAlias = NativeMessage | Plain
Outgoing: TypeAlias = Frames | NativeMessage
"""A message as frames, or a message object. The object is encoded unless a translator (coordinator/plain) receives it.
"""


def frames_of(message: Outgoing) -> Frames:
    return message if isinstance(message, list) else message.to_frames()


def size_of(message: Outgoing) -> int:
    """Return the size of a message in bytes.

    Returns 0 if the message cannot be encoded. In this case, the translator that receives it answers with an error.
    """
    try:
        return sum(map(len, frames_of(message)))
    except MalformedMessageError:
        return 0


_REQUEST_PATH: dict[int, tuple[str, Callable[[list[Any]], RequestMessage]]] = {
    int(Header.SUBMIT): ("uid, meta, prompt, generated, params", _decode_submit),  # and media, epochs, handoff
    int(Header.DISPATCH): (
        "dispatch_id, uid, route, meta, prompt, generated, params",
        _decode_dispatch,
    ),  # and media, epochs
    int(Header.PREFILL): ("dispatch_id, uid, route, meta, prompt, generated, params", _decode_prefill),  # likewise
    int(Header.PARTIAL): ("route, index, tokens, extras", _decode_partial),  # and epochs
    int(Header.FINAL): ("dispatch_id, uid, tokens, reply", _decode_final),
    int(Header.ABORT_REQUEST): ("id", _decode_abort),
    int(Header.EXPORTED): ("dispatch_id, digests, weights", _decode_exported),  # and handle
    int(Header.TRANSFER): (
        "export_id, dispatch_id, ticket, digests, weights, key, seconds, address",
        _decode_transfer,
    ),  # and handle
    int(Header.IMPORTED): ("dispatch_id, ok, has_room, received_bytes, seconds, error", _decode_imported),
    int(Header.RELEASE): ("dispatch_id", _decode_release),
    int(Header.CACHED_BLOCKS): ("fields, evicted", _decode_cached),
}
"""For each header, the names of the elements that follow it, and the function that reads them. Further elements are
ignored.
"""
_MIN_FIELDS = {header: fields.count(",") + 2 for header, (fields, _) in _REQUEST_PATH.items()}
"""Minimum number of elements, including the header, of each message of the request path."""

_KINDS = (
    *(Hello, HelloAck, Heartbeat, ControlAck, ControlCommit, Status, StatusReply, Error, Disconnect, PairState),
    *(Reserve, Quota, Charge),
)
_CONTROL: dict[int, type[ControlMessage]] = {
    **{int(verb): Control for verb in CONTROLS},
    **{int(kind.header): kind for kind in _KINDS},
}


def decode(frames: Sequence[bytes], *, plain: UnpackLimits = CONTROL) -> Message:
    """Return the message in `frames`, which do not include the routing identity.

    plain: limits of messages of the Megatron protocol, for a port to which plain peers can connect.

    Raises:
        MalformedMessageError: the frames are not a message. No other exception is raised.
    """
    if len(frames) != 1:
        raise MalformedMessageError(f"{len(frames)} frames: want one")
    frame = frames[0]
    if not frame:
        return Plain([])
    header = header_of(frame)
    if header in _REQUEST_PATH:
        items = unpack_request(frame)
    else:
        items = unpack(frame, CONTROL if header in _CONTROL else plain)
    if type(items) is not list or not items or type(items[0]) is not int:
        raise MalformedMessageError(f"frame {shown(items)}: want a list that begins with an integer header")
    number = items[0]
    entry = _REQUEST_PATH.get(number)
    if entry is not None:
        if len(items) < _MIN_FIELDS[number]:
            raise MalformedMessageError(f"{Header(number).name}: want [{number}, {entry[0]}]")
        return entry[1](items)
    kind = _CONTROL.get(number)
    if kind is not None:
        return _decode_control(kind, number, items)
    if number >= Header.HELLO:
        raise MalformedMessageError(f"unknown header {number}")
    return Plain(items)


def _decode_control(kind: type[ControlMessage], number: int, items: list[Any]) -> ControlMessage:
    body: Any = items[1] if len(items) > 1 else {}
    extra: dict[str, Any] = {}
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
        field, value = ".".join(str(part) for part in first["loc"]), shown(first["input"])
        raise MalformedMessageError(f"header {number}, field {field} {value}: {first['msg']}") from error
