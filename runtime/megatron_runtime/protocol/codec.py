"""The encoding of every message: msgpack frames, and token ids as little-endian int32.

No other module of the project reads msgpack. Each caller of `unpack` limits the number of objects that are created from
the bytes.

NumPy is imported inside the functions that use it, because its import doubles the start-up time of a coordinator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack

from megatron_runtime.protocol.text import shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Frames: TypeAlias = list[bytes]
Tokens: TypeAlias = "npt.NDArray[np.int32]"


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Limits on the objects that unpack() can create from one frame, or from one body in a frame.

    elements:   number of values in all lists and maps together; a map entry counts as one.
    containers: number of lists and maps.
    depth: levels of nested lists and maps; None means msgpack's limit of 1024.
    text_bytes: bytes of one string or one binary value; None means that only the size of the frame limits it.
    frame_bytes: bytes of the frame; None means that only the frame limit of the receiving port applies.
    """

    elements: int
    containers: int
    depth: int | None = 32
    text_bytes: int | None = None
    frame_bytes: int | None = None


REQUEST = UnpackLimits(elements=64, containers=64, depth=64)
"""Limits of messages of the request path, which have a few fields and bodies that stay bytes."""
CONTROL = UnpackLimits(elements=65_536, containers=16_384, text_bytes=65_536, frame_bytes=1 << 20)
"""Limits of control messages, and of messages of the Megatron protocol on a port that does not serve it."""
PLAIN = UnpackLimits(elements=2_097_152, containers=262_144, depth=136)
"""Limits of messages of the Megatron protocol, which contain tokens and log-probs as lists. Also the limits of
log-probs at a coordinator.
"""
REPLIES = UnpackLimits(elements=PLAIN.elements, containers=PLAIN.containers, depth=None)
"""Limits of replies of a plain engine. Only pack() visits their full depth."""
PARAMETERS = UnpackLimits(elements=262_144, containers=65_536, depth=128)
"""Limits of sampling parameters, which may contain a deep JSON schema."""
DETAILS = UnpackLimits(elements=8_388_608, containers=4_194_304)
"""Limits of log-probs and replies in the process that has requested them."""

MAX_TOKEN = (1 << 31) - 1
_SMALL_BYTES = 64 << 10
"""Maximum size of a small frame, which can contain a prompt of 16,000 tokens. At worst each byte becomes an object, 5
MB in total.
"""
_FIELDS = REQUEST.elements
_UNPROVEN_ELEMENTS = 1024
"""Number of elements above which unpack() first checks that the bytes contain all elements.

msgpack allocates a list as soon as it reads the list's length. It reads at most 1024 nested lists. Lists with this
number of elements take 8 MiB.
"""


class MalformedMessageError(ValueError):
    """The frames are not a message of this protocol.

    The error text names the field, its value and the allowed values.
    """


_KEPT_BYTES = 1 << 20
"""Size of a message after which the packer is replaced, because a packer keeps its buffer."""
_packer = msgpack.Packer()  # creating one takes three times as long as packing a small message


def pack(value: Any) -> bytes:
    """Return the encoding of a value. Raises MalformedMessageError for a value that is nested too deeply."""
    global _packer
    try:
        data: bytes = _packer.pack(value)
    except ValueError as error:
        raise MalformedMessageError(f"a value that msgpack cannot pack: {error}") from error
    if len(data) > _KEPT_BYTES:
        _packer = msgpack.Packer()
    return data


def unpack(
    data: bytes | memoryview,
    limits: UnpackLimits = CONTROL,
    *,
    extension: Callable[[int, bytes], Any] | None = None,
) -> Any:
    """Return the value that `data` encodes.

    extension: converts the code and bytes of an extension type to a value. None makes extension types malformed.

    Raises:
        MalformedMessageError: the bytes are not one msgpack value, or exceed `limits`.
    """
    size = len(data)
    if limits.frame_bytes is not None and size > limits.frame_bytes:
        raise MalformedMessageError(f"frame of {size} bytes: want at most {limits.frame_bytes}")
    maximum = min(limits.elements, size)
    left, containers = limits.elements, 0

    def count(items: list[Any]) -> list[Any]:
        nonlocal left, containers
        left -= len(items)
        containers += 1
        if left < 0 or containers > limits.containers:
            raise MalformedMessageError(
                f"frame of {size} bytes: want at most {limits.elements} elements in {limits.containers} lists and maps"
            )
        return items

    text = size if limits.text_bytes is None else limits.text_bytes
    # An element takes at least one byte, so small data needs no hooks, which take longer than the rest of a frame.
    max_containers = _max_containers(data)
    needs_count = size > limits.elements or max_containers > limits.containers
    try:
        if maximum > _UNPROVEN_ELEMENTS:
            _skip(data)
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            list_hook=count if needs_count else None,
            # A dict would drop repeated keys without counting them.
            object_pairs_hook=(lambda pairs: dict(count(pairs))) if needs_count else None,
            ext_hook=extension or msgpack.ExtType,
            max_array_len=maximum,
            max_map_len=maximum,
            max_str_len=text,
            max_bin_len=text,
            max_ext_len=0 if extension is None else size,
        )
    except MalformedMessageError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise MalformedMessageError(f"frame of {size} bytes is not msgpack within its limits: {error}") from error
    depth = limits.depth
    if depth is not None and (containers if needs_count else max_containers) > depth and _is_deeper(value, depth):
        raise MalformedMessageError(f"frame of {size} bytes: want at most {depth} lists and maps in each other")
    return value


def unpack_request(data: bytes) -> Any:
    """Return the same value as unpack(data, REQUEST), but faster for small frames.

    The size of a small frame limits the number of objects, so the objects need not be counted.
    """
    if len(data) > _SMALL_BYTES:
        return unpack(data, REQUEST)
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=False, max_array_len=_FIELDS, max_map_len=_FIELDS, max_ext_len=0
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"frame of {len(data)} bytes is not msgpack within its limits: {error}") from error


def values_of_map(data: bytes) -> Iterator[tuple[Any, int, int]]:
    """Yield each key of the packed map `data` with the start and end index of its packed value.

    The values are not unpacked. If the map is malformed, the function first yields the entries before the error, and
    then raises MalformedMessageError.
    """
    size = len(data)
    unpacker = msgpack.Unpacker(max_buffer_size=size, raw=False, max_array_len=0, max_map_len=size, max_ext_len=0)
    unpacker.feed(data)
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            begin = unpacker.tell()
            unpacker.skip()
            yield key, begin, unpacker.tell()
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"frame of {size} bytes is not a msgpack map: {error}") from error


def split_list(data: bytes) -> list[bytes]:
    """Return the elements of the packed list `data`, each still packed.

    Raises MalformedMessageError if `data` is not a packed list.
    """
    size = len(data)
    unpacker = msgpack.Unpacker(max_buffer_size=size)
    unpacker.feed(data)
    skip, tell = unpacker.skip, unpacker.tell
    elements = []
    try:
        count = unpacker.read_array_header()
        if count > _FIELDS:
            raise MalformedMessageError(f"a list of {count} elements: want at most {_FIELDS}")
        begin = tell()
        for _ in range(count):
            skip()
            end = tell()
            elements.append(data[begin:end])
            begin = end
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"frame of {size} bytes is not a msgpack list: {error}") from error
    if begin != size:
        raise MalformedMessageError(f"frame of {size} bytes: {size - begin} of them follow its list")
    return elements


def joined_list(elements: Sequence[bytes]) -> bytes:
    """Return one packed list of `elements`, which are already packed. This is the inverse of split_list()."""
    return b"".join((b"\xdd", len(elements).to_bytes(4, "big"), *elements))


class PackedTokens(bytes):
    """Token ids as a packed list, as a client of Megatron-Core sent them.

    The decoder has verified that the bytes are one complete value, but not that the value is a list of token ids.
    """


def unpack_tokens(data: PackedTokens) -> bytes:
    """Return the token ids in `data` as little-endian int32.

    No Python code runs per token, and a nested list creates no objects.

    Raises MalformedMessageError unless `data` is a list of integers from 0 to 2**31 - 1.
    """
    maximum = min(len(data), PLAIN.elements)
    lists = 0

    def count(tokens: list[Any]) -> list[Any]:
        nonlocal lists
        lists += 1
        if lists > 1:
            raise MalformedMessageError("tokens: want a list of integers, which has no lists")
        return tokens

    try:
        if maximum > _UNPROVEN_ELEMENTS:
            _skip(data)
        tokens = msgpack.unpackb(data, list_hook=count, max_array_len=maximum, max_map_len=0, max_ext_len=0)
    except MalformedMessageError:
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedMessageError(f"tokens of {len(data)} bytes are not a msgpack list: {error}") from error
    if type(tokens) is not list:
        raise MalformedMessageError(f"tokens {shown(tokens)}: want a list")
    return checked_tokens(tokens)


def checked_tokens(tokens: list[Any]) -> bytes:
    """Return `tokens` as little-endian int32.

    Raises MalformedMessageError unless each token is an integer from 0 to 2**31 - 1.
    """
    try:
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        packed = b""
    # The highest byte of a token has the sign bit, so it must not exceed 127.
    if len(packed) != 4 * len(tokens) or not packed[3::4].isascii():
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token <= MAX_TOKEN)
        raise MalformedMessageError(f"token {shown(wrong)}: want an integer from 0 to {MAX_TOKEN}")
    return packed


def extended_map(data: bytes, entries: bytes, count: int) -> bytes:
    """Return the packed map `data` extended by `count` entries.

    entries: the packed key of each new entry, followed by its packed value.
    """
    kind = data[0]
    size = 1 if kind & 0xF0 == 0x80 else 3 if kind == 0xDE else 5
    number = kind & 0x0F if size == 1 else int.from_bytes(data[1:size], "big")
    header = bytes((0x80 | number + count,)) if number + count < 16 else b"\xdf" + (number + count).to_bytes(4, "big")
    return b"".join((header, data[size:], entries))


def header_of(frame: bytes) -> int | None:
    """Return the header of a message, or None if `frame` does not begin with a list whose first element is an
    integer.
    """
    if len(frame) > 1 and frame[0] & 0xF0 == 0x90 and frame[1] < 0x80:
        return frame[1]
    unpacker = msgpack.Unpacker(max_buffer_size=64, max_str_len=0, max_bin_len=0, max_array_len=0, max_map_len=0)
    unpacker.feed(frame[:32])
    try:
        unpacker.read_array_header()
        header = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return None
    return header if type(header) is int else None


def _skip(data: bytes | memoryview) -> None:
    """Raise an error unless `data` begins with one complete value. This function creates no objects."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


_CONTAINER_BYTES = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
"""The first bytes of lists and maps."""


def _max_containers(data: bytes | memoryview) -> int:
    """Return an upper bound of the number of lists and maps in `data`.

    The bound is the number of bytes in `data` with which a list or map can begin.
    """
    return len(data) - len(bytes(data).translate(None, _CONTAINER_BYTES))


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(depth):
        inner = (item.values() if type(item) is dict else item for item in level)
        level = [child for children in inner for child in children if type(child) is list or type(child) is dict]
        if not level:
            return False
    return True


def tokens_to_bytes(tokens: Sequence[int] | Tokens) -> bytes:
    """Return token ids, shape [n], as little-endian int32.

    Raises ValueError if a list has a value that is not a 32-bit integer.
    """
    if type(tokens) is list:  # struct is four times faster than NumPy here
        try:
            return struct.pack(f"<{len(tokens)}i", *tokens)
        except struct.error as error:
            raise ValueError(f"token ids: want integers of 32 bits: {error}") from error
    import numpy as np

    return np.asarray(tokens, dtype="<i4").tobytes()


def tokens_from_bytes(data: bytes) -> Tokens:
    """Return an array of the token ids that `data` encodes as little-endian int32. Raises MalformedMessageError."""
    import numpy as np

    if len(data) % 4:
        raise MalformedMessageError(f"token frame of {len(data)} bytes: want a multiple of 4 (int32)")
    return np.frombuffer(data, dtype="<i4")


def token_list_from_bytes(data: bytes | bytearray) -> list[int]:
    """Return a list of the token ids that `data` encodes as little-endian int32. Raises MalformedMessageError."""
    if len(data) % 4:
        raise MalformedMessageError(f"token frame of {len(data)} bytes: want a multiple of 4 (int32)")
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def block_hashes_from_bytes(data: bytes) -> list[int]:
    """Return a list of the block hashes that `data` encodes as little-endian int64."""
    import numpy as np

    return np.frombuffer(data, dtype="<i8").tolist()
