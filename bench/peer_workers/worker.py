"""The main function of the workers of bench/peers.py, which loads a model and then answers requests.

Each request is a line of JSON. This module uses only the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Generate = Callable[[list[list[int]], int], float]
"""Generates a number of tokens after each prompt, greedily and without an early end.

Returns the seconds until every prompt has its first token.
"""


def serve(load: Callable[[], tuple[Generate, int]], *, libraries: Sequence[str], platform: str | None = None) -> None:
    """Load the model and answer requests until standard input ends.

    load:      returns a function that generates answers, and the size of the vocabulary.
    platform:  library that is imported first. Its time and memory are not attributed to the engine.
    libraries: libraries of the engine, which are imported before the load begins.
    """
    # Libraries print to standard output, so answers are written to a copy of its descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    bare = rss_mib("VmRSS")
    if platform is not None:
        importlib.import_module(platform)
    platform_at, base = time.perf_counter(), rss_mib("VmRSS")
    for library in libraries:
        importlib.import_module(library)
    imported = time.perf_counter()
    generate, vocabulary = load()
    ready = {
        "platform_seconds": platform_at - begun,
        "import_seconds": imported - platform_at,
        "load_seconds": time.perf_counter() - imported,
        "bare_rss_mib": bare,
        "platform_rss_mib": base,
    }
    print(json.dumps(ready), file=answers)
    for line in sys.stdin:
        ask = json.loads(line)
        rng = random.Random(ask["seed"])
        prompts = [[rng.randrange(10, vocabulary) for _ in range(ask["prompt_tokens"])] for _ in range(ask["batch"])]
        begun = time.perf_counter()
        first_seconds = generate(prompts, ask["new_tokens"])
        seconds = time.perf_counter() - begun
        reply = {"seconds": seconds, "first_seconds": first_seconds, "peak_rss_mib": rss_mib("VmHWM")}
        print(json.dumps(reply), file=answers)


def rss_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024
