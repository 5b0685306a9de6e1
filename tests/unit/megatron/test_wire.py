"""The Megatron protocol with the classes of Megatron-Core, unmodified: its client, its coordinator and its engine.

Text and token prompts, errors, the five verbs and epochs, in each combination with the classes of this project.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from gpt_models import make_gpt
from gpt_program import Send, begin_single_rank, in_processes
from megatron.core.inference import inference_client
from megatron.core.inference.contexts.dynamic_context import MaxSequenceLengthOverflowError
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams
from megatron.core.inference.text_generation_server.dynamic_text_gen_server import text_generation_server
from megatron_engine import MAX_TOKENS, be_engine
from scripted_engine import ScriptedEngine

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.spawn import spawn_coordinator
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.inference_client import InferenceClient, UnavailableError
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.megatron_core.text_generation_server.dynamic_text_gen_server import (
    start_text_gen_server,
    stop_text_gen_server,
)
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.transport.control_calls import ControlRejectedError

_FORK = multiprocessing.get_context("fork")
VERBS = ("pause", "suspend", "resume", "unpause", "pause", "stop")
TOO_LONG = [1] * (MAX_TOKENS + 1)


def counted_from(last: int, number: int = 4) -> list[int]:
    """Return the answer of Megatron's engine with the controller of tests/support."""
    return list(range(last + 1, last + 1 + number))


@pytest.fixture
def coordinator() -> Iterator[str]:
    timing = Timing(recovery=0.0)
    process = spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True, timing=timing))
    yield process.address
    process.stop()


class MegatronEngine:
    """A process with the engine of Megatron-Core. reported() returns the next of the states and epochs it entered."""

    def __init__(self, coordinator: str) -> None:
        self._receiver, sender = _FORK.Pipe(duplex=False)
        (port,) = free_ports(1)
        self.process = _FORK.Process(target=be_engine, args=(coordinator, port, sender), daemon=True)
        self.process.start()
        sender.close()

    async def reported(self) -> Any:
        assert await asyncio.to_thread(self._receiver.poll, LONG_SECONDS)
        return self._receiver.recv()

    async def ended(self) -> int | None:
        assert await self.reported() == "stopped"
        await asyncio.to_thread(self.process.join, LONG_SECONDS)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def megatron_engine(coordinator: str) -> Iterator[MegatronEngine]:
    engine = MegatronEngine(coordinator)
    yield engine
    engine.kill()


@pytest.fixture
async def theirs(coordinator: str) -> AsyncIterator[inference_client.InferenceClient]:
    client = inference_client.InferenceClient(coordinator, deserialize=True)
    client.start()
    yield client
    client.stop()


@pytest.fixture
async def ours(coordinator: str) -> AsyncIterator[InferenceClient]:
    client = InferenceClient(coordinator, deserialize=False)
    await client.start()
    yield client
    client.stop()


# --- Megatron's client, our coordinator and engine --------------------------------------------------------------------


async def test_an_answer_has_the_fields_of_the_release_of_the_client(
    coordinator: str, theirs: inference_client.InferenceClient
) -> None:
    engine = await ScriptedEngine(coordinator).start()
    try:
        theirs.deserialize = False
        params = MegatronSamplingParams(num_tokens_to_generate=4, return_prompt_tokens=True)
        request = DynamicInferenceRequest(
            request_id=0, prompt_tokens=torch.tensor([3, 1]), sampling_params=params, generated_tokens=[5]
        )
        expected = request.serialize()
        answer = await theirs.add_request([3, 1], params)
        assert answer.keys() == expected.keys()
        unset = {key for key, value in expected.items() if value is None} | {"remaining_prompt_tokens"}
        assert {key for key, value in answer.items() if value is None} <= unset
        for key in ("sampling_params", "events", "num_cached_tokens", "precomputed_block_hashes"):
            assert answer[key] == expected[key]
        assert tuple(answer["prompt_tokens"]) == expected["prompt_tokens"]
        params.return_prompt_tokens = False
        assert (await theirs.add_request([3, 1], params))["prompt_tokens"] is None
    finally:
        engine.close()


CHAT = {"messages": [{"role": "user", "content": "7 8"}], "max_tokens": 4, "temperature": 0}
COMPLETION = {"prompt": "7 8", "max_tokens": 4, "temperature": 0}


class NumberTokenizer:
    """A word is the token of its number."""

    bos = None
    eod = eos_id = 0
    vocab_size = 1024
    chat_template = "given"

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return self.tokenize(messages[-1]["content"])


@pytest.mark.parametrize("makes_engine", [None, MegatronEngine], ids=["our engine", "engine of Megatron"])
async def test_the_server_of_megatron_answers_both_routes(coordinator: str, makes_engine: Any) -> None:
    (port,) = free_ports(1)
    engine = await ScriptedEngine(coordinator, log_prob=-0.5).start() if makes_engine is None else None
    process = None if makes_engine is None else makes_engine(coordinator)
    server = asyncio.create_task(
        text_generation_server._run_text_gen_server(coordinator, NumberTokenizer(), 0, port, hostname="127.0.0.1")
    )
    expected = [9, 10, 11, 12] if engine is None else echo_answer([7, 8], 4)
    # The engine of tests/support without a model has no log-probabilities.
    completion_options = {} if engine is None else {"logprobs": 1, "echo": True}
    chat_options = {} if engine is None else {"logprobs": True}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_SECONDS) as http:
            await until_served(http)
            completion = await http.post("/v1/completions", json={**COMPLETION, **completion_options})
            assert completion.status_code == 200, completion.text
            (choice,) = completion.json()["choices"]
            assert (choice["prompt_token_ids"], choice["generation_token_ids"]) == ([7, 8], expected)
            assert choice["finish_reason"] == "length"
            assert completion.json()["usage"]["prompt_tokens"] == 2
            chat = await http.post("/v1/chat/completions", json={**CHAT, **chat_options})
            assert chat.status_code == 200, chat.text
            (choice,) = chat.json()["choices"]
            assert choice["message"]["generation_token_ids"] == expected
            assert choice["finish_reason"] == "length"
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        if engine is not None:
            engine.close()
        if process is not None:
            process.kill()


async def test_the_server_of_megatrons_name_answers_every_model_name(coordinator: str) -> None:
    (port,) = free_ports(1)
    engine = await ScriptedEngine(coordinator).start()
    start = partial(start_text_gen_server, coordinator, NumberTokenizer(), 0, port, hostname="127.0.0.1")
    try:
        await asyncio.to_thread(start)
        with pytest.raises(RuntimeError, match="stop_text_gen_server"):
            start()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_SECONDS) as http:
            answer = await http.post("/v1/completions", json={**COMPLETION, "model": "no such model"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "EMPTY"
        assert answer.json()["usage"] == {**answer.json()["usage"], "prompt_tokens": 2, "completion_tokens": 4}
    finally:
        await asyncio.to_thread(stop_text_gen_server)
        engine.close()


async def until_served(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while True:
            try:
                await http.get("/")
                return
            except httpx.ConnectError:
                await asyncio.sleep(0.05)


async def test_the_client_of_megatron_is_served(coordinator: str, theirs: inference_client.InferenceClient) -> None:
    engine = await ScriptedEngine(coordinator).start()
    try:
        params = MegatronSamplingParams(num_tokens_to_generate=4)
        requests = await asyncio.gather(*(theirs.add_request([number, 1], params) for number in range(8)))
        for number, request in enumerate(requests):
            assert request.generated_tokens == echo_answer([number, 1], 4)
            assert request.succeeded()
        for prompt, cause in (([-1], "token -1"), ("text", "tokenizer")):
            failed = await theirs.add_request(prompt, params)
            assert failed.failed()
            assert cause in failed.events[0].payload.message

        theirs.pause_engines()
        theirs.suspend_engines()
        theirs.resume_engines()
        theirs.set_generation_epoch(3)
        theirs.unpause_engines()
        await engine.until(lambda: engine.acted[Header.UNPAUSE] == 1)
        once = (Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.SET_GENERATION_EPOCH, Header.UNPAUSE)
        assert engine.acted == dict.fromkeys(once, 1)
        assert engine.epoch == 3
        assert (await theirs.add_request([5], params)).generated_tokens == echo_answer([5], 4)
        theirs.pause_engines()
        theirs.stop_engines()
        await engine.until(lambda: engine.acted[Header.STOP] == 1)
    finally:
        engine.close()


def _ask_with_the_client_of_megatron(rank: int, port: int, send: Send) -> None:
    """Text and tokens, of an engine that MegatronLLM has started."""
    begin_single_rank(port)
    fields = {"num_tokens_to_generate": 5, "termination_id": -1, "top_k": 1, "return_log_probs": True}
    tokenizer = load_tokenizer("builtin:smollm2-135m")
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)

    async def ask(address: str, prompts: list[Any]) -> list[DynamicInferenceRequest]:
        client = inference_client.InferenceClient(address, deserialize=True)
        client.start(asyncio.get_running_loop())
        try:
            params = MegatronSamplingParams(**fields, top_n_logprobs=2)
            return [await client.add_request(prompt, params) for prompt in prompts]
        finally:
            client.stop()

    prompt = "1, 2, 3"
    with MegatronLLM(
        model=make_gpt("llama", vocab_size=tokenizer.vocab_size),
        tokenizer=tokenizer,
        inference_config=config,
        use_coordinator=True,
        dtype="float32",
        threads=1,
    ) as llm:
        expected = llm.generate(prompt, SamplingParams(**fields, top_n_logprobs=2))
        tokens = llm.controller.tokenize_prompt(prompt)
        *answers, rejected = asyncio.run(ask(llm._coord_runtime.coord_addr, [prompt, tokens, [1] * 64]))
    assert rejected.failed()
    assert isinstance(rejected.events[0].payload, MaxSequenceLengthOverflowError)
    assert not rejected.events[0].payload.is_transient
    names = ("prompt", "generated_tokens", "generated_text", "generated_log_probs", "generated_top_n_logprobs")
    send([{name: getattr(one, name) for name in names} for one in (expected, *answers)])


def test_the_client_of_megatron_gets_the_text_of_an_answer() -> None:
    expected, of_text, of_tokens = in_processes(1, _ask_with_the_client_of_megatron)
    assert len(expected["generated_tokens"]) == 5
    assert all(len(likeliest) == 2 for likeliest in expected["generated_top_n_logprobs"])
    assert of_text == expected
    assert of_tokens == {**expected, "prompt": None}


# --- our coordinator, Megatron's client and engine --------------------------------------------------------------------


async def test_the_client_of_megatron_is_served_by_its_engine(
    megatron_engine: MegatronEngine, theirs: inference_client.InferenceClient
) -> None:
    params = MegatronSamplingParams(num_tokens_to_generate=4, return_prompt_tokens=True)
    answers = await asyncio.gather(*(theirs.add_request([9, number], params) for number in range(8)))
    for number, answer in enumerate(answers):
        assert answer.succeeded()
        assert answer.generated_tokens == counted_from(number)
        assert answer.prompt_tokens.tolist() == [9, number]
        assert answer.prompt_length == 2
        assert answer.sampling_params.num_tokens_to_generate == 4
        assert [event.type.name for event in answer.events][-1] == "FINISH"
    of_text = await theirs.add_request("7 50", params)
    assert (of_text.prompt, of_text.generated_tokens) == ("7 50", counted_from(50))
    failed = await theirs.add_request(TOO_LONG, params)
    assert failed.failed()
    assert {event.type.name for event in failed.events} >= {"ERROR_NONTRANSIENT", "FAIL"}

    long = theirs.add_request([1000], MegatronSamplingParams(num_tokens_to_generate=400))
    theirs.set_generation_epoch(3)
    assert await megatron_engine.reported() == ("epoch", 3)
    theirs.pause_engines()
    assert await megatron_engine.reported() == "paused"
    theirs.suspend_engines()
    assert await megatron_engine.reported() == "suspended"
    theirs.resume_engines()
    assert await megatron_engine.reported() == "resumed"
    assert await megatron_engine.reported() == "paused"
    assert not long.done()
    theirs.unpause_engines()
    answer = await long
    assert answer.generated_tokens == counted_from(1000, 400)
    assert answer.policy_epoch[-1][1] == 3
    theirs.pause_engines()
    assert await megatron_engine.reported() == "paused"
    theirs.stop_engines()
    assert await megatron_engine.ended() == 0


async def test_an_engine_of_megatron_enters_the_state_of_the_others(
    coordinator: str, megatron_engine: MegatronEngine, ours: InferenceClient
) -> None:
    """It rejects an UNPAUSE that no PAUSE precedes."""
    params = SamplingParams(num_tokens_to_generate=4)
    assert (await ours.add_request([1], params))["generated_tokens"] == counted_from(1)
    assert (await ours.pause_engines()).ok
    await ours.set_generation_epoch(5)
    megatron_engine.kill()
    successor = MegatronEngine(coordinator)
    try:
        assert {await successor.reported(), await successor.reported()} == {"paused", ("epoch", 5)}
        assert (await ours.unpause_engines()).ok
        assert (await ours.add_request([1], params))["policy_epoch"] == [[0, 5]]
    finally:
        successor.kill()


# --- our client and coordinator, Megatron's engine --------------------------------------------------------------------


async def test_the_engine_of_megatron_serves_our_client(megatron_engine: MegatronEngine, ours: InferenceClient) -> None:
    params = SamplingParams(num_tokens_to_generate=4)
    answers = await asyncio.gather(*(ours.add_request([number], params) for number in range(8)))
    for number, answer in enumerate(answers):
        assert answer["generated_tokens"] == counted_from(number)
        assert answer["status"] == "COMPLETED"
    assert (await ours.add_request("7 40", params))["generated_tokens"] == counted_from(40)
    stream = ours.add_request_streaming([100], params)
    assert [item["final"]["generated_tokens"] async for item in stream] == [counted_from(100)]
    failed = await ours.add_request(TOO_LONG, params)
    assert (failed["status"], failed["error"]["type"]) == ("FAILED", "INVALID_REQUEST")

    aborted = ours.add_request([1], SamplingParams(num_tokens_to_generate=100))
    await ours.status()  # it has been submitted
    aborted.cancel()
    long = ours.add_request([1000], SamplingParams(num_tokens_to_generate=400))
    await ours.set_generation_epoch(3)
    assert await megatron_engine.reported() == ("epoch", 3)
    for verb, states in (("pause", ["paused"]), ("suspend", ["suspended"]), ("resume", ["resumed", "paused"])):
        assert (await getattr(ours, f"{verb}_engines")()).ok
        assert [await megatron_engine.reported() for _ in states] == states
    assert not long.done()
    assert (await ours.unpause_engines()).ok
    assert (await long)["generated_tokens"] == counted_from(1000, 400)
    assert (await long)["policy_epoch"][-1][1] == 3
    await ours.pause_engines()
    assert await megatron_engine.reported() == "paused"
    await ours.stop_engines()
    assert await megatron_engine.ended() == 0


# --- our client, Megatron's coordinator and engine --------------------------------------------------------------------


def _be_coordinator(address: Connection, has_engine: Event) -> None:
    from megatron.core.inference import data_parallel_inference_coordinator as module

    tokenizer = SimpleNamespace(detokenize=lambda tokens: " ".join(map(str, tokens)), eod=-1)
    coordinator = module.DataParallelInferenceCoordinator(address, 1, tokenizer, 64, hostname="127.0.0.1")
    has_engine.set()
    coordinator.start()


@pytest.fixture
def megatron_coordinator() -> Iterator[tuple[str, Event]]:
    """Its address, and whether its engine is registered: it takes the first peer for it."""
    receiver, sender = _FORK.Pipe(duplex=False)
    has_engine = _FORK.Event()
    process = _FORK.Process(target=_be_coordinator, args=(sender, has_engine), daemon=True)
    process.start()
    sender.close()
    assert receiver.poll(LONG_SECONDS)
    yield receiver.recv(), has_engine
    process.kill()
    process.join()


async def test_requests_fail_when_the_coordinator_of_megatron_ends(
    megatron_coordinator: tuple[str, Event],
) -> None:
    address, has_engine = megatron_coordinator
    engine = MegatronEngine(address)
    assert await asyncio.to_thread(has_engine.wait, LONG_SECONDS)
    client = InferenceClient(address)
    try:
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        waiting = client.add_request([1], SamplingParams(num_tokens_to_generate=400))
        client.shutdown_coordinator()
        with pytest.raises(UnavailableError, match="the coordinator of Megatron-Core has ended"):
            await asyncio.wait_for(waiting, LONG_SECONDS)
        assert not client.connected
    finally:
        client.stop()
        engine.kill()


async def test_our_client_is_served_by_the_coordinator_of_megatron(megatron_coordinator: tuple[str, Event]) -> None:
    address, has_engine = megatron_coordinator
    engine = MegatronEngine(address)
    assert await asyncio.to_thread(has_engine.wait, LONG_SECONDS)
    client = InferenceClient(inference_coordinator_address=address)
    records = InferenceClient(address)
    try:
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        await records.start(connect_timeout_seconds=LONG_SECONDS)
        params = SamplingParams(num_tokens_to_generate=3)
        for prompt in ([1, 6], "1 6"):
            reply = await client.add_request(prompt, params)
            assert (reply["generated_tokens"], reply["generated_text"], reply["status"]) == (
                [7, 8, 9],
                "7 8 9",
                "COMPLETED",
            )
        assert (await client.add_request(TOO_LONG, params))["status"] == "FAILED"
        # Megatron's engine answers with parameters that it has calculated: fewer than no tokens.
        failed = await records.add_request(TOO_LONG, SamplingParams())
        assert failed.merge().failed()
        assert [event.type.name for event in failed[0].events][-1] == "FAIL"
        with pytest.raises(ControlRejectedError) as status:
            await client.status()
        assert status.value.code == ErrorCode.UNSUPPORTED
        ignored = await records.suspend_engines()
        assert (ignored.ok, ignored.state) == (True, EngineState.RUNNING)
        client.add_request([1], SamplingParams(num_tokens_to_generate=100)).cancel()
        await client.set_generation_epoch(3)
        assert await engine.reported() == ("epoch", 3)
        for verb in VERBS:
            await getattr(client, f"{verb}_engines")()
            if verb == "pause":
                assert await engine.reported() == "paused"
            elif verb == "unpause":
                assert (await client.add_request([6], params))["policy_epoch"] == [[0, 3]]
            elif verb == "suspend":
                assert await engine.reported() == "suspended"
            elif verb == "resume":
                assert [await engine.reported() for _ in range(2)] == ["resumed", "paused"]
        with pytest.raises(ControlRejectedError, match="a coordinator of Megatron-Core has no such message"):
            await client.update_weights("elsewhere", 1)
        assert await engine.ended() == 0
    finally:
        client.stop()
        records.stop()
        engine.kill()
