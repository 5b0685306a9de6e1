"""A float32 decoder whose results for one token are bit-identical in every batch.

A library chooses the order of a sum by the shapes of its operands. So matrix products here use shapes that a check at
load time shows to give equal rows, attention is one product of one shape for each token and split of positions, and
elementwise functions are applied to rows whose length is a multiple of every vector width.

T tokens, R rows of a product, H query heads, K key-value heads, G = H / K, D size of a head, S positions, X tokens of a
page, E = 2 K D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights
from megatron_runtime.models.layers.linear import Linear, LinearFactory, Weight, dense
from megatron_runtime.models.layers.paged_attention import DecodeGroup, PagedAttention, PrefillChunk

ROWS = (64, 32, 16, 8, 4, 2, 1)
"""Numbers of rows that a product may use if it gives the same bits as with the first number."""

SPLIT = 256
"""Positions that one product of the attention covers."""

_SERIAL = 32_768
"""Torch divides an elementwise function of this many values among threads, at any boundary."""
_VECTORS = 64
"""A multiple of the vector length of all instruction sets, in values."""


class BatchInvariantLinear(Linear):
    """A Linear whose products use only numbers of rows that gave equal bits when it was created."""

    def __init__(self, weight_NK: torch.Tensor, *, packed: bool = True) -> None:
        super().__init__(weight_NK, packed=packed)
        self._rows = equal_rows(super().__call__, self.in_features)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        count = len(x_TK)
        if count in self._rows:
            return super().__call__(x_TK)
        smallest = self._rows[-1]
        x_RK = F.pad(x_TK, (0, 0, 0, -count % smallest))
        parts, start = [], 0
        while start < len(x_RK):
            rows = next(rows for rows in self._rows if rows <= len(x_RK) - start)
            parts.append(super().__call__(x_RK[start : start + rows]))
            start += rows
        return torch.cat(parts)[:count]


def equal_rows(product: Callable[[torch.Tensor], torch.Tensor], width: int) -> tuple[int, ...]:
    """Return the numbers of rows for which `product` gives each row the same bits, at any index; descending.

    product: of x_RK [R, width] to y_RN. Returns (1,) if no larger number qualifies. All are multiples of the last.
    """
    generator = torch.Generator().manual_seed(0)
    x_RK = torch.randn(ROWS[0], width, generator=generator)
    y_RN = product(x_RK)
    if not torch.equal(product(x_RK.roll(1, 0)).roll(-1, 0), y_RN):
        return (1,)
    return tuple(rows for rows in ROWS if torch.equal(product(x_RK[:rows].contiguous()), y_RN[:rows]))


class BatchInvariantLinears(LinearFactory):
    """Creates dense matrices of type float32."""

    def linear(self, weight_NK: Weight) -> Linear:
        return BatchInvariantLinear(dense(weight_NK))

    def tied(self, weight_VD: Weight) -> Linear:
        return BatchInvariantLinear(dense(weight_VD), packed=False)


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x_TF: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to whole vectors: the scalar code for a remainder differs in the last bit."""
    width = x_TF.shape[1]
    whole_TF = F.pad(x_TF, (0, -width % _VECTORS))
    rows = max(1, (_SERIAL - 1) // whole_TF.shape[1])
    return torch.cat([function(part.contiguous()) for part in whole_TF.split(rows)])[:, :width]


class BatchInvariantAttention(PagedAttention):
    """Sums over splits of the positions, counted from position 0, for each token separately."""

    def _decode(self, q_THD: torch.Tensor, cache_PXE: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
        q_BHD = q_THD[group.rows]
        pages_BP = group.pages.view(len(q_BHD), -1)
        mask_BS = group.mask_B11S[:, 0, 0]
        pages_of_splits, masks = pages_BP.split(SPLIT // cache_PXE.shape[1], 1), mask_BS.split(SPLIT, 1)
        return self._sum(
            q_BHD,
            (
                (cache_PXE.index_select(0, pages.reshape(-1)).view(len(q_BHD), -1, cache_PXE.shape[2]), mask)
                for pages, mask in zip(pages_of_splits, masks, strict=True)
            ),
        )

    def _prefill(
        self, q_THD: torch.Tensor, kv_TE: torch.Tensor, cache_PXE: torch.Tensor, chunk: PrefillChunk
    ) -> torch.Tensor:
        q_THD = q_THD[chunk.rows]
        kv_SE = kv_TE[chunk.rows] if chunk.pages is None else cache_PXE.index_select(0, chunk.pages).flatten(0, 1)
        mask_TS = chunk.mask_TS
        if mask_TS is None:
            mask_TS = torch.full((len(q_THD), len(kv_SE)), -math.inf).triu_(1)
        return self._sum(q_THD, zip(kv_SE[None].split(SPLIT, 1), mask_TS.split(SPLIT, 1), strict=True))

    def _sum(self, q_THD: torch.Tensor, splits: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the attention of every token, [T, H * D].

        splits: keys and values [T, S, E] of each token, or [1, S, E] of all, and masks [T, S] at up to SPLIT positions.
                Every token attends to a position of the first split.
        """
        tokens, _, size = q_THD.shape
        kv_heads = self._kv_heads
        q_KTGD = (q_THD * self._scale).view(tokens, kv_heads, -1, size).transpose(0, 1).contiguous()
        values_KTGD = torch.zeros_like(q_KTGD)
        # As wide as a head: elementwise functions are applied to whole rows.
        weight_KTGD = torch.zeros_like(q_KTGD)
        largest_KTGD = torch.full_like(q_KTGD, -math.inf)
        for kv_BSE, mask_TS in splits:
            missing = SPLIT - mask_TS.shape[1]
            kv_JKBSD = F.pad(kv_BSE, (0, 0, 0, missing)).unflatten(2, (2, kv_heads, size)).permute(2, 3, 0, 1, 4)
            k_KTSD, v_KTSD = kv_JKBSD.contiguous().expand(-1, -1, tokens, -1, -1)
            scores_KTGS = torch.stack(
                [torch.bmm(q_TGD, k_TSD.transpose(1, 2)) for q_TGD, k_TSD in zip(q_KTGD, k_KTSD, strict=True)]
            )
            scores_KTGS += F.pad(mask_TS, (0, missing), value=-math.inf)[:, None]
            before_KTGD, largest_KTGD = largest_KTGD, torch.maximum(largest_KTGD, scores_KTGS.amax(-1, keepdim=True))
            weights_KTGS = _exp(scores_KTGS - largest_KTGD[..., :1])
            kept_KTGD = _exp(before_KTGD - largest_KTGD)
            weight_KTGD.mul_(kept_KTGD).add_(weights_KTGS.sum(-1, keepdim=True))
            values_KTGD.mul_(kept_KTGD)
            values_KTGD += torch.stack(list(map(torch.bmm, weights_KTGS, v_KTSD)))
        return (values_KTGD / weight_KTGD).transpose(0, 1).flatten(1)


def _exp(x_KTGN: torch.Tensor) -> torch.Tensor:
    return by_rows(torch.exp, x_KTGN.flatten(0, 2)).reshape(x_KTGN.shape)


class BatchInvariantDecoder(DecoderModel):
    """The decoder of a whole model on one rank, with the matrices of BatchInvariantLinears.

    Raises ValueError for a model with sliding windows.
    """

    attention_type = BatchInvariantAttention

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        if config.sliding is not None:
            # A window begins at another position for each token, and so do the splits of its sums.
            raise ValueError(
                "batch_invariant=True: this model has layers with a sliding window, whose sums depend on the batch: "
                "use batch_invariant=False"
            )
        super().__init__(config, weights)

    @cached_property
    def _activate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(by_rows, super()._activate)
