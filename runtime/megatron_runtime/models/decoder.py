"""One decoder for all model families, over a paged KV cache. `config.ModelConfig` describes how the families differ.

Shapes: T tokens of a step, N rows whose logits are computed, D hidden size, V vocabulary, W this rank's part of the
        vocabulary, L layers, P pages, X tokens of a page, E = keys and values of one token, H query heads, K key-value
        heads, C size of a head, Q = (H + 2 K) C, F twice the feed-forward width, J experts of a token, G layers of the
        model. L, H, K, W, E and F count only what this rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.layers.linear import Linear
from megatron_runtime.models.layers.paged_attention import (
    AttentionBatch,
    PagedAttention,
    Rotation,
    rotary_embeddings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The matrices of a feed-forward network. Each expert is also a FeedForward.

    `gate_up_FD` computes gate and up in one product.
    """

    gate_up_FD: Linear
    down_DF: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The weights of a mixture of experts.

    router_XD: router weights of all experts.
    experts:   the experts that this rank holds. `first` is the index of the first of these experts among all experts.
    """

    router_XD: Linear
    experts: tuple[FeedForward, ...]
    first: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one transformer block.

    `qkv_QD` computes q, k and v in one product. Norm weights include their offset.

    q_norm_C, k_norm_C: if all heads are normalized together, the shapes are [H C] and [K C], for this rank's heads.
    """

    qkv_QD: Linear
    output_DH: Linear
    mlp: FeedForward | ExpertWeights
    attention_norm_D: torch.Tensor | None = None
    qkv_bias_Q: torch.Tensor | None = None
    q_norm_C: torch.Tensor | None = None
    k_norm_C: torch.Tensor | None = None
    attention_output_norm_D: torch.Tensor | None = None
    mlp_norm_D: torch.Tensor | None = None
    mlp_output_norm_D: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """The weights of one rank.

    Only the first pipeline stage has `embedding`, and only the last stage has `norm_D` and `head_WD`.
    """

    embedding: Linear | None
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor | None
    head_WD: Linear | None

    @property
    def linears(self) -> list[Linear]:
        """The matrices except routers, in the order in which a step reads them."""
        linears = []
        for layer in self.layers:
            mlps = layer.mlp.experts if isinstance(layer.mlp, ExpertWeights) else (layer.mlp,)
            linears += [layer.qkv_QD, layer.output_DH]
            linears += [linear for mlp in mlps for linear in (mlp.gate_up_FD, mlp.down_DF)]
        return linears if self.head_WD is None else [*linears, self.head_WD]

    def matrices(self) -> list[Linear]:
        """Return the matrices except routers, in a fixed order.

        An embedding table that is also the head is listed once.
        """
        first = [] if self.embedding is None else [self.embedding]
        return list(dict.fromkeys(first + self.linears))

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors in a fixed order. Packed matrices are converted to dense copies."""
        return [*(linear.dense() for linear in self.matrices() + self._routers), *self._vectors]

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors as they are in memory, in a fixed order, as pairs (name, tensor).

        A name consists of the index of the pair and the format of the tensor.
        """
        parts = [part for linear in self.matrices() + self._routers for part in linear.stored()]
        parts += [("vector", vector) for vector in self._vectors]
        return [(f"{number} {format}", memory) for number, (format, memory) in enumerate(parts)]

    @property
    def _routers(self) -> list[Linear]:
        return [layer.mlp.router_XD for layer in self.layers if isinstance(layer.mlp, ExpertWeights)]

    @property
    def _vectors(self) -> list[torch.Tensor]:
        parts: list[DecoderWeights | LayerWeights] = [self, *self.layers]
        values = [getattr(part, field.name) for part in parts for field in fields(part)]
        return [value for value in values if isinstance(value, torch.Tensor)]

    @property
    def bytes_per_step(self) -> int:
        """Number of bytes of the matrices that a step reads if it uses every expert."""
        return sum(linear.num_bytes for linear in self.linears)


class Decoder(ABC):
    """The base class of the decoders of all devices.

    It implements the embedding at the beginning of a step, and the final norm and the logits at the end.

    The C++ kernels also implement the end of a step (Decoder::logits), with the same result.

    shard:       the part of the model in `weights`; None means the whole model.
    collectives: communication with the other ranks; None for a single rank.
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
        self._collectives = collectives or Collectives()
        self._heads, self._kv_heads = len(shard.heads(config.num_heads)), len(shard.kv_heads(config.num_kv_heads))
        self._layer_numbers = shard.layers(config.num_layers)
        self._is_local = [config.is_local(layer) for layer in self._layer_numbers]
        self._rotary, self._local_rotary = rotary_embeddings(config)

    @property
    def sliding_window(self) -> int | None:
        """Number of tokens that a layer with a sliding window attends to; None if the model has no such layer."""
        return None if self.config.sliding is None else self.config.sliding.window

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Return x_TD, the embeddings of tokens. Only the first pipeline stage calls this."""
        embedding, vocab_size = self.weights.embedding, self.config.vocab_size
        assert embedding is not None, "this rank is of a later pipeline stage"
        held = self._shard.vocabulary(vocab_size)
        if len(held) == vocab_size:
            x_TD = embedding.look_up(token_ids_T)
        else:  # sum over the tensor ranks, each of which holds a part of the table's rows
            is_held_T = (token_ids_T >= held.start) & (token_ids_T < held.stop)
            x_TD = embedding.look_up((token_ids_T - held.start).where(is_held_T, 0)) * is_held_T[:, None]
            x_TD = self._collectives.all_reduce(x_TD)
        if self.config.embedding_scale == 1.0:
            return x_TD
        # Families that scale embeddings round the factor to the type of their activations.
        return x_TD * float(torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype))

    def finish(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after the last layer with the final norm applied.

        Only the last pipeline stage calls this.
        """
        norm_D = self.weights.norm_D
        assert norm_D is not None, "this rank is of an earlier pipeline stage"
        return self._norm(x_ND, norm_D)

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return logits_NV, computed from hidden states after the last layer.

        The type of the logits is the output type of the head.
        """
        head_WD = self.weights.head_WD
        assert head_WD is not None, "this rank is of an earlier pipeline stage"
        logits_NW = head_WD(self.finish(x_ND))
        return self._collectives.gather_logits(logits_NW, self.config.vocab_size).contiguous()

    @abstractmethod
    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of `x_TD` times `weight_D`. Overwrites neither argument."""

    def _optional_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor | None) -> torch.Tensor:
        return x_TD if weight_D is None else self._norm(x_TD, weight_D)

    def _mean_squares(self, qkv_TQ: torch.Tensor) -> torch.Tensor:
        """Return means_T2, float32, the mean squares of each token's queries and of its keys.

        The means are over the heads of all tensor ranks.
        """
        sizes = [heads * self.config.head_dim for heads in (self._heads, self._kv_heads)]
        parts = qkv_TQ[:, : sum(sizes)].split(sizes, dim=1)
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) / part.shape[1] ** 0.5 for part in parts]
        return self._mean_over_ranks(torch.stack(norms, dim=1).square())

    def _mean_over_ranks(self, means: torch.Tensor) -> torch.Tensor:
        """Return the means over the heads of all tensor ranks.

        means: means over this rank's heads. This method may overwrite them.
        """
        # Every rank has the same number of heads, and every head is on the same number of ranks.
        ranks = self._shard.sizes.tensor
        return means if ranks == 1 else self._collectives.all_reduce(means) / ranks


class DecoderModel(Decoder):
    """A decoder that runs torch operators. It keeps no state between steps. The caller passes the KV cache."""

    @cached_property
    def _attention(self) -> PagedAttention:
        return PagedAttention(
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=self.config.head_dim,
            scale=self.config.attention_scale,
        )

    @cached_property
    def _activate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return F.silu if self.config.activation == "silu" else partial(F.gelu, approximate="tanh")

    def run_layers(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionBatch,
        cache_LPXE: torch.Tensor,
        routing_GTJ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after this rank's layers, and write the keys and values of these layers to the
        cache.

        routing_GTJ: int32; receives the experts of each token, highest router weight first, in this rank's layers
                     with experts.
        """
        in_full = self._rotary.rotation(positions_T, x_TD.dtype), attention
        in_window = in_full[0], attention.local or attention
        if self._local_rotary is not self._rotary:
            in_window = self._local_rotary.rotation(positions_T, x_TD.dtype), in_window[1]
        for number, layer, cache_PXE, is_local in zip(
            self._layer_numbers, self.weights.layers, cache_LPXE, self._is_local, strict=True
        ):
            self._collectives.begin_layer(number)
            normed_TD = self._optional_norm(x_TD, layer.attention_norm_D)
            added_TD = self._attend(layer, normed_TD, cache_PXE, *(in_window if is_local else in_full))
            x_TD = x_TD + self._optional_norm(added_TD, layer.attention_output_norm_D)
            routing_TJ = None if routing_GTJ is None else routing_GTJ[number]
            added_TD = self._feed_forward(layer.mlp, self._optional_norm(x_TD, layer.mlp_norm_D), routing_TJ)
            x_TD = x_TD + self._optional_norm(added_TD, layer.mlp_output_norm_D)
        return x_TD

    def _attend(
        self,
        layer: LayerWeights,
        x_TD: torch.Tensor,
        cache_PXE: torch.Tensor,
        rotated: Rotation,
        attention: AttentionBatch,
    ) -> torch.Tensor:
        heads, queries_and_keys = self._heads, self._heads + self._kv_heads
        qkv_TQ = layer.qkv_QD(x_TD)
        if layer.qkv_bias_Q is not None:
            qkv_TQ += layer.qkv_bias_Q
        heads_THC = qkv_TQ.unflatten(1, (-1, self.config.head_dim))
        if layer.q_norm_C is not None and layer.k_norm_C is not None:
            parts = heads_THC[:, :heads], heads_THC[:, heads:queries_and_keys]
            weights = layer.q_norm_C, layer.k_norm_C
            if self.config.joint_qk_norm:
                scales_T2 = torch.rsqrt(self._mean_squares(qkv_TQ) + self.config.rms_norm_eps)
                for part_THC, weight, scale_T in zip(parts, weights, scales_T2.unbind(1), strict=True):
                    weight_HC = weight.view(part_THC.shape[1:])
                    part_THC.copy_(part_THC.float() * scale_T[:, None, None] * weight_HC)
            else:
                for part_THC, weight_C in zip(parts, weights, strict=True):
                    part_THC.copy_(self._norm(part_THC, weight_C))
        rotated.apply_(heads_THC[:, :queries_and_keys])
        kv_TE = qkv_TQ[:, heads * self.config.head_dim :]
        out_TH = self._attention(heads_THC[:, :heads], kv_TE, cache_PXE, attention)
        return self._collectives.all_reduce(layer.output_DH(out_TH))

    def _feed_forward(
        self, mlp: FeedForward | ExpertWeights, x_TD: torch.Tensor, routing_TJ: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(mlp, FeedForward):
            return self._collectives.all_reduce(self._gated(mlp, x_TD))
        assert self.config.moe is not None
        x_AD = self._collectives.gather_tokens(x_TD)
        y_AD = self._mix(mlp, x_AD, self.config.moe, routing_TJ)
        return self._collectives.all_reduce(self._collectives.scatter_sums(y_AD))

    def _mix(
        self, weights: ExpertWeights, x_AD: torch.Tensor, moe: MoEConfig, routing_TJ: torch.Tensor | None
    ) -> torch.Tensor:
        """Return y_AD, the sum of the outputs of this rank's experts for each token. Experts have no capacity limit.

        The mixture is described by Shazeer et al. 2017, arXiv:1701.06538. A is the number of tokens in the batch, S the
        number of tokens that use one expert. The tokens of one expert are computed together.
        """
        share_AJ, expert_AJ = weights.router_XD(x_AD).float().softmax(dim=-1).topk(moe.experts_per_token, dim=-1)
        if routing_TJ is not None:
            routing_TJ.copy_(self._collectives.own_tokens(expert_AJ))
        if moe.normalize:
            share_AJ = share_AJ / share_AJ.sum(dim=-1, keepdim=True)
        # Sort the choices by expert, so that the tokens of one expert are adjacent.
        order = expert_AJ.flatten().argsort(stable=True)
        counts = expert_AJ.flatten().bincount(minlength=moe.num_experts).tolist()
        tokens, shares = order // moe.experts_per_token, share_AJ.flatten()[order].to(x_AD.dtype)
        y_AD = torch.zeros_like(x_AD)
        start = sum(counts[: weights.first])
        for number, expert in enumerate(weights.experts, weights.first):
            stop = start + counts[number]
            if stop > start:
                tokens_S = tokens[start:stop]
                y_SD = self._gated(expert, x_AD.index_select(0, tokens_S))
                y_AD.index_add_(0, tokens_S, y_SD * shares[start:stop, None])
            start = stop
        return y_AD

    def _gated(self, mlp: FeedForward, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = mlp.gate_up_FD(x_TD).chunk(2, dim=-1)
        return mlp.down_DF(self._activate(gate_TF).mul_(up_TF))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, self.config.rms_norm_eps)
