"""Measures the latency of a coordinator at a fixed rate of requests. The load generator uses no threads and no sleeps.

    python bench/coordinator_latency.py --rate 1000 --json coordinator_latency.json

A latency is the time that a message takes from a client to an engine, plus the time of the answer. All clients and
engines share the event loop and the clock of this process and read their sockets themselves. So a latency is the time
of the coordinator, the operating system, and the encoding and decoding of the messages. `megatron bench coordinator`
measures the CPU time.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import click
import uvloop

from megatron_runtime.cli.bench.coordinator import Bench, answer
from megatron_runtime.cli.bench.report import Figure, json_file, percentiles, report
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames
from megatron_runtime.protocol.messages import Final, Message
from megatron_runtime.transport.peer_link import PeerLink
from megatron_runtime.transport.zmtp.dealer import Dealer

WARM_UP_REQUESTS = 100


class UnbatchedDealer(Dealer):
    """A Dealer that sends each message separately, like peers in separate processes.

    Batches would cost the coordinator less time.
    """

    def send(self, message: Frames) -> bool:
        is_sent = super().send(message)
        if self._connection is not None:
            self._connection.flush()
        return is_sent


open_unbatched = partial(UnbatchedDealer, max_message_bytes=limits.MAX_ENGINE_MESSAGE_BYTES)


async def measure(*, rate: int, **load: int) -> list[Figure]:
    """Return the latencies of requests at a fixed rate. load: see Bench.start()."""
    bench = Bench.start(open_socket=open_unbatched, **load)
    sent: dict[bytes, float] = {}
    received: dict[bytes, float] = {}

    def on_message(peer: PeerLink, message: Message) -> None:
        if isinstance(message, Final):
            received[message.uid] = time.perf_counter()
        else:
            answer(peer, message)

    try:
        async with bench.peers(bench.clients, bench.engines, on_message) as clients:
            begun = time.perf_counter()
            # The load does not sleep between requests, because its wake-up time would be measured too.
            for number in range(WARM_UP_REQUESTS + bench.requests):
                while (now := time.perf_counter()) < begun + number / rate:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                sent[bench.submit(clients[number % len(clients)], number)] = now
            while len(received) < len(sent):  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        bench.coordinator.stop()
    latencies = [received[uid] - at for uid, at in sent.items()]
    return percentiles("latency", f"client to engine and back at {rate:,} requests/s", latencies[WARM_UP_REQUESTS:])


@click.command()
@click.option("--clients", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--engines", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=5000, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=1024, show_default=True)
@click.option("--rate", type=click.IntRange(min=1), default=1000, show_default=True, help="Requests per second.")
@json_file
def main(*, json_file: Path | None, **values: int) -> None:
    """Measure the latency of a coordinator at a fixed rate of requests."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(measure(**values))
    report("coordinator_latency", "Latency of a coordinator", values, figures, json_file)


if __name__ == "__main__":
    main()
