"""The decoder as a GPU runs it: nine launches a layer of a Llama, four of them products of matrices by torch.

Shapes: T tokens of a step, N rows of them, D hidden, V vocabulary, L layers, P pages, X tokens of a page, E = keys and
values of one token, H query heads, K key-value heads, C size of a head, S longest sequence, F = C / 2 rotary pairs.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from megatron_kernels.registry import Kernels
from megatron_runtime.backends.native.cuda.mixture import DeviceMixture
from megatron_runtime.backends.native.cuda.step_buffers import DeviceStep
from megatron_runtime.distributed.groups import Collectives, OneRank
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights, FeedForward, LayerWeights, embed
from megatron_runtime.models.layers.rotary import inverse_frequencies

_Weights = TypeVar("_Weights", LayerWeights, DecoderWeights)


class KernelDecoder:
    """A function of weights and cache, made of the operations in `kernels`. No launch depends on what a step holds.

    weights:    matrices and tables on the device already; norms and biases are brought there.
    max_length: tokens of the longest sequence.
    shard, collectives: which part of the model `weights` are, and how this rank speaks to the others.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        *,
        device: torch.device,
        max_length: int,
        shard: Shard | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.config = config
        self._shard = shard = shard or Shard()
        self._collectives: Collectives = collectives or OneRank()
        self._layer_numbers = shard.layers(config.num_layers)
        self._heads, self._kv_heads = len(shard.heads(config.num_heads)), len(shard.kv_heads(config.num_kv_heads))
        self._kernels = kernels
        self._weights = _on_device(weights, device)
        self._mlps = [_mlp_on_device(layer, device) for layer in weights.layers]
        self._window = config.sliding.window if config.sliding is not None else None
        self._is_local = [config.is_local(layer) for layer in self._layer_numbers]
        frequencies_F = inverse_frequencies(
            head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling
        )
        self._cos_sin_S2F = self._local_cos_sin_S2F = _cos_sin(frequencies_F, max_length).to(device)
        if config.sliding is not None and config.sliding.rope_theta is not None:
            frequencies_F = inverse_frequencies(head_dim=config.head_dim, theta=config.sliding.rope_theta)
            self._local_cos_sin_S2F = _cos_sin(frequencies_F, max_length).to(device)

    def __call__(self, step: DeviceStep, cache_LPXE: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values to the cache; return x_TD before the last norm."""
        return self.run_layers(self.embed(step), step, cache_LPXE)

    def embed(self, step: DeviceStep) -> torch.Tensor:
        """x_TD of the step's tokens, in the first pipeline stage."""
        embedding, vocab_size = self._weights.embedding, self.config.vocab_size
        assert embedding is not None, "this rank is of a later pipeline stage"
        held = self._shard.vocabulary(vocab_size)
        x_TD = embed(embedding, step.token_ids_T, held, vocab_size, self._collectives)
        if self.config.embedding_scale == 1.0:
            return x_TD
        # Families that scale round the factor to the type of their activations.
        return x_TD * float(torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype))

    def run_layers(self, residual_TD: torch.Tensor, step: DeviceStep, cache_LPXE: torch.Tensor) -> torch.Tensor:
        """Hidden states after this rank's layers. Overwrites those given."""
        kernels, weights, config = self._kernels, self._weights, self.config
        turn = local_turn = _turn(self._cos_sin_S2F, step)
        if self._local_cos_sin_S2F is not self._cos_sin_S2F:
            local_turn = _turn(self._local_cos_sin_S2F, step)
        added_TD: torch.Tensor | None = None
        for number, layer, mlp, cache_PXE, is_local in zip(
            self._layer_numbers, weights.layers, self._mlps, cache_LPXE, self._is_local, strict=True
        ):
            self._collectives.begin_layer(number)
            cos_TF, sin_TF = local_turn if is_local else turn
            normed_TD = self._norm(added_TD, residual_TD, layer.attention_norm_D)
            qkv_TQ = layer.qkv_QD(normed_TD)
            if layer.qkv_bias_Q is not None:
                qkv_TQ += layer.qkv_bias_Q
            kernels.qk_norm_rope_append(
                qkv_TQ,
                cos_TF,
                sin_TF,
                cache_PXE,
                step.slots_T,
                num_heads=self._heads,
                num_kv_heads=self._kv_heads,
                q_norm_C=layer.q_norm_C,
                k_norm_C=layer.k_norm_C,
                epsilon=config.rms_norm_eps,
            )
            q_THC = qkv_TQ.unflatten(1, (-1, config.head_dim))[:, : self._heads]
            out_TH = self._attend(q_THC, cache_PXE, step, is_local=is_local).flatten(1)
            added_TD = self._collectives.all_reduce(layer.output_DH(out_TH))
            added_TD = self._output_norm(added_TD, layer.attention_output_norm_D)
            normed_TD = self._norm(added_TD, residual_TD, layer.mlp_norm_D)
            added_TD = self._output_norm(self._feed_forward(mlp, normed_TD), layer.mlp_output_norm_D)
        return residual_TD if added_TD is None else residual_TD + added_TD

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """logits_NV, in the type of the weights, of rows of what a step returned. Overwrites nothing."""
        weights = self._weights
        assert weights.norm_D is not None, "this rank is of an earlier pipeline stage"
        assert weights.head_WD is not None, "this rank is of an earlier pipeline stage"
        logits_NW = weights.head_WD(self._norm(None, x_ND, weights.norm_D))
        return self._collectives.gather_logits(logits_NW, self.config.vocab_size).contiguous()

    def sample(self, logits_BV: torch.Tensor, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int32 [B] as the step's parameters ask, and their log-probabilities."""
        return self._kernels.sample(
            logits_BV,
            temperature_N=step.temperature_B,
            top_k_N=step.top_k_B,
            top_p_N=step.top_p_B,
            min_p_N=step.min_p_B,
            seeds_N=step.seeds_B,
            positions_N=step.sample_positions_B,
        )

    def _attend(
        self, q_THC: torch.Tensor, cache_PXE: torch.Tensor, step: DeviceStep, *, is_local: bool
    ) -> torch.Tensor:
        kernels, kv_heads, scale = self._kernels, self._kv_heads, self.config.attention_scale
        window = self._window if is_local else None
        count, tables_BM, lengths_B = step.decodes, step.block_table_BM, step.lengths_B
        parts = []
        if count:
            parts.append(
                kernels.paged_decode(
                    q_THC[:count],
                    cache_PXE,
                    tables_BM[:count],
                    lengths_B[:count],
                    num_kv_heads=kv_heads,
                    scale=scale,
                    window=window,
                )
            )
        if count < len(lengths_B):
            parts.append(
                kernels.paged_prefill(
                    q_THC[count:],
                    cache_PXE,
                    tables_BM[count:],
                    lengths_B[count:],
                    step.prefill_starts,
                    num_kv_heads=kv_heads,
                    scale=scale,
                    window=window,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _feed_forward(self, mlp: FeedForward | DeviceMixture, x_TD: torch.Tensor) -> torch.Tensor:
        if isinstance(mlp, FeedForward):
            gated_TF = self._kernels.swiglu(mlp.gate_up_FD(x_TD), activation=self.config.activation)
            return self._collectives.all_reduce(mlp.down_DF(gated_TF))
        assert self.config.moe is not None
        y_AD = mlp(self._collectives.gather_tokens(x_TD), self.config.moe, self._kernels)
        return self._collectives.all_reduce(self._collectives.scatter_sums(y_AD))

    def _norm(self, added_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """Adds to the residual in place."""
        return self._kernels.add_rms_norm(added_TD, residual_TD, weight_D, epsilon=self.config.rms_norm_eps)

    def _output_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor | None) -> torch.Tensor:
        return x_TD if weight_D is None else self._norm(None, x_TD, weight_D)


def _cos_sin(frequencies_F: torch.Tensor, max_length: int) -> torch.Tensor:
    angles_SF = torch.arange(max_length, dtype=torch.float32)[:, None] * frequencies_F
    return torch.cat((angles_SF.cos(), angles_SF.sin()), dim=1)


def _turn(cos_sin_S2F: torch.Tensor, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_TF and sin_TF of the step's tokens."""
    cos_TF, sin_TF = cos_sin_S2F.index_select(0, step.positions_T).chunk(2, dim=1)
    return cos_TF, sin_TF


def _on_device(weights: DecoderWeights, device: torch.device) -> DecoderWeights:
    """With all plain tensors there. What made the matrices put them where they belong."""
    layers = tuple(_moved(layer, device) for layer in weights.layers)
    return replace(_moved(weights, device), layers=layers)


def _mlp_on_device(layer: LayerWeights, device: torch.device) -> FeedForward | DeviceMixture:
    mlp = layer.mlp
    return mlp if isinstance(mlp, FeedForward) else DeviceMixture(mlp, device)


def _moved(weights: _Weights, device: torch.device) -> _Weights:
    tensors: dict[str, Any] = {
        field.name: value.to(device)
        for field in fields(weights)
        if isinstance(value := getattr(weights, field.name), torch.Tensor)
    }
    return replace(weights, **tensors)
