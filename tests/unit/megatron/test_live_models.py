"""A live GPTModel of Megatron-Core: the engine's answers are Megatron's, on one rank and on several."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from gpt_models import CASES, VOCAB, make_gpt, make_hybrid
from gpt_program import (
    PROMPTS,
    Job,
    Result,
    Send,
    begin_single_rank,
    distributions,
    in_processes,
    run_ranks,
)
from soak import size

from megatron_runtime.checkpoints.torch_dist.live_model import LiveModelCheckpoint
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.models.config import UnsupportedModelError

LARGE = [
    Job("qwen3, tied", ParallelSizes(tensor=4)),
    Job("qwen2", ParallelSizes(tensor=2, pipeline=2)),
    Job("qwen3_moe, a dense layer", ParallelSizes(tensor=2, expert=2)),
]
SEVERAL = size(
    LARGE,
    soak=[
        Job("llama", ParallelSizes(tensor=2)),
        Job("llama, tied, scaled", ParallelSizes(pipeline=2)),
        Job("mixtral", ParallelSizes(expert=2)),
        *LARGE,
    ],
)


@cache
def one_rank(case: str) -> Result:
    return run_ranks(Job(case))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_megatron(case: str) -> None:
    """Of every position and the whole vocabulary, before and after the live model has other weights."""
    result = one_rank(case)
    for answers, logits, expected in zip(result.answers, result.logits, result.expected, strict=True):
        for at, prompt in enumerate(PROMPTS):
            tokens = answers[at]["tokens"]
            assert expected[at].shape == (len(prompt) + len(tokens) - 1, VOCAB)
            np.testing.assert_allclose(logits[at], expected[at], rtol=0, atol=1e-4)
            assert expected[at][len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert result.answers[0] != result.answers[1]


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_the_logits_of_megatron(case: str) -> None:
    """Of the whole vocabulary and of the chosen tokens, in steps with several requests."""
    result = one_rank(case)
    for answers, logits in zip(result.answers, result.expected, strict=True):
        for at, prompt in enumerate(PROMPTS):
            ours, expected = answers[at], torch.from_numpy(logits[at]).log_softmax(-1).numpy()
            np.testing.assert_allclose(distributions(ours), expected, rtol=0, atol=1e-4)
            tokens = [*prompt, *ours["tokens"]][1:]
            chosen = expected[range(len(tokens)), tokens]
            assert ours["prompt_log_probs"] + ours["log_probs"] == pytest.approx(chosen, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_routing_indices_equal_those_that_megatron_records(case: str) -> None:
    """A model with moe_enable_routing_replay, before and after it has other weights."""
    result = one_rank(case)
    has_experts = "num_moe_experts" in CASES[case]
    for answers, expected in zip(result.answers, result.routing, strict=True):
        for at in range(len(PROMPTS)):
            recorded = expected[at]
            assert (recorded is not None) is has_experts
            assert answers[at].get("routing") == recorded


def _causes(rank: int, port: int, send: Send) -> None:
    begin_single_rank(port)
    config = make_gpt("llama").config
    causes = []
    for pattern in ("**--", "-*", "*-*", "M-"):
        config.num_layers = len(pattern)
        with pytest.raises(UnsupportedModelError) as rejection:
            LiveModelCheckpoint(make_hybrid(config, pattern))
        causes.append(str(rejection.value))
    send(causes)


def test_other_layers_of_a_hybrid_model_are_rejected_by_name() -> None:
    for pattern, cause in zip(("**--", "-*", "*-*", "M-"), in_processes(1, _causes), strict=True):
        assert f"hybrid_layer_pattern {pattern!r}: supported are attention layers that an MLP layer follows" in cause


@pytest.mark.parametrize("job", SEVERAL, ids=str)
def test_several_ranks_equal_one(job: Job) -> None:
    """Each rank hands over its own shard, before and after an update."""
    result, expected = run_ranks(job), one_rank(job.case)
    for ours, theirs in zip(result.answers, expected.answers, strict=True):
        for at in range(len(PROMPTS)):
            assert ours[at]["tokens"] == theirs[at]["tokens"]
            np.testing.assert_allclose(distributions(ours[at]), distributions(theirs[at]), rtol=0, atol=1e-4)
            assert ours[at].get("routing") == theirs[at].get("routing")
