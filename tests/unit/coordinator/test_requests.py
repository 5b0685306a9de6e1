"""What becomes of a request, from SUBMIT to its final answer."""

import asyncio

import pytest
from echo_executor import echo_answer

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.client.rejection import RequestRejectedError
from megatron_runtime.coordinator.environment import MAX_TEXT_CHARACTERS
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequestRecord, Status
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Submit, decode, tokens_from_bytes, tokens_to_bytes
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

PROMPT = [1, 2, 3]


async def test_a_request_comes_back_with_the_engines_tokens(stage, params) -> None:
    _, _, client = await stage.all()
    reply = await client.add_request(PROMPT, params(8))
    assert reply["generated_tokens"] == echo_answer(PROMPT, 8)
    assert (reply["status"], reply["finish_reason"], reply["prompt_length"]) == ("COMPLETED", "length", 3)
    assert client.completion_futures == {}


async def test_a_stream_gives_every_token_once_and_then_the_final_answer(stage, params, collect) -> None:
    _, _, client = await stage.all()
    tokens, final = await collect(client.add_request_streaming(PROMPT, params(20)))
    assert tokens == final["generated_tokens"] == echo_answer(PROMPT, 20)


async def test_a_request_that_comes_again_after_its_answer_is_not_run_again(stage, params) -> None:
    """Its client sent it again before it had read the answer, which was on its way to the same connection."""
    coordinator, engine, client = await stage.all()
    sent: list[list[bytes]] = []
    send = client.native._link.send
    client.native._link.send = lambda frames: (sent.append(frames), send(frames))
    await client.add_request(PROMPT, params(3))
    (submit,) = (frames for frames in sent if isinstance(decode(frames), Submit))
    send(submit)
    await client.add_request([4], params(3))
    assert (len(engine.dispatches), coordinator.core.counters.completed) == (2, 2)


async def test_by_default_a_future_gives_a_record_and_on_demand_its_merged_request(stage, params) -> None:
    stage.coordinator()
    await stage.engine()
    client = await stage.client(deserialize=None)
    record = await client.add_request(PROMPT, params(4))
    assert isinstance(record, DynamicInferenceRequestRecord)
    assert isinstance(record.latency, float)
    client = await stage.client(deserialize=True)
    request = await client.add_request(PROMPT, params(4, return_prompt_tokens=True))
    assert request.generated_tokens == echo_answer(PROMPT, 4)
    assert request.status is Status.COMPLETED
    assert list(request.prompt_tokens) == PROMPT


async def test_the_seed_is_the_users_or_minted_once(stage, params) -> None:
    _, engine, client = await stage.all()
    await client.add_request(PROMPT, params(1, seed=42))
    await client.add_request(PROMPT, params(1))
    await client.add_request(PROMPT, params(1))
    given, first, second = (dispatch.meta.seed for dispatch in engine.dispatches)
    assert given == 42
    assert first != second
    assert first.bit_length() > 32 or second.bit_length() > 32


async def test_an_engine_gets_no_more_than_it_runs_and_the_rest_keeps_its_order(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    futures = [client.add_request([n], params(1)) for n in range(1, 9)]
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 8)
    engine = await stage.engine(step_seconds=None, max_requests=3)
    await engine.until(lambda: len(engine.jobs) == 3)
    assert coordinator.core.dispatcher.queue.length == 5
    while not all(future.done() for future in futures):
        engine.step()
        await asyncio.sleep(0.01)
    assert [dispatch.prompt for dispatch in engine.dispatches] == [tokens_to_bytes([n]) for n in range(1, 9)]


@pytest.mark.parametrize("where", ["queued", "in flight"])
@pytest.mark.parametrize("how", ["cancelled future", "closed stream", "abort_request"])
async def test_an_abort_reaches_the_engine_that_has_the_request(stage, params, where, how) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(step_seconds=None) if where == "in flight" else None
    client = await stage.client()
    if how == "closed stream":
        stream = client.add_request_streaming(PROMPT, params(4))
    else:
        future = client.add_request(PROMPT, params(4))
    await stage.until(lambda: len(coordinator.core.dispatcher.journal) == 1)
    if engine is not None:
        await engine.until(lambda: engine.jobs)
    if how == "closed stream":
        await stream.aclose()
        assert [item async for item in stream] == []
    elif how == "abort_request":
        client.abort_request(0)
        assert future.cancelled()
    else:
        future.cancel()
    await stage.until(lambda: len(coordinator.core.dispatcher.journal) == 0)
    if engine is not None:
        await engine.until(lambda: engine.aborted)
    assert client.completion_futures == client.streams == {}
    assert coordinator.core.dispatcher.queue.length == 0
    assert coordinator.core.counters.aborted == 1


async def test_a_full_queue_rejects_requests_with_a_retry_time(stage, params) -> None:
    stage.coordinator(max_queued=2)
    client = await stage.client()
    waiting = [client.add_request(PROMPT, params(1)) for _ in range(2)]
    with pytest.raises(RequestRejectedError, match="2 requests wait") as rejected:
        await client.add_request(PROMPT, params(1))
    assert (rejected.value.code, rejected.value.retry_after_seconds) == (429, 1.0)
    await stage.engine()
    await asyncio.gather(*waiting)


async def test_a_full_journal_rejects_requests_until_one_ends(stage, params) -> None:
    stage.coordinator(journal_bytes=20_000)
    client = await stage.client()
    large = client.add_request(list(range(3000)), params(1))
    with pytest.raises(RequestRejectedError, match="of 20000") as rejected:
        await client.add_request(list(range(3000)), params(1))
    assert rejected.value.code == 429
    await stage.engine()
    await large
    await client.add_request(list(range(3000)), params(1))


async def test_a_prompt_that_is_too_large_is_rejected_before_it_is_sent(stage, params) -> None:
    coordinator = stage.coordinator()
    client = await stage.client()
    with pytest.raises(RequestRejectedError) as rejected:
        await client.add_request(list(range(3_000_000)), params(1))
    assert rejected.value.code == 413
    stream = client.add_request_streaming(list(range(3_000_000)), params(1))
    with pytest.raises(RequestRejectedError):
        await anext(stream)
    assert coordinator.core.counters.rejected.total() == 0


async def test_a_request_that_an_engine_rejects_gets_a_failed_reply(stage) -> None:
    _, _, client = await stage.all()
    reply = await client.add_request(PROMPT, SamplingParams.deserialize({"num_tokens_to_generate": 1}))
    assert reply["status"] == "COMPLETED"
    broken = SamplingParams()
    del broken.__dict__["num_tokens_to_generate"]
    reply = await client.add_request(PROMPT, broken)
    assert reply["status"] == "FAILED"
    assert reply["error"]["code"] == 400


async def test_requests_added_before_the_coordinator_is_there_are_submitted_when_it_is(stage, params, collect) -> None:
    (port,) = free_ports(1)
    client = InferenceClient(port, deserialize=False)
    stage.closers.append(client.stop)
    await client.start(connect_timeout_seconds=0)
    future = client.add_request(PROMPT, params(3))
    stream = client.add_request_streaming(PROMPT, params(3))
    assert not client.connected
    stage.coordinator(single_port=True, client_port=port)
    await stage.engine()
    assert (await future)["generated_tokens"] == (await collect(stream))[0] == echo_answer(PROMPT, 3)
    assert client.connected


async def test_a_coordinator_that_is_not_there_is_named(unused_tcp_port) -> None:
    client = InferenceClient(f"localhost:{unused_tcp_port}")
    with pytest.raises(CoordinatorUnreachableError, match=f"localhost:{unused_tcp_port}"):
        await client.start(connect_timeout_seconds=0.2)


async def test_a_rejected_handshake_fails_at_once(stage) -> None:
    stage.coordinator()
    client = InferenceClient(stage.address(Role.ENGINE))
    with pytest.raises(AssertionError, match="HELLO of a CLIENT on the ENGINE port"):
        await client.start()


async def test_stop_ends_everything_that_waits(stage, params) -> None:
    stage.coordinator()
    client = await stage.client()
    future = client.add_request(PROMPT, params(1))
    stream = client.add_request_streaming(PROMPT, params(1))
    client.stop()
    client.stop()
    assert future.cancelled()
    assert [item async for item in stream] == []
    assert client.completion_futures == client.streams == {}


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:port"])
def test_an_invalid_address_is_rejected(address) -> None:
    with pytest.raises(ValueError, match="host:port"):
        InferenceClient(address)


async def test_text_needs_a_tokenizer_at_the_coordinator_or_the_engine(stage, params) -> None:
    coordinator, engine, client = await stage.all()
    with pytest.raises(
        RequestRejectedError,
        match=r"engine .* cannot tokenize the prompt, and this coordinator has no tokenizer: send token ids",
    ):
        await client.add_request("hello", params(1))

    class Letters:
        def tokenize(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    coordinator.core.prompts.tokenizer = Letters()
    await client.add_request("hi", params(1))
    assert tokens_from_bytes(engine.dispatches[-1].prompt).tolist() == [104, 105]


async def test_text_that_is_too_long_or_breaks_the_tokenizer_is_rejected(stage, params) -> None:
    class PanicError(BaseException):
        """As the tokenizers library raises it."""

    class Fragile:
        def tokenize(self, text: str) -> list[int]:
            if "!" in text:
                raise PanicError("index out of bounds")
            return [ord(letter) for letter in text]

    coordinator, _, client = await stage.all()
    coordinator.core.prompts.tokenizer = Fragile()
    with pytest.raises(RequestRejectedError, match="524289 characters: at most 524288"):
        await client.add_request("x" * (MAX_TEXT_CHARACTERS + 1), params(1))
    with pytest.raises(RequestRejectedError, match="cannot be tokenized: index out of bounds"):
        await client.add_request("hi!", params(1))
    await client.add_request("hi", params(1))
