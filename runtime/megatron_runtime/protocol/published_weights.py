"""Weights that a trainer publishes: the reference that names them, their manifest, and the two messages that open a
session.

A rank of an engine connects with CURVE, to the trainer or to the same rank of another engine, and opens a session for
a reference. The answer contains the manifest and a token. With the token, the rank receives the tensors in blocks, over
a second connection to the same port, without keys. So the manifest has the SHA-256 of each block, and the reference has
the SHA-256 of the trainer's manifest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import MalformedMessageError, UnpackLimits, pack, unpack
from megatron_runtime.protocol.text import shown

TRAINER_PREFIX = "trainer://"
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per value, by the data types that a trainer may publish."""
STORED_TYPES = frozenset((*VALUE_BYTES, "uint8"))
"""Data types of manifests. Engines send packed matrices as bytes."""
DIGEST_BYTES = 32
MAX_SESSION_BYTES = 128
TOKEN_BYTES = 32
_BLOCK_VALUES = 1 << 20
_SOURCE = re.compile(r"trainer://(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):([0-9]{1,5})/([0-9]{1,16})-([0-9a-f]{64})")
_MANIFEST = UnpackLimits(elements=4_194_304, containers=524_288, depth=4, frame_bytes=limits.MAX_ENGINE_MESSAGE_BYTES)
_COPIES = "?copies="
_OPENING = UnpackLimits(elements=16, containers=2, depth=2, frame_bytes=limits.MAX_ENGINE_MESSAGE_BYTES)


class WeightsUnavailableError(OSError):
    """No engine or trainer answers, holds these weights, and sends the right bytes.

    The message names the remedy.
    """


def is_published(source: str | None) -> bool:
    """Return whether a source of weights names a trainer."""
    return source is not None and source.startswith(TRAINER_PREFIX)


def names_same_weights(source: str | None, other: str | None) -> bool:
    """Return whether two sources are equal, or name the same weights of a trainer at two addresses."""
    if source is None or other is None or not (is_published(source) and is_published(other)):
        return source == other
    one, another = (each.partition(_COPIES)[0].rpartition("/")[2] for each in (source, other))
    return one == another


@dataclass(frozen=True, slots=True)
class PublishedSource:
    """The reference `trainer://HOST:PORT/EPOCH-DIGEST`.

    digest: digest of the manifest, in hexadecimal digits.
    copies: addresses of the ranks of an engine that serves these weights, by rank. They are not part of the reference:
            an engine appends them for its ranks.
    """

    host: str
    port: int
    epoch: int
    digest: str
    copies: tuple[str, ...] = ()

    @classmethod
    def parse(cls, source: str) -> PublishedSource:
        """Return the parts of a reference. Raises ValueError."""
        reference, _, copies = source.partition(_COPIES)
        match = _SOURCE.fullmatch(reference)
        if match is None:
            raise ValueError(f"source {shown(source)}: want trainer://HOST:PORT/EPOCH-DIGEST, as publish() returns it")
        host, port, epoch, digest = match.groups()
        return cls(host, int(port), int(epoch), digest, tuple(copies.split(",")) if copies else ())

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def session(self) -> str:
        return f"{self.epoch}-{self.digest}"

    def __str__(self) -> str:
        return f"{TRAINER_PREFIX}{self.host}:{self.port}/{self.session}"


def with_copies(source: str, copies: Sequence[str]) -> str:
    """Return a reference with PublishedSource.copies."""
    return f"{source}{_COPIES}{','.join(copies)}" if copies else source


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """One tensor. From a trainer: a whole tensor, with the name and layout of transformers.

    dtype:   one of STORED_TYPES.
    digests: SHA-256 of all blocks, joined in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digests: bytes = b""

    @property
    def block_rows(self) -> int:
        """Number of rows of each block except the last: a multiple of eight, with about a million values."""
        return max(8, _BLOCK_VALUES // prod(self.shape[1:]) // 8 * 8)

    @property
    def num_blocks(self) -> int:
        return -(-self.shape[0] // self.block_rows)

    def rows(self, block: int) -> slice:
        """Return the rows of a block."""
        first = block * self.block_rows
        return slice(first, min(first + self.block_rows, self.shape[0]))

    def digest(self, block: int) -> bytes:
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """The tensors of one update."""

    epoch: int
    tensors: tuple[PublishedTensor, ...]

    def to_bytes(self) -> bytes:
        return pack(
            [
                self.epoch,
                [[tensor.name, list(tensor.shape), tensor.dtype, tensor.digests] for tensor in self.tensors],
            ]
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightsManifest:
        """Return the manifest that `data` encodes. Raises MalformedMessageError."""
        try:
            epoch, tensors = unpack(data, _MANIFEST)
            manifest = cls(epoch, tuple(_tensor(*items) for items in tensors))
        except (TypeError, ValueError) as error:
            raise MalformedMessageError(f"the manifest of weights cannot be read: {error}") from error
        if type(epoch) is not int or not 0 <= epoch <= limits.MAX_EPOCH:
            raise MalformedMessageError(f"the manifest of weights has epoch {shown(epoch)}")
        return manifest


def _tensor(name: Any, shape: Any, dtype: Any, digests: Any) -> PublishedTensor:
    is_shape = type(shape) is list and shape and all(type(size) is int and size > 0 for size in shape)
    if type(name) is not str or not is_shape or dtype not in STORED_TYPES or type(digests) is not bytes:
        raise ValueError(f"tensor {shown(name)} has shape {shown(shape)} and type {shown(dtype)}")
    tensor = PublishedTensor(name, tuple(shape), dtype, digests)
    if len(digests) != tensor.num_blocks * DIGEST_BYTES:
        raise ValueError(f"tensor {shown(name)} has {len(digests)} bytes of digests for {tensor.num_blocks} blocks")
    return tensor


def digest_of(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Engine rank to trainer or engine rank: open the session of a reference.

    session:     empty in a question: which session is the newest.
    is_question: only ask whether the other side holds its tensors.
    part:        the part of the model that the rank holds, as it stores it; empty: whole tensors, from a trainer.
    """

    session: str
    is_question: bool = False
    part: str = ""

    def to_bytes(self) -> bytes:
        return pack([self.session, self.is_question, self.part])

    @classmethod
    def from_bytes(cls, data: bytes) -> OpenSession:
        """Return the message that `data` encodes. Raises MalformedMessageError."""
        items = unpack(data, _OPENING)
        if type(items) is not list or len(items) < 1 or type(items[0]) is not str or len(items[0]) > MAX_SESSION_BYTES:
            raise MalformedMessageError(f"{shown(items)}: want a list with a session")
        part = items[2] if len(items) > 2 and type(items[2]) is str else ""
        return cls(items[0], is_question=items[1:2] == [True], part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """Answer to OpenSession: how to receive the tensors, or why they are not available.

    token:  hexadecimal digits, the first TOKEN_BYTES of the second connection; used once.
    digest: from an engine: digest of its weights, as it reports it. The newest session, if the question is for it.
    """

    error: str = ""
    manifest: bytes = b""
    token: str = ""
    digest: str = ""

    def to_bytes(self) -> bytes:
        return pack([self.error, self.manifest, self.token, self.digest])

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionOpened:
        """Return the message that `data` encodes. Raises MalformedMessageError."""
        items = unpack(data, _OPENING)
        if type(items) is not list or [type(item) for item in items[:4]] != [str, bytes, str, str]:
            raise MalformedMessageError("the answer is not [error, manifest, token, digest]")
        error, manifest, token, digest = items[:4]
        return cls(error=error, manifest=manifest, token=token, digest=digest)
