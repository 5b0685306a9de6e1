"""Small models with every feature of the model families, and batches of growing sequences, for compiled steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_kernels.quantized import BLOCK_SIZES, SCALES, QuantizedTensor
from megatron_runtime.backends.native.cpu.executor import attention_batch
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.models.config import ModelConfig, MoEConfig, SlidingWindow
from megatron_runtime.models.cpp_decoder import CppDecoder, build_decoder
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights, ExpertWeights, FeedForward, LayerWeights
from megatron_runtime.models.layers.cpu import PackedLinears
from megatron_runtime.models.layers.linear import Linear, LinearFactory

PAGE = 16
PLAIN = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=500.0,
    max_position_embeddings=512,
    tie_embeddings=True,
    eos_token_ids=(1,),
)
EXPERTS = MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=32, normalize=True, dense_layers=(1,))
TRAITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied head, one group": {"tie_embeddings": False, "num_kv_heads": 6},
    "bias": {"qkv_bias": True},
    "norms of heads": {"qk_norm": True},
    "gemma": {
        "qk_norm": True,
        "activation": "gelu_tanh",
        "output_norms": True,
        "embedding_scale": 8.0,
        "query_scale": 0.3,
        "sliding": SlidingWindow(window=20, is_local=(True, False, True), rope_theta=100.0),
    },
    "norms of outputs and of all heads": {
        "qk_norm": True,
        "joint_qk_norm": True,
        "input_norms": False,
        "output_norms": True,
        "qkv_bias": True,
        "moe": EXPERTS,
    },
    "experts": {"moe": EXPERTS},
    "experts, shares not normalized": {"moe": dataclasses.replace(EXPERTS, normalize=False, dense_layers=())},
}


def stored_blocks(kind: int, outputs: int = 32, inputs: int = 512, *, scale: float = 1.0) -> QuantizedTensor:
    """Return a random weight as stored in a file, with padding between its rows.

    scale: standard deviation of the scales of its blocks.
    """
    generator = np.random.default_rng(kind)
    values, size = BLOCK_SIZES[kind]
    blocks = generator.integers(0, 256, (outputs, inputs // values, size), dtype=np.uint8)
    scales = blocks[..., SCALES[kind]]
    halves = generator.normal(scale=scale, size=(*scales.shape[:2], scales.shape[2] // 2)).astype(np.float16)
    blocks[..., SCALES[kind]] = halves.view(np.uint8)
    rows = np.concatenate([blocks.reshape(outputs, -1), np.full((outputs, 6), 255, dtype=np.uint8)], axis=1)
    return QuantizedTensor(kind, (outputs, inputs), torch.from_numpy(rows)[:, :-6])


def weights_of(config: ModelConfig, linears: LinearFactory) -> DecoderWeights:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int, wanted: bool = True) -> torch.Tensor | None:
        return 1 + random(size) if wanted else None

    def feed_forward(size: int) -> FeedForward:
        return FeedForward(
            gate_up_FD=linears.linear(random(2 * size, hidden)), down_DF=linears.linear(random(hidden, size))
        )

    def mlp(layer: int) -> FeedForward | ExpertWeights:
        if config.moe is None or layer in config.moe.dense_layers:
            return feed_forward(config.intermediate_size)
        experts = tuple(feed_forward(config.moe.intermediate_size) for _ in range(config.moe.num_experts))
        return ExpertWeights(router_XD=Linear(random(config.moe.num_experts, hidden)), experts=experts)

    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm_D=norm(hidden, config.input_norms),
            qkv_QD=linears.linear(random(qkv, hidden)),
            output_DH=linears.linear(random(hidden, query)),
            mlp_norm_D=norm(hidden, config.input_norms),
            mlp=mlp(layer),
            qkv_bias_Q=random(qkv) if config.qkv_bias else None,
            q_norm_C=norm(query if config.joint_qk_norm else config.head_dim, config.qk_norm),
            k_norm_C=norm((qkv - query) // 2 if config.joint_qk_norm else config.head_dim, config.qk_norm),
            attention_output_norm_D=norm(hidden, config.output_norms),
            mlp_output_norm_D=norm(hidden, config.output_norms),
        )
        for layer in range(config.num_layers)
    )
    table = random(config.vocab_size, hidden)
    embedding = head = linears.embedding(table)
    if not config.tie_embeddings:
        head = linears.linear(random(config.vocab_size, hidden))
    return DecoderWeights(embedding=embedding, layers=layers, norm_D=norm(hidden), head_WD=head)


def unpacked(weights: DecoderWeights) -> DecoderWeights:
    """Return the same weights in dense matrices."""
    dense = LinearFactory()

    def of_mlp(mlp: FeedForward | ExpertWeights) -> FeedForward | ExpertWeights:
        if isinstance(mlp, ExpertWeights):
            return dataclasses.replace(mlp, experts=tuple(map(of_mlp, mlp.experts)))
        return FeedForward(gate_up_FD=dense.linear(mlp.gate_up_FD.dense()), down_DF=dense.linear(mlp.down_DF.dense()))

    def of(layer: LayerWeights) -> LayerWeights:
        return dataclasses.replace(
            layer,
            qkv_QD=dense.linear(layer.qkv_QD.dense()),
            output_DH=dense.linear(layer.output_DH.dense()),
            mlp=of_mlp(layer.mlp),
        )

    assert weights.embedding is not None
    assert weights.head_WD is not None
    return DecoderWeights(
        embedding=dense.embedding(weights.embedding.dense()),
        layers=tuple(map(of, weights.layers)),
        norm_D=weights.norm_D,
        head_WD=dense.linear(weights.head_WD.dense()),
    )


class Sequences:
    """A batch of growing sequences whose pages are scattered over the cache."""

    def __init__(self, config: ModelConfig, *, count: int = 8, pages: int = 8) -> None:
        """pages: of each of `count` sequences."""
        self.config = config
        self.random = np.random.default_rng(0)
        self.pages = self.random.permutation(count * pages).reshape(count, pages)
        self.lengths = [0] * count

    def plan(self, new: dict[int, int]) -> StepPlan:
        """Return a step plan. new: number of tokens to compute, by sequence."""
        positions, slots = [], []
        for number, count in new.items():
            at = np.arange(self.lengths[number], self.lengths[number] + count)
            positions.append(at)
            slots.append(self.pages[number][at // PAGE] * PAGE + at % PAGE)
            self.lengths[number] += count
        counts = np.array(list(new.values()), dtype=np.int32)
        return StepPlan(
            token_ids=self.random.integers(0, self.config.vocab_size, counts.sum()).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_lengths=counts,
            context_lengths=np.array([self.lengths[number] for number in new], dtype=np.int32),
            block_tables=self.pages[list(new)].astype(np.int32),
            slot_mapping=np.concatenate(slots),
            needs_sample=np.ones(len(new), dtype=bool),
            sampling=SimpleNamespace(prompt_targets={}),  # type: ignore[arg-type]
        )


STEPS = (
    {0: 37},
    {0: 1},
    {0: 1, 1: 1, 2: 70},
    {1: 50, 0: 1, 2: 1, 3: 3},
    {number: 1 for number in range(8)},
    {4: 100, 5: 17, 0: 1},
)


def caches(
    config: ModelConfig, dtype: torch.dtype = torch.float32, *, pages: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (config.num_layers, pages, PAGE, 2 * config.num_kv_heads * config.head_dim)
    # Unwritten slots are NaN, so a read of one shows in the result.
    return torch.full(shape, float("nan"), dtype=dtype), torch.zeros(shape)


def expected_logits(model: DecoderModel, plan: StepPlan, cache_LPXE: torch.Tensor) -> torch.Tensor:
    attention = attention_batch(plan, page_size=PAGE, dtype=torch.float32, window=model.sliding_window)
    x_TD = model.embed(torch.from_numpy(plan.token_ids))
    x_TD = model.run_layers(x_TD, torch.from_numpy(plan.positions), attention=attention, cache_LPXE=cache_LPXE)
    return model.logits(x_TD[torch.from_numpy(plan.query_lengths.cumsum()) - 1])


def in_cpp(
    config: ModelConfig, format: str, *, collectives: Collectives | None = None
) -> tuple[CppDecoder, DecoderModel]:
    weights = weights_of(config, PackedLinears(format))  # type: ignore[arg-type]
    model = build_decoder(config, weights, collectives=collectives)
    assert isinstance(model, CppDecoder)
    return model, DecoderModel(config, unpacked(weights), collectives=collectives)


def step(model: CppDecoder, plan: StepPlan, cache_LPXE: torch.Tensor) -> torch.Tensor:
    _, logits_NV = model.run_plan(plan, cache_LPXE, plan.query_lengths.cumsum(dtype=np.int64) - 1)
    return torch.from_numpy(logits_NV.copy())
