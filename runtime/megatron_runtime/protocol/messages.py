"""All messages of docs/protocol.md, and `decode`, which reads any of them.

A message is one frame, a list. That of a control message is `[header, map]`; those of the request path have bodies
that are bytes in bytes, so that a coordinator forwards them without parsing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron_runtime.protocol import control_messages, request_messages
from megatron_runtime.protocol.codec import (
    CONTROL,
    DETAILS,
    PARAMETERS,
    PLAIN,
    REQUEST,
    Frames,
    MalformedMessageError,
    Tokens,
    UnpackLimits,
    block_hashes_from_bytes,
    header_of,
    pack,
    shown,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
    unpack_request,
)
from megatron_runtime.protocol.control_messages import (
    ENGINE_FAILED,
    Control,
    ControlAck,
    ControlCommit,
    ControlMessage,
    Disconnect,
    EngineOutcome,
    EngineStatus,
    Error,
    FailedRequest,
    Heartbeat,
    Hello,
    HelloAck,
    KeyReport,
    Operation,
    Status,
    StatusReply,
)
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.request_messages import (
    Abort,
    Dispatch,
    EvictedBlocks,
    Final,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
    dispatch_frames,
)

__all__ = [
    "CONTROL",
    "DETAILS",
    "ENGINE_FAILED",
    "PARAMETERS",
    "PLAIN",
    "REQUEST",
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
    "FailedRequest",
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
    "UnpackLimits",
    "block_hashes_from_bytes",
    "decode",
    "dispatch_frames",
    "pack",
    "shown",
    "tokens_from_bytes",
    "tokens_to_bytes",
    "unpack",
]


@dataclass(frozen=True, slots=True)
class Plain:
    """A message of the plain protocol, as its list; `[]` is the empty frame by which a plain engine registers."""

    items: list[Any]


Message: TypeAlias = ControlMessage | Submit | Dispatch | Partial | Final | Abort | EvictedBlocks | Plain


def decode(frames: Sequence[bytes], *, plain: UnpackLimits = CONTROL) -> Message:
    """The message of `frames` (routing identity already taken off).

    plain: limits of messages of the Megatron protocol, on a port that serves it.

    Raises:
        MalformedMessageError: for anything that is not a message, and for nothing else.
    """
    if len(frames) != 1:
        raise MalformedMessageError(f"{len(frames)} frames: want one")
    frame = frames[0]
    if not frame:
        return Plain([])
    header = header_of(frame)
    if header in request_messages.DECODERS:
        items = unpack_request(frame)
    else:
        items = unpack(frame, CONTROL if header in control_messages.HEADERS else plain)
    if type(items) is not list or not items or type(items[0]) is not int:
        raise MalformedMessageError(f"frame {shown(items)}: want a list that begins with an integer header")
    number = items[0]
    reader = request_messages.DECODERS.get(number)
    if reader is not None:
        return reader(items)
    if number in control_messages.HEADERS:
        return control_messages.decode_control(number, items)
    if number >= Header.HELLO:
        raise MalformedMessageError(f"unknown header {number}")
    return Plain(items)
