"""The handshake of a connection, and the mechanism NULL, which uses no keys.

A handshake does no I/O. `receive` takes one command of the peer and returns the answer. After the handshake,
`properties` has the peer's properties, and `box`, unless it is None, encrypts and decrypts every frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import ViolationError


class NotAdmittedError(ViolationError):
    """The peer may not connect to this port, because it has no key or a key that the port does not accept."""


class Box(Protocol):
    """Encrypts and decrypts the frames of one connection."""

    def close(self, flags: int, body: bytes) -> bytes:
        """Encrypt a frame with these flags and this body. Return the frame to send."""

    def open(self, body: bytes) -> tuple[int, bytes]:
        """Decrypt the body of a frame. Return the flags and the body of the frame that was encrypted.

        Raises ViolationError if the body cannot be decrypted.
        """


class Handshake(ABC):
    """One side of a handshake.

    mechanism, as_server: fields of the greeting.
    key:        the Z85 public key whose secret key the peer has proved to hold; b"" without keys.
    properties: metadata of the peer; None until the handshake is over.
    """

    mechanism: bytes
    as_server = False

    def __init__(self, own_properties: bytes) -> None:
        self.key = b""
        self.properties: dict[bytes, bytes] | None = None
        self.box: Box | None = None
        self._own = own_properties

    def begin(self) -> bytes:
        """Return the first command of this side. Returns b"" if the peer sends the first command."""
        return b""

    @abstractmethod
    def receive(self, command: bytes) -> bytes:
        """Return the answer to the peer's command. Returns b"" if there is no answer. Raises ViolationError."""


class NullHandshake(Handshake):
    """The mechanism NULL, in which both sides send READY with their properties. begins: this side sends READY first."""

    mechanism = b"NULL"

    def __init__(self, own_properties: bytes, *, begins: bool = False) -> None:
        super().__init__(own_properties)
        self._begins = begins

    def begin(self) -> bytes:
        return frames.command(b"READY", self._own) if self._begins else b""

    def receive(self, command: bytes) -> bytes:
        head = frames.command(b"READY")
        if not command.startswith(head):
            raise ViolationError("the first command is not READY")
        self.properties = frames.read_properties(command[len(head) :])
        return b"" if self._begins else frames.command(b"READY", self._own)
