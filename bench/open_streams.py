"""Measures the requests per second of one coordinator by the number of open streams.

    python bench/open_streams.py --json build/open_streams.json

For each number of streams, a new coordinator process with longest-prefix routing starts. Clients open the streams, and
engines send the first token of each stream. Then short requests run in a closed loop while no stream gets a token. Then
all streams get tokens, one after the other. Clients and engines do almost no work and run in this process.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil
import uvloop

from megatron_runtime.cli.bench.coordinator import WINDOW, Bench, answer
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.options import COUNTS
from megatron_runtime.protocol import messages
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.transport.peer_link import PeerLink

OPENING = 256
"""Maximum number of streams that have been submitted and not dispatched yet."""
ENTRIES = 64
"""Maximum number of streams whose tokens are in one message."""
MESSAGES_AHEAD = 16
TOKENS_PER_REQUEST = 8
"""Number of stream tokens that are measured for each measured short request."""
_TOKEN = messages.tokens_to_bytes([1])


@dataclass(frozen=True, slots=True)
class Result:
    """The figures for one number of streams. All times are CPU times of all threads of the coordinator.

    mib: resident memory in MiB when all streams are open and idle.
    requests_per_second, us_per_request: rate and CPU time of the short requests.
    tokens_per_second, us_per_token: rate and CPU time of the streams' tokens.
    """

    streams: int
    mib: float
    requests_per_second: int
    us_per_request: float
    tokens_per_second: int
    us_per_token: float


@dataclass
class Group:
    """Streams of one client at one engine, whose tokens are sent in one message."""

    engine: PeerLink
    dispatches: list[messages.Dispatch]
    sent: int = 0

    def step(self) -> None:
        """Send one token for each stream of the group."""
        entries = [messages.PartialEntry(each.uid, each.dispatch_id, self.sent, 1) for each in self.dispatches]
        self.engine.send(messages.Partial(self.dispatches[0].route, entries, _TOKEN * len(entries)).to_frames())
        self.sent += 1


class Streams:
    """The open streams of all clients, and the semaphore that limits the number of unanswered messages."""

    def __init__(self) -> None:
        self.window = asyncio.Semaphore(0)
        self.waiting: set[bytes] = set()
        self._open: defaultdict[tuple[PeerLink, bytes], list[messages.Dispatch]] = defaultdict(list)

    def receive(self, peer: PeerLink, message: messages.Message) -> None:
        if isinstance(message, messages.Dispatch) and message.uid in self.waiting:
            self.waiting.discard(message.uid)
            self._open[peer, message.route].append(message)
            self.window.release()
        elif isinstance(message, messages.Final | messages.Partial):
            self.window.release()
        else:
            answer(peer, message)

    def groups(self) -> list[Group]:
        return [
            Group(engine, dispatches[first : first + ENTRIES])
            for (engine, _), dispatches in self._open.items()
            for first in range(0, len(dispatches), ENTRIES)
        ]


async def measure(streams: int, *, clients: int, engines: int, requests: int, prompt_tokens: int) -> Result:
    """Return the figures for one number of streams."""
    load = {"clients": clients, "engines": engines, "requests": requests, "streams": streams}
    bench, state = Bench.start(prompt_tokens=prompt_tokens, **load), Streams()
    async with bench.peers(clients, engines, state.receive) as links:

        def open_stream(number: int) -> None:
            state.waiting.add(bench.submit(links[number % clients], number, streaming=True))

        def loop(size: int) -> asyncio.Semaphore:
            state.window = asyncio.Semaphore(size)
            return state.window

        await bench.closed_loop(open_stream, loop(OPENING), count=streams, size=OPENING)
        groups = state.groups()
        first = loop(MESSAGES_AHEAD)
        await bench.closed_loop(lambda number: groups[number].step(), first, count=len(groups), size=MESSAGES_AHEAD)
        mib = psutil.Process(bench.coordinator.pid).memory_info().rss / (1 << 20)
        size = WINDOW * clients
        seconds, cpu = await bench.closed_loop(
            lambda number: bench.submit(links[number % clients], number), loop(size), count=requests, size=size
        )
        steps = len(groups) * -(-TOKENS_PER_REQUEST * requests // streams)
        stream_seconds, stream_cpu = await bench.closed_loop(
            lambda number: groups[number % len(groups)].step(),
            loop(MESSAGES_AHEAD),
            count=steps,
            size=MESSAGES_AHEAD,
        )
        # If engines left with open streams, the coordinator would dispatch these streams to the other engines.
        running = [(group.engine, dispatch) for group in groups for dispatch in group.dispatches]
        await bench.closed_loop(lambda number: answer(*running[number]), loop(OPENING), count=streams, size=OPENING)
    bench.coordinator.stop()
    tokens = steps // len(groups) * streams
    return Result(
        streams=streams,
        mib=round(mib, 1),
        requests_per_second=round(requests / seconds),
        us_per_request=round(cpu / requests * 1e6, 1),
        tokens_per_second=round(tokens / stream_seconds),
        us_per_token=round(stream_cpu / tokens * 1e6, 2),
    )


@click.command()
@click.option("--streams", type=COUNTS, default="64,1000,4000,10000,30000", show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--engines", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default="build/open_streams.json")
def main(*, streams: tuple[int, ...], rounds: int, path: Path, **load: int) -> None:
    """Measure every number in `streams` once per round, and write the figures to a JSON file."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    results = []
    for number in range(rounds):
        for count in streams:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                results.append({"round": number, **asdict(runner.run(measure(count, **load)))})
            click.echo(json.dumps(results[-1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "options": {"rounds": rounds, **load}, "results": results}
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
