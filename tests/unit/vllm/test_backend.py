"""VllmBackend: requests, failover, verbs and failures."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from eventually import eventually
from safetensors.torch import load_file

from megatron_runtime.backends.registry import build_backend, check_backend
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.cli import main
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.engine.backend import Capability, UnsupportedVerbError
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.progress import Stage, StartProgress
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.capabilities import POOLING
from megatron_runtime.requests.errors import MaxSequenceLengthOverflowError
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

from .conftest import FAKE, Running, Start, adapter_of, answer, lines, weights_of

PROMPT = [11, 12, 13]


def vllm_of(running: Running) -> psutil.Process:
    """Return the process in which vLLM runs."""
    return psutil.Process(running.backend._process._process.pid)


async def test_an_answer_has_every_token_once_and_a_summary(running: Running, model: Path) -> None:
    running.submit(1, PROMPT, num_tokens_to_generate=20)
    [last] = await running.listener.end_of(1)
    assert running.listener.tokens(1) == answer(PROMPT, 20, weights_of(model))
    assert (last.finish_reason, last.prompt_length) == ("length", 3)
    assert last.summary.policy_epoch == [(0, 0)]
    assert [event.type.name for event in last.summary.events] == ["ADD_ENGINE", "FINISH"]


async def test_log_probabilities_of_prompt_and_answer_are_reported_once(running: Running) -> None:
    running.submit(1, PROMPT, num_tokens_to_generate=5, return_log_probs=True, skip_prompt_log_probs=False)
    await running.listener.end_of(1)
    first, *others = running.listener.outputs
    assert first.prompt_log_probs == [-0.25, -0.25]
    assert all(output.prompt_log_probs is None for output in others)
    assert [value for output in running.listener.outputs for value in output.new_log_probs] == [-0.5] * 5


@pytest.mark.parametrize("forced", [{}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}])
async def test_a_request_from_another_engine_continues_after_its_last_token(
    running: Running, model: Path, forced: dict[str, float]
) -> None:
    """With penalties vLLM generates the earlier tokens again and so counts them. The listener gets each once."""
    whole = answer(PROMPT, 20, weights_of(model))
    running.submit(1, PROMPT, generated=whole[:8], num_tokens_to_generate=20, return_log_probs=True, **forced)
    [last] = await running.listener.end_of(1)
    assert running.listener.tokens(1) == whole[8:]
    outputs = [output for output in running.listener.outputs if output.new_tokens]
    assert all(len(output.new_log_probs) == len(output.new_tokens) for output in outputs)
    assert last.finish_reason == "length"


async def test_bad_words_hold_after_the_tokens_of_another_engine(running: Running, model: Path) -> None:
    whole = answer(PROMPT, 20, weights_of(model))
    words = [(whole[7], whole[8]), (whole[2], whole[3])]
    running.submit(1, PROMPT, generated=whole[:8], num_tokens_to_generate=20, bad_words=["as tokens"], sequences=words)
    await running.listener.end_of(1)
    assert running.listener.tokens(1)[0] == whole[8] + 1
    [sequence, *_] = running.backend.bad_words(["a"])
    assert list(sequence) == running.backend.tokenize("a", add_bos=False)


async def test_a_request_that_came_complete_ends_without_a_step(running: Running) -> None:
    running.submit(1, PROMPT, generated=[5, 6], num_tokens_to_generate=2)
    running.submit(2, PROMPT, generated=[5, 6], num_tokens_to_generate=9, stop_token_ids=[6])
    ended = await running.listener.end_of(1, 2)
    assert [last.finish_reason for last in ended] == ["length", "stop"]
    assert running.listener.tokens(1) == running.listener.tokens(2) == []


async def test_a_stop_token_ends_the_answer_and_is_named(running: Running, model: Path) -> None:
    third = answer(PROMPT, 3, weights_of(model))[2]
    running.submit(1, PROMPT, num_tokens_to_generate=20, stop_token_ids=[third])
    [last] = await running.listener.end_of(1)
    assert (last.finish_reason, last.stop_token) == ("stop", third)
    assert len(running.listener.tokens(1)) == 3


DIGITS = {"type": "regex", "value": "[0-9]+"}


def structures(log: Path) -> list[str]:
    """Return the grammars that the fake got, each with the number of tokens of the prompt before it."""
    return [line for line in log.read_text().splitlines() if line.startswith("structure ")]


@pytest.mark.parametrize("generated", [0, 2, 5, 9])
async def test_a_structure_begins_after_the_reasoning(
    running: Running, model: Path, fake_vllm: Path, generated: int
) -> None:
    """vLLM's grammar describes a whole text: it gets a request that begins after the reasoning."""
    whole = answer(PROMPT, 20, weights_of(model))
    running.submit(
        1,
        PROMPT,
        generated=whole[:generated],
        num_tokens_to_generate=20,
        return_log_probs=True,
        skip_prompt_log_probs=False,
        structured_output={**DIGITS, "after": whole[3:5]},
    )
    [last] = await running.listener.end_of(1)
    assert (running.listener.tokens(1), last.finish_reason) == (whole[generated:], "length")
    assert [line.partition(" Struct")[0] for line in structures(fake_vllm)] == ["structure 1 of 8"]
    assert "regex='[0-9]+'" in structures(fake_vllm)[0]
    outputs = running.listener.outputs
    assert all(len(output.new_log_probs or ()) == len(output.new_tokens) for output in outputs)
    assert sum(output.prompt_log_probs is not None for output in outputs) == (generated == 0)


@pytest.mark.parametrize("generated", [0, 3, 4, 5, 12])
async def test_a_budget_ends_the_reasoning_and_the_answer_goes_on(
    running: Running, model: Path, generated: int
) -> None:
    begin = answer(PROMPT, 4, weights_of(model))
    expected = [*begin, 7, 8, *answer([*PROMPT, *begin, 7, 8], 14, weights_of(model))]
    reasoning = {"closing": [7, 8], "is_open": True, "budget": 4}
    fields = {"num_tokens_to_generate": 20, "return_log_probs": True, "top_n_logprobs": 2, "reasoning": reasoning}
    running.submit(1, PROMPT, generated=expected[:generated], skip_prompt_log_probs=True, **fields)
    [last] = await running.listener.end_of(1)
    assert (running.listener.tokens(1), last.finish_reason) == (expected[generated:], "length")
    for output in running.listener.outputs:
        assert len(output.new_log_probs or ()) == len(output.new_top_n_logprobs or ()) == len(output.new_tokens)


async def test_the_limit_of_the_answer_cuts_the_end_of_the_reasoning(running: Running) -> None:
    reasoning = {"closing": [7, 8], "is_open": True, "budget": 4}
    running.submit(1, PROMPT, num_tokens_to_generate=5, reasoning=reasoning)
    [last] = await running.listener.end_of(1)
    assert (len(running.listener.tokens(1)), running.listener.tokens(1)[-1], last.finish_reason) == (5, 7, "length")


@pytest.mark.parametrize(
    ("grammar", "is_constrained"), [('calls: "x"+', True), ("calls: nothing", False)], ids=["valid", "not valid"]
)
async def test_calls_are_constrained_from_their_marker_on(
    running: Running, model: Path, fake_vllm: Path, grammar: str, is_constrained: bool
) -> None:
    whole = answer(PROMPT, 20, weights_of(model))
    first, second, *_ = (running.backend.tokenizer().token_bytes(token).decode() for token in whole)
    assert first.strip()
    structure = {"markers": {first.lstrip() + second[:1]: "calls"}, "grammar": grammar}
    running.submit(1, PROMPT, num_tokens_to_generate=20, call_structure=structure)
    await running.listener.end_of(1)
    assert running.listener.tokens(1) == whole
    if is_constrained:
        [line] = structures(fake_vllm)
        assert line.startswith("structure 1 of 4 ")
        assert second[:1] in line
    else:
        assert not structures(fake_vllm)
    other = {"markers": {"never": "calls"}, "grammar": grammar}
    running.submit(2, PROMPT, num_tokens_to_generate=20, call_structure=other)
    await running.listener.end_of(2)
    assert running.listener.tokens(2) == whole
    assert lines(fake_vllm, "begin 2 0 None") == 1


async def test_a_suspend_between_two_parts_loses_no_token(running: Running, model: Path) -> None:
    whole = answer(PROMPT, 20, weights_of(model))
    running.submit(1, PROMPT, num_tokens_to_generate=20, structured_output={**DIGITS, "after": whole[3:5]})
    await running.until(3, 1)
    for _ in range(3):
        await running.backend.pause()
        await running.backend.release_memory()
        await running.backend.restore_memory()
        await running.backend.unpause()
    await running.listener.end_of(1)
    assert running.listener.tokens(1) == whole


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "text"),
    [
        ([], {}, ValueError, "prompt is empty"),
        ([1] * 256, {}, MaxSequenceLengthOverflowError, "the prompt alone has 256 tokens"),
        (PROMPT, {"num_tokens_total": 3}, InvalidSamplingParamsError, "num_tokens_total=3"),
        (
            PROMPT,
            {"reasoning": {"closing": [10**6], "is_open": True, "budget": 1}},
            InvalidSamplingParamsError,
            "reason",
        ),
        (PROMPT, {"temperature": 3.0}, ValueError, "temperature must be in"),
        (
            PROMPT,
            {"structured_output": {"type": "regex", "value": "(("}},
            InvalidSamplingParamsError,
            "structured_output",
        ),
    ],
)
async def test_what_vllm_cannot_do_is_rejected_with_the_cause(
    running: Running, prompt: list[int], params: dict[str, Any], kind: type[Exception], text: str
) -> None:
    running.submit(1, prompt, **params)
    [last] = await running.listener.end_of(1)
    assert last.error_code is ErrorCode.INVALID_REQUEST
    assert isinstance(last.error, kind)
    assert text in str(last.error)


async def test_the_priority_and_the_salt_of_a_request_reach_vllm(running: Running, fake_vllm: Path) -> None:
    running.submit(1, PROMPT, num_tokens_to_generate=1, priority=-3, cache_salt="tenant")
    running.submit(2, PROMPT, num_tokens_to_generate=1)
    await running.listener.end_of(1, 2)
    assert lines(fake_vllm, "begin 1 -3 tenant") == lines(fake_vllm, "begin 2 0 None") == 1


async def test_a_deadline_and_an_abort_end_a_request(running: Running, fake_vllm: Path) -> None:
    running.submit(1, PROMPT, deadline=0.05)
    running.submit(2, PROMPT)
    [last] = await running.listener.end_of(1)
    assert (last.error_code, last.error) == (ErrorCode.DEADLINE, "the deadline of 0.05 s passed")
    await running.backend.abort(2)
    assert lines(fake_vllm, "end 1") == lines(fake_vllm, "end 2") == 1
    count = len(running.listener.outputs)
    await asyncio.sleep(0.05)
    assert len(running.listener.outputs) == count


async def test_no_step_runs_and_no_token_arrives_between_pause_and_unpause(
    running: Running, model: Path, fake_vllm: Path
) -> None:
    for request_id in range(8):
        running.submit(request_id, [request_id, 5], num_tokens_to_generate=40)
    await running.until(5, 0)
    assert not (await running.backend.pause()).failed
    steps, count = lines(fake_vllm, "step"), len(running.listener.outputs)
    running.submit(8, [8, 5], num_tokens_to_generate=40)
    await asyncio.sleep(0.1)
    assert (lines(fake_vllm, "step"), len(running.listener.outputs)) == (steps, count)
    await running.backend.unpause()
    await running.listener.end_of(*range(9))
    for request_id in range(9):
        assert running.listener.tokens(request_id) == answer([request_id, 5], 40, weights_of(model))


async def test_a_suspend_ends_vllms_process_and_a_resume_continues_every_answer(
    running: Running, model: Path, fake_vllm: Path
) -> None:
    for request_id in range(8):
        running.submit(request_id, [request_id, 5], num_tokens_to_generate=40)
    await running.until(5, 0)
    vllm = vllm_of(running)
    await running.backend.pause()
    assert not (await running.backend.release_memory()).failed
    assert lines(fake_vllm, "shutdown") == 1
    assert not vllm.is_running()
    running.submit(8, [8, 5], num_tokens_to_generate=40)
    assert not (await running.backend.restore_memory()).failed
    assert lines(fake_vllm, "pause") == lines(fake_vllm, "resume") + 2
    await running.backend.unpause()
    await running.listener.end_of(*range(9))
    for request_id in range(9):
        assert running.listener.tokens(request_id) == answer([request_id, 5], 40, weights_of(model))


@pytest.mark.parametrize("is_updated", [False, True])
@pytest.mark.parametrize(("asked", "level"), [(None, 2), (2, 2), (1, 1)])
async def test_on_a_platform_with_sleep_mode_a_suspend_sleeps_and_a_resume_wakes(
    start: Start,
    model: Path,
    other_weights: Path,
    fake_vllm: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_updated: bool,
    asked: int | None,
    level: int,
) -> None:
    """The process stays, unless the weights that it keeps are replaced meanwhile."""
    monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", "1")
    running = await start(vllm_sleep_level=asked)
    await running.backend.load()
    await running.backend.unpause()
    running.submit(1, PROMPT, num_tokens_to_generate=40)
    await running.until(5, 1)
    vllm = vllm_of(running)
    await running.backend.pause()
    assert not (await running.backend.release_memory()).failed
    assert (lines(fake_vllm, f"sleep {level}"), vllm.is_running()) == (1, True)
    held = running.listener.tokens(1)
    if is_updated:
        assert not (await running.backend.stage_weights(str(other_weights), 7)).failed
        assert not (await running.backend.commit_weights()).failed
    assert not (await running.backend.restore_memory()).failed
    wakes = [lines(fake_vllm, f"wake_up {tags}") for tags in ("all", "weights", "kv_cache")]
    assert wakes == ([0, 0, 0] if is_updated else [1, 0, 0] if level == 1 else [0, 1, 1])
    assert vllm.is_running() is not is_updated
    assert lines(fake_vllm, "reload_weights") == (level == 2 and not is_updated)
    running.submit(2, PROMPT, num_tokens_to_generate=5)
    steps = lines(fake_vllm, "step")
    await asyncio.sleep(0.05)
    assert (lines(fake_vllm, "step"), running.listener.tokens(1)) == (steps, held), "it resumes paused"
    await running.backend.unpause()
    await running.listener.end_of(1, 2)
    weights = weights_of(other_weights if is_updated else model)
    assert running.listener.tokens(1) == held + answer(PROMPT + held, 40 - len(held), weights)
    assert running.listener.tokens(2) == answer(PROMPT, 5, weights)


async def test_after_sleep_level_2_weights_and_adapters_are_loaded_again(
    start: Start, model: Path, tmp_path: Path, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the files cannot be read at first: the engine then stays suspended."""
    monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", "1")
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    running = await start(model=str(directory), vllm_arguments={"enable_lora": True})
    await running.backend.load()
    await running.backend.load_adapter("mine@1", str(adapter_of(tmp_path / "adapter", size=5)))
    await running.backend.release_memory()
    weights = directory / "model.safetensors"
    weights.rename(tmp_path / "moved")
    assert "No such file" in (await running.backend.restore_memory()).error
    assert lines(fake_vllm, "sleep 2") == 2
    (tmp_path / "moved").rename(weights)
    assert not (await running.backend.restore_memory()).failed
    await running.backend.unpause()
    for request_id, adapter in ((1, ""), (2, "mine@1")):
        running.submit(request_id, PROMPT, num_tokens_to_generate=5, adapter=adapter)
    await running.listener.end_of(1, 2)
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(model))
    assert running.listener.tokens(2) == answer(PROMPT, 5, weights_of(model) + 5)


async def test_weights_of_drafts_are_never_dropped(start: Start, model: Path) -> None:
    from megatron_runtime.backends.vllm.arguments import sleep_level

    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", model=str(model))
    for method, level in (("ngram", 2), ("suffix", 2), ("mtp", 1), ("eagle3", 1), ("draft_model", 1)):
        arguments = {"speculative_config": {"method": method, "num_speculative_tokens": 2}}
        assert sleep_level(replace(settings, vllm_arguments=arguments)) == level
    with pytest.raises(ValueError, match="vllm_sleep_level=2: vLLM cannot reload the weights of speculative_config"):
        await start(vllm_sleep_level=2, vllm_arguments={"speculative_config": {"method": "mtp"}})


async def test_new_weights_are_used_from_the_next_token_and_stamped(
    running: Running, model: Path, other_weights: Path, fake_vllm: Path
) -> None:
    running.submit(1, PROMPT, num_tokens_to_generate=60)
    await running.until(5, 1)
    before = running.backend.stats().weights_digest
    assert not (await running.backend.stage_weights(str(other_weights), 7)).failed
    assert not (await running.backend.commit_weights()).failed
    [last] = await running.listener.end_of(1)
    (start, old), (changed, new) = last.summary.policy_epoch
    assert (start, old, new) == (0, 0, 7)
    tokens, seen = running.listener.tokens(1), changed + 1 - len(PROMPT)
    assert tokens[:seen] == answer(PROMPT, seen, weights_of(model))
    assert tokens[seen:] == answer(PROMPT + tokens[:seen], 60 - seen, weights_of(other_weights))
    assert last.summary.kv_cache_epoch == [(0, 7)]
    assert running.backend.stats().weights_digest != before
    assert lines(fake_vllm, "reset_prefix_cache") == 1


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("was_running", [True, False], ids=["running", "paused"])
async def test_weights_load_under_a_pause_before_the_commit_and_old_ones_return_if_it_is_discarded(
    running: Running, model: Path, other_weights: Path, fake_vllm: Path, was_running: bool, is_committed: bool
) -> None:
    assert running.backend.info.loads_under_pause
    running.submit(1, PROMPT, num_tokens_to_generate=60)
    await running.until(5, 1)
    if not was_running:
        await running.backend.pause()
    assert not (await running.backend.stage_weights(str(other_weights), 7)).failed
    assert not (await running.backend.load_staged_weights()).failed
    steps, held = lines(fake_vllm, "step"), running.listener.tokens(1)
    await asyncio.sleep(0.05)
    assert (lines(fake_vllm, "step"), running.listener.tokens(1)) == (steps, held)
    if is_committed:
        assert not (await running.backend.commit_weights()).failed
    else:
        await running.backend.discard_weights()
    assert lines(fake_vllm, "reload_weights") == (1 if is_committed else 2)
    if not was_running:
        assert lines(fake_vllm, "step") == steps
        await running.backend.unpause()
    [last] = await running.listener.end_of(1)
    after = weights_of(other_weights if is_committed else model)
    assert running.listener.tokens(1) == held + answer(PROMPT + held, 60 - len(held), after)
    assert [epoch for _, epoch in last.summary.policy_epoch] == ([0, 7] if is_committed else [0])


async def test_a_load_that_fails_is_reported(running: Running, other_weights: Path, tmp_path: Path) -> None:
    weights = Path(shutil.copytree(other_weights, tmp_path / "lost")) / "model.safetensors"
    assert not (await running.backend.stage_weights(str(weights.parent), 7)).failed
    weights.unlink()
    assert "No such file" in ((await running.backend.load_staged_weights()).error or "")


async def test_a_resume_after_an_update_loads_the_new_weights_and_rejects_changed_files(
    running: Running, other_weights: Path
) -> None:
    assert not (await running.backend.stage_weights(str(other_weights), 7)).failed
    assert not (await running.backend.commit_weights()).failed
    await running.backend.pause()
    await running.backend.release_memory()
    weights = other_weights / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        assert "the released weights had" in (await running.backend.restore_memory()).error
    finally:
        weights.write_bytes(data)
    assert not (await running.backend.restore_memory()).failed
    await running.backend.unpause()
    running.submit(1, PROMPT, num_tokens_to_generate=5)
    [last] = await running.listener.end_of(1)
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(other_weights))
    assert last.summary.policy_epoch == [(0, 7)]


async def test_weights_of_another_model_are_rejected_and_those_in_use_stay(
    running: Running, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    staged = await running.backend.stage_weights(str(tmp_path), 7)
    assert "safetensors" in staged.error
    running.submit(1, PROMPT, num_tokens_to_generate=5)
    await running.listener.end_of(1)
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(model))


async def test_an_engine_that_joins_uses_the_weights_of_its_pool(start: Start, other_weights: Path) -> None:
    running = await start()
    await running.backend.adopt_weights(str(other_weights), 7)
    await running.backend.load()
    await running.backend.unpause()
    running.submit(1, PROMPT, num_tokens_to_generate=5)
    [last] = await running.listener.end_of(1)
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(other_weights))
    assert last.summary.policy_epoch == [(0, 7)]


async def test_requests_that_vllm_aborts_because_it_lost_a_rank_are_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_ABORTS", "1")
    running = await start()
    await running.backend.load()
    await running.backend.unpause()
    running.submit(1, PROMPT)
    running.submit(2, [*PROMPT, 666])

    async def has_failed() -> bool:
        return bool(running.listener.failures)

    await eventually(has_failed, what="the engine fails")
    assert running.listener.last(1) is running.listener.last(2) is None, "other engines continue them"


@pytest.mark.parametrize("is_killed", [True, False])
async def test_an_engine_whose_vllm_ends_fails_once_and_keeps_its_requests(running: Running, is_killed: bool) -> None:
    running.submit(1, [*PROMPT, *([] if is_killed else [666])])
    await running.until(1, 1)
    if is_killed:
        vllm_of(running).kill()

    async def has_failed() -> bool:
        return bool(running.listener.failures)

    await eventually(has_failed, what="the engine fails")
    [failure] = running.listener.failures
    cause = "its process was killed by SIGKILL" if is_killed else "RuntimeError: the fake got the deadly token"
    assert cause in str(failure)
    assert running.listener.last(1) is None, "the coordinator dispatches it to another engine"
    with pytest.raises(Exception, match="has ended"):
        await running.backend.abort(1)


async def test_the_end_of_the_engine_ends_every_process_of_vllm(model: Path, fake_vllm: Path) -> None:
    """Also while vLLM loads."""
    program = (
        "from megatron_runtime.backends.vllm.process import VllmProcess\n"
        "from megatron_runtime.engine.settings import EngineSettings\n"
        f"VllmProcess(EngineSettings(coordinator='tcp://127.0.0.1:1', name='e', model={str(model)!r}))\n"
        "print('started', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:  # noqa: ASYNC220
        assert await asyncio.to_thread(engine.stdout.readline) == b"started\n"
        children = psutil.Process(engine.pid).children(recursive=True)
        engine.kill()
    assert children

    async def are_gone() -> bool:
        return not any(child.is_running() for child in children)

    await eventually(are_gone, what="vLLM has ended")


async def test_adapters_answer_and_return_after_a_suspend(
    start: Start, model: Path, tmp_path: Path, fake_vllm: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    running = await start(vllm_arguments={"enable_lora": True})
    assert Capability.ADAPTERS in running.backend.info.capabilities
    await running.backend.load()
    await running.backend.unpause()
    assert "there is no adapter_config.json" in (await running.backend.load_adapter("mine@1", str(adapter))).error
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"12345")
    assert not (await running.backend.load_adapter("mine@1", str(adapter))).failed
    running.submit(1, PROMPT, num_tokens_to_generate=20)
    running.submit(2, PROMPT, num_tokens_to_generate=20, adapter="mine@1")
    await running.listener.end_of(1, 2)
    assert running.listener.tokens(1) == answer(PROMPT, 20, weights_of(model))
    assert running.listener.tokens(2) == answer(PROMPT, 20, weights_of(model) + 5)
    await running.backend.pause()
    await running.backend.release_memory()
    await running.backend.restore_memory()
    assert lines(fake_vllm, "add_lora mine@1 1") == 2
    assert not (await running.backend.unload_adapter("mine@1")).failed
    assert lines(fake_vllm, "remove_lora 1") == 1


@pytest.mark.parametrize("is_unloaded", [False, True], ids=["loaded", "unloaded"])
async def test_adapters_that_change_while_vllm_sleeps_are_there_when_it_wakes(
    start: Start, model: Path, tmp_path: Path, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, is_unloaded: bool
) -> None:
    """Its process lives on with the adapters that it had."""
    monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", "1")
    old, new = adapter_of(tmp_path / "old", size=5), adapter_of(tmp_path / "new", size=9)
    running = await start(vllm_arguments={"enable_lora": True}, vllm_sleep_level=1)
    await running.backend.load()
    assert not (await running.backend.load_adapter("old@1", str(old))).failed
    await running.backend.release_memory()
    if is_unloaded:
        assert not (await running.backend.unload_adapter("old@1")).failed
    assert not (await running.backend.load_adapter("new@1", str(new))).failed
    assert not (await running.backend.restore_memory()).failed
    assert lines(fake_vllm, "wake_up all") == 1
    assert lines(fake_vllm, "remove_lora 1") == is_unloaded
    await running.backend.unpause()
    for request_id, name in enumerate(["", "new@1"] if is_unloaded else ["", "new@1", "old@1"]):
        running.submit(request_id, PROMPT, num_tokens_to_generate=5, adapter=name)
        await running.listener.end_of(request_id)
        shift = {"": 0, "new@1": 9, "old@1": 5}[name]
        assert running.listener.tokens(request_id) == answer(PROMPT, 5, weights_of(model) + shift)


@pytest.mark.parametrize("can_sleep", [True, False])
async def test_a_resume_whose_adapter_cannot_be_loaded_is_undone_and_may_be_repeated(
    start: Start, model: Path, tmp_path: Path, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, can_sleep: bool
) -> None:
    if can_sleep:
        monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", "1")
    directory = adapter_of(tmp_path / "adapter", size=5)
    running = await start(vllm_arguments={"enable_lora": True})
    await running.backend.load()
    await running.backend.release_memory()
    assert not (await running.backend.load_adapter("mine@1", str(directory))).failed
    weights = directory / "adapter_model.safetensors"
    weights.rename(tmp_path / "moved")
    assert "No such file" in (await running.backend.restore_memory()).error
    assert lines(fake_vllm, "sleep 2") == (2 if can_sleep else 0)
    assert lines(fake_vllm, "shutdown") == (0 if can_sleep else 2)
    (tmp_path / "moved").rename(weights)
    assert not (await running.backend.restore_memory()).failed
    await running.backend.unpause()
    running.submit(1, PROMPT, num_tokens_to_generate=5, adapter="mine@1")
    await running.listener.end_of(1)
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(model) + 5)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        # POST /v1/embeddings asks for them.
        (
            {"return_hidden_state": True, "num_tokens_to_generate": 1},
            "return_hidden_state=True.*no support for hidden states",
        ),
        ({"temperature": 3.0}, r"temperature=3\.0.*no support for temperatures above 2"),
    ],
)
async def test_what_vllm_cannot_do_is_announced_and_rejected(
    running: Running, params: dict[str, Any], text: str
) -> None:
    info = running.backend.info
    pooling = ("EMBED", "CLASSIFY", "TOKEN_EMBED", "TOKEN_CLASSIFY")
    assert info.lacks == ("HIDDEN_STATES", "HIGH_TEMPERATURE", "KV_TRANSFER", *pooling)
    with pytest.raises(InvalidSamplingParamsError, match=text):
        info.check_request(SamplingParams(**params))


async def test_a_pooling_request_is_sent_again_after_a_suspend_and_answered_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake has no pooling models: its process gets nothing. tests/vllm has the other side."""
    backend, sent = running.backend, []
    pooling = {"task": "embed", "dimensions": 2}
    monkeypatch.setattr(type(backend._process), "send", lambda _, *message: sent.append(message))
    nothing = np.array([], dtype=np.int32)
    params = SamplingParams(pooling=pooling, num_tokens_to_generate=0, priority=3, cache_salt="salt")
    backend.submit(EngineRequest(1, nothing, nothing, params, text="Hi"))
    expected = ("pool", 1, pooling, "Hi", [], "", 3, "salt")
    assert sent == [expected]
    for verb in (backend.pause, backend.release_memory, backend.restore_memory, backend.unpause):
        assert not (await verb()).failed
    assert sent == [expected] * 2
    entry = [1, "pooled", [2], np.array([0.5, -1.5], dtype="<f4").tobytes(), 4, 1, "POSITIVE"]
    backend._on_message(["outputs", [entry, [2, "rejected", "unknown", ""]]])
    backend._on_message(["outputs", [entry]])
    [last] = running.listener.outputs
    assert last.pooled.tolist() == [0.5, -1.5]
    assert (last.finish_reason, last.prompt_length, last.num_cached_tokens, last.label) == ("stop", 4, 1, "POSITIVE")
    backend.submit(EngineRequest(3, nothing, nothing, params, text="Hi"))
    backend._on_message(["outputs", [[3, "rejected", "no such size", "dimensions"]]])
    error = running.listener.last(3).error
    assert (str(error), error.field) == ("no such size", "dimensions")


async def test_stop_tokens_outside_the_vocabulary_never_end_an_answer(running: Running, model: Path) -> None:
    """vLLM rejects them, a native engine does not."""
    running.submit(1, PROMPT, num_tokens_to_generate=5, stop_token_ids=[10**6])
    [last] = await running.listener.end_of(1)
    assert last.finish_reason == "length"
    assert running.listener.tokens(1) == answer(PROMPT, 5, weights_of(model))


async def test_without_enable_lora_the_remedy_for_adapters_is_named(running: Running) -> None:
    with pytest.raises(UnsupportedVerbError, match="set the engine argument enable_lora of vLLM to true"):
        running.backend.info.require("SET_ADAPTERS", Capability.ADAPTERS)


@pytest.mark.parametrize(
    ("on_gpu", "settings", "expected"),
    [
        (False, {}, (None, 64, 2048, 1 << 30, 0.92)),
        (False, {"kv_cache_memory": 7}, (None, 64, 2048, 7, 0.92)),
        (True, {}, (-1, None, None, None, 0.92)),
        (True, {"max_requests": 4096}, (-1, 4096, None, None, 0.92)),
        (True, {"max_sequence_length": 9, "max_requests": 3, "max_tokens": 2}, (9, 3, 3, None, 0.92)),
        (True, {"kv_cache_memory": 7}, (-1, None, None, 7, 0.01)),
        (True, {"kv_cache_memory": 7, "vllm_arguments": {"gpu_memory_utilization": 0.5}}, (-1, None, None, 7, 0.5)),
    ],
)
def test_on_a_gpu_vllm_chooses_what_the_settings_leave_open(
    fake_vllm: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    from megatron_runtime.backends.vllm.arguments import engine_arguments

    if on_gpu:
        monkeypatch.setenv("FAKE_VLLM_ON_GPU", "1")
    engine = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", **settings)
    chosen = engine_arguments(engine, Path("/model"), cache_events="ipc:///e")
    limits = (chosen.max_model_len, chosen.max_num_seqs, chosen.max_num_batched_tokens)
    assert (*limits, chosen.kv_cache_memory_bytes, chosen.gpu_memory_utilization) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (ParallelSizes(tensor=2), (2, False, 1, 2)),
        (ParallelSizes(tensor=2, expert=4, pipeline=3), (8, True, 1, 24)),
        (ParallelSizes(tensor=2, data=4), (2, False, 4, 8)),
        (ParallelSizes(tensor=2, expert=8, data=4), (2, True, 4, 8)),
    ],
)
async def test_expert_ranks_share_those_of_tensor_and_data(
    start: Start, sizes: ParallelSizes, expected: tuple[int, bool, int, int]
) -> None:
    from megatron_runtime.backends.vllm.arguments import engine_arguments

    engine = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", parallel=sizes)
    chosen = engine_arguments(engine, Path("/model"), cache_events="ipc:///e")
    ranks = (chosen.tensor_parallel_size, chosen.enable_expert_parallel, chosen.data_parallel_size)
    info = (await start(parallel=sizes, max_requests=8)).backend.info
    assert (*ranks, info.ranks) == expected
    assert info.max_requests == 8 * sizes.data, "vLLM's limit is that of one data-parallel rank"


def test_data_parallelism_needs_vllm_and_one_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ("engine", "--coordinator", "h:1", "--name", "e", "--health-port", "off", "--data-parallel", "2")
    result = CliRunner().invoke(main, [*engine, "--check"])
    assert result.exit_code == 2
    assert "--data-parallel 2 is not supported by --backend native: use --backend vllm, or" in result.output
    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    from megatron_runtime.backends.vllm.arguments import engine_arguments

    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", parallel=ParallelSizes(data=2))
    with pytest.raises(ValueError, match=r"data_parallel_size=2 over 2 pods: give an engine .* one pod"):
        engine_arguments(settings, Path("/model"), cache_events="ipc:///e")


async def test_the_limits_that_vllm_chose_on_a_gpu_are_announced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_ON_GPU", "1")
    running = await start(max_sequence_length=None, max_requests=None)
    assert running.backend.info.max_requests == 256
    await running.backend.load()
    assert running.backend.info.max_sequence_length == 1536


async def test_a_load_reports_its_stages_and_the_cache_that_vllm_measured(
    start: Start, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron_runtime.backends.vllm import process

    captured = tmp_path / "captured"
    monkeypatch.setenv("FAKE_VLLM_ON_GPU", "1")
    monkeypatch.setenv("FAKE_VLLM_CAPTURES_UNTIL", str(captured))
    monkeypatch.setattr(process, "PROGRESS", progress := StartProgress())
    reports = []
    monkeypatch.setattr(progress, "report", lambda *report: reports.append(report))
    monkeypatch.setattr(StartProgress, "total", 1000)
    running = await start()
    loading = asyncio.create_task(running.backend.load())

    async def are_captured() -> bool:
        return any(stage is Stage.CAPTURE for stage, *_ in reports)

    await eventually(are_captured, what="CUDA graphs are captured")
    captured.touch()
    await loading
    size = (model / "model.safetensors").stat().st_size
    stages = [report for report in reports if report[0] is not Stage.VERIFY]
    stages.remove((Stage.LOAD, 0, size))  # vLLM's output is read at the same time
    assert stages == [
        *((Stage.LOAD, 10 * n, 1000) for n in (0, 50, 100)),
        (Stage.CAPTURE, 40, 100),
    ]
    assert running.backend.info.kv_cache_bytes == int(12.25 * (1 << 30))


async def test_the_metrics_of_vllm_are_reported_under_their_names(running: Running) -> None:
    async def are_there() -> bool:
        return any(family.name == "vllm:num_requests_running" for family in running.backend.metrics())

    await eventually(are_there, what="metrics arrive")
    assert not any(family.name.startswith("python") for family in running.backend.metrics())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int4"}, "dtype int4: vLLM quantizes by its argument quantization"),
        ({"moe_enable_routing_replay": True}, "moe_enable_routing_replay is not supported by the vLLM backend"),
        ({"vllm_arguments": {"max_model_len": 5}}, "max_model_len conflicts with spec.model.maxSequenceLength"),
        ({"vllm_arguments": {"trust_remote_code": True}}, "trust_remote_code can load code"),
        ({"vllm_arguments": {"colour": 1}}, "colour is not known to this release, so it counts as loading code"),
        ({"vllm_allow_code": True, "vllm_arguments": {"colour": 1}}, "colour is not known to vLLM 0.32.0: remove it"),
        ({"vllm_arguments": {"block_size": "32"}}, "block_size is '32': give an integer or null"),
        ({"vllm_arguments": {"block_size": True}}, "block_size is True: give an integer or null"),
        ({"vllm_arguments": {"gpu_memory_utilization": "0.9"}}, "gpu_memory_utilization is '0.9': give a number"),
        ({"vllm_arguments": {"enforce_eager": 1}}, "enforce_eager is 1: give true or false"),
        ({"vllm_arguments": {"quantization": ["fp8"]}}, "quantization is ['fp8']: give a string or null"),
        ({"vllm_arguments": {"kv_cache_dtype": "odd"}}, "kv_cache_dtype is 'odd': give 'auto' or 'fp8'"),
        (
            {"vllm_arguments": {"eplb_config": {"window_size": "9"}}},
            "eplb_config.window_size is '9': give an integer",
        ),
        ({"vllm_arguments": {"quantization": "odd"}}, "quantization 'odd' is unknown"),
        ({"vllm_arguments": {"speculative_config": ["ngram"]}}, 'speculative_config is ["ngram"]: give an object'),
        (
            {"vllm_allow_code": True, "vllm_arguments": {"trust_remote_code": True}},
            "trust_remote_code is not known to vLLM 0.32.0",
        ),
    ],
)
async def test_a_bad_setting_is_named_with_the_remedy(start: Start, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        await start(**settings)


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        (
            [
                "(EngineCore pid=7) ERROR [core.py:12] ValueError: No available memory for the cache blocks.",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            1,
            "ValueError: No available memory for the cache blocks.",
        ),
        (
            ["RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}"],
            1,
            "its engine process was killed by SIGKILL, most often because its memory limit was exceeded",
        ),
        (["INFO all is well"], -11, "its process was killed by SIGSEGV"),
        ([], 3, "its process ended with exit status 3"),
    ],
)
def test_the_cause_of_a_failure_is_found_in_the_log(log: list[str], status: int, cause: str) -> None:
    from megatron_runtime.backends.vllm.process import cause_of

    assert cause_of(log, status) == cause


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_check_reads_the_model_and_needs_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    if not has_gpu:
        monkeypatch.setenv("FAKE_VLLM_WITHOUT_GPU", "1")
    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=str(model), backend="vllm")
    check_backend(settings)
    check_backend(replace(settings, model="builtin:smollm2-135m"))  # a GGUF file, which an engine converts
    with pytest.raises(ValueError, match="quantization 'odd' is unknown"):
        check_backend(replace(settings, vllm_arguments={"quantization": "odd"}))
    with pytest.raises(ValueError, match="'/lost' does not exist"):
        check_backend(replace(settings, model="/lost"))


@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", os.EX_TEMPFAIL, "killed by SIGKILL, most often because its memory"),
        ("sys.exit(3)", 1, "its process ended with exit status 3"),
    ],
)
def test_a_check_that_was_killed_may_be_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, code: int, cause: str
) -> None:
    from megatron_runtime.backends.vllm import process

    (tmp_path / "ending.py").write_text(f"import os, signal, sys\n{end}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "PROGRAM", "ending")
    engine = ("engine", "--coordinator", "h:1", "--name", "e", "--health-port", "off", "--backend", "vllm")
    result = CliRunner().invoke(main, [*engine, "--model", str(model), "--check"])
    assert result.exit_code == code
    assert cause in result.output + str(result.exception)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the files that are read for a digest from now on."""
    from megatron_runtime.backends.vllm import models

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: list[str] = []
    compute = models._file_digest
    monkeypatch.setattr(models, "_file_digest", lambda file, note: (names.append(file.name), compute(file, note))[1])
    return names


@pytest.mark.parametrize("is_writable", [True, False])
def test_weights_are_read_for_their_digest_only_once(
    model: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    from megatron_runtime.backends.vllm.models import MARKER_FILE, replace_text, weights_digest

    directory = Path(shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns(".megatron-*")))
    if not is_writable:  # root may write to any directory

        def write(path: Path, text: str) -> None:
            if path.parent == directory:
                raise PermissionError
            replace_text(path, text)

        monkeypatch.setattr("megatron_runtime.backends.vllm.models.replace_text", write)
    digest = weights_digest(directory)
    assert weights_digest(directory) == digest
    assert read == ["model.safetensors"]
    assert (directory / MARKER_FILE).exists() is is_writable
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert weights_digest(directory) != digest
    assert read == ["model.safetensors"] * 2


def test_weights_that_a_download_verified_are_not_read_for_their_digest(
    model: Path, tmp_path: Path, read: list[str]
) -> None:
    from megatron_runtime.backends.vllm.models import weights_digest
    from megatron_runtime.checkpoints.remote.files import Manifest, write_manifest

    digest = weights_digest(Path(shutil.copytree(model, tmp_path / "plain")))
    commit = "0" * 40
    directory = Path(shutil.copytree(model, tmp_path / "cache" / "repository" / "snapshots" / commit))
    (directory / ".megatron-digests.json").unlink(missing_ok=True)
    read.clear()
    weights = directory / "model.safetensors"
    found = {"size": weights.stat().st_size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    own = tmp_path / "cache" / "repository" / ".megatron" / commit
    own.mkdir(parents=True)
    write_manifest(Manifest("org/name", commit, {"model.safetensors": found}), own)
    assert weights_digest(directory) == digest
    assert read == []
    os.utime(weights, ns=(0, time.time_ns() + 10**9))  # it was written after the manifest
    assert weights_digest(directory) == digest
    assert read == ["model.safetensors"]


def test_a_megatron_checkpoint_is_converted_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_runtime.backends.vllm.models import model_directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = tmp_path / "checkpoint"
    convert(str(model), checkpoint, to="torch_dist", write_gguf_tokenizer=write_gguf_tokenizer)
    directory = model_directory(str(checkpoint), wanted_format="TorchDist")
    [weights] = directory.glob("*.safetensors")
    original = load_file(model / "model.safetensors")
    converted = load_file(weights)
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], original[name].bfloat16()) for name in original)
    written = weights.stat().st_mtime_ns
    assert model_directory(str(checkpoint)) == directory
    assert weights.stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"format=GGUF: .* is TorchDist: use Auto or TorchDist"):
        model_directory(str(checkpoint), wanted_format="GGUF")


async def test_an_older_version_of_vllm_is_rejected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_VERSION", "0.25.1")
    with pytest.raises(ValueError, match=r"vLLM 0\.25\.1 is not supported: install vLLM >=0\.26,<0\.34"):
        await start()


async def test_a_newer_version_of_vllm_starts_with_a_warning(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM_VERSION", "0.34.0")
    await start()
    log = ""

    async def is_logged() -> bool:
        nonlocal log
        log += capfd.readouterr().err
        return "vLLM 0.34.0 is newer than this release was written for: >=0.26,<0.34" in log

    await eventually(is_logged, what="the warning is logged")


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
FORCING = ("STRUCTURED_OUTPUT", "STRUCTURE_AFTER_REASONING", "BAD_WORDS", "PENALTIES")


@pytest.mark.parametrize(
    ("has_triton", "arguments", "missing"),
    [
        (False, {}, ()),
        (True, {}, ()),
        (True, {"speculative_config": NGRAM}, ("LOGIT_BIAS", "MIN_P")),
        (True, {"speculative_config": {**NGRAM, "method": "suffix"}}, (*FORCING, "LOGIT_BIAS", "MIN_P")),
        (False, {"speculative_config": NGRAM}, (*FORCING, "LOGIT_BIAS", "MIN_P")),
    ],
    ids=["V1", "V2", "V2 speculates", "V1 beside Triton", "V1 speculates"],
)
async def test_the_logits_processor_is_that_of_the_model_runner_and_what_is_missing_is_announced(
    start: Start,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_triton: bool,
    arguments: dict[str, Any],
    missing: tuple[str, ...],
) -> None:
    """A logits processor of the wrong interface, or any beside speculation on V1, ends vLLM at its start."""
    if has_triton:
        monkeypatch.setenv("FAKE_VLLM_HAS_TRITON", "1")
    running = await start(vllm_arguments=arguments)
    announced = set(running.backend.info.lacks)
    pooling = {task.name for task in POOLING.values()}
    assert announced == {"HIDDEN_STATES", "HIGH_TEMPERATURE", "KV_TRANSFER", *pooling, *missing}
    assert (Capability.CALL_STRUCTURE in running.backend.info.capabilities) == ("STRUCTURED_OUTPUT" not in missing)
    await running.backend.load()
    await running.backend.unpause()
    whole = answer(PROMPT, 20, weights_of(model))
    penalty = {} if "PENALTIES" in missing else {"presence_penalty": 0.5}
    running.submit(1, PROMPT, generated=whole[:8], num_tokens_to_generate=20, **penalty)
    await running.listener.end_of(1)
    assert running.listener.tokens(1) == whole[8:]
    for name, params in (
        ("PENALTIES", {"frequency_penalty": 0.5}),
        ("BAD_WORDS", {"bad_words": ["a"]}),
        ("MIN_P", {"min_p": 0.5, "temperature": 1.0}),
        ("LOGIT_BIAS", {"logit_bias": {7: 1.0}}),
    ):
        if name in missing:
            with pytest.raises(InvalidSamplingParamsError):
                running.backend.info.check_request(SamplingParams(**params))
        else:
            running.backend.info.check_request(SamplingParams(**params))


def test_vllm_without_the_interface_of_v2_gets_the_logits_processor_of_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 to 0.30 have a V2 that takes none, and fall back to V1 if there is one."""
    from megatron_runtime.backends.vllm import arguments

    v2 = SimpleNamespace(use_v2_model_runner=True, speculative_config=None)
    assert arguments.logits_processor_of(v2).__name__ == "AnswerRows"
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    assert arguments.logits_processor_of(v2).__name__ == "AnswerTokens"
    v2.speculative_config = NGRAM
    assert arguments.logits_processor_of(v2) is None


async def test_a_draft_model_is_resolved_like_the_model(start: Start, model: Path) -> None:
    drafts = {"method": "eagle3", "num_speculative_tokens": 2}
    await start(vllm_arguments={"speculative_config": {**drafts, "model": str(model)}})
    with pytest.raises(ValueError, match="'/lost' does not exist"):
        await start(vllm_arguments={"speculative_config": {**drafts, "model": "/lost"}})
    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=str(model), backend="vllm")
    check_backend(replace(settings, vllm_arguments={"speculative_config": {**drafts, "model": str(model)}}))
    with pytest.raises(ValueError, match="'/lost' does not exist"):
        check_backend(replace(settings, vllm_arguments={"speculative_config": {**drafts, "model": "/lost"}}))


def test_without_vllm_the_engine_names_the_remedy(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part != str(FAKE)])
    with pytest.raises(ValueError, match="vLLM is not installed: use an image that has it"):
        build_backend(EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=str(model), backend="vllm"))


async def test_rates_count_each_prompt_once_and_the_tokens_of_every_output(running: Running) -> None:
    records: list[dict[str, float]] = []
    running.backend._rates._steps.observe = lambda **record: records.append(record)
    running.submit(1, PROMPT, num_tokens_to_generate=20)
    running.submit(2, [*PROMPT, 14], generated=[5, 6], num_tokens_to_generate=4)
    await running.listener.end_of(1, 2)
    sums = {name: sum(record[name] for record in records) for name in records[0]}
    assert sums["prompt_tokens"] == 3 + (4 + 2), "another engine has generated two tokens"
    assert sums["held_tokens"] == sum(range(3, 23)) + sum(range(6, 8)), "before each token"
    assert 20 <= sums["steps"] <= 22
    assert sums["seconds"] > 0


async def test_prompts_count_as_queued_until_their_first_output(running: Running) -> None:
    await running.backend.pause()
    running.submit(1, PROMPT, num_tokens_to_generate=2)
    running.submit(3, [*PROMPT, 14], num_tokens_to_generate=2)
    assert (running.backend.stats().queued_tokens, running.backend.stats().last_request) == (7, 3)
    running.backend._stats = {"prefix_cache_queries": 100.0, "prefix_cache_hits": 75.0}
    assert running.backend.stats().queued_tokens == 2
    await running.backend.unpause()
    await running.listener.end_of(1, 3)
    assert (running.backend.stats().queued_tokens, running.backend.stats().last_request) == (0, 3)
