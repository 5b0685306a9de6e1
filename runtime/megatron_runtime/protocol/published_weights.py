"""Weights that a trainer publishes: the reference that names the weights, their manifest, and the messages of a
session.

Each rank of an engine connects with CURVE, to the trainer or to the same rank of another engine, and opens a session
for a reference. The answer contains the manifest and a token. With the token, the rank receives the tensors in blocks,
over a second connection to the same port, without encryption. The rank therefore verifies each block by its SHA-256 in
the manifest, and the trainer's manifest by its SHA-256 in the reference.
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
    """The requested weights cannot be received, or their bytes do not match the digests.

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
    copies: addresses of another engine that serves these weights, by rank. The trainer's reference does not contain
            them. The coordinator sends them separately, and the engine appends them by with_copies().
    """

    host: str
    port: int
    epoch: int
    digest: str
    copies: tuple[str, ...] = ()

    @classmethod
    def parse(cls, source: str) -> PublishedSource:
        """Return the PublishedSource that a reference describes. Raises ValueError if the reference is malformed."""
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
    """Return the reference `source` extended by `copies`, the addresses in PublishedSource.copies."""
    return f"{source}{_COPIES}{','.join(copies)}" if copies else source


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """The manifest entry of one tensor. A trainer publishes whole tensors, with the names and layout of transformers.

    dtype:   one of STORED_TYPES.
    digests: the SHA-256 digests of the tensor's blocks, concatenated in the order of the blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digests: bytes = b""

    @property
    def block_rows(self) -> int:
        """Number of rows of each block except the last.

        The number is a multiple of eight. A block has about a million values.
        """
        return max(8, _BLOCK_VALUES // prod(self.shape[1:]) // 8 * 8)

    @property
    def num_blocks(self) -> int:
        return -(-self.shape[0] // self.block_rows)

    def rows(self, block: int) -> slice:
        """Return the rows of the tensor that belong to the block with index `block`."""
        first = block * self.block_rows
        return slice(first, min(first + self.block_rows, self.shape[0]))

    def digest(self, block: int) -> bytes:
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """The description of all tensors of one weight update."""

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
    """A message that opens a session, in which a rank of an engine receives weights. The rank sends the message.

    The receiver is a trainer or a rank of another engine.

    session:     name of the session, EPOCH-DIGEST as in the reference; empty in a query for the newest session.
    is_question: whether the message is a query, which opens no session. If `session` is not empty, the query is whether
                 the receiver holds the tensors of the session.
    part:        text that describes which part of the model the rank stores, and how; empty for the whole tensors of a
                 trainer.
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
    """The answer to OpenSession. It describes how to receive the tensors, or why they are not available.

    token:  hexadecimal digits of the TOKEN_BYTES that the second connection sends first; usable once.
    digest: weights digest of the engine that answers; empty from a trainer. In the answer to a query for the newest
            session, this field has the name of that session.
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
