"""A model with a configurable shape and random weights, generated on the device without a download or a file."""

from __future__ import annotations

import zlib
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from megatron_runtime.models.config import Llama3Scaling, ModelConfig
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind, tensor_shapes

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
"""The shape of Llama 3.1 8B."""


_ROW_STEP = 61
_MAX_OFFSET = 1 << 16


@dataclass(frozen=True)
class RandomCheckpoint(Checkpoint):
    """A checkpoint with random weights. On the same type of device, each read of a tensor returns the same values.

    All tensors are views of one random vector, so a read generates no numbers. Each row of a matrix begins _ROW_STEP
    values after the previous row.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    panels_of: ClassVar[str | None] = None

    @cached_property
    def kinds(self) -> dict[str, TensorKind]:
        family = FAMILIES[self.config.family]
        return {
            family.hf_name(name): TensorKind(shape, self.dtype) for name, shape in tensor_shapes(self.config).items()
        }

    @cached_property
    def _vector(self) -> torch.Tensor:
        size = _MAX_OFFSET + max(kind.shape[0] * _ROW_STEP + kind.shape[-1] for kind in self.kinds.values())
        return torch.randn(size, device=self.device, generator=torch.Generator(self.device).manual_seed(1))

    @cached_property
    def _scaled(self) -> dict[int, torch.Tensor]:
        """Return scaled copies of the random vector, by the number of columns of the matrices that use them.

        The scale is chosen so that a product with a matrix preserves the variance.
        """
        widths = {kind.shape[1] for kind in self.kinds.values() if len(kind.shape) > 1}
        return {width: (self._vector * width**-0.5).to(self.dtype) for width in widths}

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        shape, first = self.kinds[name].shape, zlib.crc32(name.encode()) % _MAX_OFFSET
        if len(shape) == 1:  # a norm, or a bias
            return (1.0 + 0.1 * self._vector[first : first + shape[0]]).to(self.dtype)[part]
        return self._scaled[shape[1]][first:].as_strided(shape, (_ROW_STEP, 1))[part]

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None

    def panels(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None
