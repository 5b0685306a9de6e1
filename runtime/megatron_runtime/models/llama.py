"""Llama (Touvron et al. 2023, arXiv:2302.13971) over a paged KV cache.

Shapes: T tokens of a step, N rows whose next token is wanted, D hidden, V vocabulary, L layers, P pages, X tokens of a
page, E = keys and values of one token, H query heads, K key-value heads, C size of a head, Q = (H + 2 K) C,
F feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_runtime.layers.linear import Linear
from megatron_runtime.layers.paged_attention import AttentionBatch, PagedAttention
from megatron_runtime.layers.rotary import Rotation, inverse_frequencies, rotation
from megatron_runtime.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer block. `qkv` and `gate_up` are fused: one product each."""

    attention_norm_D: torch.Tensor
    qkv_QD: Linear
    output_DH: Linear
    mlp_norm_D: torch.Tensor
    gate_up_FD: Linear
    down_DF: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights. With tied embeddings `head_VD` and `embedding_VD` share their memory."""

    embedding_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head_VD: Linear


class LlamaModel:
    """A function of weights and cache: it holds no state of any request."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self._config = config
        self._weights = weights
        self._frequencies = inverse_frequencies(config)
        self._attention = PagedAttention(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )

    @property
    def config(self) -> LlamaConfig:
        return self._config

    @property
    def weights(self) -> LlamaWeights:
        return self._weights

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionBatch,
        cache_LPXE: torch.Tensor,
        rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """Write the step's keys and values to the cache; return x_ND, last hidden states of the rows asked for."""
        weights = self._weights
        x_TD = F.embedding(token_ids_T, weights.embedding_VD)
        turn = rotation(positions_T, self._frequencies, x_TD.dtype)
        for layer, cache_PXE in zip(weights.layers, cache_LPXE, strict=True):
            x_TD = x_TD + self._attend(layer, self._norm(x_TD, layer.attention_norm_D), turn, cache_PXE, attention)
            x_TD = x_TD + self._feed_forward(layer, self._norm(x_TD, layer.mlp_norm_D))
        return self._norm(x_TD.index_select(0, rows_N), weights.norm_D)

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return float32 logits_NV of last hidden states."""
        return self._weights.head_VD(x_ND).float()

    def _attend(
        self,
        layer: LayerWeights,
        x_TD: torch.Tensor,
        turn: Rotation,
        cache_PXE: torch.Tensor,
        attention: AttentionBatch,
    ) -> torch.Tensor:
        config = self._config
        qkv_TQ = layer.qkv_QD(x_TD)
        heads_THC = qkv_TQ.unflatten(1, (-1, config.head_dim))
        turn.apply_(heads_THC[:, : config.num_heads + config.num_kv_heads])
        kv_TE = qkv_TQ[:, config.num_heads * config.head_dim :]
        out_TH = self._attention(heads_THC[:, : config.num_heads], kv_TE, cache_PXE, attention)
        return layer.output_DH(out_TH)

    def _feed_forward(self, layer: LayerWeights, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = layer.gate_up_FD(x_TD).chunk(2, dim=-1)
        return layer.down_DF(F.silu(gate_TF).mul_(up_TF))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, self._config.rms_norm_eps)
