"""Compares this coordinator with the coordinator of Megatron-Core, in interleaved rounds.

Clients and engines do almost no work.

    python bench/megatron_coordinator.py --json megatron_coordinator.json
    python bench/megatron_coordinator.py --client frames --engines 32 --open 1024 --prompt-tokens 512

A cell is a combination of a client, a number of engines, a prompt length, a routing policy (prefix or load) and a
number of open requests. After each answer, the client sends another request. There are three clients: a client that
sends prepared frames and does not unpack answers, the InferenceClient of Megatron-Core, and the InferenceClient of this
project. One process contains all engines. An engine sends a single message in Megatron-Core's format to answer all
requests that it has read.

The client, the coordinator and the engines are processes. Each round runs both coordinators in alternating order. While
one coordinator runs, the processes of the other are stopped. On a loaded machine, compare the CPU time per request,
which includes all threads of the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import click
import msgpack
import psutil
import torch
import zmq
from megatron.core.inference import inference_client
from megatron.core.inference.config import PrefixCachingCoordinatorPolicy
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_runtime.cli.bench.report import json_file, machine
from megatron_runtime.coordinator import service
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Header, Role

SIDES = ("ours", "megatron")
CLIENTS = ("frames", "theirs", "ours")
_FORK = multiprocessing.get_context("fork")
"""Processes are forked, so that Megatron-Core and torch are imported only once."""
MAX_REQUESTS = 4096
"""Maximum number of requests of an engine. The routing of Megatron-Core's coordinator needs this number."""
BLOCK_TOKENS = 16
SHARED_PREFIXES, DISTINCT_PROMPTS = 8, 64
GENERATED_TOKENS = 16
WARM_UP_SECONDS = 0.5


@dataclass(frozen=True)
class Cell:
    client: Literal["frames", "theirs", "ours"]
    engines: int
    prompt_tokens: int
    by_prefix: bool
    open: int

    def __str__(self) -> str:
        routing = "prefix" if self.by_prefix else "load"
        return f"{self.client}, {self.engines} engines, {self.prompt_tokens} tokens, by {routing}, {self.open} open"

    def prompts(self) -> list[list[int]]:
        """Return the prompts. The first half of each prompt is one of SHARED_PREFIXES prefixes."""
        rng, half = random.Random(1), self.prompt_tokens // 2
        shared = [[rng.randrange(50_000) for _ in range(half)] for _ in range(SHARED_PREFIXES)]
        return [
            shared[number % SHARED_PREFIXES] + [rng.randrange(50_000) for _ in range(self.prompt_tokens - half)]
            for number in range(DISTINCT_PROMPTS)
        ]


class Tokenizer:
    """A tokenizer that detokenizes in a few microseconds, so that the coordinator's time dominates the measured
    time.
    """

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        return " " * len(tokens)


def serve_ours(pipe: Connection, cell: Cell) -> None:
    settings = CoordinatorSettings(
        listen="127.0.0.1",
        client_port=0,
        single_port=True,
        routing_policy=RoutingPolicy.LONGEST_PREFIX if cell.by_prefix else RoutingPolicy.LOAD_BALANCED,
        block_size_tokens=BLOCK_TOKENS,
        plain_max_requests=MAX_REQUESTS,
        timing=Timing(recovery=0.0),
    )
    service.run(settings, tokenizer=Tokenizer(), on_bound=lambda addresses: pipe.send(addresses[Role.CLIENT]))


def serve_megatron(pipe: Connection, cell: Cell) -> None:
    module = importlib.import_module("megatron.core.inference.data_parallel_inference_coordinator")
    module.DataParallelInferenceCoordinator(
        pipe,
        cell.engines,
        Tokenizer(),
        MAX_REQUESTS,
        block_size_tokens=BLOCK_TOKENS,
        enable_prefix_caching=cell.by_prefix,
        prefix_caching_coordinator_policy=PrefixCachingCoordinatorPolicy.LONGEST_PREFIX,
        hostname="127.0.0.1",
    ).start()


def serve_engines(address: str, pipe: Connection, cell: Cell) -> None:
    """Register engines with Megatron-Core's protocol, and answer the requests.

    An engine sends a single message to answer all requests that have arrived.
    """
    request = DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=torch.zeros(cell.prompt_tokens, dtype=torch.int64),
        sampling_params=SamplingParams(num_tokens_to_generate=GENERATED_TOKENS),
        generated_tokens=list(range(GENERATED_TOKENS)),
    )
    template = {"request_id": 0, **request.serialize(), "prompt": "", "status": "COMPLETED"}
    begin, _, rest = msgpack.packb(template).partition(msgpack.packb("request_id") + b"\0")
    begin += msgpack.packb("request_id")
    reply = b"\x92" + msgpack.packb(int(Header.ENGINE_REPLY)) + b"\xdd"
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        poller = zmq.Poller()
        for number in range(cell.engines):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.IDENTITY, f"mp-coord-{number}".encode())
            dealer.connect(address)
            dealer.send(b"")
            poller.register(dealer, zmq.POLLIN)
        time.sleep(1)  # the coordinator does not confirm the registration
        pipe.send("registered")
        while True:
            for dealer, _ in poller.poll():
                numbers = [number for message in received(dealer) if (number := number_of(message)) is not None]
                answers = b"".join([begin + number + rest for number in numbers])
                if numbers:
                    dealer.send(reply + len(numbers).to_bytes(4, "big") + answers)


def received(dealer: zmq.Socket[bytes]) -> Iterator[bytes]:
    """Yield all messages that have arrived at a socket, without waiting for more."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield dealer.recv(zmq.NOBLOCK)


def number_of(message: bytes) -> bytes | None:
    """Return the packed id of a SUBMIT_REQUEST; None for other messages."""
    if message[1] != Header.SUBMIT_REQUEST:
        return None
    unpacker = msgpack.Unpacker()
    unpacker.feed(message[2:11])
    return msgpack.packb(unpacker.unpack())


def be_frames(pipe: Connection, address: str, cell: Cell) -> None:
    """Run the client that sends packed requests and does not unpack answers."""
    params = msgpack.packb(SamplingParams(num_tokens_to_generate=GENERATED_TOKENS).serialize())
    bodies = itertools.cycle([msgpack.packb(prompt) + params for prompt in cell.prompts()])
    numbers = itertools.count()
    begin = b"\x94" + msgpack.packb(int(Header.SUBMIT_REQUEST))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(address)
        dealer.send(msgpack.packb([int(Header.CONNECT)]))
        dealer.recv()
        for _ in range(cell.open):
            dealer.send(begin + msgpack.packb(next(numbers)) + next(bodies))
        answers = 0
        while True:
            dealer.poll(10)
            for _ in received(dealer):
                answers += 1
                dealer.send(begin + msgpack.packb(next(numbers)) + next(bodies))
            if pipe.poll():
                pipe.recv()
                pipe.send((answers, time.perf_counter()))


def be_theirs(pipe: Connection, address: str, cell: Cell) -> None:
    async def start() -> inference_client.InferenceClient:
        client = inference_client.InferenceClient(address)
        client.start()
        return client

    asyncio.run(_submit_always(pipe, cell, start))


def be_ours(pipe: Connection, address: str, cell: Cell) -> None:
    async def start() -> InferenceClient:
        client = InferenceClient(inference_coordinator_address=address)
        await client.start()
        return client

    asyncio.run(_submit_always(pipe, cell, start))


async def _submit_always(pipe: Connection, cell: Cell, start: Callable[[], Any]) -> None:
    client = await start()
    params = SamplingParams(num_tokens_to_generate=GENERATED_TOKENS)
    prompts = itertools.cycle(cell.prompts())
    answers = 0

    def submit() -> None:
        client.add_request(next(prompts), params).add_done_callback(answered)

    def answered(future: asyncio.Future[Any]) -> None:
        nonlocal answers
        future.result()
        answers += 1
        submit()

    for _ in range(cell.open):
        submit()
    while True:
        if pipe.poll():
            pipe.recv()
            pipe.send((answers, time.perf_counter()))
        await asyncio.sleep(0.01)


BE_CLIENT = {"frames": be_frames, "theirs": be_theirs, "ours": be_ours}
SERVE = {"ours": serve_ours, "megatron": serve_megatron}


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[multiprocessing.process.BaseProcess]:
    child = _FORK.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


class Side:
    """The three processes of a test: one coordinator, its engines and its client.

    The processes run only between resume() and pause().
    """

    def __init__(self, side: str, stack: contextlib.ExitStack, cell: Cell) -> None:
        address, theirs = _FORK.Pipe(duplex=False)
        self._client, ours = _FORK.Pipe()
        self._coordinator = stack.enter_context(process(SERVE[side], theirs, cell))
        where = address.recv()
        engines = stack.enter_context(process(serve_engines, where, ours, cell))
        self._client.recv()  # the first peers of Megatron-Core's coordinator have to be the engines
        client = stack.enter_context(process(BE_CLIENT[cell.client], ours, where, cell))
        self._pids = [child.pid for child in (client, engines, self._coordinator)]
        while self._count()[0] < 4 * cell.open:
            time.sleep(0.1)
        self.pause()

    def pause(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in reversed(self._pids):
            os.kill(pid, signal.SIGCONT)

    def measure(self, seconds: float) -> dict[str, float]:
        """Return requests per second, and the CPU time of the coordinator per request in microseconds."""
        self.resume()
        time.sleep(WARM_UP_SECONDS)
        before = self._count()
        time.sleep(seconds)
        after = self._count()
        self.pause()
        number = after[0] - before[0]
        return {
            "requests_per_s": round(number / (after[1] - before[1]), 1),
            "cpu_us_per_request": round(1e6 * (after[2] - before[2]) / max(1, number), 1),
        }

    def _count(self) -> tuple[int, float, float]:
        """Return the number of answers so far, the time of this count, and the CPU time of the coordinator so far, in
        seconds.
        """
        self._client.send("count")
        answers, at = self._client.recv()
        times = psutil.Process(self._coordinator.pid).cpu_times()
        return answers, at, times.user + times.system


def measure(cell: Cell, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure our coordinator and Megatron-Core's coordinator in one cell.

    Ratios of rates and of CPU times are ours divided by Megatron-Core's.
    """
    with contextlib.ExitStack() as stack:
        sides = {side: Side(side, stack, cell) for side in SIDES}
        runs = [
            {side: sides[side].measure(seconds) for side in (SIDES if number % 2 == 0 else SIDES[::-1])}
            for number in range(rounds)
        ]
    names = runs[0]["ours"]
    return {
        "cell": asdict(cell),
        "median": {
            side: {name: statistics.median(run[side][name] for run in runs) for name in names} for side in SIDES
        },
        "ratio": {
            name: round(statistics.median(run["ours"][name] / run["megatron"][name] for run in runs), 3)
            for name in names
        },
        "rounds": runs,
    }


def _choice(name: str, values: tuple[Any, ...], **options: Any) -> Any:
    return click.option(name, multiple=True, default=values, show_default=True, **options)


@click.command()
@_choice("--client", CLIENTS, type=click.Choice(CLIENTS))
@_choice("--engines", (2, 32, 256), type=int)
@_choice("--prompt-tokens", (32, 512), type=int)
@_choice("--routing", ("load", "prefix"), type=click.Choice(("load", "prefix")))
@_choice("--open", (64, 1024), type=int, help="Number of open requests.")
@click.option("--rounds", default=5, show_default=True, help="Number of paired runs per cell.")
@click.option("--seconds", default=3.0, show_default=True, help="Duration of a run in seconds.")
@json_file
def main(
    *,
    client: tuple[Any, ...],
    engines: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    routing: tuple[str, ...],
    open: tuple[int, ...],
    rounds: int,
    seconds: float,
    json_file: Path | None,
) -> None:
    """Measure our coordinator and Megatron-Core's with every combination of values. Each option can be repeated."""
    logging.disable(logging.INFO)
    results = []
    for values in itertools.product(client, engines, prompt_tokens, routing, open):
        cell = Cell(*values[:3], by_prefix=values[3] == "prefix", open=values[4])
        result = measure(cell, rounds=rounds, seconds=seconds)
        results.append(result)
        rates = " / ".join(f"{result['median'][side]['requests_per_s']:,.0f}" for side in SIDES)
        times = " / ".join(f"{result['median'][side]['cpu_us_per_request']:.1f}" for side in SIDES)
        ratio = result["ratio"]["requests_per_s"]
        click.echo(f"{cell}: {ratio:.3f} ({rates} requests/s, {times} us of CPU)")
    if json_file is not None:
        options = {
            "rounds": rounds,
            "seconds": seconds,
            "lowest": min(one["ratio"]["requests_per_s"] for one in results),
        }
        document = {"benchmark": "megatron_coordinator", "machine": machine(), "options": options, "results": results}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
