"""This coordinator and that of Megatron-Core, with Megatron-Core's own client and one engine, interleaved.

    python bench/megatron_coordinator.py --json megatron_coordinator.json

The client, the coordinator and the engine are processes. The client keeps a number of requests open. The engine answers
at once, all requests that it has read in one message, with a request of Megatron-Core. Each round runs both
coordinators, in alternating order, while the processes of the other one are stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import msgpack
import psutil
import torch
import zmq
from megatron.core.inference import inference_client
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_runtime.cli.bench.report import json_file, machine
from megatron_runtime.coordinator import service
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Header, Role

SIDES = ("ours", "megatron")
_SPAWN = multiprocessing.get_context("spawn")
MAX_REQUESTS = 4096
"""Of the engine. Megatron-Core's coordinator needs it for its routing."""


class Tokenizer:
    """Detokenizes in a few microseconds, so that the coordinator is measured."""

    eod = -1

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        return " " * len(tokens)


def serve_ours(pipe: Connection) -> None:
    settings = CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True, timing=Timing(recovery=0.0))
    service.run(settings, tokenizer=Tokenizer(), on_bound=lambda addresses: pipe.send(addresses[Role.CLIENT]))


def serve_megatron(pipe: Connection) -> None:
    module = importlib.import_module("megatron.core.inference.data_parallel_inference_coordinator")
    module.DataParallelInferenceCoordinator(pipe, 1, Tokenizer(), MAX_REQUESTS, hostname="127.0.0.1").start()


def serve_engine(address: str, pipe: Connection, prompt_tokens: int, generated_tokens: int) -> None:
    """Register as an engine of Megatron-Core, and answer all requests that have arrived with one message."""
    request = DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=torch.zeros(prompt_tokens, dtype=torch.int64),
        sampling_params=SamplingParams(num_tokens_to_generate=generated_tokens),
        generated_tokens=list(range(generated_tokens)),
    )
    template = request.serialize() | {"prompt": "", "status": "COMPLETED"}
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, b"mp-coord-0")
        dealer.connect(address)
        dealer.send(b"")
        time.sleep(1)  # nothing confirms the registration
        pipe.send("registered")
        while True:
            messages = [dealer.recv()]
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(dealer.recv(zmq.NOBLOCK))
            requests = [msgpack.unpackb(message) for message in messages]
            answers = [
                template | {"request_id": number} for header, number, *_ in requests if header == Header.SUBMIT_REQUEST
            ]
            if answers:
                dealer.send(msgpack.packb([int(Header.ENGINE_REPLY), answers]))


def be_client(pipe: Connection, address: str, open_requests: int, prompt_tokens: int, generated_tokens: int) -> None:
    """Send the number of answers after each "count" of the parent."""
    asyncio.run(_be_client(pipe, address, open_requests, prompt_tokens, generated_tokens))


async def _be_client(
    pipe: Connection, address: str, open_requests: int, prompt_tokens: int, generated_tokens: int
) -> None:
    client = inference_client.InferenceClient(address, deserialize=True)
    client.start()
    params = SamplingParams(num_tokens_to_generate=generated_tokens)
    prompt = list(range(prompt_tokens))
    answers = 0

    def submit() -> None:
        client.add_request(prompt, params).add_done_callback(answered)

    def answered(future: asyncio.Future[Any]) -> None:
        nonlocal answers
        future.result()
        answers += 1
        submit()

    for _ in range(open_requests):
        submit()
    while True:
        if pipe.poll():
            pipe.recv()
            pipe.send((answers, time.perf_counter()))
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def process(target: Any, *arguments: Any) -> Iterator[multiprocessing.process.BaseProcess]:
    child = _SPAWN.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


class Side:
    """The processes of one coordinator. Only between resume() and pause() they run."""

    def __init__(self, side: str, stack: contextlib.ExitStack, open_requests: int, *sizes: int) -> None:
        address, theirs = _SPAWN.Pipe(duplex=False)
        self._client, ours = _SPAWN.Pipe()
        serve = serve_ours if side == "ours" else serve_megatron
        self._coordinator = stack.enter_context(process(serve, theirs))
        where = address.recv()
        engine = stack.enter_context(process(serve_engine, where, ours, *sizes))
        self._client.recv()  # the first peer of Megatron-Core's coordinator has to be the engine
        client = stack.enter_context(process(be_client, ours, where, open_requests, *sizes))
        self._pids = [child.pid for child in (client, engine, self._coordinator)]
        while self._count()[0] < 4 * open_requests:
            time.sleep(0.1)
        self.pause()

    def pause(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in reversed(self._pids):
            os.kill(pid, signal.SIGCONT)

    def measure(self, seconds: float) -> dict[str, float]:
        """Return requests per second and the coordinator's CPU time of a request in microseconds."""
        self.resume()
        time.sleep(0.5)
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
        """Return the number of answers, the time of the count, and the CPU time of the coordinator."""
        self._client.send("count")
        answers, at = self._client.recv()
        times = psutil.Process(self._coordinator.pid).cpu_times()
        return answers, at, times.user + times.system


@click.command()
@click.option("--open", "open_counts", multiple=True, type=int, default=(64, 1024), show_default=True)
@click.option("--rounds", default=10, show_default=True, help="Paired runs of each number of open requests.")
@click.option("--seconds", default=3.0, show_default=True, help="Duration of a run.")
@click.option("--prompt-tokens", default=16, show_default=True)
@click.option("--generated-tokens", default=16, show_default=True)
@json_file
def main(
    *,
    open_counts: tuple[int, ...],
    rounds: int,
    seconds: float,
    prompt_tokens: int,
    generated_tokens: int,
    json_file: Path | None,
) -> None:
    """Measure both coordinators with Megatron-Core's client."""
    logging.disable(logging.INFO)
    results = []
    for open_requests in open_counts:
        runs: list[dict[str, dict[str, float]]] = []
        with contextlib.ExitStack() as stack:
            sides = {side: Side(side, stack, open_requests, prompt_tokens, generated_tokens) for side in SIDES}
            for number in range(rounds):
                pair = {side: sides[side].measure(seconds) for side in (SIDES if number % 2 == 0 else SIDES[::-1])}
                runs.append(pair)
                click.echo(f"{open_requests} open, round {number + 1}: {json.dumps(pair)}")
        medians = {
            side: {key: statistics.median(run[side][key] for run in runs) for key in runs[0][side]} for side in SIDES
        }
        ratio = statistics.median(run["ours"]["requests_per_s"] / run["megatron"]["requests_per_s"] for run in runs)
        results.append({"open": open_requests, "median": medians, "median_of_ratios": round(ratio, 3), "rounds": runs})
        click.echo(f"{open_requests} open: {json.dumps(medians)}, requests/s of ours / megatron: {ratio:.3f}")
    if json_file is not None:
        options = {"seconds": seconds, "prompt_tokens": prompt_tokens, "generated_tokens": generated_tokens}
        document = {"benchmark": "megatron_coordinator", "machine": machine(), "options": options, "results": results}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
