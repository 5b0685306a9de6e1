"""Attention of a mixed batch over a paged KV cache, and the rotary position embedding.

Shapes: T tokens of the step, S cached tokens of a sequence, P pages of the cache, X tokens of a page, H query heads, K
        key-value heads, G = H / K, D size of a head, E = 2 K D (keys, then values).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_runtime.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary position embedding (Su et al. 2021, arXiv:2104.09864) of a step's tokens.

    The two values of a pair are in the first and the second half of a head, as in transformers. The first half of
    sin_T1D is negated.
    """

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
    if isinstance(scaling, YarnScaling):
        return _scale_yarn(frequencies, scaling, theta)
    return frequencies


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """A rotary embedding. All layers with a sliding window share one, and all other layers share another.

    magnitude: factor by which cos and sin are multiplied.
    long_frequencies_F: frequencies for long sequences; None if the model has only one set of frequencies. With two
                        sets, the position of a token is twice its index in the sequence, plus 1 if the sequence is
                        long.
    """

    frequencies_F: torch.Tensor
    magnitude: float = 1.0
    long_frequencies_F: torch.Tensor | None = None

    def table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of cos and sin for all positions in sequences of `length` tokens."""
        return self.cos_sin(torch.arange(length if self.long_frequencies_F is None else 2 * length))

    def cos_sin(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the tokens' angles, each float32 [T, F]."""
        frequencies_TF = self.frequencies_F
        if self.long_frequencies_F is not None:
            is_long_T1 = (positions_T % 2).bool()[:, None]
            frequencies_TF = torch.where(is_long_T1, self.long_frequencies_F, self.frequencies_F)
            positions_T = positions_T // 2
        angles_TF = positions_T.float()[:, None] * frequencies_TF
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        return (cos_TF, sin_TF) if self.magnitude == 1.0 else (cos_TF * self.magnitude, sin_TF * self.magnitude)

    def rotation(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of the tokens at `positions_T`. It is computed in float32."""
        cos_T1F, sin_T1F = (part_TF[:, None] for part_TF in self.cos_sin(positions_T))
        return Rotation(torch.cat((cos_T1F, cos_T1F), -1).to(dtype), torch.cat((-sin_T1F, sin_T1F), -1).to(dtype))


def rotary_embeddings(config: ModelConfig) -> tuple[RotaryEmbedding, RotaryEmbedding]:
    """Return two rotary embeddings: for layers that attend to all tokens, and for layers with a sliding window."""
    scaling, sliding = config.rope_scaling, config.sliding
    frequencies_F = inverse_frequencies(head_dim=config.head_dim, theta=config.rope_theta, scaling=scaling)
    if isinstance(scaling, LongRopeScaling):
        short_F, long_F = (torch.tensor(factors) for factors in (scaling.short_factor, scaling.long_factor))
        whole = RotaryEmbedding(frequencies_F / short_F, scaling.attention_factor, frequencies_F / long_F)
    elif isinstance(scaling, YarnScaling):
        whole = RotaryEmbedding(frequencies_F, scaling.attention_factor)
    else:
        whole = RotaryEmbedding(frequencies_F)
    if sliding is not None and not sliding.rotates:
        return whole, RotaryEmbedding(torch.zeros_like(whole.frequencies_F))
    if sliding is not None and sliding.rope_theta is not None:
        return whole, RotaryEmbedding(inverse_frequencies(head_dim=config.head_dim, theta=sliding.rope_theta))
    return whole, whole


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Return the scaled frequencies.

    Divides low frequencies by `factor`, keeps high frequencies, and interpolates between the two.
    """
    wavelength = 2 * math.pi / frequencies
    rotations = scaling.original_max_position_embeddings / wavelength
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _scale_yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """Return the scaled frequencies.

    Unlike _scale_llama3(), this function interpolates by the index of a rotary pair, not by its number of rotations.
    """
    count = len(frequencies)

    def pair_of(rotations: float) -> float:
        """Return the (fractional) index of the rotary pair that makes `rotations` rotations in the original length."""
        length = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
        return count * math.log(length) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    ramp = (torch.arange(count, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    blend = 1 - ramp.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The new tokens of one sequence.

    rows:    the rows of these tokens in the step.
    pages:   int64; pages of the cached and the new tokens; None if no token was cached before this step.
    mask_TS: 0 for each cached token to which a new token attends, -inf for each other cached token. The first column
             is the first token in `pages`. None means that the attention is causal.
    """

    rows: slice
    pages: torch.Tensor | None
    mask_TS: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The cache rows of a step's tokens, and the tokens to which each token attends.

    All layers share this object, except layers with a sliding window, which share `local`.

    cache_rows_T: row of each token's keys and values in the cache, page * X + offset.
    chunks: the new tokens of each sequence, in the order of the step's rows.
    local: the batch for layers with a sliding window; None if the window covers the context of every token.
    """

    cache_rows_T: torch.Tensor
    chunks: Sequence[SequenceRows]
    local: AttentionBatch | None = None


class PagedAttention:
    """Attention, softmax(scale · q · kᵀ) · v, with grouped query heads."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self._kv_heads, self._head_dim = num_kv_heads, head_dim
        self._groups = num_heads // num_kv_heads
        self._scale = scale

    def __call__(
        self, q_THD: torch.Tensor, kv_TE: torch.Tensor, cache_PXE: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Write `kv_TE` to the cache, and return the attention, [T, H * D].

        The cache can have a smaller type than `kv_TE`.
        """
        cache_PXE.flatten(0, 1).index_copy_(0, batch.cache_rows_T, kv_TE.to(cache_PXE.dtype))
        return torch.cat([self._attend(q_THD, kv_TE, cache_PXE, chunk) for chunk in batch.chunks])

    def _attend(
        self, q_THD: torch.Tensor, kv_TE: torch.Tensor, cache_PXE: torch.Tensor, chunk: SequenceRows
    ) -> torch.Tensor:
        kv_SE = kv_TE[chunk.rows]
        if chunk.pages is not None and chunk.mask_TS is not None:
            # Leave out the end of the last page, which may hold data of another request.
            kv_SE = cache_PXE.index_select(0, chunk.pages).flatten(0, 1)[: chunk.mask_TS.shape[1]].to(kv_TE.dtype)
        kv_JKSD = kv_SE.unflatten(1, (2, self._kv_heads, self._head_dim)).permute(1, 2, 0, 3)
        k_KGSD, v_KGSD = kv_JKSD[:, :, None].expand(-1, -1, self._groups, -1, -1)
        q_KGTD = q_THD[chunk.rows].unflatten(1, (self._kv_heads, self._groups)).permute(1, 2, 0, 3)
        out_KGTD = F.scaled_dot_product_attention(
            q_KGTD, k_KGSD, v_KGSD, attn_mask=chunk.mask_TS, is_causal=chunk.mask_TS is None, scale=self._scale
        )
        return out_KGTD.permute(2, 0, 1, 3).flatten(1)
