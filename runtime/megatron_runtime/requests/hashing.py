"""Block hashes of prompts. Equal prefixes have equal hashes on the coordinator and on every engine.

This module does not import torch.

Engines and coordinators use SHA-256, for which colliding prompts cannot be constructed. The polynomial hash is
Megatron-Core's, and the default of `compute_block_hashes_batched`. Its collisions are easy to construct, so it must not
be used to decide which KV is reused.

SHA-256:     d(-1) = 32 zero bytes; with a salt or an adapter, SHA-256(ROOT_TAG + length of the salt in bytes as
             little-endian int64 + salt + key of the adapter); d(i) = SHA-256(d(i-1) + tokens of block i as
             little-endian int64 + digests of the images, audio and video that have tokens in block i, in their order);
             hash(i) = first 8 bytes of d(i), little-endian, modulo 2**63 - 1, plus 1.
polynomial:  P = 2**61 - 1; w(j) = 31**j in wrapping int64, modulo P; T(i) = sum of token * w in wrapping int64, modulo
             P; h(-1) = 0; hash(i) = (h(i-1) * 31 + T(i)) modulo P, plus 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

HASH_PRIME = (1 << 61) - 1
HASH_BASE = 31
_SHA_MODULUS = (1 << 63) - 1
ROOT_TAG = b"megatron prefix cache: root, v1\0"
"""Prefix of the hash input of d(-1). It has the length of a digest.

The hash input of a block begins with a digest. The hash input of d(-1) begins with the tag and therefore never equals
the hash input of a block. Without the tag, if a salt consisted of a digest and the tokens of a block, d(-1) would equal
the digest of this block.
"""
_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")


class HashForm(StrEnum):
    SHA256 = "sha256"
    POLYNOMIAL = "polynomial"


def block_hashes(
    tokens: Sequence[int] | npt.NDArray[Any],
    block_size: int,
    *,
    form: HashForm = HashForm.SHA256,
    salt: bytes = b"",
) -> list[int]:
    """Return one positive hash per complete block of `tokens`, shape [n].

    Each hash covers its block and all earlier blocks.

    salt: different salts give different hashes, for example for tenants. Only SHA-256 supports a salt.

    Raises ValueError for a block size below 1, an unknown form, and a salt with the polynomial hash.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: want at least 1")
    if form == HashForm.SHA256:
        return [hash_of_digest(digest) for digest in block_digests(tokens, block_size, salt=salt)]
    if form != HashForm.POLYNOMIAL:
        raise ValueError(f"form {form!r}: want HashForm.SHA256 or HashForm.POLYNOMIAL")
    if salt:
        raise ValueError("the polynomial form takes no salt: use HashForm.SHA256")
    array = np.asarray(tokens, dtype=np.int64)
    return _polynomial(array[: len(array) // block_size * block_size].reshape(-1, block_size))


def block_digests(
    tokens: Sequence[int] | npt.NDArray[Any],
    block_size: int,
    *,
    salt: bytes = b"",
    adapter: str = "",
    media: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Return the 32-byte digests d(i) of all complete blocks of `tokens`, which are the keys of prefix caches.

    adapter: Adapter.key of the request; empty for the base model.
    media:   as for digests_after().
    """
    return digests_after(root_digest(salt, adapter), tokens, block_size, media=media)


def root_digest(salt: bytes = b"", adapter: str = "") -> bytes:
    """Return d(-1), the digest with which the chain of block digests begins, for a salt and an adapter.

    The result differs from the digest of every block, and from d(-1) for every other pair of salt and adapter.
    """
    if not salt and not adapter:
        return bytes(32)
    return hashlib.sha256(ROOT_TAG + len(salt).to_bytes(8, "little") + salt + adapter.encode()).digest()


def digests_after(
    digest: bytes,
    tokens: Sequence[int] | npt.NDArray[Any],
    block_size: int,
    *,
    media: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Return the digests of the complete blocks of `tokens`. The first block follows the block with digest `digest`.

    media: for each block index, the joined digests of the images, audio and video that have tokens in the block.
    """
    data = np.asarray(tokens, dtype=_INT64).tobytes()
    sha256 = hashlib.sha256
    width = block_size * _INT64.itemsize
    digests = []
    for end in range(width, len(data) + 1, width):
        block = data[end - width : end]
        if media:
            block += media.get(end // width - 1, b"")
        digest = sha256(digest + block).digest()
        digests.append(digest)
    return digests


def frame_hashes(
    frame: bytes, block_size: int, *, salt: str = "", adapter: str = "", media: Mapping[int, bytes] | None = None
) -> list[int]:
    """Return the SHA-256 block hashes of the tokens in `frame`, which are encoded as little-endian int32."""
    from_bytes = int.from_bytes  # hash_of_digest() is inlined below, because frame_hashes() is called for every request
    tokens = np.frombuffer(frame, _INT32)
    digests = block_digests(tokens, block_size, salt=salt.encode(), adapter=adapter, media=media)
    return [from_bytes(digest[:8], "little") % _SHA_MODULUS + 1 for digest in digests]


def hash_of_digest(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") % _SHA_MODULUS + 1


def _polynomial(blocks: npt.NDArray[np.int64]) -> list[int]:
    sums = (blocks * _powers(blocks.shape[1])).sum(axis=1, dtype=np.int64) % HASH_PRIME
    hashes = []
    parent = 0
    for block in sums.tolist():
        parent = (parent * HASH_BASE + block) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


@lru_cache(maxsize=8)
def _powers(block_size: int) -> npt.NDArray[np.int64]:
    wrapped = np.full(block_size, HASH_BASE, dtype=np.int64)
    wrapped[0] = 1
    return np.cumprod(wrapped, dtype=np.int64) % HASH_PRIME
