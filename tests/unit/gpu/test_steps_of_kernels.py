"""The GPU forward pass, run on the CPU by torch's references and Triton's interpreter, equals the CPU's forward pass:
same weights, same step plans, same logits, same tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import random_checkpoint
import torch

from bench.random_model import RandomCheckpoint
from megatron_kernels.registry import Backend, KernelConfig, select_kernels
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.cuda.decoder import DeviceLinears, KernelDecoder
from megatron_runtime.backends.native.cuda.executor import CudaExecutor, graph_size, graph_sizes
from megatron_runtime.backends.native.cuda.sampling import draw
from megatron_runtime.backends.native.cuda.step_buffers import StepBuffers
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.models.weights import load_weights
from megatron_runtime.sampling.batch import NO_LOG_PROBS, LogitEdits, Penalties, SamplingBatch, bits_of

PAGE = 16
CPU = torch.device("cpu")
VOCAB = 96
CONFIGS = {name: replace(config, vocab_size=VOCAB, head_dim=32) for name, config in random_checkpoint.CONFIGS.items()}
TABLES = np.array([[4, 1, 7], [2, 6, 0], [3, 5, 0]], dtype=np.int32)
"""Pages of three sequences."""
EDITS = {
    0: LogitEdits(bias_ids=np.array([3, 90], np.int32), bias=np.array([4.0, -2.0], np.float32)),
    2: LogitEdits(
        penalties=Penalties(
            np.array([1, 8, 95], np.int32), np.array([0, 2, 1], np.int32), repetition=1.3, presence=0.5, frequency=0.2
        ),
        banned=np.array([17], np.int32),
        allowed=bits_of(range(10, 96)),
    ),
}
"""Of the rows of decode steps."""


def random_weights(config: ModelConfig) -> DecoderWeights:
    linears = DeviceLinears(torch.float32, CPU)
    return load_weights(RandomCheckpoint(config, torch.float32, CPU), torch.float32, linears=linears)


def plan_of(cached: list[int], new: list[int], *, step: int, targets: tuple[int, ...] = ()) -> StepPlan:
    """Return a step in which the sequences have `cached` tokens and compute `new` more. targets: rows that return the
    log-probabilities of their prompt."""
    random = np.random.default_rng(step)
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, new, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(len(new)), new)
    log_probs = np.array([NO_LOG_PROBS, 0, 2], dtype=np.int32)
    return StepPlan(
        token_ids=random.integers(0, VOCAB, len(positions)).astype(np.int32),
        positions=positions,
        query_lengths=np.array(new, dtype=np.int32),
        context_lengths=np.add(cached, new).astype(np.int32),
        block_tables=TABLES[: len(new)],
        slot_mapping=TABLES[rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        needs_sample=np.array([True, step % 2 == 0, True]),
        sampling=SamplingBatch(
            temperature=np.array([0.8, 0.0, 0.7], dtype=np.float32),
            top_k=np.array([20, 0, 0], dtype=np.int32),
            top_p=np.array([0.9, 0.0, 0.0], dtype=np.float32),
            min_p=np.array([0.01, 0.0, 0.0], dtype=np.float32),
            seeds=np.array([2**64 - 5, 1, 17], dtype=np.uint64),
            positions=np.array([step, step, step], dtype=np.int64),
            num_log_probs=log_probs,
            returns_hidden=np.array([step == 0, False, step == 2]),
            edits=EDITS if step else {},
            prompt_targets={row: random.integers(0, VOCAB, new[row] - 1).astype(np.int32) for row in targets},
        ),
    )


# Prompts; one token each, across a page boundary; a prompt chunk before decodes; chunks of two prompts.
STEPS = (
    plan_of([0, 0, 0], [15, 7, 20], step=0, targets=(1,)),
    plan_of([15, 7, 20], [1, 1, 1], step=1),
    plan_of([16, 8, 21], [3, 1, 1], step=2),
    plan_of([19, 9, 22], [1, 20, 5], step=3, targets=(1, 2)),
)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((name, Backend.TORCH) for name in CONFIGS if name != "qwen3_moe, a dense layer"),
        ("qwen3_moe, a dense layer", Backend.TRITON),
    ],
)
# The kernels also compute expert slots that are never written or read.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_every_kind_of_step_equals_the_cpus(case, backend):
    config = CONFIGS[case]
    source = ModelInMemory(RandomCheckpoint(config, torch.float32, CPU), name="random weights")
    options = {
        "dtype": "float32",
        "kv_cache_memory": 9 * PAGE * config.kv_elements_per_token * 4,
        "max_sequence_length": 48,
        "page_size": PAGE,
    }
    kernels = KernelConfig(**dict.fromkeys(KernelConfig.__dataclass_fields__, backend))
    ours = CudaExecutor(source, max_rows=4, max_tokens=64, graph_rows=0, kernels=kernels, device=CPU, **options)
    theirs = CpuExecutor(source, **options)
    ours.load()
    theirs.load()
    for plan in STEPS:
        actual, expected = ours.execute(plan), theirs.execute(plan)
        # The last page is the dummy page.
        torch.testing.assert_close(ours.cache_LPXE[:, :-1], theirs.cache_LPXE[:, :-1], rtol=1e-4, atol=1e-4)
        assert actual.tokens.tolist() == expected.tokens.tolist()
        for name in ("log_probs", "prompt_log_probs"):
            our_lines, their_lines = getattr(actual, name), getattr(expected, name)
            assert our_lines.keys() == their_lines.keys()
            for row in their_lines:
                np.testing.assert_allclose(our_lines[row].chosen_N, their_lines[row].chosen_N, rtol=1e-3, atol=1e-3)
        assert actual.hidden_states.keys() == expected.hidden_states.keys()
        for row, state in expected.hidden_states.items():
            np.testing.assert_allclose(actual.hidden_states[row], state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_padding_of_a_decode_step_changes_no_result(case):
    """A step of decodes padded to a graph's size has the same tokens, and writes only its own slots."""
    config, kernels = CONFIGS[case], select_kernels(KernelConfig(), CPU)
    buffers = StepBuffers(max_tokens=64, max_rows=8, max_pages=3, device=CPU)
    model = KernelDecoder(config, random_weights(config), kernels, device=CPU, max_length=48)
    shape = (config.num_layers, 8, PAGE, 2 * config.num_kv_heads * config.head_dim)
    plan, found = STEPS[1], []
    for size in (None, 8):
        cache = torch.zeros(shape)
        staged = buffers.stage(plan, decode_size=size)
        logits_BV = model.logits(model(staged.step, cache))
        found.append((draw(kernels.sample, logits_BV, staged.step)[0][:3].tolist(), cache))
        # A smaller step must not read what a larger one left in the buffers.
        buffers.stage(STEPS[3])
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("rows", [1, 3, 8, 100, 256, 500])
def test_graphs_cover_every_batch_with_little_padding(rows):
    sizes = graph_sizes(rows)
    assert sizes[-1] == rows
    assert list(sizes) == sorted(set(sizes))
    for batch in range(1, rows + 1):
        padded = graph_size(batch, sizes)
        assert padded in sizes
        assert 0 <= padded - batch <= max(8, batch / 8 + 1)
    assert graph_size(rows + 1, sizes) is None
    assert graph_size(1, graph_sizes(0)) is None
