"""The client's part of CURVE, after RFC 26, with optional protocol errors for tests."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from nacl import bindings as nacl
from zmq.utils import z85

from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import COMMAND, MORE


@dataclass
class CurveClient:
    """Usage: hello(), initiate(WELCOME), ready(READY), then message() and open()."""

    keys: PeerKeys
    server_key: bytes = b""
    vouch_for: bytes = b""
    """Another short-term key than the one of this connection."""
    nonce: int = 0
    _pair: tuple[bytes, bytes] = field(default_factory=nacl.crypto_box_keypair)
    _shared: bytes = b""

    def __post_init__(self) -> None:
        self.server_key = self.server_key or z85.decode(self.keys.server_public)

    def _next(self) -> bytes:
        self.nonce += 1
        return self.nonce.to_bytes(8, "big")

    def hello(self) -> bytes:
        public, secret = self._pair
        nonce = self._next()
        box = nacl.crypto_box(bytes(64), b"CurveZMQHELLO---" + nonce, self.server_key, secret)
        return frames.command(b"HELLO", b"\x01\x00" + bytes(72) + public + nonce + box)

    def initiate(self, welcome: bytes) -> bytes:
        public, secret = self._pair
        body = welcome[len(b"\x07WELCOME") :]
        opened = nacl.crypto_box_open(body[16:], b"WELCOME-" + body[:16], self.server_key, secret)
        server_short, cookie = opened[:32], opened[32:]
        self._shared = nacl.crypto_box_beforenm(server_short, secret)
        own_public, own_secret = z85.decode(self.keys.own.public), z85.decode(self.keys.own.secret)
        vouch_nonce = secrets.token_bytes(16)
        vouched = (self.vouch_for or public) + self.server_key
        vouch = nacl.crypto_box(vouched, b"VOUCH---" + vouch_nonce, server_short, own_secret)
        content = own_public + vouch_nonce + vouch + frames.properties([(b"Socket-Type", b"DEALER")])
        nonce = self._next()
        box = nacl.crypto_box_afternm(content, b"CurveZMQINITIATE" + nonce, self._shared)
        return frames.command(b"INITIATE", cookie + nonce + box)

    def ready(self, command: bytes) -> dict[bytes, bytes]:
        nonce, box = command[6:14], command[14:]
        return frames.read_properties(nacl.crypto_box_open_afternm(box, b"CurveZMQREADY---" + nonce, self._shared))

    def message(self, body: bytes, *, more: bool = False) -> bytes:
        """Return the encrypted frame of a message."""
        nonce = self._next()
        box = nacl.crypto_box_afternm(bytes((more,)) + body, b"CurveZMQMESSAGEC" + nonce, self._shared)
        return frames.frame(0, b"\x07MESSAGE" + nonce + box)

    def open(self, body: bytes) -> tuple[int, bytes]:
        """Return flags and body of an encrypted MESSAGE."""
        nonce = body[8:16]
        content = nacl.crypto_box_open_afternm(body[16:], b"CurveZMQMESSAGES" + nonce, self._shared)
        return (MORE if content[0] & 1 else 0) | (COMMAND if content[0] & 2 else 0), content[1:]
