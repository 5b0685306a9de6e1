"""CURVE keys and their roles. Whoever connects must hold the key of the port's role; the port is the role.

A key directory holds Z85 text files `ROLE.pub` and, for the holder, `ROLE.key`; ROLE is `server` (the coordinator),
`engine`, `client` or `admin`. A file may hold two keys, one a line: the second generation during a rotation. A port
admits either; a peer tries one key of the server after the other. Of its own pair a process uses the first line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.utils import z85

from megatron_runtime.wire.event_socket import EventSocket
from megatron_runtime.wire.headers import Role

logger = logging.getLogger(__name__)

Z85_KEY_LENGTH = 40
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_CLOSING_SECONDS = 3.0

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


class KeyFileError(ValueError):
    """A key file is missing or not Z85 text. Names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes

    @classmethod
    def generate(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public, secret)


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """What a client, engine or admin needs: its own pair and the coordinator's public key, or keys in a rotation.

    source: the directory and role that refreshed() reads again; None for keys that came from elsewhere.
    """

    own: KeyPair
    server_public: bytes
    other_server_publics: tuple[bytes, ...] = ()
    source: tuple[Path, Role] | None = None

    @classmethod
    def load(cls, directory: Path, role: Role) -> PeerKeys:
        own = _load_pair(directory, role.name.lower())
        first, *others = _read_keys(directory / "server.pub")
        return cls(own, first, tuple(others), (directory, role))

    def stamp(self) -> tuple[int, int] | None:
        """Changes whenever the file of its own pair does; None for keys that came from elsewhere."""
        if self.source is None:
            return None
        directory, role = self.source
        try:
            status = (directory / f"{role.name.lower()}.key").stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def refreshed(self) -> PeerKeys:
        """The keys of this moment: those that the files hold now, or the same where they cannot be read."""
        if self.source is None:
            return self
        try:
            return PeerKeys.load(*self.source)
        except KeyFileError as error:
            logger.warning("the keys in use stay: %s", error)
            return self

    def apply(self, socket: zmq.Socket[bytes], *, attempt: int = 0) -> None:
        """Set before connect(). `attempt` counts the connections made: each tries the next key of the server."""
        servers = (self.server_public, *self.other_server_publics)
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.curve_serverkey = servers[attempt % len(servers)]


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What the coordinator needs: its own pair and, for each role, the public keys that may connect to its port."""

    own: KeyPair
    allowed: dict[Role, frozenset[bytes]]

    @classmethod
    def load(cls, directory: Path) -> ServerKeys:
        allowed = {role: frozenset(_read_keys(directory / f"{role.name.lower()}.pub")) for role in Role}
        return cls(_load_pair(directory, "server"), allowed)

    def apply(self, socket: zmq.Socket[bytes], role: Role) -> None:
        """Set before bind()."""
        socket.curve_server = True
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.zap_domain = domain_of(role)


class KeyDirectory:
    """The coordinator's key files, read again when they change. A mounted Secret changes by a swap of links."""

    def __init__(self, path: Path) -> None:
        self.keys = ServerKeys.load(path)
        self._path = path
        self._seen = self._signature()

    def changed(self) -> bool:
        """Whether `keys` are other ones now. Files that cannot be read change nothing until they can."""
        signature = self._signature()
        if signature == self._seen:
            return False
        self._seen = signature
        try:
            keys = ServerKeys.load(self._path)
        except KeyFileError as error:
            logger.warning("the keys in use stay: %s", error)
            return False
        if keys.own != self.keys.own:
            logger.warning("%s: the server's own key changed; it is used from the next start on", self._path)
        changed, self.keys = keys != self.keys, keys
        return changed

    def _signature(self) -> tuple[tuple[str, int, int], ...]:
        names = ["server.key", *(f"{role.name.lower()}.pub" for role in Role)]
        found = []
        for name in names:
            try:
                status = (self._path / name).stat()
            except OSError:
                continue
            found.append((name, status.st_ino, status.st_mtime_ns))
        return tuple(found)


def domain_of(role: Role) -> bytes:
    """The ZAP domain of a role's port."""
    return role.name.lower().encode()


_ROLES = {domain_of(role): role for role in Role}


class Gatekeeper:
    """The ZAP handler of one context (ZeroMQ RFC 27): admits to each domain the keys of its role, counts the refused.

    Start it before any socket binds: a connection made without a handler would be let in unchecked. Stop it after the
    sockets it guards, by serve_until_closed(): a handshake that waits for a handler that is gone keeps the context
    from ending.
    """

    def __init__(self, context: Context, keys: ServerKeys) -> None:
        self.refused = 0
        self.keys = keys
        """May be replaced at any time; who is connected already is not asked again."""
        self._context = context
        self._socket: EventSocket | None = None
        self._monitors: list[zmq.Socket[bytes]] = []

    def start(self) -> None:
        socket = self._context.socket(zmq.REP)
        socket.bind(_ZAP_ENDPOINT)
        self._socket = EventSocket(socket, self._answer)
        self._socket.start()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Serve handshakes of `socket` until it is closed for good."""
        endpoint = f"inproc://closed-{len(self._monitors)}"
        socket.monitor(endpoint, zmq.EVENT_MONITOR_STOPPED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(endpoint)
        self._monitors.append(monitor)

    def admits(self, role: Role, key: bytes) -> bool:
        return key in self.keys.allowed[role]

    def serve_until_closed(self) -> None:
        """Refuse handshakes while the guarded sockets close, which their owner has begun; then end. Blocks."""
        if self._socket is None:
            return
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        waiting = set(self._monitors)
        until = time.monotonic() + _CLOSING_SECONDS
        while waiting and (left := until - time.monotonic()) > 0:
            for ready, _ in poller.poll(int(left * 1000) + 1):
                frames = ready.recv_multipart()
                if ready is self._socket.socket:
                    self._refuse(frames)
                else:
                    waiting.discard(ready)
                    poller.unregister(ready)
        if waiting:
            logger.warning("%d sockets are not closed after %g s", len(waiting), _CLOSING_SECONDS)
        for monitor in self._monitors:
            monitor.close(linger=0)
        self._monitors.clear()
        self._socket.close()
        self._socket = None

    def _answer(self, frames: list[bytes]) -> None:
        match frames:
            case [version, request, domain, _address, _identity, b"CURVE", key] if version == b"1.0":
                encoded = z85.encode(key)
                role = _ROLES.get(domain)
                if role is not None and self.admits(role, encoded):
                    self._reply(request, b"200", b"OK", encoded)
                    return
        self._refuse(frames)

    def _refuse(self, frames: Sequence[bytes]) -> None:
        self.refused += 1
        self._reply(frames[1] if len(frames) > 1 else b"", b"400", b"this key does not open this port", b"")

    def _reply(self, request: bytes, status: bytes, text: bytes, user: bytes) -> None:
        assert self._socket is not None
        self._socket.send([b"1.0", request, status, text, user, b""])


def generate_key_files(*, roles: tuple[str, ...] = ("server", "engine", "client", "admin")) -> dict[str, str]:
    """Fresh pairs as `{file name: Z85 text}`."""
    files = {}
    for role in roles:
        pair = KeyPair.generate()
        files[f"{role}.pub"] = pair.public.decode()
        files[f"{role}.key"] = pair.secret.decode()
    return files


def _read_keys(path: Path) -> list[bytes]:
    try:
        lines = path.read_text().split()
    except OSError as error:
        raise KeyFileError(
            f"key file {path}: {error.strerror}. Mount the keys Secret there, or leave --keys-dir out"
        ) from error
    keys = [line.encode() for line in lines]
    if not keys or any(len(key) != Z85_KEY_LENGTH for key in keys):
        raise KeyFileError(f"key file {path}: want one Z85 key of {Z85_KEY_LENGTH} characters a line")
    return keys


def _load_pair(directory: Path, name: str) -> KeyPair:
    secret = _read_keys(directory / f"{name}.key")[0]
    return KeyPair(zmq.curve_public(secret), secret)
