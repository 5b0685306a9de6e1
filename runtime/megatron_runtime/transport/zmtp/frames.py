"""Encoding of ZMTP greetings, frames, commands and properties. Pure functions."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame. MORE means that another frame of the message follows, LONG that the size has eight bytes instead of
one, COMMAND that the frame is a command.
"""
GREETING_BYTES = 64
LONG_HEADER_BYTES = 9

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION = b"\x03\x01"
_LONG_HEADER = struct.Struct(">BQ")
_LENGTH = struct.Struct(">I")
_PING_NAME = b"\x04PING"
_TIME_TO_LIVE_BYTES = 2
PING = _PING_NAME + bytes(_TIME_TO_LIVE_BYTES)
"""The body of PING, with a time to live of 0. The peer itself then decides how long it waits for the next frame."""


class ViolationError(ValueError):
    """The peer violates the protocol, so its connection is closed."""


def greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    return b"".join((_SIGNATURE, _VERSION, mechanism.ljust(20, b"\0"), bytes((as_server,)), bytes(31)))


def check_greeting(data: bytes, mechanism: bytes) -> None:
    """Raise ViolationError unless the greeting `data` has version 3 of ZMTP and the security mechanism `mechanism`."""
    if data[0] != 0xFF or not data[9] & 1 or data[10] < 3:
        raise ViolationError("the greeting is not of ZMTP 3")
    if data[12:32] != mechanism.ljust(20, b"\0"):
        raise ViolationError(f"the security mechanism is not {mechanism.decode()}")


def frame(flags: int, body: bytes) -> bytes:
    size = len(body)
    if size > 255:
        return _LONG_HEADER.pack(flags | LONG, size) + body
    return bytes((flags, size)) + body


def message(frames: Sequence[bytes]) -> bytes:
    """Return the bytes of an unencrypted message, with all its frames."""
    last = len(frames) - 1
    return b"".join(frame(MORE if number < last else 0, body) for number, body in enumerate(frames))


def command(name: bytes, body: bytes = b"") -> bytes:
    """Return the body of a frame that contains a command."""
    return b"".join((bytes((len(name),)), name, body))


def pong(body: bytes) -> bytes | None:
    """Return the body of the answer to a PING, or None if `body` is another command."""
    if not body.startswith(_PING_NAME):
        return None
    return command(b"PONG", body[len(_PING_NAME) + _TIME_TO_LIVE_BYTES :])


def error(reason: bytes) -> bytes:
    return command(b"ERROR", bytes((len(reason),)) + reason)


def properties(values: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"".join((bytes((len(name),)), name, _LENGTH.pack(len(value)), value)) for name, value in values)


def read_properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties by name. Names are converted to lower case. Raises ViolationError."""
    properties = {}
    position = 0
    while position < len(data):
        name_end = position + 1 + data[position]
        value_begin = name_end + _LENGTH.size
        if value_begin > len(data):
            raise ViolationError("a property is truncated")
        value_end = value_begin + _LENGTH.unpack_from(data, name_end)[0]
        if value_end > len(data):
            raise ViolationError("a property is truncated")
        properties[data[position + 1 : name_end].lower()] = data[value_begin:value_end]
        position = value_end
    return properties
