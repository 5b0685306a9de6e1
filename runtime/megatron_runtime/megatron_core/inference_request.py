"""Requests, records, events and block hashes. The module path is the same as in Megatron-Core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.hashing import HASH_BASE, HASH_PRIME, HashForm, block_hashes
from megatron_runtime.requests.request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishedRequestRecord,
    InferenceRequest,
    Status,
    VLMInferenceRequest,
    as_list,
    pack_value,
    unpack_value,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "HASH_BASE",
    "HASH_PRIME",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "FinishedRequestRecord",
    "InferenceRequest",
    "Status",
    "VLMInferenceRequest",
    "compute_block_hashes_batched",
    "deserialize_ndarray",
    "deserialize_tensor",
    "serialize_ndarray",
    "serialize_tensor",
    "unwrap_serialized_tensors",
]


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the values of a tensor as nested lists."""
    values: list[Any] = tensor.detach().cpu().tolist()
    return values


def deserialize_tensor(tensor_as_list: list[Any]) -> torch.Tensor:
    """Return a tensor with the values of the nested lists `tensor_as_list`."""
    tensor: torch.Tensor = unpack_value(("tensor", tensor_as_list))
    return tensor


def serialize_ndarray(arr: npt.NDArray[Any]) -> dict[str, Any]:
    """Return a map with the values of an array as nested lists and the name of its dtype."""
    values: dict[str, Any] = pack_value(arr)[1]
    return values


def deserialize_ndarray(obj: dict[str, Any]) -> np.ndarray:
    """Return the array that serialize_ndarray() has serialized."""
    values: np.ndarray = unpack_value(("ndarray", obj))
    return values


def unwrap_serialized_tensors(serialized_request: dict[str, Any]) -> dict[str, Any]:
    """Return a serialized request with each serialized tensor replaced by its list of values."""
    return {
        name: value[1] if isinstance(value, list | tuple) and len(value) >= 2 and value[0] == "tensor" else value
        for name, value in serialized_request.items()
    }


def compute_block_hashes_batched(
    prompt_tokens: torch.Tensor | list[int], block_size: int, *, form: HashForm = HashForm.POLYNOMIAL, salt: bytes = b""
) -> list[int]:
    """Return one positive hash per complete block of `prompt_tokens`, shape [seq_len].

    The hash of a block covers the tokens of this block and of all earlier blocks.

    form: hash function. The default is the polynomial hash, whose values are from 1 to HASH_PRIME. Engines and
          coordinators use SHA-256, for which colliding prompts cannot be constructed.
    """
    return block_hashes(as_list(prompt_tokens), block_size, form=form, salt=salt)
