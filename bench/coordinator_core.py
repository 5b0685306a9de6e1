"""Measures the CPU time of the coordinator's core per request, by routing policy, without sockets.

    python bench/coordinator_core.py --engines 4 --json coordinator_core.json

A request has a prompt of 1,000 tokens, half of which is one of eight shared prefixes. Batches of requests of all
policies alternate in this process. The benchmark measures the CPU time of the thread and the number of Python
instructions. Other processes hardly affect the CPU time, and do not affect the number of instructions. `megatron bench
coordinator` measures the whole coordinator.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import click
import numpy as np

from megatron_runtime.cli.bench.report import Figure, json_file, report
from megatron_runtime.cli.options import ROUTING_POLICIES
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.protocol.codec import Frames, pack
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import Dispatch, Final, Heartbeat, Hello, Submit
from megatron_runtime.protocol.request_meta import RequestMeta

OPEN_REQUESTS = 128
PROMPT_TOKENS, NUM_PROMPTS, NUM_PREFIXES = 1000, 512, 8
BATCH = 250
"""Number of requests per batch. The policies alternate after each batch."""
INSTRUCTION_REQUESTS = 400
"""Number of requests whose instructions are counted. Counting takes a hundred times as long as running."""
CLIENT = int(Role.CLIENT), b"client"


class Pool:
    """The core of a coordinator, with running engines and one client."""

    def __init__(self, policy: str, engines: int) -> None:
        never = 1e9
        timing = Timing(recovery=0.0, suspect=never, dead=never, client_dead=never)
        settings = CoordinatorSettings(routing_policy=RoutingPolicy(policy), timing=timing)
        self.core = CoordinatorCore(settings, now=0.0, randbits=random.Random(7).getrandbits)
        self.core.start(0.0)
        for number in range(engines):
            peer, running = (int(Role.ENGINE), b"engine-%d" % number), EngineState.RUNNING
            hello = Hello(
                role=Role.ENGINE,
                name=f"engine-{number}",
                incarnation=1,
                serving=True,
                state=running,
                max_requests=OPEN_REQUESTS,
                max_tokens=2048,
                block_size_tokens=256,
            )
            self.core.received(0.0, peer, hello.to_frames())
            rates = Heartbeat(incarnation=1, state=running, prefill_rate=60_000.0, decode_rate=25e6)
            self.core.received(0.0, peer, rates.to_frames())
        self.core.received(0.0, CLIENT, Hello(role=Role.CLIENT, name="client", incarnation=1).to_frames())
        self.core.run_timers(2.0)
        self.core.context.effects.clear()
        rng, shared = np.random.default_rng(1), PROMPT_TOKENS // 2
        self._prompts = rng.integers(50_000, size=(NUM_PROMPTS, PROMPT_TOKENS), dtype=np.int32)
        self._prompts[:, :shared] = rng.choice(self._prompts[:NUM_PREFIXES, :shared], size=NUM_PROMPTS)
        self._number = 0
        self._open: deque[tuple[Any, Dispatch]] = deque()
        self._reply = pack({"status": "COMPLETED", "finish_reason": "length", "generated_length": 1})

    def requests(self, count: int) -> list[Frames]:
        """Return the messages of the next `count` requests."""
        meta, params = RequestMeta(seed=1), pack({"num_tokens_to_generate": 1})
        numbers = range(self._number, self._number + count)
        self._number += count
        return [
            Submit(n.to_bytes(16, "little"), meta, self._prompts[n % NUM_PROMPTS].tobytes(), b"", params).to_frames()
            for n in numbers
        ]

    def run(self, messages: list[Frames]) -> None:
        """Pass requests to the coordinator's core.

        After each request, answer the oldest open request if more than OPEN_REQUESTS requests are open.
        """
        core, effects = self.core, self.core.context.effects
        for message in messages:
            core.received(2.0, CLIENT, message)
            self._open.extend((peer, sent) for peer, sent in effects if isinstance(sent, Dispatch))
            effects.clear()
            if len(self._open) > OPEN_REQUESTS:
                peer, dispatch = self._open.popleft()
                final = Final(dispatch.dispatch_id, dispatch.uid, b"\1\0\0\0", self._reply)
                core.received(2.0, peer, final.to_frames())
                effects.clear()

    def microseconds(self) -> float:
        """Return the CPU time per request in microseconds, as the mean over a batch."""
        messages = self.requests(BATCH)
        begun = time.thread_time_ns()
        self.run(messages)
        return (time.thread_time_ns() - begun) / BATCH / 1000

    def instructions(self) -> float:
        """Return the number of Python instructions per request."""
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == "opcode"
            return trace

        messages = self.requests(INSTRUCTION_REQUESTS)
        sys.settrace(trace)
        try:
            self.run(messages)
        finally:
            sys.settrace(None)
        return count / INSTRUCTION_REQUESTS


@click.command()
@click.option(
    "--policy", "policies", multiple=True, type=ROUTING_POLICIES, default=["LoadBalanced", "LongestPrefix", "LeastCost"]
)
@click.option("--engines", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--batches", type=click.IntRange(min=1), default=40, show_default=True, help="Of each policy.")
@json_file
def main(*, policies: tuple[str, ...], engines: int, batches: int, json_file: Path | None) -> None:
    """Measure the CPU time and the Python instructions of a request in the coordinator's core."""
    pools = {policy: Pool(policy, engines) for policy in policies}
    for pool in pools.values():
        pool.run(pool.requests(4000))
    gc.collect()
    gc.freeze()
    gc.disable()
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    for _ in range(batches):
        for policy, pool in pools.items():
            times[policy].append(pool.microseconds())
        gc.collect()
    figures = []
    for policy, pool in pools.items():
        figures += [
            Figure(f"{policy}_us", f"{policy}, CPU time", float(np.quantile(times[policy], 0.1)), "us"),
            Figure(f"{policy}_instructions", f"{policy}, instructions", pool.instructions(), ""),
        ]
    options = {"engines": engines, "batches": batches, "open_requests": OPEN_REQUESTS, "prompt_tokens": PROMPT_TOKENS}
    report("coordinator_core", "A request in the coordinator's core, 10th percentile", options, figures, json_file)


if __name__ == "__main__":
    main()
