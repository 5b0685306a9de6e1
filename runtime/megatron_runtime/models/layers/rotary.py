"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves layout of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_runtime.models.config import LinearScaling, Llama3Scaling, RopeScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos_T1D and sin_T1D of every token of a step; the first half of sin is negated."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor

    def apply_(self, x_THD: torch.Tensor) -> None:
        """Rotate every head of `x_THD` in place."""
        first, second = x_THD.chunk(2, dim=-1)
        swapped_THD = torch.cat((second, first), dim=-1)
        x_THD.mul_(self.cos_T1D).addcmul_(swapped_THD, self.sin_T1D)


def inverse_frequencies(*, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Return the angle per position of each rotary pair, float32 [head_dim / 2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponent)
    if isinstance(scaling, Llama3Scaling):
        return _scale_llama3(frequencies, scaling)
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    return frequencies


def rotation(positions_T: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at `positions_T`, computed in float32."""
    angles_T1F = (positions_T.float()[:, None] * frequencies)[:, None]
    cos, sin = angles_T1F.cos(), angles_T1F.sin()
    return Rotation(torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype))


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between are blended."""
    wavelength = 2 * math.pi / frequencies
    rotations = scaling.original_max_position_embeddings / wavelength
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
