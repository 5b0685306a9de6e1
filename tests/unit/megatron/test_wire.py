"""The wire protocol with classes of Megatron-Core 0.16.1: its client, its coordinator, its request class.

That release numbers its messages otherwise than the documented protocol, and its replies are records. The tests give
its modules the documented numbers, and its client the documented reply; everything else is Megatron's own code.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import pytest
import zmq
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from gpt_models import make_gpt
from gpt_program import Send, begin_single_rank, in_processes
from megatron.core.inference import headers, inference_client
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams
from megatron_engine import be_engine
from scripted_engine import ScriptedEngine

from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.spawn import spawn_coordinator
from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import pack, unpack
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.transport.control_calls import ControlRejectedError

_UNDOCUMENTED = {"PAUSE_ACK": 90, "STOP_ACK": 91}
DOCUMENTED = Enum(  # type: ignore[misc]
    "Headers",
    {
        name: int(Header[name]) if name in Header.__members__ else _UNDOCUMENTED[name]
        for name in headers.Headers.__members__
    },
)


# --- Megatron's client, our coordinator and engine --------------------------------------------------------------------


@pytest.fixture
def coordinator() -> Iterator[str]:
    timing = Timing(recovery=0.0)
    process = spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True, timing=timing))
    yield process.address
    process.stop()


async def test_the_client_of_megatron_is_served(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_client, "Headers", DOCUMENTED)
    monkeypatch.setattr(inference_client, "DynamicInferenceRequestRecord", DynamicInferenceRequest)
    engine = await ScriptedEngine(coordinator).start()
    client = inference_client.InferenceClient(coordinator)
    await client.start()
    try:
        params = MegatronSamplingParams(num_tokens_to_generate=4)
        requests = await asyncio.gather(*(client.add_request([number, 1], params) for number in range(8)))
        for number, request in enumerate(requests):
            assert request.generated_tokens == echo_answer([number, 1], 4)
            assert request.succeeded()
        failed = await client.add_request([-1], params)
        assert failed.failed()
        assert "token -1" in failed.events[0].payload.message

        client._send_signal_to_engines(DOCUMENTED.PAUSE)
        client._send_signal_to_engines(DOCUMENTED.SUSPEND)
        client.resume_engines()
        signals = dict.fromkeys((Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UNPAUSE), 1)
        await engine.until(lambda: engine.acted == signals)
        assert (await client.add_request([5], params)).generated_tokens == echo_answer([5], 4)
        client._send_signal_to_engines(DOCUMENTED.PAUSE)
        client.unpause_engines()
        assert (await client.add_request([6], params)).generated_tokens == echo_answer([6], 4)
        client._send_signal_to_engines(DOCUMENTED.PAUSE)
        client._send_signal_to_engines(DOCUMENTED.STOP)
        await engine.until(lambda: engine.acted[Header.STOP] == 1)
    finally:
        client.stop()
        engine.close()


def _ask_with_the_client_of_megatron(rank: int, port: int, send: Send) -> None:
    """Text and tokens, of an engine that MegatronLLM has started."""
    begin_single_rank(port)
    module: Any = inference_client
    module.Headers, module.DynamicInferenceRequestRecord = DOCUMENTED, DynamicInferenceRequest
    fields = {"num_tokens_to_generate": 5, "termination_id": -1, "top_k": 1, "return_log_probs": True}
    tokenizer = load_tokenizer("builtin:smollm2-135m")
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)

    async def ask(address: str, prompts: list[Any]) -> list[DynamicInferenceRequest]:
        client = inference_client.InferenceClient(address)
        await client.start()
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
        answers = asyncio.run(ask(llm._coord_runtime.coord_addr, [prompt, llm.controller.tokenize_prompt(prompt)]))
    names = ("prompt", "generated_tokens", "generated_text", "generated_log_probs", "generated_top_n_logprobs")
    send([{name: getattr(one, name) for name in names} for one in (expected, *answers)])


def test_the_client_of_megatron_gets_the_text_of_an_answer() -> None:
    expected, of_text, of_tokens = in_processes(1, _ask_with_the_client_of_megatron)
    assert len(expected["generated_tokens"]) == 5
    assert all(len(likeliest) == 2 for likeliest in expected["generated_top_n_logprobs"])
    assert of_text == expected
    assert of_tokens == {**expected, "prompt": None}


# --- our client and coordinator, Megatron's engine --------------------------------------------------------------------


@pytest.fixture
def megatron_engine(coordinator: str) -> Iterator[tuple[Any, Connection]]:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = fork.Process(target=be_engine, args=(coordinator, port, DOCUMENTED, sender), daemon=True)
    process.start()
    sender.close()
    yield process, receiver
    process.kill()
    process.join()


async def test_the_engine_of_megatron_serves_our_coordinator(
    coordinator: str, megatron_engine: tuple[Any, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_client, "Headers", DOCUMENTED)
    monkeypatch.setattr(inference_client, "DynamicInferenceRequestRecord", DynamicInferenceRequest)
    process, report = megatron_engine
    client = InferenceClient(coordinator, deserialize=False)
    await client.start()

    async def reported() -> Any:
        assert await asyncio.to_thread(report.poll, LONG_SECONDS)
        return report.recv()

    try:
        params = SamplingParams(num_tokens_to_generate=4)
        answers = await asyncio.gather(*(client.add_request([number], params) for number in range(8)))
        for number, answer in enumerate(answers):
            assert answer["generated_tokens"] == [number + 1, number + 2, number + 3, number + 4]
            assert answer["status"] == "COMPLETED"
        assert (await client.add_request("7 40", params))["generated_tokens"] == [41, 42, 43, 44]
        theirs = inference_client.InferenceClient(coordinator)
        await theirs.start()
        of_text = await theirs.add_request("7 50", MegatronSamplingParams(num_tokens_to_generate=4))
        assert of_text.generated_tokens == [51, 52, 53, 54]
        theirs.stop()
        stream = client.add_request_streaming([100], params)
        assert [item["final"]["generated_tokens"] async for item in stream] == [[101, 102, 103, 104]]
        failing = client.add_request([1], SamplingParams(num_tokens_to_generate=10_000))
        await client.add_request([1], params)  # the engine reports a failure with its next step
        assert (await failing)["status"] == "FAILED"
        long = client.add_request([1000], SamplingParams(num_tokens_to_generate=400))
        assert (await client.pause_engines()).ok
        assert await reported() == "paused"
        assert (await client.suspend_engines()).ok
        assert await reported() == "suspended"
        assert (await client.resume_engines()).ok
        assert await reported() == "resumed"
        assert not long.done()
        assert (await client.unpause_engines()).ok
        assert (await long)["generated_tokens"] == list(range(1001, 1401))

        await client.set_generation_epoch(3)
        assert await reported() == [Header.SET_GENERATION_EPOCH, 3]
        aborted = client.add_request([1], SamplingParams(num_tokens_to_generate=400))
        await client.status()  # it has been submitted
        aborted.cancel()
        assert (await reported())[0] == Header.ABORT_REQUEST
        await client.pause_engines()
        assert await reported() == "paused"
        await client.stop_engines()
        assert await reported() == "stopped"
        await asyncio.to_thread(process.join, LONG_SECONDS)
        assert process.exitcode == 0
    finally:
        client.stop()


# --- our client, Megatron's coordinator, an engine of its protocol ----------------------------------------------------


class Tokenizer:
    def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def _be_coordinator(address: Connection, has_engine: Event) -> None:
    from megatron.core.inference import data_parallel_inference_coordinator as module

    module.Headers = DOCUMENTED
    module.socket.gethostname = lambda: "127.0.0.1"
    coordinator = module.DataParallelInferenceCoordinator(address, 1, Tokenizer())
    has_engine.set()
    coordinator.start()


class Engine:
    """Answers as an engine of Megatron-Core 0.16.1 does."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, b"mp-coord-0")
        dealer.connect(address)
        self.heard: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.socket = EventSocket(dealer, lambda frames: self.heard.put_nowait(unpack(frames[0])))
        self.socket.send([b""])

    async def hear(self) -> list[Any]:
        return await asyncio.wait_for(self.heard.get(), LONG_SECONDS)

    def answer(self, number: int, prompt: Any, tokens: list[int]) -> None:
        request = {"request_id": number, "prompt": prompt, "status": "COMPLETED", "generated_tokens": tokens}
        self.socket.send([pack([int(Header.ENGINE_REPLY), [{"requests": [request], "latency": None}]])])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def megatron_coordinator() -> Iterator[tuple[str, Event]]:
    """Its address, and whether its engine is registered: it takes the first peer for it."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    has_engine = fork.Event()
    process = fork.Process(target=_be_coordinator, args=(sender, has_engine), daemon=True)
    process.start()
    sender.close()
    assert receiver.poll(LONG_SECONDS)
    yield receiver.recv(), has_engine
    process.kill()
    process.join()


async def test_our_client_is_served_by_the_coordinator_of_megatron(megatron_coordinator: tuple[str, Event]) -> None:
    address, has_engine = megatron_coordinator
    engine = Engine(address)
    assert await asyncio.to_thread(has_engine.wait, LONG_SECONDS)
    client = InferenceClient(address, deserialize=False)
    try:
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        params = SamplingParams(num_tokens_to_generate=3)
        for prompt in ([1, 2], "some text"):
            future = client.add_request(prompt, params)
            header, number, forwarded, sampling = await engine.hear()
            assert (header, forwarded, sampling["num_tokens_to_generate"]) == (Header.SUBMIT_REQUEST, prompt, 3)
            engine.answer(number, str(prompt), [7, 8, 9])
            reply = await future
            assert (reply["generated_tokens"], reply["generated_text"], reply["status"]) == (
                [7, 8, 9],
                "7 8 9",
                "COMPLETED",
            )
        for verb in ("pause", "suspend", "resume", "unpause", "pause", "stop"):
            await getattr(client, f"{verb}_engines")()
            assert (await engine.hear())[0] == Header[verb.upper()]
        with pytest.raises(ControlRejectedError, match="a coordinator of Megatron-Core has no such message"):
            await client.update_weights("elsewhere", 1)
    finally:
        client.stop()
        engine.close()
