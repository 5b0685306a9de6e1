"""How two peers of ZMTP meet, and the mechanism without keys.

Bytes in, bytes out: `receive` takes one command of the peer and gives the one to answer with. When it is over,
`properties` has what the peer said of itself; from then on `box`, where there is one, closes and opens every frame.
"""

from __future__ import annotations

from typing import Protocol

from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import ViolationError


class NotAdmittedError(ViolationError):
    """The peer has no key, or not one that opens this port."""


class Box(Protocol):
    """The encryption of one connection."""

    def close(self, flags: int, body: bytes) -> bytes:
        """The frame to send for one with these flags."""

    def open(self, body: bytes) -> tuple[int, bytes]:
        """Flags and body of the frame that a received one carries. Raises ViolationError."""


class Handshake(Protocol):
    """One side's part. key: the Z85 public key that the peer has proved to hold; b"" without keys.

    as_server: what the greeting says.
    """

    mechanism: bytes
    as_server: bool
    key: bytes
    properties: dict[bytes, bytes] | None
    box: Box | None

    def begin(self) -> bytes:
        """The first command; b"" where the peer begins."""

    def receive(self, command: bytes) -> bytes:
        """The answer to the peer's next command; b"" where there is none. Raises ViolationError."""


class NullHandshake:
    """Each says READY, and what it is. begins: before the peer has."""

    def __init__(self, own_properties: bytes, *, begins: bool = False) -> None:
        self.mechanism = b"NULL"
        self.as_server = False
        self.key = b""
        self.box: Box | None = None
        self.properties: dict[bytes, bytes] | None = None
        self._own = own_properties
        self._begins = begins

    def begin(self) -> bytes:
        return frames.command(b"READY", self._own) if self._begins else b""

    def receive(self, command: bytes) -> bytes:
        head = frames.command(b"READY")
        if not command.startswith(head):
            raise ViolationError("it does not begin with READY")
        self.properties = frames.read_properties(command[len(head) :])
        return b"" if self._begins else frames.command(b"READY", self._own)
