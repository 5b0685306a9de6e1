"""This coordinator and that of Megatron-Core 0.16.1, with Megatron-Core's own client and one engine, interleaved.

    python bench/megatron_coordinator.py --json megatron_coordinator.json

The client, the coordinator and the engine are processes. The client keeps a number of requests open. The engine answers
at once, all requests that it has read in one message, with the record of a request of Megatron-Core. Each round runs
both coordinators, in alternating order. The message numbers are the documented ones on both sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import click
import msgpack
import psutil
import torch
import zmq
from megatron.core.inference import headers, inference_client
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron.core.inference.sampling_params import SamplingParams

from megatron_runtime.cli.bench.report import json_file, machine
from megatron_runtime.coordinator import service
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.protocol.headers import Header, Role

SIDES = ("ours", "megatron")
_SPAWN = multiprocessing.get_context("spawn")
_ACKNOWLEDGEMENTS = {"PAUSE_ACK": 90, "STOP_ACK": 91}
DOCUMENTED = Enum(  # type: ignore[misc]
    "Headers",
    {
        name: int(Header[name]) if name in Header.__members__ else _ACKNOWLEDGEMENTS[name]
        for name in headers.Headers.__members__
    },
)
"""Megatron-Core's message names with the documented numbers. Release 0.16.1 numbers them otherwise."""


class Tokenizer:
    """Detokenizes in a few microseconds, so that the coordinator is measured."""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: list[int]) -> str:
        return " " * len(tokens)


def serve_ours(pipe: Connection) -> None:
    settings = CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True, timing=Timing(recovery=0.0))
    service.run(settings, tokenizer=Tokenizer(), on_bound=lambda addresses: pipe.send(addresses[Role.CLIENT]))


def serve_megatron(pipe: Connection) -> None:
    module = importlib.import_module("megatron.core.inference.data_parallel_inference_coordinator")
    module.Headers = DOCUMENTED
    module.socket.gethostname = lambda: "127.0.0.1"
    module.DataParallelInferenceCoordinator(pipe, 1, Tokenizer()).start()


def serve_engine(address: str, prompt_tokens: int, generated_tokens: int) -> None:
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
        while True:
            messages = [dealer.recv()]
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(dealer.recv(zmq.NOBLOCK))
            requests = [msgpack.unpackb(message) for message in messages]
            records = [
                {"requests": [template | {"request_id": number}], "latency": None}
                for header, number, *_ in requests
                if header == Header.SUBMIT_REQUEST
            ]
            if records:
                dealer.send(msgpack.packb([int(Header.ENGINE_REPLY), records]))


class Answer:
    """Megatron-Core's class for a reply: a record in release 0.16.1, a request in the documents."""

    @staticmethod
    def deserialize(reply: dict[str, Any]) -> DynamicInferenceRequest | DynamicInferenceRequestRecord:
        of = DynamicInferenceRequestRecord if "requests" in reply else DynamicInferenceRequest
        return of.deserialize(reply)


def be_client(pipe: Connection, address: str, open_requests: int, prompt_tokens: int, generated_tokens: int) -> None:
    """Send the number of answers after each "count" of the parent."""
    module = cast("Any", inference_client)
    module.Headers, module.DynamicInferenceRequestRecord = DOCUMENTED, Answer
    asyncio.run(_be_client(pipe, address, open_requests, prompt_tokens, generated_tokens))


async def _be_client(
    pipe: Connection, address: str, open_requests: int, prompt_tokens: int, generated_tokens: int
) -> None:
    client = inference_client.InferenceClient(address)
    await client.start()
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


def measure(side: str, *, seconds: float, open_requests: int, prompt_tokens: int, generated_tokens: int) -> Any:
    """Return requests per second and the coordinator's CPU time of a request in microseconds."""
    theirs, ours = _SPAWN.Pipe(), _SPAWN.Pipe()
    sizes = prompt_tokens, generated_tokens
    with contextlib.ExitStack() as stack:
        serve = serve_ours if side == "ours" else serve_megatron
        coordinator = stack.enter_context(process(serve, theirs[1]))
        address = theirs[0].recv()
        stack.enter_context(process(serve_engine, address, *sizes))
        if side == "megatron":
            time.sleep(3)  # its first peer has to be the engine
        stack.enter_context(process(be_client, ours[1], address, open_requests, *sizes))

        def count() -> tuple[int, float, float]:
            ours[0].send("count")
            answers, at = ours[0].recv()
            times = psutil.Process(coordinator.pid).cpu_times()
            return answers, at, times.user + times.system

        while count()[0] < 4 * open_requests:
            time.sleep(0.1)
        before = count()
        time.sleep(seconds)
        after = count()
        number = after[0] - before[0]
        return {
            "requests_per_s": round(number / (after[1] - before[1]), 1),
            "cpu_us_per_request": round(1e6 * (after[2] - before[2]) / max(1, number), 1),
        }


@click.command()
@click.option("--open", "open_counts", multiple=True, type=int, default=(64, 1024), show_default=True)
@click.option("--rounds", default=6, show_default=True, help="Paired runs of each number of open requests.")
@click.option("--seconds", default=5.0, show_default=True, help="Duration of a run.")
@click.option("--prompt-tokens", default=16, show_default=True)
@click.option("--generated-tokens", default=16, show_default=True)
@json_file
def main(*, open_counts: tuple[int, ...], rounds: int, json_file: Path | None, **options: Any) -> None:
    """Measure both coordinators with Megatron-Core's client."""
    logging.disable(logging.INFO)
    results = []
    for open_requests in open_counts:
        runs: list[dict[str, Any]] = []
        for number in range(rounds):
            pair = {}
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                pair[side] = measure(side, open_requests=open_requests, **options)
            runs.append(pair)
            click.echo(f"{open_requests} open, round {number + 1}: {json.dumps(pair)}")
        ratios = [run["ours"]["requests_per_s"] / run["megatron"]["requests_per_s"] for run in runs]
        medians = {side: statistics.median(run[side]["requests_per_s"] for run in runs) for side in SIDES}
        median = statistics.median(ratios)
        results.append({"open": open_requests, "median": medians, "median_of_ratios": round(median, 3), "rounds": runs})
        click.echo(f"{open_requests} open: median {medians}, ours / megatron {median:.3f} ({sorted(ratios)})")
    if json_file is not None:
        document = {"benchmark": "megatron_coordinator", "machine": machine(), "options": options, "results": results}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
