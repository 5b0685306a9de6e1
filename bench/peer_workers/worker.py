"""What every worker of bench/peers.py does: load a model, then answer lines of JSON. Standard library only."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], int], None]
"""Generate so many tokens after each prompt, greedily, ending none early."""


def serve(load: Callable[[], tuple[Generate, int]]) -> None:
    """`load` returns how to generate, and the size of the vocabulary. The seconds it takes are reported."""
    # Libraries print; the answers go where standard output was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    generate, vocabulary = load()
    print(json.dumps({"load_seconds": time.perf_counter() - begun}), file=answers)
    for line in sys.stdin:
        ask = json.loads(line)
        rng = random.Random(ask["seed"])
        prompts = [[rng.randrange(10, vocabulary) for _ in range(ask["prompt_tokens"])] for _ in range(ask["batch"])]
        begun = time.perf_counter()
        generate(prompts, ask["new_tokens"])
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "peak_rss_mib": peak_rss_mib()}), file=answers)


def peak_rss_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
