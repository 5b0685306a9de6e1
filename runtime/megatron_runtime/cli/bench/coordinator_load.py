"""The loads of `megatron bench coordinator`, each on a coordinator in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from megatron_runtime.cli.bench.forwarder import Forwarder
from megatron_runtime.cli.bench.lean_peers import DirectEngine, LeanClient, LeanEngine, LeanPeer
from megatron_runtime.cli.bench.pauses import PauseWatch, Trip, undisturbed
from megatron_runtime.cli.bench.report import Figure, percentile
from megatron_runtime.cli.bench.surroundings import Surroundings
from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import tokens_from_bytes, tokens_to_bytes
from megatron_runtime.requests.sampling_params import SamplingParams

SHARED_PREFIXES = 8
DISTINCT_PROMPTS = 512
WINDOW = 16
"""Requests that a client of the closed loop has open at once."""
ROUNDS = 5
"""Coordinator, forwarder and nobody take turns so often: what disturbs the machine for seconds disturbs them alike."""
SEQUENTIAL_REQUESTS = 2000
OPEN_LOOP_SECONDS = 5
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


@dataclass(frozen=True, slots=True)
class Way:
    """From clients to engines. address: where more clients connect. pid: of the process between, or of this one."""

    clients: Sequence[LeanClient]
    engines: Sequence[LeanEngine | DirectEngine]
    address: str
    pid: int


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
        rng = random.Random(1)
        half = options.prompt_tokens // 2
        prefixes = [rng.choices(range(50_000), k=half) for _ in range(SHARED_PREFIXES)]
        self.prompts = [
            tokens_to_bytes(rng.choice(prefixes) + rng.choices(range(50_000), k=options.prompt_tokens - half))
            for _ in range(DISTINCT_PROMPTS)
        ]

    def prompt(self, number: int) -> bytes:
        return self.prompts[number % DISTINCT_PROMPTS]

    def close(self) -> None:
        self.coordinator.stop()

    @asynccontextmanager
    async def ways(self, *, clients: int, engines: int) -> AsyncIterator[tuple[Way, Way, Way]]:
        """Through the coordinator, through a forwarder, and with nobody between."""
        with Forwarder() as forwarder:
            async with (
                self.peers(clients=clients, engines=engines) as through,
                self.direct_peers(forwarder, clients=clients, engines=engines) as forwarded,
                self.direct_peers(clients=clients, engines=engines) as direct,
            ):
                yield (
                    Way(*through, self.coordinator.addresses[Role.CLIENT], self.coordinator.pid),
                    Way(*forwarded, forwarder.client_address, forwarder.pid),
                    Way(*direct, direct[1][0].address, os.getpid()),
                )

    @asynccontextmanager
    async def direct_peers(
        self, forwarder: Forwarder | None = None, *, clients: int, engines: int
    ) -> AsyncIterator[tuple[list[LeanClient], list[DirectEngine]]]:
        """Peers that no coordinator is between, but perhaps a forwarder."""
        behind = forwarder.engine_address if forwarder is not None else None
        engine_peers = [DirectEngine(forwarder_address=behind) for _ in range(engines)]
        for engine in engine_peers:
            await engine.start()
        client_peers = [
            LeanClient(
                forwarder.client_address if forwarder is not None else engine_peers[number % engines].address,
                f"direct-{number}",
            )
            for number in range(clients)
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*(client.start() for client in client_peers)), 30)
            yield client_peers, engine_peers
        finally:
            for client in client_peers:
                await client.close()
            for engine in engine_peers:
                engine.close()

    @asynccontextmanager
    async def peers(
        self, *, clients: int, engines: int, answers: bool = True
    ) -> AsyncIterator[tuple[list[LeanClient], list[LeanEngine]]]:
        addresses = self.coordinator.addresses
        most = max(STREAMS, self.options.clients * WINDOW)
        engine_peers = [
            LeanEngine(addresses[Role.ENGINE], f"engine-{number}", max_requests=most, answers=answers)
            for number in range(engines)
        ]
        client_peers = [LeanClient(addresses[Role.CLIENT], f"client-{number}") for number in range(clients)]
        peers: list[LeanPeer] = [*engine_peers, *client_peers]
        try:
            await asyncio.wait_for(asyncio.gather(*(peer.start() for peer in peers)), 30)
            yield client_peers, engine_peers
        finally:
            for peer in peers:
                await peer.close()


async def run(options: LoadOptions) -> list[Figure]:
    """All parts, one after the other, on one coordinator."""
    bench = Bench(options)
    try:
        surroundings = Surroundings(bench.process)
        await asyncio.sleep(1)  # until a fresh process is idle
        figures = [
            Figure("start_seconds", "start to address", bench.start_seconds, "s", "< 0.7"),
            Figure("idle_rss_mib", "memory, idle", bench.process.memory_info().rss / (1 << 20), "MiB", "< 80"),
        ]
        figures += await sequential(bench)
        figures += await throughput(bench)
        figures += await added_latency(bench)
        figures += await partials(bench)
        return figures + surroundings.figures()
    finally:
        bench.close()


async def sequential(bench: Bench) -> list[Figure]:
    """One inference client, one request at a time, answered at once."""
    each = max(1, min(bench.options.requests, SEQUENTIAL_REQUESTS) // ROUNDS)
    async with bench.ways(clients=0, engines=1) as ways:
        clients = [InferenceClient(way.address, deserialize=False) for way in ways]
        latencies: list[list[float]] = [[] for _ in ways]
        try:
            for client in clients:
                await client.start()
            for begin in range(0, ROUNDS * each, each):
                for client, found in zip(clients, latencies, strict=True):
                    found += [await _one(client, bench.prompt(number)) for number in range(begin, begin + each)]
        finally:
            for client in clients:
                client.stop()
    through, forwarded, direct = latencies
    what = "one client in sequence"
    return [
        Figure("sequential_p50_ms", f"{what}, p50", percentile(through, 50), "ms", "≤ 0.5"),
        Figure("sequential_p99_ms", f"{what}, p99", percentile(through, 99), "ms"),
        Figure("floor_sequential_p50_ms", f"{what}, through the forwarder, p50", percentile(forwarded, 50), "ms"),
        Figure("direct_sequential_p50_ms", f"{what}, with nobody between, p50", percentile(direct, 50), "ms"),
    ]


async def _one(client: InferenceClient, prompt: bytes) -> float:
    """Milliseconds that a request takes, as its client sees it."""
    tokens, params = tokens_from_bytes(prompt).tolist(), SamplingParams(num_tokens_to_generate=1)
    begun = time.perf_counter()
    await client.add_request(tokens, params)
    return (time.perf_counter() - begun) * 1000


@dataclass(slots=True)
class Used:
    """By closed loops: wall-clock seconds, and processor seconds of all threads and of the first, not ZeroMQ's."""

    seconds: float = 0.0
    all_threads: float = 0.0
    own_thread: float = 0.0


async def throughput(bench: Bench) -> list[Figure]:
    """Closed loop: every client keeps WINDOW requests open."""
    options = bench.options
    each = max(1, options.requests // ROUNDS)
    used, floor = Used(), Used()
    async with bench.ways(clients=options.clients, engines=options.engines) as (through, forwarded, _):
        for _ in range(ROUNDS):
            for way, sums in ((through, used), (forwarded, floor)):
                await _closed_loop(bench, way, sums, count=each)
    requests = ROUNDS * each
    tokens = f"{options.prompt_tokens}-token prompts"
    own = "of it in its own thread, not ZeroMQ's"
    all_us, own_us, floor_us = (
        seconds / requests * 1e6 for seconds in (used.all_threads, used.own_thread, floor.all_threads)
    )
    share = 100 * floor_us / all_us if all_us else 0.0
    rate = requests / used.seconds
    return [
        Figure("requests_per_second", f"requests, {tokens}, {options.clients} clients", rate, "1/s"),
        Figure("cpu_us_per_request", "coordinator's CPU per request", all_us, "µs", "≤ 100"),
        Figure("own_thread_us_per_request", own, own_us, "µs"),
        Figure("floor_us_per_request", "CPU per request of a forwarder that does nothing", floor_us, "µs"),
        Figure("floor_percent", "the forwarder's share of the coordinator's CPU", share, "%"),
    ]


async def _closed_loop(bench: Bench, way: Way, used: Used, *, count: int) -> None:
    """`count` requests, and what they took of the process in the middle added to `used`."""
    done = asyncio.Event()
    submitted = answers = 0

    def submit(client: LeanClient) -> None:
        nonlocal submitted
        client.submit(bench.prompt(submitted))
        submitted += 1

    def answered(client: LeanClient) -> None:
        nonlocal answers
        answers += 1
        if submitted < count:
            submit(client)
        elif answers == count:
            done.set()

    for client in way.clients:
        client.on_final = lambda _uid, client=client: answered(client)  # type: ignore[misc]
    (all_threads, own_thread), begun = _cpu_seconds(way.pid), time.perf_counter()
    for number in range(min(count, WINDOW * len(way.clients))):
        submit(way.clients[number % len(way.clients)])
    await done.wait()
    used.seconds += time.perf_counter() - begun
    all_now, own_now = _cpu_seconds(way.pid)
    used.all_threads += all_now - all_threads
    used.own_thread += own_now - own_thread


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Of a process so far: of all its threads, and of the first, which is not ZeroMQ's."""
    times = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    return sum(times.values()), times[pid]


async def added_latency(bench: Bench) -> list[Figure]:
    """What a request and its answer spend between client and engine, both ways, more than without a coordinator."""
    options = bench.options
    each = max(1, min(options.requests, options.rate * OPEN_LOOP_SECONDS) // ROUNDS)
    async with bench.ways(clients=options.clients, engines=options.engines) as ways:
        trips = await _in_turns(bench, ways, each)
        # Whoever watches wakes thousands of times a second: a load of its own on most virtual machines.
        with PauseWatch() as watch:
            watched = await _in_turns(bench, ways, each)
    at = f"at {options.rate:,} requests/s"
    figures = _added(*trips, at=at)
    if watch.pauses is None:
        return figures
    kept = [undisturbed(found, watch.pauses) for found in watched]
    if all(kept):
        figures += _added(*kept, at=f"{at}, undisturbed", prefix="undisturbed_")
    share = 100 * len(kept[0]) / len(watched[0])
    return [*figures, Figure("undisturbed_percent", "coordinator's requests that nothing disturbed", share, "%")]


async def _in_turns(bench: Bench, ways: Sequence[Way], each: int) -> list[list[Trip]]:
    """ROUNDS times `each` requests by every way."""
    trips: list[list[Trip]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, found in zip(ways, trips, strict=True):
            found += await _open_loop(bench, way, count=each)
    return trips


def _added(
    through: list[Trip], forwarded: list[Trip], direct: list[Trip], *, at: str, prefix: str = ""
) -> list[Figure]:
    figures = []
    for percent, goal in ((50, ""), (99, "≤ 0.3")):
        all_, floor, least = (
            percentile([trip.on_the_way_ms for trip in trips], percent) for trips in (through, forwarded, direct)
        )
        which = f"{at}, p{percent}"
        figures += [
            Figure(f"{prefix}direct_p{percent}_ms", f"both ways with nobody between {which}", least, "ms"),
            Figure(f"{prefix}floor_added_p{percent}_ms", f"added by the forwarder {which}", floor - least, "ms"),
            Figure(f"{prefix}added_p{percent}_ms", f"added by the coordinator {which}", all_ - least, "ms", goal),
        ]
    return figures


async def _open_loop(bench: Bench, way: Way, *, count: int) -> list[Trip]:
    """Requests at the rate asked for.

    The load does not sleep between them: what its own waking would take is nobody's who stands in the middle.
    """
    rate, clients = bench.options.rate, way.clients
    sent: dict[bytes, float] = {}
    received: dict[bytes, float] = {}

    def answered(uid: bytes) -> None:
        received[uid] = time.perf_counter()

    for engine in way.engines:
        engine.taken = {}
    for client in clients:
        client.on_final = answered
    begun = time.perf_counter()
    for number in range(count):
        due = begun + number / rate
        while (now := time.perf_counter()) < due:  # noqa: ASYNC110 - to sleep is what it must not do
            await asyncio.sleep(0)
        sent[clients[number % len(clients)].submit(bench.prompt(number))] = now
    while len(received) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    taken = {uid: stamps for engine in way.engines for uid, stamps in engine.taken.items()}
    return [
        Trip(sent[uid], end, (taken[uid][0] - sent[uid] + end - taken[uid][1]) * 1000) for uid, end in received.items()
    ]


async def partials(bench: Bench) -> list[Figure]:
    """One engine that generates for STREAMS streams of one client: one message a step."""
    steps = max(1, bench.options.requests // STREAMS * 4)
    async with bench.peers(clients=1, engines=1, answers=False) as ([client], [engine]):
        uids = [client.submit(bench.prompt(number), streaming=True) for number in range(STREAMS)]
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
