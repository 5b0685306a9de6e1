"""What every message is made of: msgpack frames and token ids as little-endian int32.

NumPy is imported where it is used: it would double the time that a coordinator takes from its start to its address.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Frames: TypeAlias = list[bytes]
Tokens: TypeAlias = "npt.NDArray[np.int32]"


class MalformedMessageError(ValueError):
    """The frames are not a message of this protocol. The message says what is wrong and where."""


def pack(value: Any) -> bytes:
    return msgpack.Packer().pack(value)  # packb() is a function in Python over just this


def unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessageError(f"frame of {len(data)} bytes is not msgpack: {error}") from error


def tokens_to_bytes(tokens: Sequence[int] | Tokens) -> bytes:
    """Token ids, shape [n], as little-endian int32.

    Raises ValueError for a list with anything but integers that fit.
    """
    if type(tokens) is list:  # struct takes a quarter of the time that NumPy does
        try:
            return struct.pack(f"<{len(tokens)}i", *tokens)
        except struct.error as error:
            raise ValueError(f"token ids: want integers of 32 bits: {error}") from error
    import numpy as np

    return np.asarray(tokens, dtype="<i4").tobytes()


def tokens_from_bytes(data: bytes) -> Tokens:
    import numpy as np

    if len(data) % 4:
        raise MalformedMessageError(f"token frame of {len(data)} bytes: want a multiple of 4 (int32)")
    return np.frombuffer(data, dtype="<i4")


def block_hashes_from_bytes(data: bytes) -> list[int]:
    """Block hashes, little-endian int64."""
    import numpy as np

    return np.frombuffer(data, dtype="<i8").tolist()
