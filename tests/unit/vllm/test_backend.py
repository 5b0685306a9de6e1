"""VllmBackend: requests, failover, verbs and failures."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.errors import MaxSequenceLengthOverflowError
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError

from .conftest import Running, Start, answer, weights_of

PROMPT = [11, 12, 13]


def engine_of(running: Running) -> Any:
    return running.backend._llm


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


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "text"),
    [
        ([], {}, ValueError, "prompt is empty"),
        ([1] * 256, {}, MaxSequenceLengthOverflowError, "has 256 tokens; prompt and answer together may have 256"),
        (PROMPT, {"num_tokens_total": 3}, InvalidSamplingParamsError, "num_tokens_total=3"),
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
    assert type(last.error) is kind
    assert text in str(last.error)


async def test_a_deadline_and_an_abort_end_a_request(running: Running) -> None:
    running.submit(1, PROMPT, deadline=0.05)
    running.submit(2, PROMPT)
    [last] = await running.listener.end_of(1)
    assert (last.error_code, last.error) == (ErrorCode.DEADLINE, "the deadline of 0.05 s passed")
    await running.backend.abort(2)
    assert engine_of(running)._requests == {}
    count = len(running.listener.outputs)
    await asyncio.sleep(0.05)
    assert len(running.listener.outputs) == count


async def test_no_step_runs_and_no_token_arrives_between_pause_and_unpause(running: Running, model: Path) -> None:
    for request_id in range(8):
        running.submit(request_id, [request_id, 5], num_tokens_to_generate=40)
    await running.until(5, 0)
    assert not (await running.backend.pause()).failed
    engine, count = engine_of(running), len(running.listener.outputs)
    steps = engine.steps
    running.submit(8, [8, 5], num_tokens_to_generate=40)
    await asyncio.sleep(0.1)
    assert (engine.steps, len(running.listener.outputs)) == (steps, count)
    await running.backend.unpause()
    await running.listener.end_of(*range(9))
    for request_id in range(9):
        assert running.listener.tokens(request_id) == answer([request_id, 5], 40, weights_of(model))


async def test_a_suspend_ends_vllms_process_and_a_resume_continues_every_answer(running: Running, model: Path) -> None:
    for request_id in range(8):
        running.submit(request_id, [request_id, 5], num_tokens_to_generate=40)
    await running.until(5, 0)
    first = engine_of(running)
    await running.backend.pause()
    assert not (await running.backend.release_memory()).failed
    assert first.calls[-1] == "shutdown"
    assert engine_of(running) is None
    running.submit(8, [8, 5], num_tokens_to_generate=40)
    assert not (await running.backend.restore_memory()).failed
    assert engine_of(running).is_paused_now
    await running.backend.unpause()
    await running.listener.end_of(*range(9))
    for request_id in range(9):
        assert running.listener.tokens(request_id) == answer([request_id, 5], 40, weights_of(model))


async def test_new_weights_are_used_from_the_next_token_and_stamped(
    running: Running, model: Path, other_weights: Path
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
    assert "reset_prefix_cache" in engine_of(running).calls


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


async def test_an_engine_whose_process_dies_fails_once_while_idle_too(running: Running) -> None:
    running.submit(1, PROMPT)
    await running.until(3, 1)
    engine_of(running).die()
    await asyncio.sleep(1.5)
    assert len(running.listener.failures) == 1
    assert running.listener.last(1) is None, "the coordinator dispatches it to another engine"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int4"}, "dtype int4: vLLM quantizes by its argument quantization"),
        ({"batch_invariant": True}, "batch_invariant is not supported by the vLLM backend"),
        ({"vllm_arguments": {"max_model_len": 5}}, "max_model_len conflicts with spec.model.maxSequenceLength"),
        ({"vllm_arguments": {"trust_remote_code": True}}, "trust_remote_code can load code"),
        ({"vllm_arguments": {"colour": 1}}, "colour is not supported: use one of"),
        ({"vllm_arguments": {"quantization": "odd"}}, "quantization 'odd' is unknown"),
        ({"vllm_allow_code": True, "vllm_arguments": {"trust_remote_code": True}}, "vLLM 0.32.0 rejects its arguments"),
    ],
)
async def test_a_bad_setting_is_named_with_the_remedy(start: Start, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=r".*") as raised:
        await start(**settings)
    assert text in str(raised.value)


async def test_another_version_of_vllm_is_rejected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.9.1")
    with pytest.raises(ValueError, match=r"vLLM 0\.9\.1 is not supported: install vLLM >=0\.32,<0\.33"):
        await start()


def test_without_vllm_the_engine_names_the_remedy(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    from megatron_runtime.backends.registry import build_backend
    from megatron_runtime.engine.settings import EngineSettings

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="vLLM is not installed: use an image that has it"):
        build_backend(EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=str(model), backend="vllm"))
