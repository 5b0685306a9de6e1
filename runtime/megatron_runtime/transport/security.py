"""CURVE keys and their roles. Each port is for one role, and a peer must hold a key of this role.

A key directory has Z85 text files: `ROLE.pub` for each role, and `ROLE.key` for the role that this process holds. ROLE
is `server` (the coordinator), `engine`, `client` or `admin`. `trainer.pub` and `trainer.key` are optional. They belong
to a trainer, which publishes weights and may send some of the verbs to the admin port. During a rotation a file has two
keys, one on each line. A port accepts both keys. A peer alternates between the two public keys of the server. A process
uses the first line of its own key files.
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_runtime.protocol.headers import Role

logger = logging.getLogger(__name__)

TRAINER = "trainer"
"""File name of a trainer's keys. Trainers have no port of their own."""
Z85_KEY_LENGTH = 40
_Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_Z85 = b"0123456789" + _LETTERS + _LETTERS.upper() + b".-:+=^!/*?&<>()[]{}@%$#"
_BASE85 = b"0123456789" + _LETTERS.upper() + _LETTERS + b"!#$%&()*+-;<=>?@^_`{|}~"
"""The digits of Z85 (ZeroMQ RFC 32), and the digits of the standard library's Base85. Both encodings are otherwise the
same.
"""


class KeyFileError(ValueError):
    """A key file is missing or not Z85 text. The message names the file and the remedy."""


def key_text(key: bytes) -> bytes:
    """Return the Z85 text of a key of 32 bytes."""
    return base64.b85encode(key).translate(bytes.maketrans(_BASE85, _Z85))


def key_bytes(text: bytes) -> bytes:
    """Return the 32 bytes of a key in Z85 text. Raises ValueError if the text is not a key."""
    if not _Z85_KEY.fullmatch(text):
        raise ValueError(f"key of {len(text)} characters: want {Z85_KEY_LENGTH} characters of Z85")
    return base64.b85decode(text.translate(bytes.maketrans(_Z85, _BASE85)))


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret key, as Z85 text."""

    public: bytes
    secret: bytes

    @classmethod
    def generate(cls) -> KeyPair:
        return cls.of_secret(key_text(secrets.token_bytes(32)))

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        from nacl import bindings  # imported only if keys are used, as in curve.py

        return cls(key_text(bindings.crypto_scalarmult_base(key_bytes(secret))), secret)


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """The keys of a client, engine or admin: its own key pair, and the public keys of the coordinator.

    source: the directory of the key files, the name of this side's files and the name of the coordinator's file. Used
            by refreshed(). None for keys without files.
    """

    own: KeyPair
    server_public: bytes
    other_server_publics: tuple[bytes, ...] = ()
    source: tuple[Path, str, str] | None = None

    @classmethod
    def load(cls, directory: Path, role: Role | str, *, server: str = "server") -> PeerKeys:
        """Return the keys in a directory.

        role:   role of this process, or TRAINER.
        server: file name of the other side's public keys: "server" for the coordinator, or TRAINER.

        Raises KeyFileError if a file is missing or invalid.
        """
        name = role if isinstance(role, str) else _file_name(role)
        own = _load_pair(directory, name)
        first, *others = _read_keys(directory / f"{server}.pub")
        return cls(own, first, tuple(others), (directory, name, server))

    def stamp(self) -> tuple[int, int] | None:
        """Return a value that changes when the file of this side's key pair changes.

        Returns None for keys without files.
        """
        if self.source is None:
            return None
        directory, name, _ = self.source
        return _stamp(directory / f"{name}.key")

    def refreshed(self) -> PeerKeys:
        """Return the keys that the files now contain. If the files cannot be read, return this object."""
        if self.source is None:
            return self
        try:
            directory, name, server = self.source
            return PeerKeys.load(directory, name, server=server)
        except KeyFileError as error:
            logger.warning("keeping the keys in use: %s", error)
            return self

    def for_try(self, number: int) -> PeerKeys:
        """Return the keys for attempt `number`. Successive attempts alternate between the coordinator's public keys."""
        servers = (self.server_public, *self.other_server_publics)
        return replace(self, server_public=servers[number % len(servers)])


class Gatekeeper:
    """The coordinator's own key pair and, for each role, the public keys of peers that may connect to the role's port.

    own:     the key pair, which stays the same until the process ends.
    allowed: public keys by role. changed() reads them again, but does not check existing connections again.
    servers: the public keys of coordinators, including this one. changed() reads them again.
    trainers: the public keys of trainers, which may send some messages to the admin port. changed() reads them again.
    """

    def __init__(self, directory: Path) -> None:
        """Read the key files in `directory`. Raises KeyFileError."""
        self._directory = directory
        publics = (directory / f"{name}.pub" for name in ("server", *map(_file_name, Role), TRAINER))
        self._files = [directory / "server.key", *publics]
        self._stamps = [_stamp(file) for file in self._files]
        self.own, self.allowed, self.servers, self.trainers = self._load()

    def admits(self, role: Role, key: bytes) -> bool:
        return key in self.allowed[role]

    def changed(self) -> bool:
        """Read changed key files again, and return whether `allowed` changed. Files that cannot be read are ignored."""
        stamps = [_stamp(file) for file in self._files]
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            own, allowed, self.servers, trainers = self._load()
        except KeyFileError as error:
            logger.warning("keeping the keys in use: %s", error)
            return False
        if own != self.own:
            logger.warning("%s: the server's own key changed; it is used after the next start", self._directory)
        changed = (allowed, trainers) != (self.allowed, self.trainers)
        self.allowed, self.trainers = allowed, trainers
        return changed

    def _load(self) -> tuple[KeyPair, dict[Role, frozenset[bytes]], tuple[bytes, ...], frozenset[bytes]]:
        allowed = {role: frozenset(_read_keys(self._directory / f"{_file_name(role)}.pub")) for role in Role}
        servers = tuple(_read_keys(self._directory / "server.pub"))
        trainer = self._directory / f"{TRAINER}.pub"
        trainers = frozenset(_read_keys(trainer) if trainer.exists() else ())
        return _load_pair(self._directory, "server"), allowed, servers, trainers


def public_keys(directory: Path, role: Role) -> frozenset[bytes]:
    """Return the public keys of a role that the files in `directory` now contain. Raises KeyFileError."""
    return frozenset(_read_keys(directory / f"{_file_name(role)}.pub"))


def generate_key_files(*, roles: tuple[str, ...] = ("server", "engine", "client", "admin")) -> dict[str, str]:
    """Return new key pairs of the roles, as `{file name: Z85 text}`."""
    files = {}
    for role in roles:
        pair = KeyPair.generate()
        files[f"{role}.pub"] = pair.public.decode()
        files[f"{role}.key"] = pair.secret.decode()
    return files


def _file_name(role: Role) -> str:
    return role.name.lower()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file changes, or None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read_keys(path: Path) -> list[bytes]:
    try:
        keys = path.read_bytes().split()
    except OSError as error:
        raise KeyFileError(
            f"key file {path}: {error.strerror}. Mount the keys Secret there, or leave --keys-dir out"
        ) from error
    if not keys or not all(_Z85_KEY.fullmatch(key) for key in keys):
        raise KeyFileError(f"key file {path}: want one Z85 key of {Z85_KEY_LENGTH} characters a line")
    return keys


def _load_pair(directory: Path, name: str) -> KeyPair:
    return KeyPair.of_secret(_read_keys(directory / f"{name}.key")[0])
