"""All messages of docs/protocol.md, and `decode`, which reads any of them.

Two shapes. Control messages are one frame, `[header, map]`. Messages of the request path are a small header frame
followed by opaque body frames, so that a coordinator forwards them without parsing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_runtime.wire import control_messages, limits, request_messages
from megatron_runtime.wire.codec import (
    Frames,
    MalformedMessageError,
    Tokens,
    block_hashes_from_bytes,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.wire.control_messages import (
    Control,
    ControlAck,
    ControlCommit,
    ControlMessage,
    Disconnect,
    EngineOutcome,
    EngineStatus,
    Error,
    Heartbeat,
    Hello,
    HelloAck,
    KeyReport,
    Operation,
    Status,
    StatusReply,
)
from megatron_runtime.wire.headers import Header
from megatron_runtime.wire.request_messages import (
    Abort,
    Dispatch,
    EvictedBlocks,
    Final,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
)

__all__ = [
    "Abort",
    "Control",
    "ControlAck",
    "ControlCommit",
    "ControlMessage",
    "Disconnect",
    "Dispatch",
    "EngineOutcome",
    "EngineStatus",
    "Error",
    "EvictedBlocks",
    "Final",
    "Frames",
    "Heartbeat",
    "Hello",
    "HelloAck",
    "KeyReport",
    "MalformedMessageError",
    "Message",
    "Operation",
    "Partial",
    "PartialEntry",
    "Plain",
    "RequestMeta",
    "Status",
    "StatusReply",
    "Submit",
    "Tokens",
    "block_hashes_from_bytes",
    "decode",
    "pack",
    "tokens_from_bytes",
    "tokens_to_bytes",
    "unpack",
]


@dataclass(frozen=True, slots=True)
class Plain:
    """A message of the plain protocol, as its list; `[]` is the empty frame by which a plain engine registers."""

    items: list[Any]


Message: TypeAlias = ControlMessage | Submit | Dispatch | Partial | Final | Abort | EvictedBlocks | Plain


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
    reader = request_messages.DECODERS.get(number)
    if reader is not None:
        return reader(items, frames)
    if number in control_messages.HEADERS:
        return control_messages.decode_control(number, items)
    if number >= Header.HELLO:
        raise MalformedMessageError(f"unknown header {number}")
    return Plain(items)
