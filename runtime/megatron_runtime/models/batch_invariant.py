"""The decoder in float32 whose results for one token do not depend on the tokens computed beside it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights, FeedForward
from megatron_runtime.models.layers.batch_invariant import BatchInvariantAttention, by_rows

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class BatchInvariantDecoder(DecoderModel):
    """The decoder of all of a model on one rank. Its matrices are those of BatchInvariantLinears.

    Raises ValueError for a model with sliding windows.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        if config.sliding is not None:
            # What a window leaves out moves with the token, and with it where sums are split.
            raise ValueError(
                "batch_invariant=True: this model has layers with a sliding window, whose sums are not split alike for "
                "every batch: use batch_invariant=False"
            )
        super().__init__(config, weights)
        self._attention = BatchInvariantAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
        )

    def _gated(self, mlp: FeedForward, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = mlp.gate_up_FD(x_TD).chunk(2, dim=-1)
        return mlp.down_DF(by_rows(_ACTIVATIONS[self.config.activation], gate_TF).mul_(up_TF))
