"""InferenceClient: sockets, handshake, task and verbs. tests/unit/client has the client that it is built on."""

import asyncio
import contextlib
import gc

import pytest
import zmq
import zmq.asyncio
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually

from megatron_runtime.megatron_core.inference_client import (
    AdapterNotFoundError,
    CoordinatorUnreachableError,
    HandshakeRejectedError,
    InferenceClient,
    InvalidRequestError,
    ModelChangedError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
)
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import EngineState

PROMPT = [1, 2, 3]


@pytest.fixture
async def client(pool):
    client = InferenceClient(pool.address, deserialize=False)
    await client.start()
    yield client
    client.stop()


def on_loop(loop, coroutine):
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


class TestAnyLoop:
    async def test_started_and_stopped_from_outside_its_loop(self, pool, params, elsewhere) -> None:
        client = InferenceClient(pool.address, deserialize=False)
        await client.start(loop=elsewhere)
        pool.engine.step_seconds = None
        future = client.add_request(PROMPT, params(4))
        await client.status()  # the request has been submitted
        await asyncio.to_thread(client.stop)
        with pytest.raises(asyncio.CancelledError):
            await future


class TestRequests:
    async def test_streaming_is_set_on_the_callers_object(self, client, params, collect) -> None:
        asked = params(2)
        await collect(client.add_request_streaming(PROMPT, asked))
        assert asked.streaming

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

    async def test_start_may_be_called_again(self, pool, params) -> None:
        client = InferenceClient(pool.address, deserialize=False)
        client.start()
        await client.start()
        task = client.listener_task
        await asyncio.create_task(client.start())
        assert client.listener_task is task
        assert (await client.add_request(PROMPT, params(3)))["generated_tokens"] == echo_answer(PROMPT, 3)
        await asyncio.to_thread(client.stop)
        assert client.context.closed

    async def test_a_loop_is_enough_to_connect(self, pool, elsewhere) -> None:
        client, later = InferenceClient(pool.address), InferenceClient(pool.address)
        await asyncio.to_thread(client.start, elsewhere)

        async def is_connected() -> bool:
            return client.connected

        await eventually(is_connected, what="the client connects without await")
        await asyncio.to_thread(client.stop)

        def begin_before_the_loop_runs() -> bool:
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                later.start(loop)
                loop.run_until_complete(asyncio.wait_for(later._starting, LONG_SECONDS))
                connected = later.connected
                later.stop()
                return connected

        assert await asyncio.to_thread(begin_before_the_loop_runs)

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
        with pytest.raises(HandshakeRejectedError, match="it is not a coordinator"):
            await InferenceClient(port).start(connect_timeout_seconds=10 * LONG_SECONDS)


async def test_kv_of_another_engine_that_is_unknown_means_computing(client, params) -> None:
    """tests/survival/test_kv_handoff.py has engines that hand over KV."""
    expected = await client.add_request([1, 2, 3], params())
    again = await client.add_request_with_kv_handoff([1, 2, 3], params(), {"agent_name": "prefill-rank0"}, [0])
    assert again["generated_tokens"] == expected["generated_tokens"]
    frames = [frame async for frame in client.add_request_with_kv_handoff_streaming([1, 2, 3], params(), None, [0])]
    assert frames[-1]["final"]["generated_tokens"] == expected["generated_tokens"]
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
