"""The decoder on a GPU. Each layer of a Llama model takes nine launches, four of which are matrix products.

Shapes: T tokens of a step, N some of these tokens, D hidden size, V vocabulary, L layers, P pages, X tokens of a page,
        E keys and values of one token, H query heads, K key-value heads, C head size, S longest sequence, F = C / 2
        rotary pairs. In a mixture of experts: A tokens in the steps of all expert ranks together, Y experts of this
        rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from megatron_kernels.registry import Kernels
from megatron_kernels.tuning import expert_places
from megatron_runtime.backends.native.cuda.step_buffers import DeviceStep
from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.decoder import Decoder, DecoderWeights, ExpertWeights, FeedForward, LayerWeights
from megatron_runtime.models.layers.linear import Linear, LinearFactory, Weight
from megatron_runtime.models.layers.paged_attention import RotaryEmbedding

_Weights = TypeVar("_Weights", LayerWeights, DecoderWeights)


class StackedLinear(Linear):
    """A Linear whose matrix is `stack_YNK[number]`, one of several matrices in one tensor."""

    def __init__(self, stack_YNK: torch.Tensor, number: int) -> None:
        super().__init__(stack_YNK[number])
        self.stack_YNK = stack_YNK


class DeviceLinears(LinearFactory):
    """A factory of dense matrices, which copies each matrix to the device as soon as it is read."""

    checks_values = False

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dense_dtypes = frozenset({dtype})
        self._dtype = dtype
        self._device = device

    def dense(self, weight: Weight) -> torch.Tensor:
        return super().dense(weight).to(self._device, self._dtype, copy=True)

    def linear(self, weight_NK: Weight) -> Linear:
        return Linear(self.dense(weight_NK))

    def several(self, weights: Iterable[Weight], *, count: int) -> tuple[Linear, ...]:
        stack_YNK: torch.Tensor | None = None
        for number, weight_NK in enumerate(map(super().dense, weights)):
            if stack_YNK is None:
                stack_YNK = torch.empty(count, *weight_NK.shape, dtype=self._dtype, device=self._device)
            stack_YNK[number].copy_(weight_NK)
        assert stack_YNK is not None, "a layer has experts"
        return tuple(StackedLinear(stack_YNK, number) for number in range(count))


class StagedLinears(LinearFactory):
    """A factory of dense matrices in host memory, which are later copied over the matrices on the device.

    weights:  matrices on the device, with the same shapes.
    allocate: returns host memory of a given size in bytes.
    """

    def __init__(self, dtype: torch.dtype, weights: DecoderWeights, allocate: Callable[[int], torch.Tensor]) -> None:
        self.dense_dtypes = frozenset({dtype})
        self._dtype = dtype
        self._size = sum(linear.dense().nbytes for linear in weights.matrices())
        self._allocate = allocate
        self._rest: torch.Tensor | None = None

    def dense(self, weight: Weight) -> torch.Tensor:
        weight_NK = super().dense(weight)
        if self._rest is None:
            self._rest = self._allocate(self._size)
        size = weight_NK.numel() * self._dtype.itemsize
        target, self._rest = self._rest[:size], self._rest[size:]
        return target.view(self._dtype).view(weight_NK.shape).copy_(weight_NK)

    def linear(self, weight_NK: Weight) -> Linear:
        return Linear(self.dense(weight_NK))


class DeviceMixture:
    """A mixture of experts whose kernel launches do not depend on the routing.

    weights: router and experts, whose matrices were created by DeviceLinears.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._router_ND = weights.router_XD.dense()
        self._gate_up_YGD = _stack([expert.gate_up_FD for expert in weights.experts])
        self._down_YDF = _stack([expert.down_DF for expert in weights.experts])
        self._first = weights.first

    def __call__(self, x_AD: torch.Tensor, moe: MoEConfig, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y_AD, the sum of the outputs of this rank's experts, and the experts of each token, int32 [A, J]."""
        places = expert_places(tokens=len(x_AD), top_k=moe.experts_per_token, num_experts=moe.num_experts)
        routing = kernels.moe_routing(
            F.linear(x_AD, self._router_ND), top_k=moe.experts_per_token, normalize=moe.normalize, alignment=places
        )
        y_AD = kernels.moe_experts(
            x_AD, self._gate_up_YGD, self._down_YDF, routing, first=self._first, alignment=places
        )
        return y_AD, routing.experts_TJ


class KernelDecoder(Decoder):
    """A decoder that runs the operations in `kernels`. No launch depends on the contents of a step.

    weights:    matrices and tables must be on the device already. The decoder copies norms and biases to the device.
    max_length: number of tokens of the longest sequence.
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
        layers = tuple(_moved(layer, device) for layer in weights.layers)
        weights = replace(_moved(weights, device), layers=layers)
        super().__init__(config, weights, shard=shard, collectives=collectives)
        self.kernels = kernels
        self._mlps = [layer.mlp if isinstance(layer.mlp, FeedForward) else DeviceMixture(layer.mlp) for layer in layers]
        self._cos_sin_S2F = self._local_cos_sin_S2F = _cos_sin(self._rotary, max_length).to(device)
        if self._local_rotary is not self._rotary:
            self._local_cos_sin_S2F = _cos_sin(self._local_rotary, max_length).to(device)

    def __call__(
        self, step: DeviceStep, cache_LPXE: torch.Tensor, routing_GTJ: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run all layers, and return x_TD, the hidden states before the last norm.

        The arguments are as in run_layers().
        """
        return self.run_layers(self.embed(step.token_ids_T), step, cache_LPXE, routing_GTJ)

    def run_layers(
        self,
        residual_TD: torch.Tensor,
        step: DeviceStep,
        cache_LPXE: torch.Tensor,
        routing_GTJ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after this rank's layers, and write the step's keys and values to the cache.
        Overwrites `residual_TD`.

        routing_GTJ: as in DecoderModel.run_layers().
        """
        kernels, config = self.kernels, self.config
        rotated = local_rotated = _rotation(self._cos_sin_S2F, step)
        if self._local_cos_sin_S2F is not self._cos_sin_S2F:
            local_rotated = _rotation(self._local_cos_sin_S2F, step)
        added_TD: torch.Tensor | None = None
        for number, layer, mlp, cache_PXE, is_local in zip(
            self._layer_numbers, self.weights.layers, self._mlps, cache_LPXE, self._is_local, strict=True
        ):
            self._collectives.begin_layer(number)
            cos_TF, sin_TF = local_rotated if is_local else rotated
            normed_TD = self._add_norm(added_TD, residual_TD, layer.attention_norm_D)
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
                mean_squares_T2=self._mean_squares(qkv_TQ) if config.joint_qk_norm else None,
                epsilon=config.rms_norm_eps,
            )
            q_THC = qkv_TQ.unflatten(1, (-1, config.head_dim))[:, : self._heads]
            out_TH = self._attend(q_THC, cache_PXE, step, is_local=is_local).flatten(1)
            added_TD = self._collectives.all_reduce(layer.output_DH(out_TH))
            added_TD = self._optional_norm(added_TD, layer.attention_output_norm_D)
            normed_TD = self._add_norm(added_TD, residual_TD, layer.mlp_norm_D)
            routing_TJ = None if routing_GTJ is None else routing_GTJ[number]
            added_TD = self._optional_norm(self._feed_forward(mlp, normed_TD, routing_TJ), layer.mlp_output_norm_D)
        return residual_TD if added_TD is None else residual_TD + added_TD

    def _attend(
        self, q_THC: torch.Tensor, cache_PXE: torch.Tensor, step: DeviceStep, *, is_local: bool
    ) -> torch.Tensor:
        kernels, count = self.kernels, step.decodes
        tables_BM, lengths_B = step.block_table_BM, step.lengths_B
        options: dict[str, Any] = {
            "num_kv_heads": self._kv_heads,
            "scale": self.config.attention_scale,
            "window": self.sliding_window if is_local else None,
        }
        parts = []
        if count:
            parts.append(
                kernels.paged_decode(q_THC[:count], cache_PXE, tables_BM[:count], lengths_B[:count], **options)
            )
        if count < len(lengths_B):
            prompts = q_THC[count:], cache_PXE, tables_BM[count:], lengths_B[count:], step.prefill_starts
            parts.append(kernels.paged_prefill(*prompts, **options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _feed_forward(
        self, mlp: FeedForward | DeviceMixture, x_TD: torch.Tensor, routing_TJ: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(mlp, FeedForward):
            gated_TF = self.kernels.swiglu(mlp.gate_up_FD(x_TD), activation=self.config.activation)
            return self._collectives.all_reduce(mlp.down_DF(gated_TF))
        assert self.config.moe is not None
        y_AD, experts_AJ = mlp(self._collectives.gather_tokens(x_TD), self.config.moe, self.kernels)
        if routing_TJ is not None:
            routing_TJ.copy_(self._collectives.own_tokens(experts_AJ))
        return self._collectives.all_reduce(self._collectives.scatter_sums(y_AD))

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return self.kernels.add_rms_norm(None, x_TD, weight_D, epsilon=self.config.rms_norm_eps)

    def _add_norm(
        self, added_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor | None
    ) -> torch.Tensor:
        """Add `added_TD` to the residual in place.

        Return the sum after RMS normalization, or the sum itself if `weight_D` is None.
        """
        if weight_D is None:
            return residual_TD if added_TD is None else residual_TD.add_(added_TD)
        return self.kernels.add_rms_norm(added_TD, residual_TD, weight_D, epsilon=self.config.rms_norm_eps)


def _cos_sin(rotary: RotaryEmbedding, max_length: int) -> torch.Tensor:
    return torch.cat(rotary.table(max_length), dim=1)


def _rotation(cos_sin_S2F: torch.Tensor, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos_TF and sin_TF, the cosines and sines of the rotary embedding at the positions of the step's tokens."""
    cos_TF, sin_TF = cos_sin_S2F.index_select(0, step.positions_T).chunk(2, dim=1)
    return cos_TF, sin_TF


def _stack(linears: list[Linear]) -> torch.Tensor:
    first = linears[0]
    assert isinstance(first, StackedLinear), "DeviceLinears.several() returns these"
    return first.stack_YNK


def _moved(weights: _Weights, device: torch.device) -> _Weights:
    """Return a copy of `weights` in which the router and all fields of type Tensor are on the device.

    All matrices except the router must be on the device already.
    """
    moved: dict[str, Any] = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, torch.Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, ExpertWeights):
            moved[field.name] = replace(value, router_XD=Linear(value.router_XD.dense().to(device)))
    return replace(weights, **moved)
