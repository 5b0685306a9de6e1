"""The load of `megatron bench engine`: one engine, in this process, without sockets."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_runtime.backends.native.build import build_native
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.cli.bench.report import Figure
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

PROBE_BYTES = 1 << 28
"""Read to learn the memory bandwidth: far beyond any cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """batch: sizes, each a run of its own. Sizes of prompt and answer in tokens; greedy, nothing ends early."""

    model: str
    dtype: str
    batch: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    threads: int | None
    kv_cache_memory: int


def run(options: LoadOptions) -> list[Figure]:
    engine = build_native(
        EngineSettings(
            coordinator="tcp://127.0.0.1:0",  # never connected to
            name="bench",
            model=options.model,
            dtype=options.dtype,
            max_requests=max(options.batch),
            max_tokens=max(2048, *options.batch),
            max_sequence_length=options.prompt_tokens + options.new_tokens,
            kv_cache_memory=options.kv_cache_memory,
            threads=options.threads,
            prefix_caching=False,
        )
    ).core
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    begun = time.perf_counter()
    executor.load()
    load_seconds = time.perf_counter() - begun
    bound = memory_bandwidth()
    figures = [
        Figure("load_seconds", "weights loaded", load_seconds, "s"),
        Figure("bandwidth_gb_per_s", "memory bandwidth, read", bound / 1e9, "GB/s"),
    ]
    _generate(engine, options, batch=1)  # what is made at first use
    for batch in options.batch:
        figures += _figures(_generate(engine, options, batch=batch), options, batch, executor.weight_bytes, bound)
    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return [*figures, Figure("peak_memory_mib", "memory, peak", peak / (1 << 20), "MiB")]


def memory_bandwidth() -> float:
    """Bytes per second that torch's threads read, the best of some tries."""
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        data.sum()
        best = max(best, PROBE_BYTES / (time.perf_counter() - begun))
    return best


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds until every request had its first token, and from there to the last token; decode steps."""

    prefill: float
    decode: float
    steps: int


def _generate(engine: EngineCore, options: LoadOptions, *, batch: int) -> _Timing:
    rng = np.random.default_rng(batch)
    params = SamplingParams(
        temperature=0.0, num_tokens_to_generate=options.new_tokens, termination_id=IGNORE_EOS, top_k=1
    )
    nothing = np.empty(0, dtype=np.int32)
    for number in range(batch):
        prompt = rng.integers(1, engine.executor.vocab_size, options.prompt_tokens, dtype=np.int32)
        engine.add_request(EngineRequest(number, prompt, nothing, params))
    begun = time.perf_counter()
    started: set[int] = set()
    while len(started) < batch:
        started.update(output.request_id for output in engine.step() if output.new_tokens)
    prefilled = time.perf_counter()
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    return _Timing(prefilled - begun, time.perf_counter() - prefilled, steps)


def _figures(timing: _Timing, options: LoadOptions, batch: int, weight_bytes: int, bound: float) -> Iterable[Figure]:
    prefill = batch * options.prompt_tokens / timing.prefill
    yield Figure(f"b{batch}_prefill_tokens_per_s", f"batch {batch}: prefill", prefill, "tokens/s")
    yield Figure(f"b{batch}_first_token_ms", f"batch {batch}: first token of all", timing.prefill * 1000, "ms")
    if not timing.steps:
        return
    decode = batch * (options.new_tokens - 1) / timing.decode
    # The weights are read once a step; the cache is small beside them at these lengths.
    achieved = weight_bytes * timing.steps / timing.decode
    yield Figure(f"b{batch}_decode_tokens_per_s", f"batch {batch}: decode", decode, "tokens/s")
    yield Figure(f"b{batch}_weights_gb_per_s", f"batch {batch}: weights read", achieved / 1e9, "GB/s")
    yield Figure(f"b{batch}_percent_of_bound", f"batch {batch}: of the bandwidth", 100 * achieved / bound, "%")
