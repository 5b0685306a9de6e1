"""Measures the routing cost and memory of one coordinator and of several, with up to 10,000 engines.

    python bench/cells.py --json build/cells.json

This is a simulation without sockets. Each coordinator is the real core (`megatron_runtime.coordinator.core`) with
longest-prefix routing. The simulation passes messages of engines and of one client to the core, and reads the effects
that the core returns. The first half of each prompt is one of (number of engines / 2) shared prefixes. If there are
more engines than a coordinator accepts, the simulation raises the coordinator's limit.

The simulation compares four layouts:

- one coordinator for all engines
- one coordinator for all engines, with the same prefix in all prompts
- cells of --cell engines with one coordinator each, and a router that selects the cell by the prefix
- the same cells, and a router that selects the cells in rotation

The figures of a layout are:

- CPU time of the core per Submit and per Final
- resident memory per engine
- share of requests that went to an engine that had received their prefix before
- maximum number of requests that are open at one engine

The simulation also measures the router's memory per cached block of an engine. A table (.md) and a plot (.svg) are
written next to the figures.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import time
import zlib
from collections import Counter, deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.options import COUNTS
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.records import Engine
from megatron_runtime.coordinator.core.routing import MAX_KNOWN_BLOCKS, EngineRouter
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.protocol import limits, messages
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState

PREFIX_TOKENS = PROMPT_TOKENS = 512
"""Number of tokens in the shared half of a prompt, and in the other half."""
BLOCK_TOKENS = 64
MAX_REQUESTS = 64
"""Maximum number of requests that an engine runs at a time."""
ENGINES_PER_PREFIX = 2
ENGINES_PER_OPEN_REQUEST = 2
ONE, SHARED = "one coordinator", "one coordinator, one prefix"
AFFINE, ROTATION = "cells by prefix", "cells in rotation"

_CLIENT = (Role.CLIENT, b"client")
_PARAMS = messages.pack({"num_tokens_to_generate": 1})
_REPLY = messages.pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})
_TOKEN = messages.tokens_to_bytes([1])
_LEFT, _RIGHT, _TOP, _BOTTOM, _PANEL = 60, 400, 40, 300, 560


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one layout.

    submit_us, final_us: median CPU time of a coordinator per message, in microseconds.
    kib_per_engine: growth of the process's resident memory by the creation of the coordinators, per engine.
    hits:           share of requests that went to an engine that had received their prefix before, 0 to 1.
    max_open:       maximum number of open requests of one engine. On average, an engine has 0.5 open requests.
    """

    layout: str
    engines: int
    cells: int
    submit_us: float
    final_us: float
    kib_per_engine: float
    hits: float
    max_open: int


@dataclass(frozen=True, slots=True)
class Open:
    """A request that an engine has not answered yet."""

    peer: tuple[int, bytes]
    dispatch_id: int
    uid: bytes


class Cell:
    """The core of one coordinator with its engines."""

    def __init__(self, engines: int, *, seed: int) -> None:
        settings = CoordinatorSettings(routing_policy=RoutingPolicy.LONGEST_PREFIX, timing=Timing(recovery=0.0))
        self.core = CoordinatorCore(settings, now=0.0, randbits=random.Random(seed).getrandbits)
        self.core.start(0.0)
        for number in range(engines):
            hello = messages.Hello(
                role=Role.ENGINE,
                name=f"engine-{number}",
                incarnation=number + 1,
                serving=True,
                state=EngineState.RUNNING,
                max_requests=MAX_REQUESTS,
                block_size_tokens=BLOCK_TOKENS,
            )
            self._receive((Role.ENGINE, b"%d" % number), hello.to_frames())
        self._receive(_CLIENT, messages.Hello(role=Role.CLIENT, name="client", incarnation=1).to_frames())
        assert sum(engine.has_room() for engine in self.core.engines) == engines, "an engine was rejected"

    def submit(self, uid: bytes, prompt: bytes) -> tuple[Open, float]:
        """Submit a request to the coordinator's core. Return its dispatch, and the CPU seconds that the core used."""
        frames = messages.Submit(uid, messages.RequestMeta(seed=1), prompt, b"", _PARAMS).to_frames()
        seconds, ((peer, sent),) = self._receive(_CLIENT, frames)
        dispatch = messages.decode(messages.frames_of(sent))
        assert isinstance(dispatch, messages.Dispatch), dispatch
        return Open(peer, dispatch.dispatch_id, uid), seconds

    def finish(self, request: Open) -> float:
        """Send an engine's answer to the coordinator's core. Return the CPU seconds that the core used."""
        frames = messages.Final(request.dispatch_id, request.uid, _TOKEN, _REPLY).to_frames()
        seconds, ((peer, _),) = self._receive(request.peer, frames)
        assert peer == _CLIENT
        return seconds

    def _receive(self, peer: tuple[int, bytes], frames: list[bytes]) -> tuple[float, list[Any]]:
        """Pass a peer's message to the coordinator's core. Return the core's CPU seconds and its effects."""
        begun = time.thread_time()
        self.core.received(0.0, peer, frames)
        seconds = time.thread_time() - begun
        effects, self.core.context.effects = self.core.context.effects, []
        return seconds, effects


def simulate(layout: str, engines: int, cell_size: int, requests: int, seed: int) -> Result:
    """Simulate one of the four layouts of coordinators, and return its figures.

    Warm-up requests come first. Then `requests` requests are measured.
    """
    limits.MAX_ENGINES = max(limits.MAX_ENGINES, engines)
    process, rng = psutil.Process(), np.random.default_rng(seed)
    groups = 1 if layout == SHARED else max(1, engines // ENGINES_PER_PREFIX)
    prefixes = rng.integers(50_000, size=(groups, PREFIX_TOKENS), dtype=np.int32)
    before = process.memory_info().rss
    size = engines if layout in (ONE, SHARED) else cell_size
    cells = [Cell(min(size, engines - first), seed=seed + first) for first in range(0, engines, size)]
    open_requests: deque[tuple[Cell, Open]] = deque()
    given: set[tuple[int, bytes, int]] = set()
    loads: Counter[tuple[int, bytes]] = Counter()
    submits, finals, hits, max_open = [], [], 0, 0
    warm_up = 2 * max(1, engines // ENGINES_PER_PREFIX)
    for number in range(warm_up + requests):
        group = int(rng.integers(len(prefixes)))
        rest = rng.integers(50_000, size=PROMPT_TOKENS, dtype=np.int32)
        chosen = number if layout == ROTATION else zlib.crc32(prefixes[group].tobytes())
        place = chosen % len(cells)
        cell = cells[place]
        request, seconds = cell.submit(number.to_bytes(16), prefixes[group].tobytes() + rest.tobytes())
        open_requests.append((cell, request))
        key = (place, request.peer[1], group)
        loads[key[:2]] += 1
        if number >= warm_up:
            submits.append(seconds)
            hits += key in given
            max_open = max(max_open, loads[key[:2]])
        given.add(key)
        if len(open_requests) > max(1, engines // ENGINES_PER_OPEN_REQUEST):
            done_by, done = open_requests.popleft()
            loads[cells.index(done_by), done.peer[1]] -= 1
            seconds = done_by.finish(done)
            if number >= warm_up:
                finals.append(seconds)
    return Result(
        layout=layout,
        engines=engines,
        cells=len(cells),
        submit_us=round(statistics.median(submits) * 1e6, 1),
        final_us=round(statistics.median(finals) * 1e6, 1),
        kib_per_engine=round((process.memory_info().rss - before) / 1024 / engines, 1),
        hits=round(hits / requests, 3),
        max_open=max_open,
    )


def bytes_per_block() -> float:
    """Return the bytes of memory that the router uses for each block that it records for an engine."""
    router = EngineRouter(RoutingPolicy.LONGEST_PREFIX, block_size_tokens=BLOCK_TOKENS)
    engine = Engine("engine-0", (Role.ENGINE, b"0"), 1, 0, 0.0)
    hashes = [random.Random(1).getrandbits(63) + number for number in range(MAX_KNOWN_BLOCKS)]
    before = psutil.Process().memory_info().rss
    for first in range(0, MAX_KNOWN_BLOCKS, 16):
        router.blocks.give(engine, hashes[first : first + 16])
    # The tables keep the numbers of the list alive, so their size counts too.
    size = psutil.Process().memory_info().rss - before + sum(map(sys.getsizeof, hashes))
    return round(size / MAX_KNOWN_BLOCKS, 1)


def table(document: dict[str, Any]) -> str:
    """Return a Markdown table of the figures."""
    lines = [
        "| layout | engines | coordinators | Submit, µs | Final, µs | KiB per engine | prefix hits | most open |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in document["results"]:
        figures = (f"{entry['submit_us']:.0f}", f"{entry['final_us']:.0f}", f"{entry['kib_per_engine']:.0f}")
        shares = (f"{entry['hits']:.0%}", str(entry["max_open"]))
        cells = (entry["layout"], f"{entry['engines']:,}", str(entry["cells"]), *figures, *shares)
        lines.append(f"| {' | '.join(cells)} |")
    known = document["bytes_per_block"] * MAX_KNOWN_BLOCKS / (1 << 20)
    lines.append(
        f"\nA known block takes {document['bytes_per_block']:.0f} bytes. At most {MAX_KNOWN_BLOCKS:,} blocks are known "
        f"of an engine: {known:.0f} MiB."
    )
    return "\n".join(lines) + "\n"


def plot(document: dict[str, Any]) -> str:
    """Return an SVG plot of the CPU time of a request, and of the share of requests with a cached prefix.

    The x-axis is the number of engines.
    """
    results = document["results"]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _PANEL}" height="340" font-family="sans-serif" '
            'font-size="12">',
            *_panel(results, "submit_us", left=0, title="µs of CPU from Submit to Dispatch, by engines"),
            *_panel(results, "hits", left=_PANEL, title="share of requests with a cached prefix, by engines"),
            "</svg>\n",
        ]
    )


def _panel(results: list[dict[str, Any]], value: str, *, left: int, title: str) -> list[str]:
    counts = sorted({entry["engines"] for entry in results})
    low, high = np.log2(counts[0]), max(np.log2(counts[-1]), np.log2(counts[0]) + 1)
    highest = max(entry[value] for entry in results) or 1.0

    def place(entry: dict[str, Any]) -> tuple[int, int]:
        x = left + _LEFT + (_RIGHT - _LEFT) * (np.log2(entry["engines"]) - low) / (high - low)
        return round(x), round(_BOTTOM - (_BOTTOM - _TOP) * entry[value] / highest)

    lines = [f'<text x="{left + 8}" y="18">{title}</text>']
    for count in counts:
        x, _ = place({"engines": count, value: 0})
        lines.append(f'<text x="{x}" y="322" text-anchor="middle">{count}</text>')
    for shown in (0.0, highest):
        _, y = place({"engines": counts[0], value: shown})
        lines.append(f'<text x="{left + _LEFT - 8}" y="{y}" text-anchor="end">{shown:.3g}</text>')
    names = []
    for layout, colour in ((ONE, "#26a"), (SHARED, "#87b"), (AFFINE, "#284"), (ROTATION, "#c52")):
        own = [entry for entry in results if entry["layout"] == layout]
        if own:
            joined = " ".join(f"{x},{y}" for x, y in map(place, own))
            lines.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"/>')
            names.append((place(own[-1])[1], layout, colour))
    lowest = 0
    for y, layout, colour in sorted(names):
        lowest = max(y + 4, lowest + 14)
        lines.append(f'<text x="{left + _RIGHT + 6}" y="{lowest}" fill="{colour}">{layout}</text>')
    return lines


@click.command()
@click.option("--engines", type=COUNTS, default="16,64,256,1024,2048,4096,10000", show_default=True)
@click.option("--cell", type=click.IntRange(min=1), default=256, show_default=True, help="Number of engines per cell.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Number of measured requests per layout.",
)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default="build/cells.json")
def main(*, engines: tuple[int, ...], cell: int, requests: int, path: Path) -> None:
    """Simulate all layouts, and write figures, a table and a plot."""
    spawn = multiprocessing.get_context("spawn")
    results = []
    for layout in (ONE, SHARED, AFFINE, ROTATION):
        for count in engines:
            if layout in (AFFINE, ROTATION) and count <= cell:
                continue
            # Each layout runs in a new process, because resident memory does not shrink.
            with spawn.Pool(1) as pool:
                result = pool.apply(simulate, (layout, count, cell, requests, 1))
            results.append(asdict(result))
            click.echo(json.dumps(results[-1]))
    with spawn.Pool(1) as pool:
        block = pool.apply(bytes_per_block)
    document = {
        "machine": machine(),
        "options": {"cell": cell, "requests": requests},
        "bytes_per_block": block,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    path.with_suffix(".md").write_text(table(document))
    path.with_suffix(".svg").write_text(plot(document))
    click.echo(table(document))


if __name__ == "__main__":
    main()
