"""Megatron-Core names: requests, records, events and block hashes."""

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
    unpack_value,
)

if TYPE_CHECKING:
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
    "deserialize_tensor",
    "serialize_tensor",
]


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the values of a tensor as (nested) lists."""
    values: list[Any] = tensor.detach().cpu().tolist()
    return values


def deserialize_tensor(tensor_as_list: list[Any]) -> torch.Tensor:
    """Return the tensor of (nested) lists."""
    tensor: torch.Tensor = unpack_value(("tensor", tensor_as_list))
    return tensor


def compute_block_hashes_batched(
    prompt_tokens: torch.Tensor | list[int], block_size: int, *, form: HashForm = HashForm.POLYNOMIAL, salt: bytes = b""
) -> list[int]:
    """Return one positive hash per complete block of `prompt_tokens`, shape [seq_len], covering all blocks up to it.

    form: by default the polynomial, with hashes from 1 to HASH_PRIME. Engines and coordinators use SHA-256, for which
          colliding prompts cannot be constructed.
    """
    return block_hashes(as_list(prompt_tokens), block_size, form=form, salt=salt)
