"""One decoder for all families, over a paged KV cache. What differs between them is data: `config.ModelConfig`.

Shapes: T tokens of a step, N rows whose next token is wanted, D hidden, V vocabulary, W this rank's part of it,
L layers, P pages, X tokens of a page, E = keys and values of one token, H query heads, K key-value heads, C size of a
head, Q = (H + 2 K) C, F twice the feed-forward. L, H, K, W, E and F count what this rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_runtime.distributed.groups import Collectives, OneRank
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.layers.embedding import Embedding
from megatron_runtime.models.layers.linear import Linear
from megatron_runtime.models.layers.paged_attention import AttentionBatch, PagedAttention
from megatron_runtime.models.layers.rotary import Rotation, inverse_frequencies, rotation
from megatron_runtime.models.mixture import ExpertWeights, mix


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """`gate_up_FD` is fused: one product. Each expert of a mixture is one of these."""

    gate_up_FD: Linear
    down_DF: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer block. `qkv_QD` is fused: one product. Norms have their offset added."""

    attention_norm_D: torch.Tensor
    qkv_QD: Linear
    output_DH: Linear
    mlp_norm_D: torch.Tensor
    mlp: FeedForward | ExpertWeights
    qkv_bias_Q: torch.Tensor | None = None
    q_norm_C: torch.Tensor | None = None
    k_norm_C: torch.Tensor | None = None
    attention_output_norm_D: torch.Tensor | None = None
    mlp_output_norm_D: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """What one rank holds. embedding: None but in the first pipeline stage; norm_D, head_WD: None but in the last."""

    embedding: Embedding | None
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor | None
    head_WD: Linear | None

    @property
    def bytes_per_step(self) -> int:
        """Of the matrices that every step reads, experts as if all were asked."""
        linears = [self.head_WD] if self.head_WD is not None else []
        for layer in self.layers:
            mlps = layer.mlp.experts if isinstance(layer.mlp, ExpertWeights) else (layer.mlp,)
            linears += [layer.qkv_QD, layer.output_DH]
            linears += [linear for mlp in mlps for linear in (mlp.gate_up_FD, mlp.down_DF)]
        return sum(linear.num_bytes for linear in linears)


class DecoderModel:
    """A function of weights and cache: it holds no state of any request.

    shard:       which part of the model `weights` are.
    collectives: how this rank speaks to the others.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        shard: Shard | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self._shard = shard = shard or Shard()
        self._collectives: Collectives = collectives or OneRank()
        self._heads, self._kv_heads = len(shard.heads(config.num_heads)), len(shard.kv_heads(config.num_kv_heads))
        self._layer_numbers = shard.layers(config.num_layers)
        self._is_local = [config.is_local(layer) for layer in self._layer_numbers]
        self._attention = PagedAttention(
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
        )
        self._frequencies = inverse_frequencies(
            head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
        )
        self._local_frequencies = self._frequencies
        if config.sliding is not None and config.sliding.rope_theta is not None:
            self._local_frequencies = inverse_frequencies(head_dim=config.head_dim, theta=config.sliding.rope_theta)

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a local layer sees; None where all layers see everything."""
        return None if self.config.sliding is None else self.config.sliding.window

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
        x_TD = self.embed(token_ids_T)
        x_TD = self.run_layers(x_TD, positions_T, attention=attention, cache_LPXE=cache_LPXE)
        return self.finish(x_TD, rows_N)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """x_TD of tokens, in the first pipeline stage."""
        embedding = self.weights.embedding
        assert embedding is not None, "this rank is of a later pipeline stage"
        held = self._shard.vocabulary(self.config.vocab_size)
        x_TD = embed(embedding, token_ids_T, held, self.config.vocab_size, self._collectives)
        if self.config.embedding_scale == 1.0:
            return x_TD
        # Families that scale round the factor to the type of their activations.
        return x_TD * torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype)

    def run_layers(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionBatch,
        cache_LPXE: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states after this rank's layers, whose keys and values are in the cache then."""
        turn = local_turn = rotation(positions_T, self._frequencies, x_TD.dtype)
        if self._local_frequencies is not self._frequencies:
            local_turn = rotation(positions_T, self._local_frequencies, x_TD.dtype)
        local = attention.local or attention
        for number, layer, cache_PXE, is_local in zip(
            self._layer_numbers, self.weights.layers, cache_LPXE, self._is_local, strict=True
        ):
            self._collectives.begin_layer(number)
            normed_TD = self._norm(x_TD, layer.attention_norm_D)
            if is_local:
                added_TD = self._attend(layer, normed_TD, local_turn, cache_PXE, local)
            else:
                added_TD = self._attend(layer, normed_TD, turn, cache_PXE, attention)
            x_TD = x_TD + self._output_norm(added_TD, layer.attention_output_norm_D)
            added_TD = self._feed_forward(layer.mlp, self._norm(x_TD, layer.mlp_norm_D))
            x_TD = x_TD + self._output_norm(added_TD, layer.mlp_output_norm_D)
        return x_TD

    def finish(self, x_TD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """x_ND of the rows asked for, in the last pipeline stage."""
        norm_D = self.weights.norm_D
        assert norm_D is not None, "this rank is of an earlier pipeline stage"
        return self._norm(x_TD.index_select(0, rows_N), norm_D)

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return float32 logits_NV of last hidden states."""
        head_WD = self.weights.head_WD
        assert head_WD is not None, "this rank is of an earlier pipeline stage"
        return self._collectives.gather_logits(head_WD(x_ND), self.config.vocab_size).float()

    def _attend(
        self,
        layer: LayerWeights,
        x_TD: torch.Tensor,
        turn: Rotation,
        cache_PXE: torch.Tensor,
        attention: AttentionBatch,
    ) -> torch.Tensor:
        heads, turned = self._heads, self._heads + self._kv_heads
        qkv_TQ = layer.qkv_QD(x_TD)
        if layer.qkv_bias_Q is not None:
            qkv_TQ += layer.qkv_bias_Q
        heads_THC = qkv_TQ.unflatten(1, (-1, self.config.head_dim))
        if layer.q_norm_C is not None and layer.k_norm_C is not None:
            heads_THC[:, :heads] = self._norm(heads_THC[:, :heads], layer.q_norm_C)
            heads_THC[:, heads:turned] = self._norm(heads_THC[:, heads:turned], layer.k_norm_C)
        turn.apply_(heads_THC[:, :turned])
        kv_TE = qkv_TQ[:, heads * self.config.head_dim :]
        out_TH = self._attention(heads_THC[:, :heads], kv_TE, cache_PXE, attention)
        return self._collectives.all_reduce(layer.output_DH(out_TH))

    def _feed_forward(self, mlp: FeedForward | ExpertWeights, x_TD: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, FeedForward):
            return self._collectives.all_reduce(self._gated(mlp, x_TD))
        assert self.config.moe is not None
        x_AD = self._collectives.gather_tokens(x_TD)
        y_AD = mix(x_AD, mlp, self.config.moe, self._gated)
        return self._collectives.all_reduce(self._collectives.scatter_sums(y_AD))

    def _gated(self, mlp: FeedForward, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = mlp.gate_up_FD(x_TD).chunk(2, dim=-1)
        if self.config.activation == "silu":
            return mlp.down_DF(F.silu(gate_TF).mul_(up_TF))
        return mlp.down_DF(F.gelu(gate_TF, approximate="tanh").mul_(up_TF))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, self.config.rms_norm_eps)

    def _output_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor | None) -> torch.Tensor:
        return x_TD if weight_D is None else self._norm(x_TD, weight_D)


def embed(
    embedding: Embedding, token_ids_T: torch.Tensor, held: range, vocab_size: int, collectives: Collectives
) -> torch.Tensor:
    """x_TD of tokens, of which `embedding` has the rows `held`, and the other tensor ranks have the others."""
    if len(held) == vocab_size:
        return embedding(token_ids_T)
    is_held_T = (token_ids_T >= held.start) & (token_ids_T < held.stop)
    x_TD = embedding((token_ids_T - held.start).where(is_held_T, 0)) * is_held_T[:, None]
    return collectives.all_reduce(x_TD)


def build_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    *,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
) -> DecoderModel:
    """The model that runs `weights`: the only place that knows which forms of it there are."""
    from megatron_runtime.models.native_decoder import NativeDecoder, runs_natively

    if collectives is None and (shard is None or shard == Shard()) and runs_natively(config, weights):
        return NativeDecoder(config, weights)
    return DecoderModel(config, weights, shard=shard, collectives=collectives)
