"""The loads of `megatron bench coordinator`, each on a coordinator in a process of its own."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import zmq

from megatron_runtime.cli.bench.forwarder import Forwarder
from megatron_runtime.cli.bench.lean_peers import DirectEngine, LeanClient, LeanEngine, LeanPeer
from megatron_runtime.cli.bench.report import Figure, percentile
from megatron_runtime.data_parallel_inference_coordinator.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.data_parallel_inference_coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.headers import Role
from megatron_runtime.wire.messages import tokens_from_bytes, tokens_to_bytes

SHARED_PREFIXES = 8
DISTINCT_PROMPTS = 512
WINDOW = 16
"""Requests that a client of the closed loop has open at once."""
STREAMS = 64
STEPS_AHEAD = 16
"""Messages of partials on their way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """clients, engines: how many. requests: of each part. prompt_tokens: of each. rate: requests/s of the open loop."""

    clients: int = 8
    engines: int = 4
    requests: int = 10_000
    prompt_tokens: int = 1024
    rate: int = 1000


class Bench:
    """One coordinator with longest-prefix routing, and who talks to it."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
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
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        rng = random.Random(1)
        half = options.prompt_tokens // 2
        prefixes = [rng.choices(range(50_000), k=half) for _ in range(SHARED_PREFIXES)]
        self.prompts = [
            tokens_to_bytes(rng.choice(prefixes) + rng.choices(range(50_000), k=options.prompt_tokens - half))
            for _ in range(DISTINCT_PROMPTS)
        ]

    def close(self) -> None:
        self.coordinator.stop()
        self.context.term()

    @asynccontextmanager
    async def direct_peers(
        self, forwarder: Forwarder | None = None
    ) -> AsyncIterator[tuple[list[LeanClient], list[DirectEngine]]]:
        """Peers that no coordinator is between, but perhaps a forwarder."""
        options = self.options
        behind = forwarder.engine_address if forwarder is not None else None
        engines = [DirectEngine(self.context, forwarder_address=behind) for _ in range(options.engines)]
        clients = [
            LeanClient(
                self.context,
                forwarder.client_address if forwarder is not None else engines[number % len(engines)].address,
                f"direct-{number}",
            )
            for number in range(options.clients)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*(client.registered.wait() for client in clients)), 30)
            yield clients, engines
        finally:
            for client in clients:
                await client.close()
            for engine in engines:
                engine.socket.close()

    @asynccontextmanager
    async def peers(
        self, *, clients: int, engines: int, answers: bool = True
    ) -> AsyncIterator[tuple[list[LeanClient], list[LeanEngine]]]:
        addresses = self.coordinator.addresses
        most = max(STREAMS, self.options.clients * WINDOW)
        engine_peers = [
            LeanEngine(self.context, addresses[Role.ENGINE], f"engine-{number}", max_requests=most, answers=answers)
            for number in range(engines)
        ]
        client_peers = [
            LeanClient(self.context, addresses[Role.CLIENT], f"client-{number}") for number in range(clients)
        ]
        peers: list[LeanPeer] = [*engine_peers, *client_peers]
        try:
            await asyncio.wait_for(asyncio.gather(*(peer.registered.wait() for peer in peers)), 30)
            yield client_peers, engine_peers
        finally:
            for peer in peers:
                await peer.close()


async def run(options: LoadOptions) -> list[Figure]:
    """All parts, one after the other, on one coordinator."""
    bench = Bench(options)
    try:
        await asyncio.sleep(1)  # until a fresh process is idle
        figures = [
            Figure("start_seconds", "start to address", bench.start_seconds, "s", "< 0.7"),
            Figure("idle_rss_mib", "memory, idle", bench.process.memory_info().rss / (1 << 20), "MiB", "< 80"),
        ]
        figures += await sequential(bench)
        figures += await throughput(bench)
        figures += await added_latency(bench)
        figures += await partials(bench)
        return figures
    finally:
        bench.close()


async def sequential(bench: Bench) -> list[Figure]:
    """One inference client, one request at a time, answered at once."""
    async with bench.peers(clients=0, engines=1):
        client = InferenceClient(bench.coordinator.addresses[Role.CLIENT], deserialize=False)
        await client.start()
        try:
            latencies = []
            for number in range(min(bench.options.requests, 2000)):
                prompt = tokens_from_bytes(bench.prompts[number % DISTINCT_PROMPTS]).tolist()
                begun = time.perf_counter()
                await client.add_request(prompt, SamplingParams(num_tokens_to_generate=1))
                latencies.append((time.perf_counter() - begun) * 1000)
        finally:
            client.stop()
    return [
        Figure("sequential_p50_ms", "one client in sequence, p50", percentile(latencies, 50), "ms", "≤ 0.5"),
        Figure("sequential_p99_ms", "one client in sequence, p99", percentile(latencies, 99), "ms"),
    ]


async def throughput(bench: Bench) -> list[Figure]:
    """Closed loop: every client keeps WINDOW requests open."""
    options = bench.options
    async with bench.peers(clients=options.clients, engines=options.engines) as (clients, _):
        rate, all_threads, own_thread = await _closed_loop(bench, clients, bench.coordinator.pid)
    with Forwarder() as forwarder:
        async with bench.direct_peers(forwarder) as (clients, _):
            _, floor, _ = await _closed_loop(bench, clients, forwarder.pid)
    tokens = f"{options.prompt_tokens}-token prompts"
    own = "of it in its own thread, not ZeroMQ's"
    share = 100 * floor / all_threads if all_threads else 0.0
    return [
        Figure("requests_per_second", f"requests, {tokens}, {options.clients} clients", rate, "1/s"),
        Figure("cpu_us_per_request", "coordinator's CPU per request", all_threads, "µs", "≤ 100"),
        Figure("own_thread_us_per_request", own, own_thread, "µs"),
        Figure("floor_us_per_request", "CPU per request of a forwarder that does nothing", floor, "µs"),
        Figure("floor_percent", "the forwarder's share of the coordinator's CPU", share, "%"),
    ]


async def _closed_loop(bench: Bench, clients: Sequence[LeanClient], pid: int) -> tuple[float, float, float]:
    """Requests/s, and the CPU in µs a request of process `pid`: of all threads, and of its own without ZeroMQ's."""
    count = bench.options.requests
    done = asyncio.Event()
    submitted = answers = 0

    def submit(client: LeanClient) -> None:
        nonlocal submitted
        client.submit(bench.prompts[submitted % DISTINCT_PROMPTS])
        submitted += 1

    def answered(client: LeanClient) -> None:
        nonlocal answers
        answers += 1
        if submitted < count:
            submit(client)
        elif answers == count:
            done.set()

    for client in clients:
        client.on_final = lambda _uid, client=client: answered(client)  # type: ignore[misc]
    before, begun = _cpu_seconds(pid), time.perf_counter()
    for number in range(min(count, WINDOW * len(clients))):
        submit(clients[number % len(clients)])
    await done.wait()
    seconds = time.perf_counter() - begun
    all_threads, own_thread = ((now - then) / count * 1e6 for now, then in zip(_cpu_seconds(pid), before, strict=True))
    return count / seconds, all_threads, own_thread


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process so far: of all its threads, and of the first, which is not ZeroMQ's."""
    times = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    return sum(times.values()), times[pid]


async def added_latency(bench: Bench) -> list[Figure]:
    """What a request and its answer spend between client and engine, both ways, more than without a coordinator."""
    options = bench.options
    async with bench.peers(clients=options.clients, engines=options.engines) as (clients, engines):
        for engine in engines:
            engine.stamps = True
        through = await _open_loop(bench, clients, engines)
    with Forwarder() as forwarder:
        async with bench.direct_peers(forwarder) as (clients, nobodies):
            forwarded = await _open_loop(bench, clients, nobodies)
    async with bench.direct_peers() as (clients, nobodies):
        direct = await _open_loop(bench, clients, nobodies)
    at = f"at {options.rate:,} requests/s"
    figures = []
    for percent, goal in ((50, ""), (99, "≤ 0.3")):
        least, floor, all_ = (percentile(values, percent) for values in (direct, forwarded, through))
        figures += [
            Figure(f"direct_p{percent}_ms", f"both ways without a coordinator {at}, p{percent}", least, "ms"),
            Figure(f"floor_added_p{percent}_ms", f"added by the forwarder, p{percent}", floor - least, "ms"),
            Figure(f"added_p{percent}_ms", f"added by the coordinator, p{percent}", all_ - least, "ms", goal),
        ]
    return figures


async def _open_loop(
    bench: Bench, clients: Sequence[LeanClient], engines: Sequence[LeanEngine | DirectEngine]
) -> list[float]:
    """Requests at the rate asked for; milliseconds on the way, client to engine plus engine to client, of each."""
    options = bench.options
    sent: dict[bytes, float] = {}
    received: dict[bytes, float] = {}
    count = min(options.requests, options.rate * 5)
    done = asyncio.Event()

    def answered(uid: bytes) -> None:
        received[uid] = time.perf_counter()
        if len(received) == count:
            done.set()

    for client in clients:
        client.on_final = answered
    begun = time.perf_counter()
    for number in range(count):
        due = begun + number / options.rate
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        now = time.perf_counter()
        sent[clients[number % len(clients)].submit(bench.prompts[number % DISTINCT_PROMPTS])] = now
    await done.wait()
    taken = {uid: stamps for engine in engines for uid, stamps in engine.taken.items()}
    return [(taken[uid][0] - sent[uid] + received[uid] - taken[uid][1]) * 1000 for uid in received]


async def partials(bench: Bench) -> list[Figure]:
    """One engine that generates for STREAMS streams of one client: one message a step."""
    steps = max(1, bench.options.requests // STREAMS * 4)
    async with bench.peers(clients=1, engines=1, answers=False) as ([client], [engine]):
        uids = [client.submit(bench.prompts[number], streaming=True) for number in range(STREAMS)]
        while len(engine.open) < STREAMS:  # noqa: ASYNC110 - filled by a socket's callback
            await asyncio.sleep(0.01)
        done = asyncio.Event()
        sent = received = 0

        def step() -> None:
            nonlocal sent
            engine.send_step(sent)
            sent += 1

        def arrived() -> None:
            nonlocal received
            received += 1
            if sent < steps:
                step()
            elif received == steps:
                done.set()

        client.on_partial = arrived
        before, begun = _cpu_seconds(bench.coordinator.pid)[0], time.perf_counter()
        for _ in range(min(STEPS_AHEAD, steps)):
            step()
        await done.wait()
        seconds, cpu = time.perf_counter() - begun, _cpu_seconds(bench.coordinator.pid)[0] - before
        for uid in uids:
            client.abort(uid)
    what = f"coordinator's CPU per partial, {STREAMS} streams a message"
    return [
        Figure("partials_per_second", "partials forwarded", steps * STREAMS / seconds, "1/s"),
        Figure("cpu_us_per_partial", what, cpu / (steps * STREAMS) * 1e6, "µs", "≤ 10"),
    ]
