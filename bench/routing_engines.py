"""Compares routing policies with native engines on this machine, on one trace of `megatron bench routing`.

    python bench/routing_engines.py --json routing_engines.json

Each policy has its own `megatron serve` with the same engines. Each round sends one trace to every server, one server
at a time, in alternating order. Requests are sent at their arrival times, whether earlier requests are answered or not.
The token counts of the trace are multiplied by --scale, so that a CPU computes the longest prompt within seconds. The
first tenth of the requests is not measured. The servers share the CPUs, so use an idle machine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
import numpy as np
import uvloop
from peer_bench.cells import Engine
from peer_bench.servers import Server
from peers import commit

from megatron_runtime.cli.api_client import EventReader
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.bench.routing import SHAPES, SHORT_TOKENS, synthesised
from megatron_runtime.cli.bench.simulated_pool import TraceRequest
from megatron_runtime.cli.options import ROUTING_POLICIES
from megatron_runtime.process.options import FiniteRange
from megatron_runtime.protocol import strict_json as json

MAX_TOKENS, MIN_TOKENS = 4000, 2
"""Maximum and minimum number of tokens of a prompt after it is scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a round.

    scale:      factor for the token counts of the trace.
    vocabulary: size of the vocabulary, from which random token ids are drawn.
    """

    trace: Sequence[TraceRequest]
    scale: float
    vocabulary: int = 1000

    def body(self, request: TraceRequest, model: str) -> dict[str, Any]:
        count = min(MAX_TOKENS, max(MIN_TOKENS, round(len(request.prompt) * self.scale)))
        return {
            "model": model,
            "prompt": (request.prompt[:count] % self.vocabulary).tolist(),
            "max_tokens": max(1, round(request.tokens * self.scale)),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


async def run(server: Server, load: Load) -> dict[str, float]:
    """Send the requests at their arrival times. Return percentiles in milliseconds.

    The percentiles describe the time between tokens, the time to first token of all prompts, and the time to first
    token of prompts that had fewer than SHORT_TOKENS tokens before scaling.

    Raises httpx.HTTPError if a request fails.
    """
    gaps: list[float] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        begun = time.perf_counter()

        async def answered(request: TraceRequest) -> float:
            await asyncio.sleep(request.arrival - (time.perf_counter() - begun))
            last = sent = time.perf_counter()
            first = None
            async with http.stream(
                "POST", f"{server.url}/v1/completions", json=load.body(request, server.model)
            ) as reply:
                reply.raise_for_status()
                events = EventReader()
                async for data in reply.aiter_raw():
                    if any(event.get("choices") for event in events.feed(data)):
                        now = time.perf_counter()
                        if first is None:
                            first = now - sent
                        else:
                            gaps.append(now - last)
                        last = now
            if first is None:
                raise httpx.RemoteProtocolError("an answer has no token")
            return first

        waits = await asyncio.gather(*(answered(request) for request in load.trace))
    measured = list(zip(waits, load.trace, strict=True))[len(waits) // 10 :]
    series = {
        "ttft": [wait for wait, _ in measured],
        "ttft_short": [wait for wait, request in measured if len(request.prompt) < SHORT_TOKENS],
        "gap": gaps,
    }
    return {
        f"{key}_p{percent}_ms": 1000 * float(np.percentile(seconds or [0.0], percent))
        for key, seconds in series.items()
        for percent in (50, 90, 99)
    }


def start(policy: str, *, model: str, engines: int, threads: int, max_tokens: int) -> Server:
    options = {"--model": model, "--engines": engines, "--threads": threads, "--max-tokens": max_tokens}
    arguments = [part for name, value in options.items() for part in (name, str(value))]
    program = [sys.executable, "-P", "-m", "megatron_runtime.cli", "serve", "--device", "cpu", "--port", "{port}"]
    server = Server(Engine(policy, model, [*program, *arguments, "--routing-policy", policy]), "/readyz")
    server.start(os.sched_getaffinity(0))
    return server


@click.command()
@click.option("--policy", "policies", multiple=True, type=ROUTING_POLICIES, default=["LoadBalanced", "LeastCost"])
@click.option("--trace", type=click.Choice(list(SHAPES)), default="mixed", show_default=True)
@click.option("--scale", type=FiniteRange(0.001, 1), default=0.1, show_default=True, help="Of numbers of tokens.")
@click.option("--rate", type=FiniteRange(0.01, 1000), default=4.0, show_default=True, help="Requests per second.")
@click.option("--requests", type=click.IntRange(min=10), default=200, show_default=True, help="Of a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Each has its own trace.")
@click.option("--model", default="builtin:smollm2-135m", show_default=True)
@click.option("--engines", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of an engine.")
@click.option("--max-tokens", type=click.IntRange(min=64), default=256, show_default=True, help="Of a step.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
def main(
    *,
    policies: tuple[str, ...],
    trace: str,
    scale: float,
    rate: float,
    requests: int,
    rounds: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Compare routing policies with native engines on this machine.

    Each other policy is compared with the first policy.
    """
    rows: dict[str, list[dict[str, float]]] = {policy: [] for policy in policies}
    servers: dict[str, Server] = {}
    try:
        for policy in policies:
            servers[policy] = start(policy, **options)
        for number in range(rounds):
            load = Load(trace=synthesised(trace, requests=requests, rate=rate, seed=number + 1), scale=scale)
            for policy in sorted(policies, reverse=number % 2 == 1):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    rows[policy].append(runner.run(run(servers[policy], load)))
    finally:
        for server in servers.values():
            server.close()
    figures = {
        policy: {key: round(median(row[key] for row in policy_rows), 2) for key in policy_rows[0]}
        for policy, policy_rows in rows.items()
    }
    for key, before in figures[policies[0]].items():
        later = [
            f"{policy} {figures[policy][key]:g} ({figures[policy][key] / before - 1:+.0%})" for policy in policies[1:]
        ]
        click.echo(f"{key}: {policies[0]} {before:g}; {'; '.join(later)}")
    if json_file is not None:
        settings = {"trace": trace, "scale": scale, "rate": rate, "requests": requests, "rounds": rounds, **options}
        document = {"commit": commit(), "machine": machine(), "options": settings, "figures": figures, "rounds": rows}
        json_file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
