"""A model of a given shape with random weights, generated on the device without a download or a file."""

from __future__ import annotations

import zlib
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_runtime.models.config import Llama3Scaling, ModelConfig
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Part, TensorKind, tensor_shapes

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    max_position_embeddings=131072,
    tie_embeddings=False,
    eos_token_ids=(),
)
"""Llama 3.1 8B."""


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """Implements Checkpoint. Repeated reads of a tensor on the same type of device return the same values."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    panels_of: ClassVar[str | None] = None

    @property
    def kinds(self) -> dict[str, TensorKind]:
        family = FAMILIES[self.config.family]
        return {
            family.hf_name(name): TensorKind(shape, self.dtype) for name, shape in tensor_shapes(self.config).items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        shape = self.kinds[name].shape
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:  # a norm, or a bias
            return values.normal_(std=0.1, generator=generator).add_(1.0)[part]
        return values.normal_(std=shape[-1] ** -0.5, generator=generator)[part]

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None

    def panels(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None
