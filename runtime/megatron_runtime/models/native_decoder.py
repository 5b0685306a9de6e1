"""A decoder whose steps run in compiled code, from token ids to logits, and the choice of a model's decoder."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.records import GELU_TANH, ITEM, LAYER, MATRIX, SILU, STEP
from megatron_kernels.cpu.sizes import UNIT, least_scratch
from megatron_kernels.cpu.step_buffers import Buffers
from megatron_kernels.cpu.thread_pool import shared_thread_pool
from megatron_kernels.cpu.tuning import tuning
from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.distributed.shard import Shard
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights
from megatron_runtime.models.layers.cpu import NativeLinear

Float32 = npt.NDArray[np.float32]
_WORDS = {name: number for number, name in enumerate(STEP.names or ())}
"""Every field of a step's record has eight bytes."""
_ITEM_WORDS = len(ITEM.names or ())


class PlannedTokens(Protocol):
    """The tokens of a step plan, as documented in backends.native.executor.StepPlan."""

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


def runs_natively(config: ModelConfig, weights: DecoderWeights) -> bool:
    """Return whether every matrix is packed and the compiled step supports every size."""
    is_packed = all(isinstance(linear, NativeLinear) for linear in weights.linears)
    is_whole = weights.embedding is not None and weights.head_WD is not None and config.moe is None
    return is_packed and is_whole and config.head_dim % 16 == 0 and config.intermediate_size % UNIT == 0


class NativeDecoder(DecoderModel):
    """The decoder of a whole model on one rank, if runs_natively()."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        assert runs_natively(config, weights)
        super().__init__(config, weights)
        self._thread_pool = shared_thread_pool()
        self._tuning = tuning()
        self._buffers = Buffers()
        self._kept: list[torch.Tensor] = []
        self._layers = np.array([self._layer(number) for number in range(config.num_layers)], dtype=LAYER)
        linears = [linear for linear in weights.linears if isinstance(linear, NativeLinear)]
        self._matrices = np.concatenate([linear.matrix.record for linear in linears], dtype=MATRIX)
        self._counters = np.zeros(config.num_layers, dtype=np.int64)
        self._step = np.zeros(1, dtype=STEP)
        self._words: npt.NDArray[np.int64] = self._step.view(np.int64)
        self._sizes: tuple[int, ...] = ()
        self._rotations: dict[str, npt.NDArray[np.float32]] = {}
        self._set_constants()

    def run_plan(
        self, plan: PlannedTokens, cache_LPXE: torch.Tensor, logit_rows_N: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, Float32]:
        """Compute the plan's tokens in their order, and write their keys and values to the cache.

        Returns x_TD, the hidden states after the last layer, and float32 [N, V], the logits after the tokens
        `logit_rows_N`, which the next step overwrites.
        """
        tokens, logits, config = len(plan.token_ids), len(logit_rows_N), self.config
        x_TD = self.embed(torch.from_numpy(plan.token_ids))
        logits_NV = self._buffers.floats("logits", logits, config.vocab_size)
        counts, lengths = plan.query_lengths.astype(np.int64), plan.context_lengths.astype(np.int64)
        items = _items(counts, lengths, kv_heads=config.num_kv_heads, query_block=self._tuning.query_block)
        tables = np.ascontiguousarray(plan.block_tables, np.int32)
        arrays: dict[str, npt.NDArray[Any]] = {
            "x": x_TD.numpy(),
            "logits": logits_NV,
            "items": items,
            "positions": plan.positions.astype(np.int64),
            "slots": plan.slot_mapping,
            "sequence_starts": counts.cumsum() - counts,
            "sequence_lengths": lengths,
            "sequence_counts": counts,
            "block_tables": tables,
            "logit_rows": logit_rows_N,
        }
        context = -(-int(lengths.max()) // UNIT) * UNIT
        self._resize_workspace(tokens, max(tokens, logits), context, has_prompts=len(counts) < tokens)
        self._extend_rotations(int(plan.positions.max()) + 1)
        size = cache_LPXE.element_size()
        self._set(
            {name: _address(array) for name, array in arrays.items()}
            | {
                "tokens": tokens,
                "num_items": len(items),
                "num_logits": logits,
                "block_table_stride": tables.strides[0],
                "cache": cache_LPXE.data_ptr(),
                "page_size": cache_LPXE.shape[2],
                "layer_stride": cache_LPXE.stride(0) * size,
                "row_stride": cache_LPXE.stride(2) * size,
                "is_bfloat16": cache_LPXE.dtype is torch.bfloat16,
            }
        )
        self._counters[:] = 0
        self._thread_pool.run_step(self._step)
        return x_TD, logits_NV

    def _set(self, values: dict[str, int]) -> None:
        """Set words of the step's record by number: numpy's access by field name is slower than the assignment."""
        for name, value in values.items():
            self._words[_WORDS[name]] = value

    def _resize_workspace(self, tokens: int, rows: int, context: int, *, has_prompts: bool) -> None:
        """Provide the workspace of a step. A step of the same sizes as the previous one uses the same memory.

        rows:    of inputs of a product.
        context: tokens of the longest sequence, in whole units.
        """
        sizes = (tokens, rows, context, has_prompts)
        if sizes == self._sizes:
            return
        config, floats = self.config, self._buffers.floats
        query = config.num_heads * config.head_dim
        width = max(config.hidden_size, query, config.intermediate_size)
        group = config.num_heads // config.num_kv_heads
        scratch = least_scratch(
            context,
            group=group,
            head_dim=config.head_dim,
            inputs=config.hidden_size,
            has_prompts=has_prompts,
        )
        # A row of inputs: floats, bytes, and a scale and a sum of each 32.
        row = width + width // 4 + width // 16
        arrays = {
            "qkv": floats("qkv", tokens, query + 2 * config.num_kv_heads * config.head_dim),
            "attended": floats("attended", tokens, query),
            "gated": floats("gated", tokens, config.intermediate_size),
            "added": floats("added", rows, config.hidden_size),
            "shared_inputs": floats("shared_inputs", rows, row),
            "scratch": floats("scratch", self._thread_pool.threads, scratch),
        }
        self._set({name: _address(array) for name, array in arrays.items()})
        self._set({"width": width, "context": context, "scratch_stride": scratch * 4})
        self._sizes = sizes

    def _extend_rotations(self, positions: int) -> None:
        """Compute cos and sin of `positions` positions, of twice as many if the tables are too short."""
        if self._rotations and len(self._rotations["cos"]) >= positions:
            return
        at = torch.arange(max(1024, 2 * positions)).float()[:, None]
        for prefix, frequencies in (("", self._frequencies), ("local_", self._local_frequencies)):
            angles = at * frequencies
            self._rotations[f"{prefix}cos"] = angles.cos().numpy()
            self._rotations[f"{prefix}sin"] = angles.sin().numpy()
        self._set({name: _address(array) for name, array in self._rotations.items()})

    def _set_constants(self) -> None:
        config, step = self.config, self._step
        step["counters"] = self._counters.ctypes.data
        step["num_layers"], step["layers"] = config.num_layers, self._layers.ctypes.data
        step["matrices"] = self._matrices.ctypes.data
        step["hidden"], step["heads"], step["kv_heads"] = config.hidden_size, config.num_heads, config.num_kv_heads
        step["head_dim"], step["feed_forward"] = config.head_dim, config.intermediate_size
        step["activation"] = SILU if config.activation == "silu" else GELU_TANH
        step["window"] = config.sliding.window if config.sliding is not None else 0
        step["norm"] = self._address(self.weights.norm_D)
        step["epsilon"], step["scale"] = config.rms_norm_eps, config.attention_scale

    def _layer(self, number: int) -> tuple[int, ...]:
        layer = self.weights.layers[number]
        return (
            int(self.config.is_local(number)),
            self._address(layer.attention_norm_D),
            self._address(layer.qkv_bias_Q),
            self._address(layer.q_norm_C),
            self._address(layer.k_norm_C),
            self._address(layer.attention_output_norm_D),
            self._address(layer.mlp_norm_D),
            self._address(layer.mlp_output_norm_D),
        )

    def _address(self, weight: torch.Tensor | None) -> int:
        if weight is None:
            return 0
        self._kept.append(weight.float().contiguous())
        return self._kept[-1].data_ptr()


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _items(
    counts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], *, kv_heads: int, query_block: int
) -> npt.NDArray[np.int64]:
    """Return the attention work items, the largest first, as rows of the words of ITEM."""
    sequence, first, count = np.arange(len(counts)), np.zeros_like(counts), counts
    if counts.max() > query_block:
        blocks = -(-counts // query_block)
        sequence = np.repeat(sequence, blocks)
        first = (np.arange(len(sequence)) - np.repeat(blocks.cumsum() - blocks, blocks)) * query_block
        count = np.minimum(query_block, counts[sequence] - first)
    order = np.argsort(-lengths[sequence] * count, kind="stable")
    items: npt.NDArray[np.int64] = np.empty((len(order), kv_heads, _ITEM_WORDS), dtype=np.int64)
    items[..., 0], items[..., 1] = sequence[order, None], np.arange(kv_heads)
    items[..., 2], items[..., 3] = first[order, None], count[order, None]
    return items.reshape(-1, _ITEM_WORDS)


def build_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    *,
    shard: Shard | None = None,
    collectives: Collectives | None = None,
) -> DecoderModel:
    """Return the decoder for `weights` on the CPU: the compiled one if it supports the model, else torch operators."""
    if collectives is None and (shard is None or shard == Shard()) and runs_natively(config, weights):
        return NativeDecoder(config, weights)
    return DecoderModel(config, weights, shard=shard, collectives=collectives)
