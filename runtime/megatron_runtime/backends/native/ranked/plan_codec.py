"""Encodes step plans and their results as msgpack, in which arrays are raw bytes.

Decoding never executes code from the sender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import msgpack
import numpy as np

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.protocol import codec
from megatron_runtime.protocol.codec import MalformedMessageError, UnpackLimits
from megatron_runtime.sampling.batch import LogitEdits, Penalties, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

_ARRAY = 1
_KINDS = frozenset("biuf")
_CLASSES: dict[int, type] = {
    2: StepPlan,
    3: StepResult,
    4: SamplingBatch,
    5: LogitEdits,
    6: Penalties,
    7: LogProbs,
}
"""The class of each extension type. An object is encoded as the list of its fields, in the order of the class."""
_CODES = {cls: code for code, cls in _CLASSES.items()}
_LEVELS = 5
"""Maximum nesting of extensions, which are a plan, its batch, the edits of a row, their penalties, and an array."""
_LIMITS = UnpackLimits(elements=1_048_576, containers=262_144)
"""Limits of a message between ranks. A step has a few values and arrays per row, and arrays are encoded as bytes."""


def pack(value: Any) -> bytes:
    """Encode a StepPlan, a StepResult, an array, or a value that msgpack supports. Raises TypeError for other types."""
    return msgpack.packb(value, use_bin_type=True, default=_pack_object)


def unpack(data: bytes | memoryview, *, levels: int = _LEVELS) -> Any:
    """Decode the bytes that pack() returned. Decoded arrays are read-only.

    levels: maximum nesting of extensions.

    Raises MalformedMessageError if `data` is invalid.
    """
    return codec.unpack(data, _LIMITS, extension=partial(_unpack_extension, levels=levels))


def pack_frames(value: Any) -> list[bytes]:
    """Encode a value like pack(). If the last item of a list is a byte string, it becomes a frame of its own.

    Such a byte string, the contents of KV blocks, is long. unpack() would look for the start of containers in it.
    """
    match value:
        case [*items, bytes() as last]:
            return [pack(items), last]
    return [pack(value)]


def unpack_frames(frames: Sequence[bytes]) -> Any:
    """Decode the frames that pack_frames() returned. Raises ValueError or TypeError if they are invalid."""
    first, *last = frames
    value = unpack(first)
    return [*value, *last] if last else value


def _pack_object(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        header = msgpack.packb([value.dtype.str, value.shape])
        return msgpack.ExtType(_ARRAY, bytes((len(header),)) + header + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    code = _CODES.get(type(value))
    if code is None:
        raise TypeError(f"{type(value).__name__} cannot be sent between ranks")
    return msgpack.ExtType(code, pack([getattr(value, field.name) for field in fields(value)]))


def _unpack_extension(code: int, data: bytes, *, levels: int) -> Any:
    if levels == 0:
        raise MalformedMessageError(f"more than {_LEVELS} nested extensions")
    if code in _CLASSES:
        cls, values = _CLASSES[code], unpack(data, levels=levels - 1)
        return cls(**dict(zip((field.name for field in fields(cls)), values, strict=True)))
    if code != _ARRAY:
        raise MalformedMessageError(f"extension type {code} is unknown")
    start = 1 + data[0] if data else 0
    name, shape = codec.unpack(data[1:start])
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise MalformedMessageError(f"an array of {name} cannot be sent between ranks")
    # A writable copy, because torch warns of tensors on read-only memory.
    return np.frombuffer(data, dtype, offset=start).reshape(shape).copy()
