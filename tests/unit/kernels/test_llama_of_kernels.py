"""A Llama put together from the kernels computes what the runtime's Llama computes, from the runtime's own weights,
pages and step plans, which the kernels take without a copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_kernels.registry import Backend, KernelConfig, Kernels, select_kernels
from megatron_runtime.engines.executor import StepPlan
from megatron_runtime.engines.step_layout import lay_out
from megatron_runtime.layers.embedding import Embedding
from megatron_runtime.layers.linear import Linear
from megatron_runtime.layers.rotary import inverse_frequencies, rotation
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights, FeedForward, LayerWeights
from megatron_runtime.sampling.batch import NO_LOG_PROBS, SamplingBatch
from megatron_runtime.sampling.sampler import sample

PAGE = 16
CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_embeddings=False,
    eos_token_ids=(0,),
)
FREQUENCIES = inverse_frequencies(head_dim=CONFIG.head_dim, theta=CONFIG.rope_theta)
TABLES = np.array([[4, 1, 7], [2, 6, 0]], dtype=np.int32)
"""Pages of two sequences."""


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    c, heads = CONFIG, CONFIG.num_heads * CONFIG.head_dim
    layers = [
        LayerWeights(
            attention_norm_D=1 + 0.1 * matrix(1, c.hidden_size)[0],
            qkv_QD=Linear(matrix(heads + 2 * c.num_kv_heads * c.head_dim, c.hidden_size)),
            output_DH=Linear(matrix(c.hidden_size, heads)),
            mlp_norm_D=1 + 0.1 * matrix(1, c.hidden_size)[0],
            mlp=FeedForward(
                gate_up_FD=Linear(matrix(2 * c.intermediate_size, c.hidden_size)),
                down_DF=Linear(matrix(c.hidden_size, c.intermediate_size)),
            ),
        )
        for _ in range(c.num_layers)
    ]
    embedding, head = matrix(c.vocab_size, c.hidden_size), matrix(c.vocab_size, c.hidden_size)
    return DecoderWeights(
        embedding=Embedding(embedding, torch.float32),
        layers=tuple(layers),
        norm_D=torch.ones(c.hidden_size),
        head_WD=Linear(4 * head),
    )


class LlamaOfKernels:
    """The decoder as a GPU would run it: nine launches a layer, four of them products of matrices by torch."""

    def __init__(self, weights: DecoderWeights, kernels: Kernels) -> None:
        self.weights, self.kernels = weights, kernels

    def __call__(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> torch.Tensor:
        k, weights, half = self.kernels, self.weights, CONFIG.head_dim // 2
        turn = rotation(torch.from_numpy(plan.positions), FREQUENCIES, torch.float32)
        cos_TF, sin_TF = turn.cos_T1D[:, 0, :half], turn.sin_T1D[:, 0, half:]
        slots_T = torch.from_numpy(plan.slot_mapping)
        residual_TD = weights.embedding(torch.from_numpy(plan.token_ids))
        x_TD = None
        for layer, cache_PXE in zip(weights.layers, cache_LPXE, strict=True):
            normed_TD = k.add_rms_norm(x_TD, residual_TD, layer.attention_norm_D, epsilon=CONFIG.rms_norm_eps)
            qkv_TQ = layer.qkv_QD(normed_TD)
            k.qk_norm_rope_append(
                qkv_TQ,
                cos_TF,
                sin_TF,
                cache_PXE,
                slots_T,
                num_heads=CONFIG.num_heads,
                num_kv_heads=CONFIG.num_kv_heads,
            )
            q_THC = qkv_TQ.unflatten(1, (-1, CONFIG.head_dim))[:, : CONFIG.num_heads]
            x_TD = layer.output_DH(self._attend(plan, q_THC, cache_PXE).flatten(1))
            normed_TD = k.add_rms_norm(x_TD, residual_TD, layer.mlp_norm_D, epsilon=CONFIG.rms_norm_eps)
            x_TD = layer.mlp.down_DF(k.swiglu(layer.mlp.gate_up_FD(normed_TD)))
        last_TD = k.add_rms_norm(x_TD, residual_TD, weights.norm_D, epsilon=CONFIG.rms_norm_eps)
        return weights.head_WD(last_TD[torch.from_numpy(plan.query_lengths.cumsum() - 1)])

    def _attend(self, plan: StepPlan, q_THC: torch.Tensor, cache_PXE: torch.Tensor) -> torch.Tensor:
        tables, lengths = torch.from_numpy(plan.block_tables), torch.from_numpy(plan.context_lengths)
        if (plan.query_lengths == 1).all():
            return self.kernels.paged_decode(q_THC, cache_PXE, tables, lengths, num_kv_heads=CONFIG.num_kv_heads)
        starts = torch.from_numpy(np.concatenate(([0], plan.query_lengths.cumsum())).astype(np.int32))
        return self.kernels.paged_prefill(q_THC, cache_PXE, tables, lengths, starts, num_kv_heads=CONFIG.num_kv_heads)

    def sample(self, logits_NV: torch.Tensor, batch: SamplingBatch) -> list[int]:
        tokens, _ = self.kernels.sample(
            logits_NV,
            temperature_N=torch.from_numpy(batch.temperature),
            top_k_N=torch.from_numpy(batch.top_k),
            top_p_N=torch.from_numpy(batch.top_p),
            min_p_N=torch.from_numpy(batch.min_p),
            seeds_N=torch.from_numpy(batch.seeds.view(np.int64)),
            positions_N=torch.from_numpy(batch.positions),
        )
        return tokens.tolist()


def plan_of(cached: list[int], new: list[int], *, step: int) -> StepPlan:
    """A step in which the sequences have `cached` tokens and compute `new` more."""
    random = np.random.default_rng(step)
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, new, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(len(new)), new)
    return StepPlan(
        token_ids=random.integers(0, CONFIG.vocab_size, len(positions)).astype(np.int32),
        positions=positions,
        query_lengths=np.array(new, dtype=np.int32),
        context_lengths=np.add(cached, new).astype(np.int32),
        block_tables=TABLES[: len(new)],
        slot_mapping=TABLES[rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        needs_sample=np.ones(len(new), dtype=np.bool_),
        sampling=SamplingBatch(
            temperature=np.array([0.8, 0.0], dtype=np.float32),
            top_k=np.array([20, 0], dtype=np.int32),
            top_p=np.array([0.9, 0.0], dtype=np.float32),
            min_p=np.array([0.01, 0.0], dtype=np.float32),
            seeds=np.array([2**64 - 5, 1], dtype=np.uint64),
            positions=np.array([step, step], dtype=np.int64),
            num_log_probs=np.full(2, NO_LOG_PROBS, dtype=np.int32),
        ),
    )


@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.TRITON])
def test_every_kind_of_step(weights, backend):
    config = KernelConfig(**{name: backend for name in KernelConfig.__dataclass_fields__})
    ours = LlamaOfKernels(weights, select_kernels(config, torch.device("cpu")))
    theirs = DecoderModel(CONFIG, weights)
    shape = (CONFIG.num_layers, 8, PAGE, 2 * CONFIG.num_kv_heads * CONFIG.head_dim)
    our_cache, their_cache = torch.zeros(shape), torch.zeros(shape)
    # Prompts; a token each, over the end of a page; a token of one and more of the other's prompt.
    steps = [([0, 0], [15, 7]), ([15, 7], [1, 1]), ([16, 8], [1, 1]), ([17, 9], [1, 20])]
    for step, (cached, new) in enumerate(steps):
        plan = plan_of(cached, new, step=step)
        layout = lay_out(plan, page_size=PAGE, dtype=torch.float32)
        with torch.inference_mode():
            hidden_ND = theirs(
                layout.token_ids_T,
                layout.positions_T,
                attention=layout.attention,
                cache_LPXE=their_cache,
                rows_N=layout.logit_rows_N,
            )
            expected_NV = theirs.logits(hidden_ND)[np.argsort(layout.sampled_rows)]
            actual_NV = ours(plan, our_cache)
        torch.testing.assert_close(actual_NV, expected_NV, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(our_cache, their_cache, rtol=1e-4, atol=1e-4)
        expected_tokens = sample(expected_NV.numpy().copy(), plan.sampling, np.arange(2))
        assert ours.sample(actual_NV, plan.sampling) == expected_tokens.tolist()
