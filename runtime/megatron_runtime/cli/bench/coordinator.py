"""`megatron bench coordinator`: a coordinator in its own process, between clients and engines that do almost nothing.

Clients and engines share the event loop and the clock of this process and read their sockets themselves, so that the
time between two of their timestamps is that of the coordinator and the kernel.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop

from megatron_runtime.cli.bench.report import Figure, json_file, percentile, report
from megatron_runtime.cli.options import COUNT, readable_errors
from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.protocol import limits, messages
from megatron_runtime.protocol.codec import Frames
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.zmtp.connection import Connection
from megatron_runtime.transport.zmtp.dealer import Dealer

SHARED_PREFIXES, DISTINCT_PROMPTS = 8, 512
WINDOW = 16
"""Open requests per client of the closed loop."""
SEQUENTIAL_REQUESTS = 2000
OPEN_LOOP_SECONDS = 5
STREAMS = 64
STEPS_AHEAD = 16
"""Messages of partials in flight."""
_REPLY = messages.pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})
_TOKEN = messages.tokens_to_bytes([1])
_PARAMS = messages.pack({"num_tokens_to_generate": 1})


class UnbatchedDealer(Dealer):
    """Sends each message at once, as peers in separate processes do. Batches would cost the coordinator less."""

    _waiting: Connection | None = None

    def send(self, message: Frames) -> bool:
        is_sent = super().send(message)
        if self._waiting is not None:
            self._waiting.flush()
        return is_sent

    def flush_soon(self, connection: Connection) -> None:
        self._waiting = connection
        super().flush_soon(connection)


class Peer:
    """A connection to the coordinator, registered after start().

    on_message: called with the head of each message of a request.
    """

    def __init__(self, address: str, hello: messages.Hello) -> None:
        self.on_message: Callable[[list[Any]], None] = lambda head: None
        self._hello = hello
        self._registered = asyncio.Event()
        self._dealer = UnbatchedDealer(address, self._receive, max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES)

    async def start(self) -> None:
        while not self._dealer.send(self._hello.to_frames()):  # noqa: ASYNC110 - the dealer connects by itself
            await asyncio.sleep(0.01)
        self._heartbeats = asyncio.create_task(self._send_heartbeats())
        await self._registered.wait()

    async def _send_heartbeats(self) -> None:
        state = EngineState.RUNNING if self._hello.role is Role.ENGINE else None
        while True:
            await asyncio.sleep(limits.HEARTBEAT_SECONDS)
            self.send(messages.Heartbeat(incarnation=self._hello.incarnation, state=state).to_frames())

    async def close(self) -> None:
        self._heartbeats.cancel()
        await asyncio.wait([self._heartbeats])
        self.send(messages.Disconnect(reason="done").to_frames())
        self._dealer.close(linger_ms=1000)

    def send(self, frames: Frames) -> None:
        if not self._dealer.send(frames):
            raise RuntimeError("the connection of the benchmark is closed, or its peer does not read")

    def submit(self, prompt: bytes, *, streaming: bool = False) -> bytes:
        """Submit a request as a client. Return its uid."""
        uid, meta = secrets.token_bytes(16), messages.RequestMeta(streaming=streaming, seed=1)
        self.send(messages.Submit(uid, meta, prompt, b"", _PARAMS).to_frames())
        return uid

    def _receive(self, frames: Frames) -> None:
        head = messages.unpack(frames[0])
        if head[0] == Header.HELLO_ACK:
            self._registered.set()
        elif head[0] == Header.ERROR:
            raise RuntimeError(f"the coordinator rejected a message: {messages.decode(frames)}")
        elif head[0] != Header.HEARTBEAT:
            self.on_message(head)


class Engine(Peer):
    """Answers each request at once with one token or, if not `answers`, keeps it open.

    held: by uid, the seconds from a dispatch to its answer.
    open: dispatch ids and uids of the requests that are kept open. route: of their client.
    """

    def __init__(self, address: str, name: str, *, max_requests: int, answers: bool) -> None:
        hello = messages.Hello(
            role=Role.ENGINE,
            name=name,
            incarnation=secrets.randbits(63),
            serving=True,
            state=EngineState.RUNNING,
            max_requests=max_requests,
            block_size_tokens=256,
        )
        super().__init__(address, hello)
        self.on_message = self._handle
        self._answers = answers
        self.held: dict[bytes, float] = {}
        self.open: list[tuple[int, bytes]] = []
        self.route = 0

    def _handle(self, head: list[Any]) -> None:
        if head[0] != Header.DISPATCH:
            return
        arrived = time.perf_counter()
        _, dispatch_id, uid, route, *_ = head
        if self._answers:
            frames = messages.Final(dispatch_id, uid, _TOKEN, _REPLY).to_frames()
            self.held[uid] = time.perf_counter() - arrived
            self.send(frames)
        else:
            self.open.append((dispatch_id, uid))
            self.route = route

    def send_step(self, number: int) -> None:
        """Send one token for each open request, in one message."""
        entries = [messages.PartialEntry(uid, dispatch_id, number, 1) for dispatch_id, uid in self.open]
        self.send(messages.Partial(self.route, entries, _TOKEN * len(entries)).to_frames())


class Bench:
    """A coordinator with longest-prefix routing, and the load.

    clients, engines: how many. requests: of each part. rate: requests/s of the open loop.
    """

    def __init__(self, *, clients: int, engines: int, requests: int, prompt_tokens: int, rate: int) -> None:
        self.clients, self.engines, self.requests, self.rate = clients, engines, requests, rate
        settings = CoordinatorSettings(
            listen="127.0.0.1",
            client_port=0,
            engine_port=0,
            admin_port=0,
            routing_policy=RoutingPolicy.LONGEST_PREFIX,
            timing=Timing(recovery=0.0),
        )
        begun = time.perf_counter()
        self.coordinator: CoordinatorProcess = spawn_coordinator(settings)
        self.start_seconds = time.perf_counter() - begun
        self.process = psutil.Process(self.coordinator.pid)
        rng = random.Random(1)
        half = prompt_tokens // 2
        prefixes = [rng.choices(range(50_000), k=half) for _ in range(SHARED_PREFIXES)]
        self._prompts = [
            messages.tokens_to_bytes(rng.choice(prefixes) + rng.choices(range(50_000), k=prompt_tokens - half))
            for _ in range(DISTINCT_PROMPTS)
        ]

    def prompt(self, number: int) -> bytes:
        return self._prompts[number % DISTINCT_PROMPTS]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of the coordinator."""
        return sum(thread.user_time + thread.system_time for thread in self.process.threads())

    @asynccontextmanager
    async def peers(
        self, clients: int, engines: int, *, answers: bool = True
    ) -> AsyncIterator[tuple[list[Peer], list[Engine]]]:
        """Connect clients and engines to the coordinator."""
        addresses, most = self.coordinator.addresses, max(STREAMS, self.clients * WINDOW)
        engine_peers = [
            Engine(addresses[Role.ENGINE], f"engine-{number}", max_requests=most, answers=answers)
            for number in range(engines)
        ]
        hellos = (
            messages.Hello(role=Role.CLIENT, name=f"client-{number}", incarnation=secrets.randbits(63))
            for number in range(clients)
        )
        client_peers = [Peer(addresses[Role.CLIENT], hello) for hello in hellos]
        peers: list[Peer] = [*engine_peers, *client_peers]
        await asyncio.wait_for(asyncio.gather(*(peer.start() for peer in peers)), 30)
        try:
            yield client_peers, engine_peers
        finally:
            for peer in peers:
                await peer.close()


async def run(**values: int) -> list[Figure]:
    """Measure all parts, one after the other, on one coordinator."""
    bench = Bench(**values)
    try:
        await asyncio.sleep(1)  # until the new process is idle
        return [
            Figure("start_seconds", "start to address", bench.start_seconds, "s", "< 0.7"),
            Figure("idle_rss_mib", "memory, idle", bench.process.memory_info().rss / (1 << 20), "MiB", "< 80"),
            *await sequential(bench),
            *await throughput(bench),
            *await open_loop(bench),
            *await partials(bench),
        ]
    finally:
        bench.coordinator.stop()


async def sequential(bench: Bench) -> list[Figure]:
    """Measure one InferenceClient that sends one request at a time."""
    params = SamplingParams(num_tokens_to_generate=1)
    latencies: list[float] = []
    async with bench.peers(0, 1):
        client = InferenceClient(bench.coordinator.address, deserialize=False)
        await client.start()
        try:
            for number in range(min(bench.requests, SEQUENTIAL_REQUESTS)):
                tokens = messages.tokens_from_bytes(bench.prompt(number)).tolist()
                begun = time.perf_counter()
                await client.add_request(tokens, params)
                latencies.append((time.perf_counter() - begun) * 1000)
        finally:
            client.stop()
    return [
        Figure("sequential_p50_ms", "one client in sequence, p50", percentile(latencies, 50), "ms", "≤ 0.5"),
        Figure("sequential_p99_ms", "one client in sequence, p99", percentile(latencies, 99), "ms"),
    ]


def _answers(clients: Sequence[Peer], kind: Header) -> asyncio.Queue[tuple[float, list[Any]]]:
    """Return a queue of the messages of `kind` that the clients receive, with the time of each."""
    queue: asyncio.Queue[tuple[float, list[Any]]] = asyncio.Queue()

    def on_message(head: list[Any]) -> None:
        if head[0] == kind:
            queue.put_nowait((time.perf_counter(), head))

    for client in clients:
        client.on_message = on_message
    return queue


async def _closed_loop(
    send: Callable[[int], object], answers: asyncio.Queue[Any], bench: Bench, *, count: int, window: int
) -> tuple[float, float]:
    """Send `count` messages, at most `window` of them unanswered. Return seconds and CPU seconds of the coordinator."""
    before, begun = bench.cpu_seconds(), time.perf_counter()
    for number in range(count):
        if number >= window:
            await answers.get()
        send(number)
    for _ in range(min(count, window)):
        await answers.get()
    return time.perf_counter() - begun, bench.cpu_seconds() - before


async def throughput(bench: Bench) -> list[Figure]:
    """Measure a closed loop of WINDOW requests per client."""
    count = bench.requests
    async with bench.peers(bench.clients, bench.engines) as (clients, _):

        def send(number: int) -> None:
            clients[number % len(clients)].submit(bench.prompt(number))

        answers = _answers(clients, Header.FINAL)
        seconds, cpu = await _closed_loop(send, answers, bench, count=count, window=WINDOW * len(clients))
    what = f"requests, {len(bench.prompt(0)) // 4}-token prompts, {bench.clients} clients"
    return [
        Figure("requests_per_second", what, count / seconds, "1/s"),
        Figure("cpu_us_per_request", "coordinator's CPU per request", cpu / count * 1e6, "µs", "≤ 100"),
    ]


async def open_loop(bench: Bench) -> list[Figure]:
    """Measure the time that requests at a fixed rate spend between client and engine, both ways.

    The load does not sleep between requests, because the time to wake it would be measured too.
    """
    count = min(bench.requests, bench.rate * OPEN_LOOP_SECONDS)
    sent: dict[bytes, float] = {}
    async with bench.peers(bench.clients, bench.engines) as (clients, engines):
        answers = _answers(clients, Header.FINAL)
        begun = time.perf_counter()
        for number in range(count):
            due = begun + number / bench.rate
            while (now := time.perf_counter()) < due:  # noqa: ASYNC110 - it must not sleep
                await asyncio.sleep(0)
            sent[clients[number % len(clients)].submit(bench.prompt(number))] = now
        while answers.qsize() < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
    held = {uid: seconds for engine in engines for uid, seconds in engine.held.items()}
    received = {head[2]: at for at, head in (answers.get_nowait() for _ in range(count))}
    latencies = [(received[uid] - begun - held[uid]) * 1000 for uid, begun in sent.items()]
    what = f"client to engine and back at {bench.rate:,} requests/s"
    return [
        Figure(f"latency_p{percent}_ms", f"{what}, p{percent}", percentile(latencies, percent), "ms")
        for percent in (50, 99)
    ]


async def partials(bench: Bench) -> list[Figure]:
    """Measure one engine that generates for STREAMS streams of one client, with one message per step."""
    steps = max(1, bench.requests // STREAMS * 4)
    async with bench.peers(1, 1, answers=False) as ([client], [engine]):
        uids = [client.submit(bench.prompt(number), streaming=True) for number in range(STREAMS)]
        while len(engine.open) < STREAMS:  # noqa: ASYNC110 - filled by a socket's callback
            await asyncio.sleep(0.01)
        answers = _answers([client], Header.PARTIAL)
        seconds, cpu = await _closed_loop(engine.send_step, answers, bench, count=steps, window=STEPS_AHEAD)
        for uid in uids:
            client.send(messages.Abort(uid).to_frames())
    what = f"coordinator's CPU per partial, {STREAMS} streams a message"
    return [
        Figure("partials_per_second", "partials forwarded", steps * STREAMS / seconds, "1/s"),
        Figure("cpu_us_per_partial", what, cpu / (steps * STREAMS) * 1e6, "µs", "≤ 10"),
    ]


@click.command()
@click.option("--clients", type=COUNT, default=8, help="At once.")
@click.option("--engines", type=COUNT, default=4, help="They answer at once, with one token.")
@click.option("--requests", type=COUNT, default=10_000, help="Of each part.")
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=1024)
@click.option("--rate", type=COUNT, default=1000, help="Requests/s of the measurement of latency.")
@json_file
@readable_errors
def coordinator(*, json_file: Path | None, **values: int) -> None:
    """What a request costs in the coordinator.

    The coordinator runs in its own process, with longest-prefix routing. Clients and engines that do almost nothing run
    in this one. The CPU time is that of all threads of the coordinator.
    """
    # The load shares the machine with the coordinator and must not be the slower part.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(run(**values))
    report("coordinator", "Coordinator", values, figures, json_file)
