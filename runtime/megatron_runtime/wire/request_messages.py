"""Messages of the request path: a small header frame and opaque bodies, which a coordinator forwards unparsed.

Named tuples: they are made for every message, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from megatron_runtime.wire import limits
from megatron_runtime.wire.codec import Frames, MalformedMessageError, pack
from megatron_runtime.wire.headers import Header


class RequestMeta(NamedTuple):
    """What the coordinator reads of a request; all else stays in the body frames."""

    streaming: bool = False
    seed: int = 0
    deadline_ms: int | None = None
    """Time left at this hop; None means no deadline."""
    text: bool = False
    """The prompt frame is UTF-8 text, not tokens; only a coordinator with a tokenizer accepts it."""
    priority: int = 0
    """Who waits: lower first."""
    cache_salt: str = ""
    """Seeds the block hashes, so that tenants with different salts share no prefix."""
    engine: str = ""
    """The one engine that may answer; empty: any."""

    def items(self) -> tuple[Any, ...]:
        """As they travel: the last one only where it says something."""
        return self if self.engine else self[:6]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        """The last three elements may be absent: a peer of the first release does not send them."""
        if type(value) is list and len(value) >= 4:
            streaming, seed, deadline, text = value[:4]
            priority, salt = value[4:6] if len(value) >= 6 else (0, "")
            engine = value[6] if len(value) >= 7 else ""
            if (
                type(streaming) is type(text) is bool
                and type(seed) is type(priority) is int
                and 0 <= seed < 1 << 64
                and (deadline is None or type(deadline) is int)
                and type(salt) is str
                and len(salt) <= limits.MAX_SALT_CHARACTERS
                and type(engine) is str
            ):
                return cls(streaming, seed, deadline, text, priority, salt, engine)
        raise MalformedMessageError(
            f"request meta {value!r:.80}: want [streaming, seed, deadline_ms, text, priority, cache_salt, engine]"
        )


class Submit(NamedTuple):
    """SUBMIT: client to coordinator. `generated` is what the client already holds, when it submits again."""

    uid: bytes
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes

    def to_frames(self) -> Frames:
        head = pack([int(Header.SUBMIT), self.uid, self.meta.items()])
        return [head, self.prompt, self.generated, self.params]


class Dispatch(NamedTuple):
    """DISPATCH: coordinator to engine. The three bodies are those of SUBMIT; `generated` may have grown."""

    dispatch_id: int
    uid: bytes
    route: int
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes

    def to_frames(self) -> Frames:
        head = pack([int(Header.DISPATCH), self.dispatch_id, self.uid, self.route, self.meta.items()])
        return [head, self.prompt, self.generated, self.params]


class PartialEntry(NamedTuple):
    """`count` new tokens of one request, the first of which is generated token number `offset`."""

    uid: bytes
    dispatch_id: int
    offset: int
    count: int  # type: ignore[assignment]  # the name of the protocol; nobody looks for values in an entry


_ENTRY = struct.Struct("<16sQII")


class Partial(NamedTuple):
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


class Final(NamedTuple):
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
class EvictedBlocks:
    """EVICTED_BLOCKS: engine to coordinator: prefix blocks that it no longer holds."""

    hashes: bytes = b""
    """Block hashes, little-endian int64."""
    cleared: bool = False
    """Its whole index went: other weights, or the memory was given back."""

    def to_frames(self) -> Frames:
        return [pack([int(Header.EVICTED_BLOCKS), {"cleared": self.cleared}]), self.hashes]


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
    if len(items) >= 3:
        meta = RequestMeta.from_list(items[2])
        _check_tokens(*(() if meta.text else (frames[1],)), frames[2])
        return Submit(_uid(items[1]), meta, frames[1], frames[2], frames[3])
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
    entries = list(map(PartialEntry._make, _ENTRY.iter_unpack(frames[1])))
    total = sum([entry[3] for entry in entries])
    if len(frames[2]) != 4 * total:
        raise MalformedMessageError(f"PARTIAL carries {len(frames[2])} token bytes: its index says {4 * total}")
    return Partial(_u64("route", items[1]), entries, frames[2], frames[3])


def _decode_final(items: list[Any], frames: Sequence[bytes]) -> Final:
    _expect_frames("FINAL", frames, 3)
    if len(items) >= 3:
        _check_tokens(frames[1])
        return Final(_u64("dispatch id", items[1]), _uid(items[2]), frames[1], frames[2])
    raise MalformedMessageError("FINAL header: want [113, dispatch_id, uid]")


def _decode_abort(items: list[Any], frames: Sequence[bytes]) -> Abort:
    _expect_frames("ABORT_REQUEST", frames, 1)
    if len(items) < 2:
        raise MalformedMessageError("ABORT_REQUEST: want [23, id]")
    if isinstance(items[1], bytes):
        return Abort(_uid(items[1]))
    return Abort(_u64("id", items[1]))


def _decode_evicted(items: list[Any], frames: Sequence[bytes]) -> EvictedBlocks:
    _expect_frames("EVICTED_BLOCKS", frames, 2)
    if len(frames[1]) % 8:
        raise MalformedMessageError(f"EVICTED_BLOCKS of {len(frames[1])} bytes: want a multiple of 8 (int64)")
    match items:
        case [_, {"cleared": bool(cleared)}, *_]:
            return EvictedBlocks(frames[1], cleared)
        case [_, {**rest}, *_] if "cleared" not in rest:
            return EvictedBlocks(frames[1])
    raise MalformedMessageError("EVICTED_BLOCKS header: want [108, {cleared}]")


RequestMessage: TypeAlias = Submit | Dispatch | Partial | Final | Abort | EvictedBlocks
DECODERS: dict[int, Callable[[list[Any], Sequence[bytes]], RequestMessage]] = {
    int(Header.EVICTED_BLOCKS): _decode_evicted,
    int(Header.SUBMIT): _decode_submit,
    int(Header.DISPATCH): _decode_dispatch,
    int(Header.PARTIAL): _decode_partial,
    int(Header.FINAL): _decode_final,
    int(Header.ABORT_REQUEST): _decode_abort,
}
