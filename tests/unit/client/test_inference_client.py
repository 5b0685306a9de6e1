"""The client itself: loops, threads, handshakes, deadlines, verbs. Coordinators and engines are tested elsewhere."""

import asyncio
import gc
import threading
import time

import pytest
import zmq
import zmq.asyncio
from eventually import LONG_SECONDS, eventually

from megatron_runtime.backends.echo.echo_executor import echo_answer
from megatron_runtime.client.rejection import rejection
from megatron_runtime.megatron_core.inference_client import (
    AdapterNotFoundError,
    ControlRejectedError,
    CoordinatorUnreachableError,
    DeadlineExceededError,
    EngineFailedError,
    HandshakeRejectedError,
    InferenceClient,
    InvalidRequestError,
    ModelChangedError,
    QueueFullError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
    UnsupportedByBackendError,
)
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import Abort, Error, Final, Partial, PartialEntry, decode, pack, tokens_to_bytes
from megatron_runtime.requests.sampling_params import SamplingParams

PROMPT = [1, 2, 3]


@pytest.fixture
async def client(pool):
    client = InferenceClient(pool.address, deserialize=False)
    await client.start()
    yield client
    client.stop()


@pytest.fixture
def elsewhere():
    """Another thread with an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def forgotten(client: InferenceClient) -> None:
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
            assert (await client.pause_engines()).ok
            with pytest.raises(ControlRejectedError, match="PAUSED"):
                await client.resume_engines()
            client.unpause_engines()  # may be ignored
            assert (await client.status()).engines

        await on_loop(elsewhere, use())
        assert client.completion_futures == client.streams == {}

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

    async def test_started_and_stopped_from_outside_its_loop(self, pool, params, elsewhere) -> None:
        client = InferenceClient(pool.address, deserialize=False)
        await client.start(loop=elsewhere)
        pool.engine.step_seconds = None
        future = client.add_request(PROMPT, params(4))
        await client.status()  # the request has been submitted
        await asyncio.to_thread(client.stop)
        with pytest.raises(asyncio.CancelledError):
            await future

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
        assert client.completion_futures == client.streams == {}


class TestRequests:
    async def test_ids_count_from_zero_and_finished_requests_leave_every_table(self, client, params) -> None:
        futures = [client.add_request(PROMPT, params(1)) for _ in range(3)]
        assert sorted(client.completion_futures) == [0, 1, 2]
        assert all(type(future).__module__ == "_asyncio" for future in futures)
        replies = await asyncio.gather(*futures)
        assert [reply["request_id"] for reply in replies] == [0, 1, 2]
        assert all(reply["latency"] > 0 for reply in replies)
        assert client.completion_futures == client._open == client._by_id == {}

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
            client._link.receive(message.to_frames())
        assert client.completion_futures == client.streams == client._open == {}
        assert (await client.add_request(PROMPT, params(1)))["generated_tokens"] == echo_answer(PROMPT, 1)

    @pytest.mark.parametrize("form", ["port", "host:port", "url"])
    async def test_a_port_an_address_or_a_url_names_the_coordinator(self, pool, params, form) -> None:
        address = pool.address.removeprefix("tcp://")
        where = {"port": int(address.rpartition(":")[2]), "host:port": address, "url": pool.address}[form]
        client = InferenceClient(where, deserialize=False)
        await client.start()
        assert (await client.add_request(PROMPT, params(1)))["generated_tokens"] == echo_answer(PROMPT, 1)
        client.stop()

    async def test_add_request_needs_a_running_event_loop(self, client, params) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            await asyncio.to_thread(client.add_request, PROMPT, params(1))
        assert client.next_request_id == 0

    async def test_streaming_is_set_on_the_callers_object(self, client, params, collect) -> None:
        asked = params(2)
        await collect(client.add_request_streaming(PROMPT, asked))
        assert asked.streaming

    async def test_a_stream_has_one_final_and_then_the_end(self, client, params) -> None:
        items = [item async for item in client.add_request_streaming(PROMPT, params(6))]
        assert [next(iter(item)) for item in items] == ["partial"] * (len(items) - 1) + ["final"]

    async def test_closing_before_start_forgets_the_request(self, pool, params) -> None:
        client = InferenceClient(pool.address, deserialize=False)
        stream = client.add_request_streaming(PROMPT, params(2))
        assert client.streams == {0: stream}
        await stream.aclose()
        assert client.streams == client._open == {}
        client.stop()

    async def test_both_water_marks_are_off(self, client) -> None:
        assert client.socket.getsockopt(zmq.SNDHWM) == client.socket.getsockopt(zmq.RCVHWM) == 0

    async def test_a_stopped_client_rejects_requests_and_closes_its_context(self, pool, params) -> None:
        client = InferenceClient(pool.address)
        await client.start()
        client.stop()
        client.stop()
        assert client.socket is None
        assert client.context.closed
        with pytest.raises(UnavailableError, match="was stopped"):
            await client.add_request(PROMPT, params(1))

    async def test_client_and_listener_task_end_together(self, pool, params) -> None:
        stopped, cancelled = InferenceClient(pool.address), InferenceClient(pool.address)
        for client in (stopped, cancelled):
            await client.start()
            assert isinstance(client.listener_task, asyncio.Task)
            assert not client.listener_task.done()
        pool.engine.step_seconds = None
        future = cancelled.add_request(PROMPT, params(1))
        stopped.stop()
        cancelled.listener_task.cancel()
        await asyncio.wait([stopped.listener_task, cancelled.listener_task])
        assert stopped.listener_task.cancelled()
        assert future.cancelled()
        assert cancelled.context.closed

    async def test_the_end_of_the_event_loop_stops_the_client(self, pool) -> None:
        client = InferenceClient(pool.address)
        await asyncio.to_thread(lambda: asyncio.run(client.start()))
        assert client.context.closed

    async def test_requests_fail_after_their_deadline_without_a_coordinator(
        self, params, monkeypatch, unused_tcp_port
    ) -> None:
        monkeypatch.setattr("megatron_runtime.client.inference_client.DEADLINE_MARGIN_SECONDS", 0.05)
        client = InferenceClient(unused_tcp_port)
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
            (500, EngineFailedError),
            (418, RequestRejectedError),
        ],
    )
    def test_each_error_code_has_its_exception_class(self, code, kind) -> None:
        error = rejection(code, "no", 2.0)
        assert type(error) is kind
        assert (error.code, error.message, error.retry_after_seconds) == (code, "no", 2.0)


class TestVerbs:
    async def test_signals_are_sent_at_once_and_acknowledged(self, client, pool) -> None:
        await client.pause_engines()
        await client.suspend_engines()
        await client.resume_engines()
        await client.unpause_engines()
        await client.set_generation_epoch(7)

        async def has_epoch() -> bool:
            return pool.engine.epoch == 7

        await eventually(has_epoch, what="the engine has committed the epoch")
        await client.pause_engines()
        await client.stop_engines()
        assert {Header.SUSPEND, Header.RESUME, Header.STOP} <= set(pool.engine.acted)


async def test_the_handshake_alone_registers_the_client(pool, params) -> None:
    client = InferenceClient(pool.address, deserialize=False)
    await client._connect_with_inference_coordinator()
    assert client.connected
    assert client.listener_task is None
    assert (await client.add_request(PROMPT, params(3)))["generated_tokens"] == echo_answer(PROMPT, 3)
    client.stop()
    silent = InferenceClient(1)
    with pytest.raises(CoordinatorUnreachableError, match="no coordinator answered"):
        await silent._connect_with_inference_coordinator(connect_timeout_seconds=0.1)


class TestConnecting:
    async def test_the_constructor_connects_and_needs_no_event_loop(self, unused_tcp_port) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
            monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
            router.bind(f"tcp://127.0.0.1:{unused_tcp_port}")
            client = await asyncio.to_thread(InferenceClient, unused_tcp_port)
            assert isinstance(client.socket, zmq.Socket)
            await asyncio.wait_for(monitor.recv_multipart(), LONG_SECONDS)
            client.stop()
            assert client.socket is None
            assert client.context.closed
            router.disable_monitor()

    def test_a_client_that_is_dropped_without_a_start_closes_its_context(self, unused_tcp_port) -> None:
        client = InferenceClient(unused_tcp_port)
        client.cycle = client
        context, socket = client.context, client.socket
        del client
        gc.collect()
        assert socket.closed
        context.term()

    async def test_start_need_not_be_awaited(self, pool, params) -> None:
        client = InferenceClient(pool.address, deserialize=False)
        client.start()
        assert (await client.add_request(PROMPT, params(3)))["generated_tokens"] == echo_answer(PROMPT, 3)
        assert client.connected
        client.stop()

    async def test_start_is_a_coroutine_for_tasks_and_other_threads(self, pool, params, elsewhere) -> None:
        first, second, third = (InferenceClient(pool.address) for _ in range(3))
        await asyncio.create_task(first.start())
        await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(second.start(), elsewhere).result())
        await on_loop(elsewhere, third.start())  # begun on this loop
        for client in (first, second, third):
            assert client.connected
            await asyncio.to_thread(client.stop)

    async def test_a_client_that_was_stopped_before_it_started_stays_stopped(self, pool) -> None:
        client = InferenceClient(pool.address)
        starting = client.start()
        client.stop()
        await starting
        assert client.context.closed

    async def test_cancelling_start_closes_the_client(self, unused_tcp_port) -> None:
        client = InferenceClient(unused_tcp_port)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.start(), 0.05)
        assert client.context.closed


@pytest.mark.parametrize("signal", [Header.PAUSE, int(Header.PAUSE)])
async def test_any_signal_reaches_the_engines_by_its_header_or_number(client, pool, signal) -> None:
    assert (await client._send_signal_to_engines(signal, operation_id="op-1")).operation_id == "op-1"
    await pool.engine.until(lambda: pool.engine.state is EngineState.PAUSED)
    assert (await client._send_signal_to_engines(Header.SET_GENERATION_EPOCH, epoch=3)).ok
    assert pool.coordinator.core.verbs.epoch == 3
    assert (await client._send_signal_to_engines(Header.UNPAUSE)).ok
    await pool.engine.until(lambda: pool.engine.state is EngineState.RUNNING)


async def test_headers_that_are_not_signals_are_rejected(client) -> None:
    with pytest.raises(ValueError, match=r"want one of DRAIN, PAUSE, RESUME"):
        client._send_signal_to_engines(Header.SHUTDOWN)


async def test_a_pinned_request_runs_on_the_named_engine_or_fails(client, pool, params) -> None:
    future = client.add_request(PROMPT, params(2), engine="engine-0")
    stream = client.add_request_streaming(PROMPT, params(2), engine="engine-1")
    assert (await future)["generated_tokens"] == echo_answer(PROMPT, 2)
    with pytest.raises(RequestRejectedError, match="'engine-1' does not serve") as rejected:
        await anext(aiter(stream))
    assert rejected.value.code == ErrorCode.ENGINES_MISSING


async def test_a_client_of_a_single_port_coordinator_may_shut_it_down(client, pool) -> None:
    assert not pool.coordinator.ended.is_set()
    client.shutdown_coordinator()
    await asyncio.wait_for(pool.coordinator.ended.wait(), LONG_SECONDS)


class TestHandshake:
    @pytest.fixture
    async def impostor(self):
        """A ROUTER that accepts every message and sends the answer of the test."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        received: list[list[bytes]] = []
        answer: list[bytes] = []

        async def serve() -> None:
            while True:
                peer, *frames = await socket.recv_multipart()
                received.append(frames)
                if answer:
                    await socket.send_multipart([peer, *answer])

        task = asyncio.create_task(serve())
        yield port, answer, received
        task.cancel()
        socket.close(linger=0)
        context.term()

    async def test_any_other_answer_raises_an_assertion_error(self, impostor) -> None:
        port, answer, _ = impostor
        answer[:] = [b"\x91\x14"]  # SUBMIT_REQUEST, which no coordinator sends
        client = InferenceClient(port)
        with pytest.raises(HandshakeRejectedError, match=f"127.0.0.1:{port}") as rejected:
            await client.start(connect_timeout_seconds=LONG_SECONDS)
        assert isinstance(rejected.value, AssertionError)
        assert client.context.closed

    async def test_an_answer_that_is_no_message_raises_at_once(self, impostor) -> None:
        port, answer, _ = impostor
        answer[:] = [b"HTTP/1.1 400 Bad Request"]
        with pytest.raises(HandshakeRejectedError, match="it is no coordinator"):
            await InferenceClient(port).start(connect_timeout_seconds=10 * LONG_SECONDS)


async def test_an_abort_names_the_request(client, pool, params) -> None:
    pool.engine.step_seconds = None
    sent: list[list[bytes]] = []
    stream = client.add_request_streaming(PROMPT, params(4))
    uid = next(iter(client._open))
    send = client._link.send
    client._link.send = lambda frames: (sent.append(frames), send(frames))
    await stream.aclose()
    assert [decode(frames) for frames in sent] == [Abort(uid)]
    assert client.streams == client._by_id == {}


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
        heard = link._heard
        async with asyncio.timeout(LONG_SECONDS):
            while link._heard == heard:  # noqa: ASYNC110 - a moment has no event
                await asyncio.sleep(0.01)
    assert link._incarnation == connection
    # A coordinator that is silent while this loop runs is still detected.
    monkeypatch.setattr(link._socket, "_on_message", lambda _frames: None)
    async with asyncio.timeout(LONG_SECONDS):
        while link._incarnation == connection:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_kv_handoff_is_unsupported(client, params) -> None:
    with pytest.raises(UnsupportedByBackendError, match="UnsupportedByBackend") as rejected:
        await client.add_request_with_kv_handoff([1], params(), {}, [0])
    assert (rejected.value.code, rejected.value.is_transient) == (501, False)
    with pytest.raises(UnsupportedByBackendError):
        await anext(client.add_request_with_kv_handoff_streaming([1], params(), {}, [0]))
    with pytest.raises(UnsupportedByBackendError):
        client.release_handoff(0)


@pytest.mark.parametrize("error", [InvalidRequestError, RequestTooLargeError, ModelChangedError, AdapterNotFoundError])
def test_errors_that_a_retry_does_not_help_are_permanent(error: type[RequestRejectedError]) -> None:
    assert not error(400, "x").is_transient


@pytest.mark.parametrize("streams", [True, False])
async def test_tokens_are_counted_when_they_arrive_though_nothing_reads_them(client, pool, params, streams) -> None:
    pool.engine.step_seconds = None
    counts: list[int] = []
    add = client.add_request_streaming if streams else client.add_request
    answer = add(PROMPT, params(6), on_tokens=counts.append)
    await pool.engine.until(lambda: pool.engine.jobs)

    async def arrived() -> bool:
        return sum(counts) == 3

    for _ in range(3):
        pool.engine.step()
    await eventually(arrived, what="three tokens")
    if streams:
        await answer.aclose()
    else:
        answer.cancel()
    await pool.engine.until(lambda: pool.engine.aborted)
    assert sum(counts) == 3, "of a request that is aborted, what was generated"
    pool.engine.step_seconds = 0.0
    reply = await client.add_request(PROMPT, params(5), on_tokens=counts.append)
    assert sum(counts) == 3 + len(reply["generated_tokens"]) == 8
