"""vLLM behind the worker, the coordinator and the client: answers, verbs, failover."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from fleet import Fleet, Load, until_serving, until_status

from megatron_runtime.backends.text import ModelText
from megatron_runtime.client.rejection import InvalidRequestError
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.bad_words import BadWords
from megatron_runtime.tokenization import load_tokenizer

from .conftest import START_SECONDS, Pool

pytestmark = pytest.mark.timeout(1800)

LENGTH = 48


def prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(100, 40_000), k=12) for _ in range(count)]


async def answers(pool: Pool, wanted: list[list[int]]) -> list[list[int]]:
    """Return the undisturbed greedy answers."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=LENGTH, termination_id=-1)
    replies = await asyncio.gather(*(pool.client.add_request(prompt, params) for prompt in wanted))
    return [reply["generated_tokens"] for reply in replies]


def load_of(pool: Pool, wanted: list[list[int]], **params: Any) -> Load:
    load = Load([pool.client])
    for prompt in wanted:
        load.add(prompt, LENGTH, temperature=0.0, termination_id=-1, **params)
    return load


async def check(load: Load, expected: list[list[int]]) -> None:
    await load.finish(seconds=START_SECONDS)
    for record, answer in zip(load.records, expected, strict=True):
        record.check(answer)


async def test_verbs_change_no_answer(pool: Pool, model: Path) -> None:
    """Pause, suspend and an update with the same weights, each in the middle of eight streams."""
    await pool.start(only="vllm")
    wanted = prompts(8)
    expected = await answers(pool, wanted)

    load = load_of(pool, wanted)
    await load.until(40)
    await pool.control(Header.PAUSE)
    held = load.tokens
    await asyncio.sleep(1)
    assert load.tokens == held
    await pool.control(Header.UNPAUSE)
    await check(load, expected)

    load = load_of(pool, wanted)
    await load.until(40)
    before = pool.memory("only")
    await pool.control(Header.PAUSE)
    await pool.control(Header.SUSPEND)
    suspended = pool.memory("only")
    print(f"\nresident memory {before >> 20} MiB, suspended {suspended >> 20} MiB")
    assert suspended < 700 << 20
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    await check(load, expected)

    load = load_of(pool, wanted)
    await load.until(40)
    await pool.control(Header.UPDATE_WEIGHTS, source=str(model), epoch=5)
    await check(load, expected)
    for record in load.records:
        assert [epoch for _, epoch in record.final["policy_epoch"]] == [0, 5]
    await pool.control(Header.PAUSE)
    await pool.control(Header.STOP)


@pytest.mark.parametrize("other", ["vllm", "native"])
async def test_a_killed_engine_loses_no_request_and_doubles_no_token(pool: Pool, other: str) -> None:
    await pool.start(killed="vllm", other=other)
    wanted = prompts(32)
    expected = await answers(pool, wanted)
    load = load_of(pool, wanted)
    await load.until(10 * len(wanted))
    engine = pool.fleet.engines.pop("killed")
    parts = psutil.Process(engine.pid).children(recursive=True)
    await engine.kill()
    await check(load, expected)

    async def are_gone() -> bool:
        return not any(part.is_running() and part.status() != psutil.STATUS_ZOMBIE for part in parts)

    await eventually(are_gone, what="the processes of the killed engine have ended")


async def test_what_vllm_does_not_support_stays_with_the_native_engine(pool: Pool) -> None:
    """The native engine is killed in the middle of streams with a temperature above 2, beside a vLLM engine."""
    await pool.start(native="native", vllm="vllm")
    wanted = prompts(6)
    hot = {"temperature": 3.0, "seed": 7, "termination_id": -1}

    def hot_load() -> Load:
        load = Load([pool.client])
        for prompt in wanted:
            load.add(prompt, LENGTH, **hot)
        return load

    load = hot_load()
    await load.finish(seconds=START_SECONDS)
    expected = [record.final["generated_tokens"] for record in load.records]
    hidden = SamplingParams(num_tokens_to_generate=1, return_hidden_state=True)
    replies = await asyncio.gather(*(pool.client.add_request(prompt, hidden) for prompt in wanted))
    assert all(reply["hidden_state"] for reply in replies)

    load = hot_load()
    await load.until(5 * len(wanted))
    await pool.fleet.engines.pop("native").kill()
    await until_status(pool.admin, lambda status: status.queued == len(wanted), what="the streams wait")
    assert all(await answers(pool, wanted)), "the vLLM engine serves what it supports"
    for params, field in (
        (SamplingParams(num_tokens_to_generate=4, **hot), "temperature"),
        (hidden, "return_hidden_state"),
    ):
        with pytest.raises(InvalidRequestError, match=r"backend 'vllm'") as rejected:
            await pool.client.add_request(wanted[0], params)
        assert rejected.value.field == field
    await pool.engine("native", "native")
    await check(load, expected)


async def test_moved_requests_keep_their_penalties_and_their_grammar(pool: Pool, model: Path) -> None:
    """Tokens that were delivered are forced, so that the state of penalties and grammars is rebuilt."""
    await pool.start(killed="vllm", other="vllm")
    tokenizer = load_tokenizer(str(model))
    digits = {"type": "regex", "value": "[0-9]{40,60}"}
    prompt = tokenizer.encode("The digits of pi are 3.")
    penalised = load_of(pool, [prompt] * 8, frequency_penalty=0.4)
    await penalised.finish(seconds=START_SECONDS)
    expected = penalised.records[0].final["generated_tokens"]
    load = load_of(pool, [prompt] * 8, frequency_penalty=0.4)
    shaped = load_of(pool, [prompt] * 8, structured_output=digits)
    await load.until(80)
    await shaped.until(40)
    await pool.fleet.engines.pop("killed").kill()
    await check(load, [expected] * 8)
    await shaped.finish(seconds=START_SECONDS)
    for record in shaped.records:
        text = tokenizer.decode(record.final["generated_tokens"])
        assert text.isdigit(), text


async def test_bad_words_give_the_answers_of_a_native_engine(pool: Pool, model: Path) -> None:
    """Also when a request moves within its answer. A grammar that allows only banned tokens overrules them."""
    await pool.start(first="native")
    text = ModelText.of_model(str(model))
    wanted = prompts(8)
    plain = await answers(pool, wanted)
    pieces = [text.detokenize(answer[start : start + 2]) for answer in plain for start in (3, 10, 20, 30)]
    words = [piece for piece in pieces if piece.strip()]
    native = load_of(pool, wanted, bad_words=words)
    await native.finish(seconds=START_SECONDS)
    expected = [record.final["generated_tokens"] for record in native.records]
    banned = BadWords(text.bad_words(words, vocab_size=text.tokenizer.vocab_size))
    for answer, before in zip(expected, plain, strict=True):
        assert answer != before
        assert not any(token in banned.after(answer[:place]) for place, token in enumerate(answer))

    await pool.engine("second", "vllm")
    await until_serving(pool.admin, ("first", "second"), seconds=START_SECONDS)
    load = load_of(pool, wanted, bad_words=words)
    await load.until(10 * len(wanted))
    await pool.fleet.engines.pop("first").kill()
    await check(load, expected)
    await check(load_of(pool, wanted, bad_words=words), expected)

    params = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=8,
        bad_words=["Paris"],
        structured_output={"type": "choice", "value": ["Paris"]},
    )
    reply = await pool.client.add_request(wanted[0], params)
    assert text.detokenize(reply["generated_tokens"]) == "Paris"


def test_bad_words_have_the_token_sequences_of_vllm(model: Path) -> None:
    from vllm import SamplingParams as VllmParams
    from vllm.tokenizers import get_tokenizer

    words = ["Paris", " the", "New York", "ello", "a", "é", "🦙", "1 2", "\n x", "word\n", "<|im_end|>", "Paris"]
    theirs = VllmParams(bad_words=words)
    theirs.update_from_tokenizer(get_tokenizer(str(model)))
    ours = ModelText.of_model(str(model)).bad_words(words, vocab_size=1 << 20)
    assert {*ours} == {tuple(sequence) for sequence in theirs.bad_words_token_ids}


async def test_log_probabilities_of_prompt_and_answer_are_complete(pool: Pool) -> None:
    await pool.start(only="vllm")
    [prompt] = prompts(1)
    params = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=8,
        termination_id=-1,
        return_log_probs=True,
        top_n_logprobs=3,
        skip_prompt_log_probs=False,
    )
    reply = await pool.client.add_request(prompt, params)
    assert len(reply["generated_log_probs"]) == len(reply["generated_top_n_logprobs"]) == 8
    assert len(reply["prompt_log_probs"]) == len(prompt) - 1
    for chosen, top in zip(reply["generated_log_probs"], reply["generated_top_n_logprobs"], strict=True):
        assert chosen == pytest.approx(max(value for _, value in top), abs=1e-4)


async def test_requests_go_to_the_engine_that_has_their_prefix(fleet: Fleet, pool: Pool) -> None:
    """Eight long prefixes over two engines. Every continuation finds its prefix in vLLM's cache."""
    await pool.start("--routing-policy", "LongestPrefix", "--alpha", "1", first="vllm", second="vllm")
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, termination_id=-1)
    rng = random.Random(3)
    prefixes = [rng.choices(range(100, 40_000), k=300) for _ in range(8)]
    first = await asyncio.gather(*(pool.client.add_request(prefix, params) for prefix in prefixes))
    assert [reply["num_cached_tokens"] for reply in first] == [0] * 8
    longer = [prefix + rng.choices(range(100, 40_000), k=20) for prefix in prefixes]
    replies = await asyncio.gather(*(pool.client.add_request(prompt, params) for prompt in longer))
    cached = [reply["num_cached_tokens"] for reply in replies]
    assert min(cached) >= 128, cached


async def test_the_cause_of_a_failed_start_is_the_engines_last_message(fleet: Fleet, pool: Pool) -> None:
    """vLLM reports in another process that the KV cache has no room for a block."""
    await pool.start()
    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_runtime.cli", "engine", "--name", "small"),
        *("--coordinator", f"127.0.0.1:{fleet.engine_port}", "--keys-dir", str(fleet.keys_dir), "--health-port", "off"),
        *pool.engine_options("vllm"),
        *("--kv-cache-memory", "1Mi"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, log = await engine.communicate()
    assert engine.returncode == 1
    last = log.decode().splitlines()[-1]
    assert "engine small failed: " in last
    assert re.search("No available memory for the cache blocks|larger than the available KV cache memory", last)
