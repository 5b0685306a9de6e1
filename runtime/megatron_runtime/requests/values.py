"""Tensors and arrays as msgpack-ready values, and back. torch is loaded when the first tensor is made, not before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_PLAIN_DTYPES = {"float32": float, "int64": int, "bool": bool}
"""What torch makes of a list of Python's own numbers; other types have to be named."""


def load_torch() -> Any:
    """By name: processes that never meet a tensor must not load torch."""
    return importlib.import_module("torch")


def is_tensor(value: Any) -> bool:
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)


def as_list(values: Any) -> list[Any]:
    """The items of a tensor, an array or a sequence; nothing for None."""
    if values is None:
        return []
    return values.tolist() if hasattr(values, "tolist") else list(values)


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """The values of a tensor as (nested) lists."""
    values: list[Any] = tensor.detach().cpu().tolist()
    return values


def deserialize_tensor(tensor_as_list: list[Any]) -> torch.Tensor:
    tensor: torch.Tensor = load_torch().tensor(tensor_as_list)
    return tensor


def pack_value(value: Any) -> Any:
    """A tensor as ("tensor", values), with the name of its type where values do not tell it; an array as
    ("ndarray", {data, dtype}); all else as it is.
    """
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        values = serialize_tensor(value)
        return ("tensor", values) if dtype in _PLAIN_DTYPES and value.numel() else ("tensor", values, dtype)
    if isinstance(value, np.ndarray):
        return ("ndarray", {"data": value.tolist(), "dtype": str(value.dtype)})
    return value


def unpack_value(value: Any) -> Any:
    match value:
        case ["tensor" | b"tensor", values]:
            return deserialize_tensor(values)
        case ["tensor" | b"tensor", values, str(dtype)]:
            torch = load_torch()
            return torch.tensor(values, dtype=getattr(torch, dtype))
        case ["ndarray" | b"ndarray", {"data": data, "dtype": dtype}]:
            return np.array(data, dtype=dtype)
    return value
