"""ZMTP as bytes: greeting, frames, commands and their properties. No sockets, no state."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: another one follows; its size has eight bytes, not one; it is a command."""
GREETING_BYTES = 64
LONG_HEADER_BYTES = 9

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x01"
_LONG_HEADER = struct.Struct(">BQ")
_LENGTH = struct.Struct(">I")
_PING_NAME = b"\x04PING"
_TIME_TO_LIVE_BYTES = 2
PING = _PING_NAME + bytes(_TIME_TO_LIVE_BYTES)
"""The body of the command that asks for a PONG. How long the peer waits for words of ours is left to it."""


class ViolationError(ValueError):
    """The peer does not keep to the protocol: its connection ends."""


def greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    return b"".join((_SIGNATURE, _VERSION, mechanism.ljust(20, b"\0"), bytes((as_server,)), bytes(31)))


def check_greeting(data: bytes, mechanism: bytes) -> None:
    """Raises ViolationError unless the peer speaks version 3 and the same security mechanism."""
    if data[0] != 0xFF or not data[9] & 1 or data[10] < 3:
        raise ViolationError("it does not speak ZMTP 3")
    if data[12:32] != mechanism.ljust(20, b"\0"):
        raise ViolationError(f"its security mechanism is not {mechanism.decode()}")


def frame(flags: int, body: bytes) -> bytes:
    size = len(body)
    if size > 255:
        return _LONG_HEADER.pack(flags | LONG, size) + body
    return bytes((flags, size)) + body


def message(frames: Sequence[bytes]) -> bytes:
    """A whole message without a security mechanism."""
    last = len(frames) - 1
    return b"".join(frame(MORE if number < last else 0, body) for number, body in enumerate(frames))


def command(name: bytes, body: bytes = b"") -> bytes:
    """The body of a command's frame."""
    return b"".join((bytes((len(name),)), name, body))


def pong(body: bytes) -> bytes | None:
    """The answer to the body of a command; None to one that is not PING."""
    if not body.startswith(_PING_NAME):
        return None
    return command(b"PONG", body[len(_PING_NAME) + _TIME_TO_LIVE_BYTES :])


def error(reason: bytes) -> bytes:
    return command(b"ERROR", bytes((len(reason),)) + reason)


def properties(values: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"".join((bytes((len(name),)), name, _LENGTH.pack(len(value)), value)) for name, value in values)


def read_properties(data: bytes) -> dict[bytes, bytes]:
    """Names in lower case: they are the same in either.

    Raises ViolationError.
    """
    found = {}
    position = 0
    while position < len(data):
        name_end = position + 1 + data[position]
        value_begin = name_end + _LENGTH.size
        if value_begin > len(data):
            raise ViolationError("a property is cut short")
        value_end = value_begin + _LENGTH.unpack_from(data, name_end)[0]
        if value_end > len(data):
            raise ViolationError("a property is cut short")
        found[data[position + 1 : name_end].lower()] = data[value_begin:value_end]
        position = value_end
    return found
