"""CURVE keys and their roles. Whoever connects must hold the key of the port's role; the port is the role.

A key directory holds Z85 text files `ROLE.pub` and, for the holder, `ROLE.key`; ROLE is `server` (the coordinator),
`engine`, `client` or `admin`. A file may hold two keys, one a line: the second generation during a rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_runtime.wire.headers import Role

Z85_KEY_LENGTH = 40


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
    """What a client, engine or admin needs: its own pair and the coordinator's public key."""

    own: KeyPair
    server_public: bytes

    @classmethod
    def load(cls, directory: Path, role: Role) -> PeerKeys:
        return cls(_load_pair(directory, role.name.lower()), _read_keys(directory / "server.pub")[0])

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set before connect()."""
        socket.curve_publickey = self.own.public
        socket.curve_secretkey = self.own.secret
        socket.curve_serverkey = self.server_public


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


def domain_of(role: Role) -> bytes:
    """The ZAP domain of a role's port."""
    return role.name.lower().encode()


class Gatekeeper:
    """The ZAP handler of one context: admits to each domain the keys of its role, and counts who is refused.

    Start it before any socket binds: a connection made without a handler would be let in unchecked.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self.refused = 0
        self._keys = keys
        self._authenticator = AsyncioAuthenticator(context)

    def start(self) -> None:
        self._authenticator.start()
        for role in Role:
            self._authenticator.configure_curve_callback(domain=domain_of(role).decode(), credentials_provider=self)

    def stop(self) -> None:
        self._authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator with a Z85 public key."""
        role = Role[domain.upper()]
        admitted = key in self._keys.allowed[role]
        self.refused += not admitted
        return admitted


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
