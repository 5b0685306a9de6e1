"""The client of the native protocol: loops, threads, deadlines. Coordinators and engines are tested elsewhere."""

import asyncio
import time

import pytest
from echo_executor import echo_answer
from eventually import LONG_SECONDS

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.client.rejection import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelChangedError,
    QueueFullError,
    RequestFailedError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
    rejection,
)
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    Error,
    Final,
    Partial,
    PartialEntry,
    decode,
    pack,
    tokens_to_bytes,
)
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlRejectedError

PROMPT = [1, 2, 3]


@pytest.fixture
async def client(pool):
    client = CoordinatorClient(pool.address)
    await client.start()
    yield client
    client.stop()


async def forgotten(client: CoordinatorClient) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while client._open:  # noqa: ASYNC110 - a table has no event
            await asyncio.sleep(0.01)


def on_loop(loop, coroutine):
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


class TestAnyLoop:
    async def test_requests_streams_and_verbs_from_another_thread(
        self, client, pool, params, collect, elsewhere
    ) -> None:
        async def use() -> None:
            future = client.add_request(PROMPT, params(4))
            assert future.get_loop() is elsewhere
            assert (await future)["generated_tokens"] == echo_answer(PROMPT, 4)
            tokens, final = await collect(client.add_request_streaming(PROMPT, params(20)))
            assert tokens == final["generated_tokens"] == echo_answer(PROMPT, 20)
            assert (await client.control(Control(kind=Header.PAUSE))).ok
            with pytest.raises(ControlRejectedError, match="PAUSED"):
                await client.control(Control(kind=Header.RESUME))
            client.control(Control(kind=Header.UNPAUSE))  # may be ignored
            assert (await client.status()).engines

        await on_loop(elsewhere, use())
        assert client.requests == {}

    async def test_two_loops_at_once_never_share_an_id(self, client, params, elsewhere) -> None:
        async def many() -> list[dict]:
            return await asyncio.gather(*(client.add_request(PROMPT, params(2)) for _ in range(200)))

        here, there = await asyncio.gather(many(), on_loop(elsewhere, many()))
        assert len({reply["request_id"] for reply in here + there}) == 400
        assert client.next_request_id == 400

    async def test_cancelling_and_closing_from_another_loop_aborts(self, client, pool, params, elsewhere) -> None:
        pool.engine.step_seconds = None

        async def leave() -> None:
            future = client.add_request(PROMPT, params(4))
            stream = client.add_request_streaming(PROMPT, params(4))
            future.cancel()
            await stream.aclose()
            assert [item async for item in stream] == []

        await on_loop(elsewhere, leave())
        await forgotten(client)

    async def test_a_reader_with_a_closed_loop_leaves_no_request(self, client, pool, params) -> None:
        pool.engine.step_seconds = None

        async def begin() -> None:
            client.add_request_streaming(PROMPT, params(4))
            client.add_request(PROMPT, params(4))
            await client.status()

        await asyncio.to_thread(asyncio.run, begin())
        await pool.engine.until(lambda: len(pool.engine.jobs) == 2)
        for _ in range(4):
            pool.engine.step()
        await forgotten(client)
        assert client.requests == {}


class TestRequests:
    async def test_ids_count_from_zero_and_finished_requests_leave_every_table(self, client, params) -> None:
        futures = [client.add_request(PROMPT, params(1)) for _ in range(3)]
        assert sorted(client.requests) == [0, 1, 2]
        assert all(type(future).__module__ == "_asyncio" for future in futures)
        replies = await asyncio.gather(*futures)
        assert [reply["request_id"] for reply in replies] == [0, 1, 2]
        assert all(reply["latency"] > 0 for reply in replies)
        assert client.requests == client._open == {}

    async def test_latency_counts_from_add_request(self, client, pool, params) -> None:
        pool.engine.step_seconds = None
        begun = time.perf_counter()
        future = client.add_request(PROMPT, params(1))
        begun, called = time.perf_counter(), time.perf_counter() - begun
        await pool.engine.until(lambda: pool.engine.jobs)
        waited = time.perf_counter() - begun
        pool.engine.step()
        reply = await future
        assert waited <= reply["latency"] <= called + time.perf_counter() - begun

    async def test_messages_for_unknown_requests_are_dropped(self, client, params) -> None:
        uid = bytes(16)
        partial = Partial(1, [PartialEntry(uid, 1, 0, 1)], tokens_to_bytes([5]))
        final = Final(1, uid, tokens_to_bytes([5]), pack({"status": "COMPLETED"}))
        error = Error(code=ErrorCode.DEADLINE, message="not yours", uid=uid)
        for message in (partial, final, error):
            client._link._receive(message.to_frames())
        assert client.requests == client._open == {}
        assert (await client.add_request(PROMPT, params(1)))["generated_tokens"] == echo_answer(PROMPT, 1)

    @pytest.mark.parametrize("form", ["port", "host:port", "url"])
    async def test_a_port_an_address_or_a_url_names_the_coordinator(self, pool, params, form) -> None:
        address = pool.address.removeprefix("tcp://")
        where = {"port": int(address.rpartition(":")[2]), "host:port": address, "url": pool.address}[form]
        client = CoordinatorClient(where)
        await client.start()
        assert (await client.add_request(PROMPT, params(1)))["generated_tokens"] == echo_answer(PROMPT, 1)
        client.stop()

    async def test_add_request_needs_a_running_event_loop(self, client, params) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            await asyncio.to_thread(client.add_request, PROMPT, params(1))
        assert client.next_request_id == 0

    async def test_a_stream_has_one_final_and_then_the_end(self, client, params) -> None:
        items = [item async for item in client.add_request_streaming(PROMPT, params(6))]
        assert [next(iter(item)) for item in items] == ["partial"] * (len(items) - 1) + ["final"]

    async def test_closing_before_start_forgets_the_request(self, pool, params) -> None:
        client = CoordinatorClient(pool.address)
        stream = client.add_request_streaming(PROMPT, params(2))
        assert client.requests[0].stream is stream
        await stream.aclose()
        assert client.requests == client._open == {}
        client.stop()

    async def test_requests_fail_after_their_deadline_without_a_coordinator(
        self, params, monkeypatch, unused_tcp_port
    ) -> None:
        monkeypatch.setattr("megatron_runtime.client.coordinator_client.DEADLINE_MARGIN_SECONDS", 0.05)
        client = CoordinatorClient(unused_tcp_port)
        await client.start(connect_timeout_seconds=0)
        with pytest.raises(TimeoutError, match=str(unused_tcp_port)) as ended:
            await client.add_request(PROMPT, params(1), deadline_seconds=0.05)
        assert isinstance(ended.value, DeadlineExceededError)
        assert client._open == {}
        client.stop()

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (400, InvalidRequestError),
            (409, ModelChangedError),
            (413, RequestTooLargeError),
            (429, QueueFullError),
            (503, UnavailableError),
            (504, DeadlineExceededError),
            (500, RequestFailedError),
            (418, RequestRejectedError),
        ],
    )
    def test_each_error_code_has_its_exception_class(self, code, kind) -> None:
        error = rejection(code, "no", 2.0)
        assert type(error) is kind
        assert (error.code, error.message, error.retry_after_seconds) == (code, "no", 2.0)


async def test_a_pinned_request_runs_on_the_named_engine_or_fails(client, pool, params) -> None:
    future = client.add_request(PROMPT, params(2), engine="engine-0")
    stream = client.add_request_streaming(PROMPT, params(2), engine="engine-1")
    assert (await future)["generated_tokens"] == echo_answer(PROMPT, 2)
    with pytest.raises(RequestRejectedError, match="'engine-1' does not serve") as rejected:
        await anext(aiter(stream))
    assert rejected.value.code == ErrorCode.ENGINES_MISSING


async def test_an_abort_names_the_request(client, pool, params) -> None:
    pool.engine.step_seconds = None
    sent: list[list[bytes]] = []
    stream = client.add_request_streaming(PROMPT, params(4))
    uid = next(iter(client._open))
    send = client._link.send
    client._link.send = lambda frames: (sent.append(frames), send(frames))
    await stream.aclose()
    assert [decode(frames) for frames in sent] == [Abort(uid)]
    assert client.requests == {}


async def test_one_params_object_may_be_shared_and_changed_later(client, params) -> None:
    shared = params(3)
    futures = [client.add_request([number], shared) for number in range(50)]
    shared.num_tokens_to_generate = 1
    replies = await asyncio.gather(*futures)
    assert all(len(reply["generated_tokens"]) == 3 for reply in replies)
    assert isinstance(shared, SamplingParams)


@pytest.mark.slow
async def test_a_blocked_event_loop_is_not_mistaken_for_a_silent_coordinator(pool, client, monkeypatch) -> None:
    monkeypatch.setattr("megatron_runtime.transport.peer_link.SILENCE_SECONDS", 1.0)
    link = client._link
    connection = link._incarnation
    for _ in range(2):
        time.sleep(1.5)  # noqa: ASYNC251 - a library that holds the interpreter, as a compiler does
        received = link._last_received
        async with asyncio.timeout(LONG_SECONDS):
            while link._last_received == received:  # noqa: ASYNC110 - a moment has no event
                await asyncio.sleep(0.01)
    assert link._incarnation == connection
    # A coordinator that is silent while this loop runs is still detected.
    monkeypatch.setattr(link._socket, "on_message", lambda _frames: None)
    async with asyncio.timeout(LONG_SECONDS):
        while link._incarnation == connection:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
