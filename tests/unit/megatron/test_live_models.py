"""A live GPTModel of Megatron-Core: the engine's answers are Megatron's, on one rank and on several."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from gpt_models import CASES
from gpt_program import PROMPTS, Job, Result, run_ranks

from megatron_runtime.distributed.shard import ParallelSizes

SEVERAL = [
    Job("llama", ParallelSizes(tensor=2)),
    Job("llama, tied, scaled", ParallelSizes(pipeline=2)),
    Job("mixtral", ParallelSizes(expert=2)),
    Job("qwen2", ParallelSizes(tensor=2, pipeline=2)),
    Job("qwen3_moe, a dense layer", ParallelSizes(tensor=2, expert=2)),
]


@cache
def one_rank(case: str) -> Result:
    return run_ranks(Job(case))


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probs_equal_those_of_megatron(case: str) -> None:
    """Before and after the live model has other weights."""
    result = one_rank(case)
    for answers, logits in zip(result.answers, result.logits, strict=True):
        for at, prompt in enumerate(PROMPTS):
            ours, tokens = answers[at], torch.tensor([*prompt, *answers[at]["tokens"]])
            log_probs = torch.from_numpy(logits[at])[:-1].log_softmax(-1)
            assert log_probs[len(prompt) - 1 :].argmax(-1).tolist() == ours["tokens"]
            expected = log_probs.gather(1, tokens[1:, None])[:, 0].tolist()
            assert ours["prompt_log_probs"] + ours["log_probs"] == pytest.approx(expected, abs=1e-4)
    assert result.answers[0] != result.answers[1]


@pytest.mark.parametrize("case", CASES)
def test_routing_indices_equal_those_that_megatron_records(case: str) -> None:
    """A model with moe_enable_routing_replay, before and after it has other weights."""
    result = one_rank(case)
    has_experts = "num_moe_experts" in CASES[case]
    for answers, expected in zip(result.answers, result.routing, strict=True):
        for at in range(len(PROMPTS)):
            recorded = expected[at]
            assert (recorded is not None) is has_experts
            assert answers[at].get("routing") == (recorded[:-1] if recorded is not None else None)


@pytest.mark.parametrize("job", SEVERAL, ids=str)
def test_several_ranks_equal_one(job: Job) -> None:
    """Each rank hands over its own shard, before and after an update."""
    result, expected = run_ranks(job), one_rank(job.case)
    for ours, theirs in zip(result.answers, expected.answers, strict=True):
        for at in range(len(PROMPTS)):
            assert ours[at]["tokens"] == theirs[at]["tokens"]
            for name in ("prompt_log_probs", "log_probs"):
                assert ours[at][name] == pytest.approx(theirs[at][name], abs=1e-4)
            assert ours[at].get("routing") == theirs[at].get("routing")
