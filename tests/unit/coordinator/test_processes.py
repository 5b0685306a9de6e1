"""The coordinator and engines as processes, ended by SIGKILL and SIGTERM."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import urllib.request

import echo_engine
import psutil
import pytest
import zmq
from control_link import ControlLink
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from fleet import Process
from scripted_engine import ScriptedEngine
from warm_python import WarmProcess

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.megatron_core.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.process.listening import private_folder
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import pack, unpack

pytestmark = pytest.mark.slow

PROMPT = [11, 12, 13]
COORDINATOR = ("-m", "megatron_runtime.cli", "coordinator")


class Processes:
    """Starts a coordinator and echo engines; those that still run at the end are killed."""

    def __init__(self) -> None:
        self.ports = free_ports(4)
        self.running: list[Process] = []
        self.closers = contextlib.ExitStack()

    def start(self, *arguments: str) -> Process:
        command = (*arguments, "--log-level", "warning")
        process = Process(WarmProcess(*command, environment=os.environ), self.ports[3])
        self.running.append(process)
        return process

    def coordinator(self) -> Process:
        client, engine, admin, health = map(str, self.ports)
        ports = ("--client-port", client, "--engine-port", engine, "--admin-port", admin, "--health-port", health)
        return self.start(*COORDINATOR, "--listen", "127.0.0.1", *ports)

    def engine(self, name: str, *arguments: str) -> Process:
        address = ("--coordinator", f"127.0.0.1:{self.ports[1]}", "--name", name)
        return self.start(echo_engine.PROGRAM, *address, "--health-port", "off", *arguments)

    async def client(self) -> InferenceClient:
        client = InferenceClient(self.ports[0], deserialize=False)
        self.closers.callback(client.stop)
        await client.start()
        return client

    async def admin(self) -> ControlLink:
        link = ControlLink(self.ports[2])
        self.closers.callback(link.close)
        await link.start(connect_timeout_seconds=LONG_SECONDS)
        return link

    async def close(self) -> None:
        self.closers.close()
        for process in self.running:
            await process.kill()


@pytest.fixture
async def processes():
    processes = Processes()
    yield processes
    await processes.close()


async def until_serving(link: ControlLink, names: set[str]) -> None:
    async with asyncio.timeout(LONG_SECONDS):
        while {engine.name for engine in (await link.status()).engines if engine.serving} != names:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_coordinator_that_is_killed_while_suspended_comes_back_suspended(processes, params) -> None:
    coordinator = processes.coordinator()
    processes.engine("engine-0")
    link, client = await processes.admin(), await processes.client()
    await until_serving(link, {"engine-0"})
    await link.control(Header.SET_GENERATION_EPOCH, operation_id="e", fence=3, epoch=8)
    await link.control(Header.PAUSE, operation_id="p", fence=3, expected_engines=1)
    await link.control(Header.SUSPEND, operation_id="s", fence=3, expected_engines=1)
    future = client.add_request(PROMPT, params(5))
    await coordinator.kill()
    processes.coordinator()
    async with asyncio.timeout(LONG_SECONDS):
        while (status := await link.status(timeout_seconds=LONG_SECONDS)).state == "RECOVERING":  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (status.state, status.epoch, status.fence) == ("SUSPENDED", 8, 3)
    await link.control(Header.RESUME, operation_id="r", fence=3, expected_engines=1)
    await link.control(Header.UNPAUSE, operation_id="u", fence=3, expected_engines=1)
    assert (await future)["generated_tokens"] == echo_answer(PROMPT, 5)


async def test_after_sigterm_the_coordinator_finishes_open_requests_and_an_engine_hands_over(processes, params) -> None:
    coordinator = processes.coordinator()
    leaving = processes.engine("leaving", "--drain-seconds", "0", "--echo-step-seconds", "0.1")
    link, client = await processes.admin(), await processes.client()
    await until_serving(link, {"leaving"})
    future = client.add_request(PROMPT, params(300))
    processes.engine("staying")
    await until_serving(link, {"leaving", "staying"})
    leaving.process.send_signal(signal.SIGTERM)
    assert await leaving.ended() == 0
    coordinator.process.send_signal(signal.SIGTERM)
    assert (await future)["generated_tokens"] == echo_answer(PROMPT, 300)
    assert await coordinator.ended() == 0


async def test_probes_and_metrics(processes) -> None:
    processes.coordinator()
    await processes.admin()

    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{processes.ports[3]}{path}", timeout=LONG_SECONDS) as answer:
            return answer.read().decode()

    assert "true" in await asyncio.to_thread(get, "/readyz")
    metrics = await asyncio.to_thread(get, "/metrics")
    assert 'megatron_coordinator_rejected_frames_total{reason="malformed"} 0.0' in metrics
    assert "megatron_coordinator_queued_requests 0.0" in metrics


def test_the_library_class_sends_its_address_waits_for_engines_and_ends(params) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ready = context.Event()
    process = context.Process(
        target=DataParallelInferenceCoordinator.entrypoint, args=(theirs, ready, 1, None), daemon=True
    )
    process.start()
    try:
        assert ours.poll(LONG_SECONDS)
        address = ours.recv()
        assert not ready.is_set()
        asyncio.run(serve_one(address, ready, params))
        process.join(LONG_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_an_interrupt_ends_the_library_class_without_an_error() -> None:
    """The terminal sends it to all processes of a program."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ready = context.Event()
    process = context.Process(
        target=DataParallelInferenceCoordinator.entrypoint, args=(theirs, ready, 0, None), daemon=True
    )
    process.start()
    try:
        assert ready.wait(LONG_SECONDS)
        assert process.pid is not None
        with zmq.Context() as zmq_context, zmq_context.socket(zmq.DEALER) as dealer:
            dealer.connect(ours.recv())
            dealer.send(pack([int(Header.CONNECT)]))
            assert dealer.poll(LONG_SECONDS * 1000), "it serves"
        os.kill(process.pid, signal.SIGINT)
        process.join(LONG_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


async def serve_one(address: str, ready, params) -> None:
    engine = await ScriptedEngine(address).start()
    assert await asyncio.to_thread(ready.wait, LONG_SECONDS)
    client = InferenceClient(address, deserialize=False)
    await client.start()
    assert (await client.add_request(PROMPT, params(3)))["generated_tokens"] == echo_answer(PROMPT, 3)
    client.stop()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        dealer.send(pack([int(Header.CONNECT)]))
        assert await asyncio.to_thread(dealer.poll, LONG_SECONDS * 1000)
        assert unpack(dealer.recv()) == [Header.CONNECT_ACK]
        dealer.send(pack([int(Header.SHUTDOWN)]))
        dealer.close(linger=1000)
    engine.close()


def test_with_no_engine_to_wait_for_the_library_class_is_ready_at_once() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 0, None, block_size_tokens=4, enable_prefix_caching=True)
    try:
        assert coordinator.address.startswith("tcp://127.0.0.1:")
        assert len(coordinator.compute_request_hashes(list(range(8)))) == 2
        assert coordinator.compute_request_hashes([1, 2, 3]) == []
        with pytest.raises(RuntimeError, match="no engine is registered"):
            coordinator.get_next_data_parallel_rank()
    finally:
        coordinator.stop()
        coordinator.stop()


async def _stop_engines(link: ControlLink) -> None:
    for header in (Header.PAUSE, Header.STOP):
        await link.control(header, operation_id=header.name, fence=1, expected_engines=1)


async def test_stop_ends_the_process_of_an_engine_that_belongs_to_no_resource(processes) -> None:
    processes.coordinator()
    engine = processes.engine("engine-0")
    link = await processes.admin()
    await until_serving(link, {"engine-0"})
    await _stop_engines(link)
    assert await engine.ended() == 0


async def test_a_stopped_engine_of_a_resource_idles_until_sigterm(processes) -> None:
    """The kubelet would start an ended container again."""
    processes.coordinator()
    engine, other = processes.engine("engine-0", "--revision", "abc"), processes.engine("engine-1")
    link = await processes.admin()
    await until_serving(link, {"engine-0", "engine-1"})
    await _stop_engines(link)
    assert await other.ended() == 0  # by then both had the signal
    assert engine.running
    engine.process.send_signal(signal.SIGTERM)
    assert await engine.ended() == 0


async def test_a_coordinator_on_unix_sockets_replaces_one_that_was_killed_and_opens_no_port(
    processes: Processes,
) -> None:
    with private_folder() as folder:
        options = (*COORDINATOR, "--socket-dir", str(folder), "--health-port", "off")
        address = f"ipc://{folder}/client"
        for _ in range(2):
            coordinator = processes.start(*options)
            client = CoordinatorClient(address)
            await client.start(connect_timeout_seconds=LONG_SECONDS)
            assert (await client.status()).engines == []
            client.stop()
            listeners = psutil.Process(coordinator.pid).net_connections(kind="inet")
            assert listeners == []
            assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
            await coordinator.kill()
