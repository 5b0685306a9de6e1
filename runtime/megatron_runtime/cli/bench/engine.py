"""`megatron bench engine`: measures one engine in this process, without sockets."""

from __future__ import annotations

import resource
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from megatron_kernels.cpu.library import instruction_set
from megatron_runtime.backends.native.build import build_native
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.cli.bench.report import Figure, json_file, report
from megatron_runtime.cli.options import COUNT, COUNTS, MEMORY
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

PROBE_BYTES = 1 << 28
"""Number of bytes that the memory bandwidth measurement reads. This is much more than any cache holds."""
PRODUCT_ROWS = 192


def run(*, batch: tuple[int, ...], prompt_tokens: int, new_tokens: int, **engine_settings: Any) -> Iterator[Figure]:
    """Run the benchmark once for each batch size in `batch`, and yield the figures.

    Sampling is greedy, and requests ignore end-of-sequence tokens.
    """
    core = build_native(
        EngineSettings(
            coordinator="tcp://127.0.0.1:0",  # no client connects
            name="bench",
            max_requests=max(batch),
            max_tokens=max(2048, *batch),
            max_sequence_length=prompt_tokens + new_tokens,
            prefix_caching=False,
            **engine_settings,
        )
    ).core
    executor = core.executor
    assert isinstance(executor, CpuExecutor)
    config = executor.model_config
    yield Figure("load_seconds", "weights loaded", timeit.timeit(executor.load, number=1), "s")
    bound = memory_bandwidth()
    yield Figure("bandwidth_gb_per_s", "memory bandwidth, read", bound / 1e9, "GB/s")
    assert executor.model is not None, "load() has built it"
    weights = executor.model.weights
    products = product_rate(weights)
    of_token = sum(linear.in_features * linear.out_features for linear in weights.linears)
    of_head = config.vocab_size * config.hidden_size
    yield Figure("products_gmac_per_s", "compute bound: products in the CPU cache", products / 1e9, "GMAC/s")
    _generate(core, 1, prompt_tokens, new_tokens)  # the first use allocates memory and compiles kernels
    for size in batch:
        prefill, decode, steps = _generate(core, size, prompt_tokens, new_tokens)
        rate = size * prompt_tokens / prefill
        yield Figure(f"b{size}_prefill_tokens_per_s", f"batch {size}: prefill", rate, "tokens/s")
        # Only the last token of a prompt needs logits.
        achieved = 100 * size * (prompt_tokens * (of_token - of_head) + of_head) / prefill / products
        yield Figure(f"b{size}_percent_of_compute", f"batch {size}: prefill, of the compute bound", achieved, "%")
        yield Figure(f"b{size}_first_token_ms", f"batch {size}: first token of every request", prefill * 1000, "ms")
        if steps:
            rate = size * (new_tokens - 1) / decode
            # A step reads the weights once. At these lengths the KV cache is small compared with the weights.
            achieved = executor.weight_bytes * steps / decode
            yield Figure(f"b{size}_decode_tokens_per_s", f"batch {size}: decode", rate, "tokens/s")
            yield Figure(f"b{size}_weights_gb_per_s", f"batch {size}: weights read", achieved / 1e9, "GB/s")
            yield Figure(f"b{size}_percent_of_bound", f"batch {size}: of the bandwidth", 100 * achieved / bound, "%")
            achieved = 100 * rate * of_token / products
            yield Figure(f"b{size}_decode_percent_of_compute", f"batch {size}: of the compute bound", achieved, "%")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield Figure("peak_memory_mib", "memory, peak", peak, "MiB")


def memory_bandwidth() -> float:
    """Return the memory bandwidth of torch's threads in bytes per second, the best of five measurements."""
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    return PROBE_BYTES / min(timeit.repeat(data.sum, repeat=5, number=1))


def product_rate(weights: DecoderWeights) -> float:
    """Return the maximum number of multiplications per second, with operands that stay in the CPU cache.

    The function multiplies a weight matrix of the model by a batch, and returns the best of five measurements.
    """
    linear = weights.layers[0].output_DH
    x_TK = torch.randn(PRODUCT_ROWS, linear.in_features)
    seconds = min(timeit.repeat(lambda: linear(x_TK), repeat=5, number=10)) / 10
    return PRODUCT_ROWS * linear.in_features * linear.out_features / seconds


def _generate(core: EngineCore, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float, int]:
    """Run a batch of requests.

    Return the seconds until every request has its first token, the seconds from that time to the last token, and the
    number of decode steps.
    """
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, top_k=1)
    nothing = np.empty(0, dtype=np.int32)
    for number in range(batch):
        prompt = rng.integers(1, core.executor.vocab_size, prompt_tokens, dtype=np.int32)
        core.add_request(EngineRequest(number, prompt, nothing, params))
    begun = time.perf_counter()
    started: set[int] = set()
    while len(started) < batch:
        started.update(output.request_id for output in core.step() if output.new_tokens)
    prefilled = time.perf_counter()
    steps = 0
    while core.has_work:
        core.step()
        steps += 1
    return prefilled - begun, time.perf_counter() - prefilled, steps


@click.command()
@click.option(
    "--model", default="builtin:smollm2-135m", help="Model to measure: builtin:NAME, a GGUF file or a directory."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
    default="auto",
    help="Data type of the weights.",
)
@click.option("--batch", type=COUNTS, default="1,8,32", help="Batch sizes to measure, one run per size.")
@click.option("--prompt-tokens", type=COUNT, default=64, help="Number of tokens per prompt.")
@click.option("--new-tokens", type=COUNT, default=128, help="Number of tokens per answer.")
@click.option("--threads", type=COUNT, help="Number of CPU threads. Default: PyTorch's choice.")
@click.option("--kv-cache-memory", type=MEMORY, default="1Gi", help="Memory for the KV cache.")
@json_file
def engine(*, json_file: Path | None, **values: Any) -> None:
    """Measure the prefill and decode throughput of one engine, and which share of the memory bandwidth it uses."""
    title = f"Engine, {values['model']}, {values['dtype']}, {instruction_set()}"
    report("engine", title, values | {"instruction_set": instruction_set()}, list(run(**values)), json_file)
