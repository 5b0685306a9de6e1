"""`megatron bench coordinator`: measures a coordinator with clients and engines that do almost no work."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import click
import numpy as np
import psutil
import uvloop

from megatron_runtime.cli.bench.report import Figure, json_file, percentiles, report
from megatron_runtime.cli.options import COUNT, ROUTING_POLICIES
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.coordinator.spawn import CoordinatorProcess, spawn_coordinator
from megatron_runtime.protocol import messages
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.addresses import CoordinatorAddresses
from megatron_runtime.transport.peer_link import OpenSocket, PeerLink, open_dealer

PREFIXES_PER_ENGINE, DISTINCT_PROMPTS = 2, 512
WINDOW = 16
"""Number of open requests per client in the closed loop."""
SEQUENTIAL_REQUESTS = 2000
STREAMS = 64
STEPS_AHEAD = 16
"""Maximum number of messages with partial answers that have been sent and that the client has not received yet."""
_RATES: dict[str, Any] = {"prefill_rate": 60_000.0, "decode_rate": 25e6}
"""Prefill and decode rates that the engines report for the LeastCost policy: Llama 3.1 8B on one H100, as in
`megatron bench routing`.
"""
_REPLY = messages.pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})
_TOKEN = messages.tokens_to_bytes([1])
_PARAMS = messages.pack({"num_tokens_to_generate": 1})

OnMessage: TypeAlias = Callable[[PeerLink, messages.Message], object]


def answer(engine: PeerLink, message: messages.Message) -> None:
    """Answer a request message to the simulated engine `engine` immediately with one token."""
    if isinstance(message, messages.Dispatch):
        engine.send(messages.Final(message.dispatch_id, message.uid, _TOKEN, _REPLY).to_frames())


@dataclass(kw_only=True)
class Bench:
    """A running coordinator, and the parameters of the load that a benchmark puts on it.

    clients, engines: number of clients and of engines.
    requests:         number of requests in each part of the measurement.
    start_seconds:    seconds from the start of the coordinator process until it reports its address.
    prompts:          token ids of the prompts, int32 [DISTINCT_PROMPTS, tokens]. The first half of each prompt is a
                      prefix that it shares with others. There are PREFIXES_PER_ENGINE prefixes for each engine, so
                      that a policy that routes by prefix can use all engines.
    streams:          number of streams that an engine accepts in addition to the measured requests.
    open_socket:      opens the socket of a client or an engine.
    """

    coordinator: CoordinatorProcess
    start_seconds: float
    clients: int
    engines: int
    requests: int
    prompts: np.ndarray
    streams: int = STREAMS
    open_socket: OpenSocket = open_dealer

    @classmethod
    def start(cls, *, prompt_tokens: int, policy: str = "LongestPrefix", **load: Any) -> Self:
        """Start a coordinator with a routing policy, and return its Bench. load: the other fields of Bench."""
        settings = CoordinatorSettings(
            listen="127.0.0.1",
            client_port=0,
            engine_port=0,
            admin_port=0,
            routing_policy=RoutingPolicy(policy),
            timing=Timing(recovery=0.0),
        )
        rng, half = np.random.default_rng(1), prompt_tokens // 2
        prompts = rng.integers(50_000, size=(DISTINCT_PROMPTS, prompt_tokens), dtype=np.int32)
        prefixes = prompts[: PREFIXES_PER_ENGINE * load["engines"], :half]
        prompts[:, :half] = rng.choice(prefixes, size=DISTINCT_PROMPTS)
        begun = time.perf_counter()
        coordinator = spawn_coordinator(settings)
        return cls(coordinator=coordinator, start_seconds=time.perf_counter() - begun, prompts=prompts, **load)

    @asynccontextmanager
    async def peers(self, clients: int, engines: int, on_message: OnMessage) -> AsyncIterator[list[PeerLink]]:
        """Connect engines and clients to the coordinator, and yield the clients."""
        engine = {
            "role": Role.ENGINE,
            "serving": True,
            "state": EngineState.RUNNING,
            "max_requests": self.streams + self.clients * WINDOW,
            "max_tokens": 2048,
            "block_size_tokens": 256,
        }
        hellos: list[dict[str, Any]] = [
            *({**engine, "name": f"engine-{number}"} for number in range(engines)),
            *({"role": Role.CLIENT, "name": f"client-{number}"} for number in range(clients)),
        ]
        links = [self._connection(hello, on_message) for hello in hellos]
        try:
            await asyncio.gather(*(link.start(connect_timeout_seconds=30) for link in links))
            yield links[engines:]
        finally:
            for link in links:
                link.close("done")

    def _connection(self, hello: dict[str, Any], on_message: OnMessage) -> PeerLink:
        def receive(message: messages.Message) -> None:
            if isinstance(message, messages.Error):
                raise RuntimeError(f"the coordinator rejected a message: {message}")
            on_message(link, message)

        link = PeerLink(
            CoordinatorAddresses(self.coordinator.addresses[hello["role"]]),
            keys=None,
            hello=lambda incarnation: messages.Hello(incarnation=incarnation, **hello),
            on_ack=lambda ack, forgotten: None,
            on_message=receive,
            heartbeat=lambda incarnation: messages.Heartbeat(
                incarnation=incarnation, state=hello.get("state"), **(_RATES if hello["role"] is Role.ENGINE else {})
            ),
            open_socket=self.open_socket,
        )
        return link

    def submit(self, client: PeerLink, number: int, *, streaming: bool = False) -> bytes:
        """Submit a request and return its uid."""
        uid, meta = secrets.token_bytes(16), messages.RequestMeta(streaming=streaming, seed=1)
        prompt = self.prompts[number % DISTINCT_PROMPTS].tobytes()
        client.send(messages.Submit(uid, meta, prompt, b"", _PARAMS).to_frames())
        return uid

    async def closed_loop(
        self, send: Callable[[int], object], window: asyncio.Semaphore, *, count: int, size: int
    ) -> tuple[float, float]:
        """Send `count` messages. Return the elapsed seconds, and the CPU seconds of all threads of the coordinator.

        send:   sends the message with a number from 0 to `count` - 1.
        window: semaphore that limits unanswered messages to `size`. The receiver of an answer releases it.
        """
        process = psutil.Process(self.coordinator.pid)
        before, begun = process.cpu_times(), time.perf_counter()
        for number in range(count):
            await window.acquire()
            send(number)
        for _ in range(size):
            await window.acquire()
        seconds, after = time.perf_counter() - begun, process.cpu_times()
        return seconds, (after.user + after.system) - (before.user + before.system)


async def run(**load: Any) -> list[Figure]:
    """Run all measurements one after another on one coordinator, and return their figures. load: see Bench.start()."""
    bench = Bench.start(**load)
    try:
        await asyncio.sleep(1)  # wait until the new process is idle
        memory = psutil.Process(bench.coordinator.pid).memory_info().rss / (1 << 20)
        return [
            Figure("start_seconds", "start to address", bench.start_seconds, "s", "< 0.7"),
            Figure("idle_rss_mib", "memory, idle", memory, "MiB", "< 80"),
            *await sequential(bench),
            *await throughput(bench),
            *await partials(bench),
        ]
    finally:
        bench.coordinator.stop()


async def sequential(bench: Bench) -> list[Figure]:
    """Return the figures of one client that sends its requests one after another."""
    params = SamplingParams(num_tokens_to_generate=1)
    latencies: list[float] = []
    async with bench.peers(0, 1, answer):
        client = CoordinatorClient(bench.coordinator.address)
        await client.start()
        try:
            for number in range(min(bench.requests, SEQUENTIAL_REQUESTS)):
                tokens = bench.prompts[number % DISTINCT_PROMPTS].tolist()
                begun = time.perf_counter()
                await client.add_request(tokens, params)
                latencies.append(time.perf_counter() - begun)
        finally:
            client.stop()
    return percentiles("sequential", "one client in sequence", latencies, goals=("≤ 0.5", ""))


async def throughput(bench: Bench) -> list[Figure]:
    """Return the figures of a closed loop with WINDOW open requests per client."""
    count, size = bench.requests, WINDOW * bench.clients
    window = asyncio.Semaphore(size)

    def on_message(peer: PeerLink, message: messages.Message) -> None:
        if isinstance(message, messages.Final):
            window.release()
        else:
            answer(peer, message)

    async with bench.peers(bench.clients, bench.engines, on_message) as clients:
        seconds, cpu = await bench.closed_loop(
            lambda number: bench.submit(clients[number % len(clients)], number), window, count=count, size=size
        )
    what = f"requests, {bench.prompts.shape[1]}-token prompts, {bench.clients} clients"
    return [
        Figure("requests_per_second", what, count / seconds, "1/s"),
        Figure("cpu_us_per_request", "coordinator's CPU per request", cpu / count * 1e6, "µs", "≤ 100"),
    ]


async def partials(bench: Bench) -> list[Figure]:
    """Return the figures of one engine that sends tokens of STREAMS streams to one client, in one message per step."""
    steps = max(1, bench.requests // STREAMS * 4)
    window = asyncio.Semaphore(STEPS_AHEAD)
    dispatched: asyncio.Queue[tuple[PeerLink, messages.Dispatch]] = asyncio.Queue()

    def on_message(peer: PeerLink, message: messages.Message) -> None:
        if isinstance(message, messages.Partial):
            window.release()
        elif isinstance(message, messages.Dispatch):
            dispatched.put_nowait((peer, message))

    async with bench.peers(1, 1, on_message) as [client]:
        for number in range(STREAMS):
            bench.submit(client, number, streaming=True)
        streams = [await dispatched.get() for _ in range(STREAMS)]
        engine, first = streams[0]

        def send_step(number: int) -> None:
            """Send one token for each stream, all in one message."""
            entries = [messages.PartialEntry(request.uid, request.dispatch_id, number, 1) for _, request in streams]
            engine.send(messages.Partial(first.route, entries, _TOKEN * STREAMS).to_frames())

        seconds, cpu = await bench.closed_loop(send_step, window, count=steps, size=STEPS_AHEAD)
        for _, request in streams:
            client.send(messages.Abort(request.uid).to_frames())
    what = f"coordinator's CPU per partial, {STREAMS} streams a message"
    return [
        Figure("partials_per_second", "partials forwarded", steps * STREAMS / seconds, "1/s"),
        Figure("cpu_us_per_partial", what, cpu / (steps * STREAMS) * 1e6, "µs", "≤ 10"),
    ]


@click.command()
@click.option("--clients", type=COUNT, default=8, help="Number of concurrent clients.")
@click.option(
    "--engines",
    type=COUNT,
    default=4,
    help="Number of engines, each of which answers every request immediately with one token.",
)
@click.option("--requests", type=COUNT, default=10_000, help="Number of requests in each part of the measurement.")
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=1024, help="Number of tokens per prompt.")
@click.option("--policy", type=ROUTING_POLICIES, default="LongestPrefix", help="Routing policy of the coordinator.")
@json_file
def coordinator(*, json_file: Path | None, **values: Any) -> None:
    """Measure the CPU time per request in the coordinator.

    The coordinator runs in its own process. Minimal clients and engines run in the process of this command. The CPU
    time includes all threads of the coordinator.
    """
    # The load generator runs on the same machine, and must be faster than the coordinator.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(run(**values))
    report("coordinator", "Coordinator", values, figures, json_file)
