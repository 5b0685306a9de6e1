"""A decoder that runs whole steps in the C++ kernels. build_decoder() selects this decoder or the torch decoder."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.library import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GELU_TANH,
    PANEL,
    SILU,
    Layer,
    Matrix,
    Model,
    Step,
    library,
)
from megatron_kernels.cpu.thread_pool import shared_thread_pool
from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights, ExpertWeights, LayerWeights
from megatron_runtime.models.layers.cpu import PackedLinear
from megatron_runtime.models.layers.linear import Linear

Float32 = npt.NDArray[np.float32]

_CACHE_FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class PlannedTokens(Protocol):
    """The part of a step plan that describes the step's tokens; see backends.native.executor.StepPlan."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def positions(self) -> npt.NDArray[np.int32]: ...
    @property
    def query_lengths(self) -> npt.NDArray[np.int32]: ...
    @property
    def context_lengths(self) -> npt.NDArray[np.int32]: ...
    @property
    def block_tables(self) -> npt.NDArray[np.int32]: ...
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]: ...


def runs_in_cpp(config: ModelConfig, weights: DecoderWeights) -> bool:
    """Return whether the C++ kernels can run the model.

    Every matrix must be packed, and the kernels must support the head size.
    """
    is_packed = all(isinstance(linear, PackedLinear) for linear in weights.linears)
    return is_packed and config.head_dim % PANEL == 0


class CppDecoder(DecoderModel):
    """The decoder of one rank, computed in the C++ kernels. The model must satisfy runs_in_cpp()."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        shard: Shard | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        assert runs_in_cpp(config, weights)
        super().__init__(config, weights, shard=shard, collectives=collectives)
        self._thread_pool = shared_thread_pool()
        self._library = library()
        self._kept: list[Any] = []
        self._phases = 3 * len(weights.layers)
        handle = self._library.megatron_create_decoder(self._model())
        if handle is None:
            raise MemoryError("the memory of a decoder's layers cannot be allocated")
        self._handle: int = handle
        weakref.finalize(self, self._library.megatron_destroy_decoder, handle)
        self._rotations: dict[str, Float32] = {}
        self._logits: Float32 = np.empty((0, config.vocab_size), dtype=np.float32)

    def run_plan(
        self,
        plan: PlannedTokens,
        cache_LPXE: torch.Tensor,
        logit_rows_N: npt.NDArray[np.int64],
        routing_GTJ: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Float32]:
        """Run the model on the tokens of `plan`, and write the keys and values of these tokens to the cache.

        routing_GTJ: as in run_layers().

        Returns x_TD, the hidden states after the last layer in the order of the plan, and float32 [N, V], the logits of
        the tokens `logit_rows_N`. The next step overwrites the logits.
        """
        x_TD = self.embed(torch.from_numpy(plan.token_ids))
        if len(self._logits) < len(logit_rows_N):
            self._logits = np.empty((len(logit_rows_N), self.config.vocab_size), dtype=np.float32)
        logits_NV = self._logits[: len(logit_rows_N)]
        step = self._step(plan, x_TD, cache_LPXE)
        step.logit_rows, step.num_logits, step.logits = _address(logit_rows_N), len(logit_rows_N), _address(logits_NV)
        step.routing = None if routing_GTJ is None else routing_GTJ.data_ptr()
        self._run(step, 0, self._phases + 1)
        return x_TD, logits_NV

    def run_rank(
        self,
        plan: PlannedTokens,
        *,
        x_TD: torch.Tensor,
        cache_LPXE: torch.Tensor,
        routing_GTJ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after this rank's layers, and write the keys and values of these layers to the
        cache.

        routing_GTJ: as in run_layers().
        """
        x_TD = x_TD.float().contiguous()
        sums_TD = torch.empty_like(x_TD)
        step = self._step(plan, x_TD, cache_LPXE)
        step.sums = sums_TD.data_ptr()
        means_T2 = torch.empty(len(x_TD), 2)
        is_joint = self.config.joint_qk_norm
        step.means = means_T2.data_ptr() if is_joint else None
        for number, layer, phase in zip(self._layer_numbers, self.weights.layers, count(step=3), strict=False):
            self._collectives.begin_layer(number)
            if is_joint:
                self._run(step, phase, phase + 1)
                means_T2.copy_(self._mean_over_ranks(means_T2))
            self._run(step, phase + is_joint, phase + 2)
            self._add_sums(step, phase + 1, sums_TD, sums_TD)
            if isinstance(layer.mlp, ExpertWeights):
                mixed_TD = self._mixture(step, phase + 2, x_TD, None if routing_GTJ is None else routing_GTJ[number])
            else:
                self._run(step, phase + 2, phase + 3)
                mixed_TD = sums_TD
            self._add_sums(step, phase + 2, mixed_TD, sums_TD)
        return x_TD

    def _mixture(self, step: Step, phase: int, x_TD: torch.Tensor, routing_TJ: torch.Tensor | None) -> torch.Tensor:
        """Compute the mixture of experts, and return the sum of the experts' outputs over all ranks that share the
        tokens.

        The caller adds the sum to x_TD.
        """
        x_AD = self._collectives.gather_tokens(x_TD).contiguous()
        y_AD = torch.empty_like(x_AD)
        step.gathered_tokens, step.gathered, step.gathered_sums = len(x_AD), x_AD.data_ptr(), y_AD.data_ptr()
        if routing_TJ is None:
            self._run(step, phase, phase + 1)
        else:
            routing_AJ = routing_TJ.new_empty(len(x_AD), routing_TJ.shape[1])
            step.routing = routing_AJ.data_ptr()
            self._run(step, phase, phase + 1)
            routing_TJ.copy_(self._collectives.own_tokens(routing_AJ))
        return self._collectives.scatter_sums(y_AD)

    def _add_sums(self, step: Step, phase: int, part_TD: torch.Tensor, sums_TD: torch.Tensor) -> None:
        """Add the result of a phase to the hidden states.

        The result is the sum of `part_TD` over all ranks. It is also written to `sums_TD`.
        """
        summed_TD = self._collectives.all_reduce(part_TD)
        if summed_TD is not sums_TD:
            sums_TD.copy_(summed_TD)
        self._library.megatron_add_sums(self._handle, self._thread_pool.handle, step, phase)

    def _run(self, step: Step, first: int, end: int) -> None:
        if self._library.megatron_run(self._handle, self._thread_pool.handle, step, first, end) != 0:
            raise MemoryError(f"the memory of a step of {step.tokens} tokens cannot be allocated")

    def _step(self, plan: PlannedTokens, x_TD: torch.Tensor, cache_LPXE: torch.Tensor) -> Step:
        """Return the arguments with which the C++ kernels compute a step, without the arguments for logits.

        The arguments contain addresses of the plan's arrays.
        """
        size, tables = cache_LPXE.element_size(), plan.block_tables
        assert tables.strides[1] == tables.itemsize
        self._extend_rotations(int(plan.positions.max()) + 1)
        return Step(
            tokens=len(x_TD),
            x=x_TD.data_ptr(),
            positions=_address(plan.positions),
            slots=_address(plan.slot_mapping),
            sequences=len(plan.query_lengths),
            query_lengths=_address(plan.query_lengths),
            context_lengths=_address(plan.context_lengths),
            block_tables=_address(tables),
            block_table_stride=tables.strides[0] // tables.itemsize,
            cache=cache_LPXE.data_ptr(),
            layer_bytes=cache_LPXE.stride(0) * size,
            row_bytes=cache_LPXE.stride(2) * size,
            page_size=cache_LPXE.shape[2],
            cache_format=_CACHE_FORMATS[cache_LPXE.dtype],
            **{name: _address(array) for name, array in self._rotations.items()},
        )

    def _extend_rotations(self, positions: int) -> None:
        """Extend the tables of cos and sin so that they have at least `positions` positions.

        Each extension at least doubles the tables.
        """
        if self._rotations and len(self._rotations["cos"]) >= positions:
            return
        at = torch.arange(max(1024, 2 * positions))
        for prefix, rotary in (("", self._rotary), ("local_", self._local_rotary)):
            cos, sin = rotary.cos_sin(at)
            self._rotations[f"{prefix}cos"], self._rotations[f"{prefix}sin"] = cos.numpy(), sin.numpy()

    def _model(self) -> Model:
        config, weights = self.config, self.weights
        layers = (Layer * len(weights.layers))(*map(self._layer, weights.layers, self._is_local))
        model = Model(
            num_layers=len(layers),
            layers=layers,
            hidden=config.hidden_size,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=config.head_dim,
            activation=SILU if config.activation == "silu" else GELU_TANH,
            window=config.sliding.window if config.sliding is not None else 0,
            norm=self._address(weights.norm_D),
            epsilon=config.rms_norm_eps,
            scale=config.attention_scale,
            joint_qk_norm=config.joint_qk_norm,
        )
        if weights.head_WD is not None:
            model.head = _matrix(weights.head_WD)
        if config.moe is not None:
            mixtures = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, ExpertWeights)]
            model.routed, model.routed_first = config.moe.num_experts, mixtures[0].first if mixtures else 0
            model.routed_per_token, model.routed_normalize = config.moe.experts_per_token, config.moe.normalize
        return model

    def _layer(self, layer: LayerWeights, is_local: bool) -> Layer:
        mlp = layer.mlp
        mlps, router_XD = (mlp.experts, mlp.router_XD.dense()) if isinstance(mlp, ExpertWeights) else ((mlp,), None)
        matrices = Matrix * len(mlps)
        gate, up, down = (
            matrices(*each) for each in zip(*((*_halves(m.gate_up_FD), _matrix(m.down_DF)) for m in mlps), strict=True)
        )
        assert isinstance(layer.qkv_QD, PackedLinear)
        qkv = (Matrix * len(layer.qkv_QD.matrices))(*(matrix.record for matrix in layer.qkv_QD.matrices))
        self._kept += [gate, up, down, qkv]
        return Layer(
            is_local=is_local,
            attention_norm=self._address(layer.attention_norm_D),
            qkv_bias=self._address(layer.qkv_bias_Q),
            q_norm=self._address(layer.q_norm_C),
            k_norm=self._address(layer.k_norm_C),
            attention_output_norm=self._address(layer.attention_output_norm_D),
            mlp_norm=self._address(layer.mlp_norm_D),
            mlp_output_norm=self._address(layer.mlp_output_norm_D),
            num_qkv=len(qkv),
            qkv=qkv,
            output=_matrix(layer.output_DH),
            num_experts=len(mlps),
            gate=gate,
            up=up,
            down=down,
            router=self._address(router_XD),
        )

    def _address(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        self._kept.append(weight.float().contiguous())
        address: int = self._kept[-1].data_ptr()
        return address


def _matrix(linear: Linear) -> Matrix:
    assert isinstance(linear, PackedLinear)
    (matrix,) = linear.matrices
    return matrix.record


def _halves(linear: Linear) -> tuple[Matrix, Matrix]:
    """Return the matrices that compute the first and the second half of the outputs of `linear`.

    The halves are parts of one matrix, or two matrices with different formats.
    """
    assert isinstance(linear, PackedLinear)
    if len(linear.matrices) == 2:
        first, second = (matrix.record for matrix in linear.matrices)
        assert first.outputs == second.outputs
        return first, second
    (matrix,) = linear.matrices
    half, address = matrix.outputs // 2, matrix.data.data_ptr()
    later = address + matrix.data.nbytes // 2
    return Matrix(matrix.format, matrix.inputs, half, address), Matrix(matrix.format, matrix.inputs, half, later)


def _address(array: npt.NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    address: int = array.__array_interface__["data"][0]
    return address


def build_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    *,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
) -> DecoderModel:
    """Return the decoder of the CPU: a CppDecoder if the C++ kernels support the model, otherwise a DecoderModel."""
    decoder = CppDecoder if runs_in_cpp(config, weights) else DecoderModel
    return decoder(config, weights, shard=shard, collectives=collectives)
