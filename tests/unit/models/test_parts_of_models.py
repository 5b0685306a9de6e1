"""Sharded models of every family equal the whole model. Each rank is a thread of this process.

Tests of engines (tests/unit/parallel) cover ranks in processes.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import pytest
import torch
from random_checkpoint import FAMILY_EXAMPLES, random_model

from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.models.layers.paged_attention import AttentionBatch, SequenceRows
from megatron_runtime.models.tensors import Checkpoint, Part
from megatron_runtime.models.weights import load_weights

TOKENS = 12
PAGE = 16
MIXTURES = [family for family, config in FAMILY_EXAMPLES.items() if config.moe is not None]
CASES = [
    *((family, ParallelSizes(tensor=2)) for family in FAMILY_EXAMPLES),
    # Three ranks have each key-value head.
    *((family, ParallelSizes(tensor=6)) for family in ("qwen2", "gemma3_text", "olmo2")),
    *((family, ParallelSizes(pipeline=2)) for family in ("gemma3_text", "qwen3")),
    *((family, ParallelSizes(expert=2)) for family in MIXTURES),
    *((family, ParallelSizes(tensor=2, expert=2)) for family in MIXTURES),
]


class Exchange:
    """The tensors that the ranks of one group exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._brought: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait()
        found = [one for one in self._brought if one is not None]
        self._barrier.wait()
        return found


class Group(Collectives):
    """The collectives of one rank, between threads."""

    def __init__(self, shard: Shard, tensor: Exchange, expert: Exchange) -> None:
        self._shard, self._tensor, self._expert = shard, tensor, expert

    def begin_layer(self, number: int) -> None:
        """Record no progress."""

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._tensor.exchange(self._shard.tensor_rank, x_TD)).sum(dim=0)

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return torch.cat(self._tensor.exchange(self._shard.tensor_rank, logits_NW), dim=1)

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._expert.exchange(self._shard.expert_rank, x_TD))

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        total_AD = torch.stack(self._expert.exchange(self._shard.expert_rank, y_AD)).sum(dim=0)
        return total_AD.chunk(self._shard.sizes.expert)[self._shard.expert_rank]


def stage(checkpoint: Checkpoint, shard: Shard, collectives: Collectives | None) -> Callable[[torch.Tensor], Any]:
    """What one rank does to what the stage before gave, or to tokens."""
    weights = load_weights(checkpoint, torch.float32, shard=shard)
    model = DecoderModel(checkpoint.config, weights, shard=shard, collectives=collectives)
    config = checkpoint.config
    layers, heads = len(shard.layers(config.num_layers)), len(shard.kv_heads(config.num_kv_heads))
    cache = torch.zeros(layers, 2, PAGE, 2 * heads * config.head_dim)
    positions = torch.arange(TOKENS)
    causal = AttentionBatch(positions, [SequenceRows(slice(0, TOKENS), None, None)])
    seen = positions[None] <= positions[:, None]
    seen &= positions[None] > positions[:, None] - (model.sliding_window or TOKENS)
    band = torch.zeros(TOKENS, TOKENS).masked_fill_(~seen, float("-inf"))
    local = AttentionBatch(positions, [SequenceRows(slice(0, TOKENS), None, band)])
    attention = AttentionBatch(causal.cache_rows_T, causal.chunks, local)

    @torch.inference_mode()
    def run(given: torch.Tensor) -> torch.Tensor:
        x_TD = model.embed(given) if shard.has_embedding else given
        x_TD = model.run_layers(x_TD, positions, attention=attention, cache_LPXE=cache)
        return model.logits(x_TD) if shard.has_head else x_TD

    return run


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=str)
def test_sharded_model_equals_whole_model(family: str, sizes: ParallelSizes) -> None:
    checkpoint = random_model(FAMILY_EXAMPLES[family])
    tokens = [torch.arange(start, start + TOKENS) * 7 % checkpoint.config.vocab_size for start in range(sizes.expert)]
    whole = stage(checkpoint, Shard(), None)
    expected = [whole(own) for own in tokens]
    given = tokens
    for pipeline_rank in range(sizes.pipeline):
        tensor_meetings = [Exchange(sizes.tensor) for _ in range(sizes.expert)]
        expert_meetings = [Exchange(sizes.expert) for _ in range(sizes.tensor)]
        ranks = []
        for rank in range(sizes.tensor * sizes.expert):
            shard = sizes.shard(pipeline_rank * sizes.tensor * sizes.expert + rank)
            group = Group(shard, tensor_meetings[shard.expert_rank], expert_meetings[shard.tensor_rank])
            ranks.append((shard, stage(checkpoint, shard, group)))
        with ThreadPoolExecutor(len(ranks)) as threads:
            futures = [threads.submit(run, given[shard.expert_rank]) for shard, run in ranks]
            results = [future.result() for future in futures]
        given = [results[expert * sizes.tensor] for expert in range(sizes.expert)]
    for found, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "held_by_all"),
    [
        (ParallelSizes(tensor=2), ("norm", "gate.weight")),
        (ParallelSizes(expert=2), ("norm", "gate.weight", "self_attn", "embed", "head")),
        (ParallelSizes(pipeline=2), ()),
    ],
    ids=str,
)
def test_a_rank_reads_only_its_part(
    monkeypatch: pytest.MonkeyPatch, sizes: ParallelSizes, held_by_all: tuple[str, ...]
) -> None:
    checkpoint = random_model(FAMILY_EXAMPLES["qwen3_moe"])
    everything = checkpoint.read
    values: Counter[str] = Counter()

    def counted(name: str, part: Part = ()) -> torch.Tensor:
        tensor = everything(name, part)
        values[name] += tensor.numel()
        return tensor

    monkeypatch.setattr(checkpoint, "read", counted)
    for rank in range(sizes.world):
        load_weights(checkpoint, torch.float32, shard=sizes.shard(rank))
    for name, kind in checkpoint.kinds.items():
        times = sizes.world if any(word in name for word in held_by_all) else 1
        assert values[name] == times * prod(kind.shape), name
