"""CURVE (RFC 26). Both sides prove that they hold their keys, and the keys of the connection encrypt every frame.

libsodium does the cryptography, through PyNaCl. This module encodes the messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from nacl import bindings as nacl
from nacl.exceptions import CryptoError

from megatron_runtime.transport.security import key_bytes, key_text
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.frames import COMMAND, MORE, ViolationError
from megatron_runtime.transport.zmtp.handshake import Handshake, NotAdmittedError

_KEY_BYTES = 32
_COOKIE_BYTES = 96
_NONCE_BYTES = 8
_HELLO_BYTES = 200
_HELLO_KEY = slice(80, 112)
_INITIATE_HEAD = b"\x08INITIATE"
_VOUCH_BYTES = 16 + 80
_MESSAGE_HEAD = b"\x07MESSAGE"
_MESSAGE_BEGIN = len(_MESSAGE_HEAD) + _NONCE_BYTES
_FROM_SERVER, _FROM_CLIENT = b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"
_INNER_MORE, _INNER_COMMAND = 1, 2


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The key pair of a port, as raw bytes. admits: returns whether a peer with this Z85 public key may connect."""

    public: bytes
    secret: bytes
    admits: Callable[[bytes], bool]

    @classmethod
    def from_z85(cls, secret: bytes, admits: Callable[[bytes], bool]) -> CurveServer:
        raw = key_bytes(secret)
        return cls(nacl.crypto_scalarmult_base(raw), raw, admits)


class CurveHandshake(Handshake):
    """The server side of a handshake. It answers HELLO with WELCOME, and INITIATE with READY.

    The cookie in WELCOME is meant for servers without state before INITIATE. This server keeps its state with the
    connection, so the cookie is random, and INITIATE must return it.
    """

    mechanism = b"CURVE"
    as_server = True

    def __init__(self, server: CurveServer, own_properties: bytes) -> None:
        super().__init__(own_properties)
        self._server = server
        self._cookie = b""
        self._client = b""
        self._secret = b""

    def receive(self, command: bytes) -> bytes:
        try:
            return self._welcome(command) if not self._cookie else self._ready(command)
        except CryptoError as error:
            raise NotAdmittedError(f"its keys do not match ours: {error}") from error

    def _welcome(self, hello: bytes) -> bytes:
        if len(hello) != _HELLO_BYTES or not hello.startswith(b"\x05HELLO\x01\x00"):
            raise ViolationError("the first command is not HELLO of CURVE 1.0")
        self._client, nonce, box = hello[_HELLO_KEY], hello[112:120], hello[120:]
        long_term = nacl.crypto_box_beforenm(self._client, self._server.secret)
        if nacl.crypto_box_open_afternm(box, b"CurveZMQHELLO---" + nonce, long_term) != bytes(64):
            raise ViolationError("the box of HELLO is not zero")
        public, self._secret = nacl.crypto_box_keypair()
        self._cookie = secrets.token_bytes(_COOKIE_BYTES)
        nonce = secrets.token_bytes(16)
        box = nacl.crypto_box_afternm(public + self._cookie, b"WELCOME-" + nonce, long_term)
        return frames.command(b"WELCOME", nonce + box)

    def _ready(self, initiate: bytes) -> bytes:
        begin = len(_INITIATE_HEAD) + _COOKIE_BYTES
        nonce, box = initiate[begin : begin + _NONCE_BYTES], initiate[begin + _NONCE_BYTES :]
        if not initiate.startswith(_INITIATE_HEAD + self._cookie) or len(nonce) != _NONCE_BYTES:
            raise ViolationError("INITIATE does not return the cookie")
        shared = nacl.crypto_box_beforenm(self._client, self._secret)
        content = nacl.crypto_box_open_afternm(box, b"CurveZMQINITIATE" + nonce, shared)
        if len(content) < _KEY_BYTES + _VOUCH_BYTES:
            raise ViolationError("INITIATE is too short")
        long_term, vouch = content[:_KEY_BYTES], content[_KEY_BYTES : _KEY_BYTES + _VOUCH_BYTES]
        # The vouch proves to this server that the owner of the long-term key also owns the short-term key.
        vouched = nacl.crypto_box_open(vouch[16:], b"VOUCH---" + vouch[:16], long_term, self._secret)
        if not secrets.compare_digest(vouched, self._client + self._server.public):
            raise NotAdmittedError("the vouch is not for the key of HELLO")
        key = key_text(long_term)
        if not self._server.admits(key):
            raise NotAdmittedError("its key does not open this port")
        self._secret = b""  # erase secrets that are no longer needed
        self.key = key
        self.properties = frames.read_properties(content[_KEY_BYTES + _VOUCH_BYTES :])
        box_of_both = CurveBox(shared, last_received=int.from_bytes(nonce, "big"))
        self.box = box_of_both
        ready = box_of_both.next_nonce()
        return frames.command(b"READY", ready + nacl.crypto_box_afternm(self._own, b"CurveZMQREADY---" + ready, shared))


class CurveClientHandshake(Handshake):
    """The client side of a handshake. Keys are Z85 text. The peer must hold the secret key of `server_public`."""

    mechanism = b"CURVE"

    def __init__(self, public: bytes, secret: bytes, server_public: bytes, own_properties: bytes) -> None:
        super().__init__(own_properties)
        self.key = server_public
        self._public, self._secret = key_bytes(public), key_bytes(secret)
        self._server = key_bytes(server_public)
        self._short_public, self._short_secret = nacl.crypto_box_keypair()
        self._shared = b""

    def begin(self) -> bytes:
        nonce = (1).to_bytes(_NONCE_BYTES, "big")
        box = nacl.crypto_box(bytes(64), b"CurveZMQHELLO---" + nonce, self._server, self._short_secret)
        return frames.command(b"HELLO", b"\x01\x00" + bytes(72) + self._short_public + nonce + box)

    def receive(self, command: bytes) -> bytes:
        try:
            return self._take_ready(command) if self._shared else self._initiate(command)
        except CryptoError as error:
            raise ViolationError(f"the server does not hold the expected key: {error}") from error

    def _initiate(self, welcome: bytes) -> bytes:
        head = b"\x07WELCOME"
        nonce, box = welcome[len(head) : len(head) + 16], welcome[len(head) + 16 :]
        if not welcome.startswith(head) or len(nonce) != 16:
            raise ViolationError(f"the answer to HELLO is not WELCOME but {welcome[:16]!r}")
        opened = nacl.crypto_box_open(box, b"WELCOME-" + nonce, self._server, self._short_secret)
        if len(opened) != _KEY_BYTES + _COOKIE_BYTES:
            raise ViolationError("WELCOME has the wrong length")
        server_short, cookie = opened[:_KEY_BYTES], opened[_KEY_BYTES:]
        self._shared = nacl.crypto_box_beforenm(server_short, self._short_secret)
        vouch_nonce = secrets.token_bytes(16)
        vouched = self._short_public + self._server
        vouch = nacl.crypto_box(vouched, b"VOUCH---" + vouch_nonce, server_short, self._secret)
        number = (2).to_bytes(_NONCE_BYTES, "big")
        content = self._public + vouch_nonce + vouch + self._own
        return frames.command(
            b"INITIATE",
            cookie + number + nacl.crypto_box_afternm(content, b"CurveZMQINITIATE" + number, self._shared),
        )

    def _take_ready(self, command: bytes) -> bytes:
        head = b"\x05READY"
        nonce, box = command[len(head) : len(head) + _NONCE_BYTES], command[len(head) + _NONCE_BYTES :]
        if not command.startswith(head) or len(nonce) != _NONCE_BYTES:
            raise ViolationError(f"the answer to INITIATE is not READY but {command[:16]!r}")
        opened = nacl.crypto_box_open_afternm(box, b"CurveZMQREADY---" + nonce, self._shared)
        self.properties = frames.read_properties(opened)
        self._secret = self._short_secret = b""  # erase secrets that are no longer needed
        self.box = CurveBox(self._shared, sent=2, last_received=int.from_bytes(nonce, "big"), as_server=False)
        return b""


class CurveBox:
    """Encrypts and decrypts frames with the keys of one connection.

    Nonces must increase, so a repeated nonce is rejected.

    sent, last_received: numbers of the last nonces that this side sent and received in the handshake.
    """

    def __init__(self, shared: bytes, *, last_received: int, sent: int = 0, as_server: bool = True) -> None:
        self._shared = shared
        self._sent = sent
        self._received = last_received
        self._mine, self._peers = (_FROM_SERVER, _FROM_CLIENT) if as_server else (_FROM_CLIENT, _FROM_SERVER)

    def next_nonce(self) -> bytes:
        self._sent += 1
        return self._sent.to_bytes(_NONCE_BYTES, "big")

    def close(self, flags: int, body: bytes) -> bytes:
        """Encrypt a frame with these flags and this body. Return the frame to send."""
        inner = (_INNER_MORE if flags & MORE else 0) | (_INNER_COMMAND if flags & COMMAND else 0)
        nonce = self.next_nonce()
        box = nacl.crypto_box_afternm(bytes((inner,)) + body, self._mine + nonce, self._shared)
        return frames.frame(0, b"".join((_MESSAGE_HEAD, nonce, box)))

    def open(self, body: bytes) -> tuple[int, bytes]:
        """Decrypt the body of a frame. Return the flags and the body of the frame that was encrypted.

        Raises ViolationError if the body is not a MESSAGE of this connection, or its nonce is not new.
        """
        nonce = body[len(_MESSAGE_HEAD) : _MESSAGE_BEGIN]
        number = int.from_bytes(nonce, "big")
        if not body.startswith(_MESSAGE_HEAD) or number <= self._received:
            raise ViolationError("a frame is not MESSAGE, or has an old nonce")
        try:
            content = nacl.crypto_box_open_afternm(body[_MESSAGE_BEGIN:], self._peers + nonce, self._shared)
        except CryptoError as error:
            raise ViolationError("a MESSAGE is not encrypted with the keys of this connection") from error
        if not content:
            raise ViolationError("a MESSAGE is empty")
        self._received = number
        inner = content[0]
        return (MORE if inner & _INNER_MORE else 0) | (COMMAND if inner & _INNER_COMMAND else 0), content[1:]
