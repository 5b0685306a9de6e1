"""Test vectors: one example of every message with its exact bytes.

`PYTHONPATH=tests/support .venv/bin/python -m vectors` prints the table at the end of docs/reference/protocol.md.
"""

from __future__ import annotations

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.media import Media, MediaItem, media_digest
from megatron_runtime.protocol.messages import (
    Abort,
    AnswerFormats,
    CachedBlocks,
    Charge,
    Control,
    ControlAck,
    ControlCommit,
    ControlMessage,
    Disconnect,
    Dispatch,
    EngineOutcome,
    EngineStatus,
    Error,
    Exported,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    Imported,
    KVPort,
    Operation,
    PairState,
    Partial,
    PartialEntry,
    Prefill,
    Quota,
    ReleaseBlocks,
    RequestMessage,
    RequestMeta,
    Reserve,
    Status,
    StatusReply,
    Submit,
    Transfer,
    pack,
    tokens_to_bytes,
)

UID = bytes(range(16))
ADAPTERS = AdapterList((Adapter("sql", "hf:org/sql-lora@5d8f"), Adapter("chat", "/models/adapters/chat")))
_META = RequestMeta(streaming=True, seed=7, deadline_ms=30000)
_PROMPT, _NONE, _GENERATED = tokens_to_bytes([1, 2, 3]), b"", tokens_to_bytes([4])
_MEDIA = Media(tokens_to_bytes([1, 9]), (MediaItem("image", media_digest("image", b"file"), 1, 2, b"file"),))
_PARAMS = pack({"temperature": 0.0, "num_tokens_to_generate": 16})
_EXTRAS = pack({UID: {"log_probs": [-0.5], "top_n_logprobs": [[[5, -0.5], [9, -1.0]]]}})
_PLAIN_PARAMS = {"temperature": 1.0, "top_k": 1, "top_p": 0.0, "num_tokens_to_generate": 16}

_DIGEST = bytes(range(32))
_TRANSFER = Transfer(
    export_id=5, dispatch_id=6, ticket=bytes(range(32, 64)), digests=_DIGEST, weights="7 5eed", key="", seconds=30.0
)


class _PlainFrames:
    """A message of the Megatron protocol, as its list."""

    def __init__(self, *items: object) -> None:
        self._items = items

    def to_frames(self) -> Frames:
        return [pack([int(item) if isinstance(item, Header) else item for item in self._items])]


class _EmptyFrame:
    def to_frames(self) -> Frames:
        return [b""]


Vector = ControlMessage | RequestMessage | _PlainFrames | _EmptyFrame


def _control(kind: Header, **fields: object) -> Control:
    return Control.model_validate({"kind": kind, "operation_id": "op-1", "fence": 3, "timeout_seconds": 60.0, **fields})


VECTORS: dict[str, Vector] = {
    "CONNECT": _PlainFrames(Header.CONNECT),
    "CONNECT_ACK": _PlainFrames(Header.CONNECT_ACK),
    "CONNECT of a client of this runtime": _PlainFrames(Header.CONNECT, PROTOCOL_VERSION),
    "CONNECT_ACK to it": _PlainFrames(Header.CONNECT_ACK, PROTOCOL_VERSION),
    "registration of a plain engine": _EmptyFrame(),
    "SUBMIT_REQUEST": _PlainFrames(Header.SUBMIT_REQUEST, 0, [1, 2, 3], _PLAIN_PARAMS, None),
    "ENGINE_REPLY, to a plain client": _PlainFrames(Header.ENGINE_REPLY, 0, {"generated_tokens": [4]}),
    "ENGINE_REPLY_PARTIAL, to a plain client": _PlainFrames(
        Header.ENGINE_REPLY_PARTIAL, 0, {"request_id": 0, "new_tokens": [4]}
    ),
    "ABORT_REQUEST, plain": Abort(0),
    "ABORT_REQUEST, by uid": Abort(UID),
    "SUBMIT_REQUEST_WITH_KV": _PlainFrames(Header.SUBMIT_REQUEST_WITH_KV, 0, [1, 2, 3], _PLAIN_PARAMS, {}, [0]),
    "RELEASE_KV": _PlainFrames(Header.RELEASE_KV, 0),
    "PAUSE, plain": _PlainFrames(Header.PAUSE),
    "PAUSE": _control(Header.PAUSE, expected_engines=2),
    "UNPAUSE": _control(Header.UNPAUSE),
    "SUSPEND": _control(Header.SUSPEND),
    "RESUME": _control(Header.RESUME),
    "SET_GENERATION_EPOCH": _control(Header.SET_GENERATION_EPOCH, epoch=7),
    "STOP": _control(Header.STOP),
    "START_CUDA_PROFILER": _control(Header.START_CUDA_PROFILER),
    "STOP_CUDA_PROFILER": _control(Header.STOP_CUDA_PROFILER),
    "DISCONNECT": Disconnect(reason="SIGTERM"),
    "SHUTDOWN": _PlainFrames(Header.SHUTDOWN),
    "TP_BROADCAST": _PlainFrames(Header.TP_BROADCAST, [b"\x91\x28"]),
    "HELLO, client": Hello(role=Role.CLIENT, name="server-0", incarnation=1, model="9a3c"),
    "HELLO, server": Hello(
        role=Role.CLIENT,
        name="server-0",
        incarnation=1,
        model="9a3c",
        formats=AnswerFormats(tool_calls="hermes", reasoning="think"),
    ),
    "HELLO, engine": Hello(
        role=Role.ENGINE,
        name="demo-engine-0",
        incarnation=2,
        serving=True,
        state=EngineState.RUNNING,
        epoch=7,
        fence=3,
        revision="5d8f",
        model="9a3c",
        max_requests=64,
        max_sequence_length=4096,
        block_size_tokens=256,
        started_ms=1_764_000_000_000,
    ),
    "HELLO, engine that lacks features": Hello(
        role=Role.ENGINE,
        name="demo-engine-1",
        incarnation=3,
        backend="vllm",
        lacks=("HIDDEN_STATES", "HIGH_TEMPERATURE"),
    ),
    "HELLO, engine with sampling parameters": Hello(
        role=Role.ENGINE, name="demo-engine-2", incarnation=3, parameters=("temperature", "top_k")
    ),
    "HELLO, engine for prompts": Hello(
        role=Role.ENGINE,
        name="demo-prefill-0",
        incarnation=4,
        engine_role="prefill",
        kv=KVPort(address="tcp://10.0.0.7:5558", layout="float32 30x16x384 256", block_bytes=11_796_480),
    ),
    "HELLO_ACK": HelloAck(incarnation=9, state=CoordinatorState.RUNNING, epoch=7, fence=3, route=1),
    "HEARTBEAT": Heartbeat(incarnation=2, state=EngineState.RUNNING, running=4, waiting=1, steps=100),
    "CONTROL_ACK, of an engine": ControlAck(operation_id="op-1", ok=True, state=EngineState.PAUSING, ranks=1),
    "CONTROL_ACK, to the sender": ControlAck(
        operation_id="op-1",
        ok=True,
        state=CoordinatorState.PAUSED,
        ranks=1,
        total_ranks=1,
        engines={"demo-engine-0": EngineOutcome(ok=True, ranks=1)},
    ),
    "CONTROL_COMMIT": ControlCommit(operation_id="op-1", signal=Header.PAUSE, state=EngineState.PAUSED),
    "STATUS": Status(),
    "STATUS_REPLY": StatusReply(
        incarnation=9,
        state=CoordinatorState.PAUSED,
        epoch=7,
        fence=3,
        drained_all=True,
        engines=[EngineStatus(name="demo-engine-0", state=EngineState.PAUSED, serving=True, epoch=7, digest="5eed")],
        operations=[Operation(operation_id="op-1", signal=Header.PAUSE, phase="Confirmed", ranks=1, total_ranks=1)],
    ),
    "ERROR, of a standby": Error(code=ErrorCode.STANDBY, message="on standby", other="demo-coordinator.prod.svc"),
    "PAIR_STATE": PairState(incarnation=9, term=3, active=True),
    "RESERVE": Reserve(uid=UID, tenant="5eed" * 8, requests_per_minute=60, tokens_per_minute=1000, tokens=1000),
    "QUOTA": Quota(uid=UID, accepted=True, window=7, requests_left=59, requests_reset_seconds=42.5, tokens_left=0),
    "QUOTA, rejected": Quota(uid=UID, accepted=False, tokens_left=100, retry_after_seconds=42.5),
    "CHARGE": Charge(tenant="5eed" * 8, tokens_per_minute=1000, tokens=16),
    "CHARGE, to return tokens": Charge(tenant="5eed" * 8, tokens_per_minute=1000, tokens=-700, window=7),
    "ERROR": Error(code=ErrorCode.QUEUE_FULL, message="queue full", uid=UID, retry_after_seconds=1.0),
    "ERROR, of a parameter": Error(
        code=ErrorCode.INVALID_REQUEST, message="no engine supports it", uid=UID, field="temperature"
    ),
    "CACHED_BLOCKS": CachedBlocks((7).to_bytes(8, "little") + (1 << 62).to_bytes(8, "little")),
    "CACHED_BLOCKS, stored": CachedBlocks(stored=(7).to_bytes(8, "little")),
    "CACHED_BLOCKS, all": CachedBlocks(cleared=True),
    "UPDATE_WEIGHTS": _control(Header.UPDATE_WEIGHTS, epoch=8, source="/models/8"),
    "SET_ADAPTERS": _control(Header.SET_ADAPTERS, adapters=ADAPTERS),
    "DRAIN": _control(Header.DRAIN, engine="demo-engine-0"),
    "DISPATCH": Dispatch(5, UID, 1, _META, _PROMPT, _GENERATED, _PARAMS),
    "DISPATCH, with media": Dispatch(5, UID, 1, _META._replace(needs="media"), _PROMPT, _GENERATED, _PARAMS, _MEDIA),
    "DISPATCH, of tokens with epochs": Dispatch(5, UID, 1, _META, _PROMPT, _GENERATED, _PARAMS, epochs=((0, 7),)),
    "PREFILL": Prefill(Dispatch(5, UID, 1, _META, _PROMPT, _NONE, _PARAMS)),
    "EXPORTED": Exported(dispatch_id=5, digests=_DIGEST, weights="7 5eed"),
    "EXPORTED of a vLLM engine": Exported(dispatch_id=5, digests=_DIGEST, weights="7 5eed", handle=b"handle"),
    "TRANSFER, to the exporting engine": _TRANSFER,
    "TRANSFER, to the importing engine": _TRANSFER._replace(address="tcp://10.0.0.7:5558"),
    "TRANSFER, to a vLLM engine": _TRANSFER._replace(address="tcp://10.0.0.7:5558", handle=b"handle"),
    "IMPORTED": Imported(dispatch_id=6, ok=True, received_bytes=11_796_480, seconds=0.25),
    "IMPORTED, without room": Imported(dispatch_id=6, ok=False, has_room=False),
    "RELEASE": ReleaseBlocks(dispatch_id=5),
    "PARTIAL": Partial(1, [PartialEntry(UID, 5, 1, 2)], tokens_to_bytes([5, 6])),
    "PARTIAL, with log-probs": Partial(1, [PartialEntry(UID, 5, 1, 1)], tokens_to_bytes([5]), _EXTRAS),
    "PARTIAL, with epochs": Partial(1, [PartialEntry(UID, 5, 1, 2)], tokens_to_bytes([5, 6]), epochs=((0, 7), (1, 8))),
    "FINAL": Final(5, UID, tokens_to_bytes([4, 5, 6]), pack({"status": "COMPLETED", "finish_reason": "stop"})),
    "SUBMIT": Submit(UID, _META, _PROMPT, _NONE, _PARAMS),
    "SUBMIT, of a tenant": Submit(UID, _META._replace(tenant="5eed" * 8), _PROMPT, _NONE, _PARAMS),
    "SUBMIT, for an adapter": Submit(UID, _META._replace(adapter="sql"), _PROMPT, _NONE, _PARAMS),
    "SUBMIT, of tokens with epochs": Submit(UID, _META, _PROMPT, _GENERATED, _PARAMS, epochs=((0, 7),)),
    "SUBMIT, with media": Submit(UID, _META._replace(needs="media"), _PROMPT, _NONE, _PARAMS, _MEDIA),
    "SUBMIT, with needs": Submit(UID, _META._replace(needs="HIGH_TEMPERATURE"), _PROMPT, _NONE, _PARAMS),
}


def as_markdown() -> str:
    rows = ["| message | frame, hexadecimal, `–` an empty one |", "|---|---|"]
    for name, message in VECTORS.items():
        [frame] = message.to_frames()
        rows.append(f"| {name} | {f'`{frame.hex()}`' if frame else '–'} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
