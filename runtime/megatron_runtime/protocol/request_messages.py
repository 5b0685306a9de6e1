"""Messages of the request path: a list of small fields and opaque bodies, which a coordinator forwards unparsed.

Named tuples: they are made for every message, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames, MalformedMessageError, pack, shown
from megatron_runtime.protocol.headers import Header

_SUBMIT, _DISPATCH = int(Header.SUBMIT), int(Header.DISPATCH)
_PARTIAL, _FINAL = int(Header.PARTIAL), int(Header.FINAL)


class RequestMeta(NamedTuple):
    """What the coordinator reads of a request; all else stays in the bodies."""

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
    tenant: str = ""
    """The opaque id of whose share of the engines the request counts against; empty: its client's connection."""

    def items(self) -> tuple[Any, ...]:
        """The elements as they travel: the last two are left out where they and all after them are empty."""
        return self if self.tenant else self[:7] if self.engine else self[:6]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        """The last four elements may be absent: a peer of an earlier release does not send them."""
        if type(value) is list and len(value) >= 4:
            streaming, seed, deadline, text = value[:4]
            priority, salt = value[4:6] if len(value) >= 6 else (0, "")
            engine = value[6] if len(value) >= 7 else ""
            tenant = value[7] if len(value) >= 8 else ""
            if (
                type(streaming) is type(text) is bool
                and type(seed) is type(priority) is int
                and 0 <= seed < 1 << 64
                and (deadline is None or type(deadline) is int)
                and type(salt) is str
                and len(salt) <= limits.MAX_SALT_CHARACTERS
                and type(engine) is str
                and type(tenant) is str
                and len(tenant) <= limits.MAX_TENANT_CHARACTERS
            ):
                return cls(streaming, seed, deadline, text, priority, salt, engine, tenant)
        raise MalformedMessageError(
            f"request meta {shown(value)}: want [streaming, seed, deadline_ms, text, priority, cache_salt, engine, "
            "tenant]"
        )


class Submit(NamedTuple):
    """SUBMIT: client to coordinator. `generated` is what the client already holds, when it submits again."""

    uid: bytes
    meta: RequestMeta
    prompt: bytes
    generated: bytes
    params: bytes

    def to_frames(self) -> Frames:
        uid, meta, prompt, generated, params = self
        return [pack((_SUBMIT, uid, meta.items(), prompt, generated, params))]


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
        return dispatch_frames(*self)


def dispatch_frames(
    dispatch_id: int, uid: bytes, route: int, meta: RequestMeta, prompt: bytes, generated: bytes, params: bytes
) -> Frames:
    """Dispatch(…).to_frames() without the Dispatch: it runs for every request."""
    return [pack((_DISPATCH, dispatch_id, uid, route, meta.items(), prompt, generated, params))]


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
        return [pack((_PARTIAL, self.route, index, self.tokens, self.extras))]


class Final(NamedTuple):
    """FINAL: the authoritative end of a request: all generated tokens, and the reply map. Forwarded unchanged."""

    dispatch_id: int
    uid: bytes
    tokens: bytes
    """Every generated token from the first, including those that came in DISPATCH."""
    reply: bytes
    """msgpack map; see docs/protocol.md."""

    def to_frames(self) -> Frames:
        return [pack((_FINAL, *self))]


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
        return [pack((int(Header.EVICTED_BLOCKS), {"cleared": self.cleared}, self.hashes))]


def _uid(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != limits.UID_BYTES:
        raise MalformedMessageError(f"uid {shown(value)}: want {limits.UID_BYTES} bytes")
    return value


def _u64(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise MalformedMessageError(f"{name} {shown(value)}: want an unsigned 64-bit integer")
    return value


def _body(name: str, value: Any) -> bytes:
    if type(value) is not bytes:
        raise MalformedMessageError(f"{name} is {type(value).__name__}: want bytes")
    return value


def _tokens(name: str, value: Any) -> bytes:
    if type(value) is not bytes or len(value) % 4:
        raise MalformedMessageError(f"{name} {shown(value)}: want bytes, a multiple of 4 of them (int32)")
    return value


def _decode_submit(items: list[Any]) -> Submit:
    if len(items) < 6:
        raise MalformedMessageError("SUBMIT: want [114, uid, meta, prompt, generated, params]")
    meta = RequestMeta.from_list(items[2])
    prompt = _body("prompt", items[3]) if meta.text else _tokens("prompt", items[3])
    return Submit(_uid(items[1]), meta, prompt, _tokens("generated", items[4]), _body("params", items[5]))


def _decode_dispatch(items: list[Any]) -> Dispatch:
    if len(items) < 8:
        raise MalformedMessageError("DISPATCH: want [111, dispatch_id, uid, route, meta, prompt, generated, params]")
    return Dispatch(
        _u64("dispatch id", items[1]),
        _uid(items[2]),
        _u64("route", items[3]),
        RequestMeta.from_list(items[4]),
        _tokens("prompt", items[5]),
        _tokens("generated", items[6]),
        _body("params", items[7]),
    )


def _decode_partial(items: list[Any]) -> Partial:
    if len(items) < 5:
        raise MalformedMessageError("PARTIAL: want [112, route, index, tokens, extras]")
    index, tokens = _body("index", items[2]), _body("tokens", items[3])
    if len(index) % _ENTRY.size:
        raise MalformedMessageError(f"PARTIAL index of {len(index)} bytes: want a multiple of {_ENTRY.size}")
    entries = list(map(PartialEntry._make, _ENTRY.iter_unpack(index)))
    total = sum([entry[3] for entry in entries])
    if len(tokens) != 4 * total:
        raise MalformedMessageError(f"PARTIAL carries {len(tokens)} token bytes: its index says {4 * total}")
    return Partial(_u64("route", items[1]), entries, tokens, _body("extras", items[4]))


def _decode_final(items: list[Any]) -> Final:
    if len(items) < 5:
        raise MalformedMessageError("FINAL: want [113, dispatch_id, uid, tokens, reply]")
    return Final(_u64("dispatch id", items[1]), _uid(items[2]), _tokens("tokens", items[3]), _body("reply", items[4]))


def _decode_abort(items: list[Any]) -> Abort:
    if len(items) < 2:
        raise MalformedMessageError("ABORT_REQUEST: want [23, id]")
    if isinstance(items[1], bytes):
        return Abort(_uid(items[1]))
    return Abort(_u64("id", items[1]))


def _decode_evicted(items: list[Any]) -> EvictedBlocks:
    match items:
        case [_, dict(fields), bytes(hashes), *_] if type(fields.get("cleared", False)) is bool:
            if len(hashes) % 8:
                raise MalformedMessageError(f"EVICTED_BLOCKS of {len(hashes)} bytes: want a multiple of 8 (int64)")
            return EvictedBlocks(hashes, fields.get("cleared", False))
    raise MalformedMessageError("EVICTED_BLOCKS: want [108, {cleared}, hashes]")


RequestMessage: TypeAlias = Submit | Dispatch | Partial | Final | Abort | EvictedBlocks
DECODERS: dict[int, Callable[[list[Any]], RequestMessage]] = {
    int(Header.EVICTED_BLOCKS): _decode_evicted,
    int(Header.SUBMIT): _decode_submit,
    int(Header.DISPATCH): _decode_dispatch,
    int(Header.PARTIAL): _decode_partial,
    int(Header.FINAL): _decode_final,
    int(Header.ABORT_REQUEST): _decode_abort,
}
