"""Images, audio and video of a request, which are an optional last element of SUBMIT and DISPATCH.

A message contains each item as the file that the client sent, and the item's digest. It does not contain the features
that the model computes from the file, because for some models a photo of 200 KB has 25 MB of features, and because the
receiver would need pickle to read them.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from megatron_runtime.protocol.codec import MalformedMessageError
from megatron_runtime.protocol.text import shown

FRAMES = "video/jpeg"
"""The kind of a video that is a list of images. Its data are the images in base64, separated by commas."""
KINDS = ("image", "audio", "video", FRAMES)
"""The kinds of an item's data. The index of a kind is its number in messages."""
MEDIA_NEED = "media"
"""Name in RequestMeta.needs of requests with media. Engines that accept media announce the name as a parameter.

Engines and coordinators of releases without media reject these requests, because the name is an unknown parameter.
"""
MAX_MEDIA_ITEMS = 256

_INDEX = struct.Struct("<32sBIII")


class MediaItem(NamedTuple):
    """One image, audio or video.

    kind:   one of KINDS.
    digest: media_digest() of kind and data.
    offset, length: range of the prompt tokens that stand for the item.
    data:   the content of the file; empty in a SUBMIT if the client has already sent it with another open request.
    """

    kind: str
    digest: bytes
    offset: int
    length: int
    data: bytes


class Media(NamedTuple):
    """All items of a request, in the order of their tokens.

    template: tokens of the prompt with one placeholder per item, little-endian int32. The model expands the
              placeholders.
    """

    template: bytes
    items: tuple[MediaItem, ...]

    @property
    def data_bytes(self) -> int:
        """Total size of the data of all items, in bytes."""
        return sum(len(item.data) for item in self.items)

    def without(self, digests: Iterable[bytes]) -> Self:
        """Return a copy in which the items with these digests have no data."""
        left_out = frozenset(digests)
        return self._replace(
            items=tuple(item._replace(data=b"") if item.digest in left_out else item for item in self.items)
        )

    def to_list(self) -> list[bytes]:
        """Return the list that encodes the media as an element of a message."""
        index = [
            _INDEX.pack(item.digest, KINDS.index(item.kind), item.offset, item.length, len(item.data))
            for item in self.items
        ]
        return [self.template, b"".join(index), b"".join(item.data for item in self.items)]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        """Return the media that an element of a message encodes. Raises MalformedMessageError."""
        if type(value) is not list or len(value) < 3 or any(type(part) is not bytes for part in value[:3]):
            raise MalformedMessageError(f"media {shown(value)}: want [template, index, data] as bytes")
        template, index, data = value[:3]
        if len(template) % 4 or not index or len(index) % _INDEX.size or len(index) > MAX_MEDIA_ITEMS * _INDEX.size:
            raise MalformedMessageError(
                f"media with {len(template)} bytes of template and {len(index)} of index: want multiples of 4 and of "
                f"{_INDEX.size}, for 1 to {MAX_MEDIA_ITEMS} items"
            )
        items: list[MediaItem] = []
        position = end = 0
        for digest, kind, offset, length, size in _INDEX.iter_unpack(index):
            if kind >= len(KINDS) or offset < end or position + size > len(data):
                raise MalformedMessageError(
                    f"media item {len(items)} has kind {kind}, offset {offset} and {size} bytes: want a kind below "
                    f"{len(KINDS)}, tokens after those of the item before, and its bytes in the data"
                )
            items.append(MediaItem(KINDS[kind], digest, offset, length, data[position : position + size]))
            position, end = position + size, offset + length
        if position != len(data):
            raise MalformedMessageError(f"media with {len(data)} bytes of data: the index has {position}")
        return cls(template, tuple(items))


def media_digest(kind: str, data: bytes) -> bytes:
    """Return the SHA-256 that identifies an item of this kind with this data."""
    return hashlib.sha256(kind.encode() + b"\0" + data).digest()


def data_url(kind: str, data: bytes) -> str:
    """Return a data URL of an item.

    vLLM uses the URL's media type only to detect whether a video is a list of images.
    """
    if kind == FRAMES:
        return f"data:{kind};base64,{data.decode('ascii', 'replace')}"
    return f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"


def media_of_blocks(items: Sequence[MediaItem], block_size: int) -> dict[int, bytes]:
    """Return, by block index, the joined digests of the items that have tokens in the block.

    Blocks of the prompt without such tokens are not in the result.
    """
    digests: dict[int, bytes] = {}
    for item in items:
        for block in range(item.offset // block_size, -(-(item.offset + item.length) // block_size)):
            digests[block] = digests.get(block, b"") + item.digest
    return digests
