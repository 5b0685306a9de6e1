"""Measures the host time of a decode step of the native engine on a GPU, without a GPU.

    python bench/host_step.py --rows 1,64,256 --json host.json

The device computes nothing. A replay of a graph leaves the output of its capture unchanged. So only the work of the
host is measured: the scheduler, the copies of the plan, sampling, log-probabilities and answers. Operations that a GPU
would execute run on the CPU. The vocabulary is small, so each of these operations takes little more time than a launch
on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.random_model import LLAMA_8B, RandomCheckpoint
from megatron_runtime.backends.native.cuda.device import HostFunctions, Record
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

SMALL = replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "log-probabilities": {"return_log_probs": True, "skip_prompt_log_probs": True},
    "top 5 log-probabilities": {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 5},
    "presence penalty": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {7: 2.0}},
}
PROMPT_TOKENS = 16
WARM_UP_STEPS = 20


class IdleDevice(HostFunctions):
    """A device whose graph replays take no time."""

    def recorder(self) -> Record:
        return lambda run: ((lambda: None), run())


def engine(rows: int, longest: int) -> EngineCore:
    """Return an engine with `rows` slots and a maximum sequence length of `longest` tokens."""
    device = torch.device("cpu")
    executor = CudaExecutor(
        ModelInMemory(RandomCheckpoint(SMALL, torch.float32, device), name="random weights"),
        ModelText(_no_tokenizer),
        dtype="float32",
        kv_cache_memory=(rows + 1) * (longest + 16) * SMALL.kv_elements_per_token * 4,
        max_sequence_length=longest,
        max_rows=rows,
        max_tokens=rows * PROMPT_TOKENS,
        graph_rows=rows,
        threads=1,
        device=device,
        functions=IdleDevice(),
    )
    executor.load()
    assert executor.model is not None
    executor.model.kernels = replace(executor.model.kernels, sample=_first_token)
    limits = InferenceConfig(max_requests=rows, max_tokens=rows * PROMPT_TOKENS, max_sequence_length=longest)
    return EngineCore(executor, limits)


def _first_token(logits_NV: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token 0 and log-probability 0 for each row.

    The function replaces the sampling kernel, and takes about as long as the launch of a kernel.
    """
    return torch.zeros(len(logits_NV), dtype=torch.int32), torch.zeros(len(logits_NV))


def microseconds(core: EngineCore, rows: int, steps: int, fields: dict[str, Any]) -> list[float]:
    """Return the duration of each of `steps` steps with `rows` requests, in microseconds."""
    nothing = np.empty(0, np.int32)
    tokens = steps + WARM_UP_STEPS + 8
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=IGNORE_EOS, **fields)
    for number in range(rows):
        prompt = np.arange(1, PROMPT_TOKENS + 1, dtype=np.int32)
        core.add_request(EngineRequest(number, prompt, nothing, params, seed=number))
    times = [_timed(core.step) for _ in range(WARM_UP_STEPS + steps)][WARM_UP_STEPS:]
    core.reset()
    return times


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun)


def _no_tokenizer() -> Any:
    raise RuntimeError("prompts are token ids here")


@click.command(help=__doc__)
@click.option(
    "--rows", default="1,64,256", show_default=True, help="Numbers of rows per step. Each number is one cell."
)
@click.option("--steps", default=200, show_default=True, help="Number of measured steps per cell.")
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(rows: str, steps: int, path: Path | None) -> None:
    cells = []
    for count in map(int, rows.split(",")):
        core = engine(count, PROMPT_TOKENS + steps + 2 * WARM_UP_STEPS)
        for name, fields in REQUESTS.items():
            times = microseconds(core, count, steps, fields)
            cell = {
                "rows": count,
                "requests": name,
                "median_us": round(statistics.median(times)),
                "min_us": round(min(times)),
            }
            cells.append(cell)
            click.echo(f"{count:4} rows  {name:24} {cell['median_us']:6} µs a step, at least {cell['min_us']:6} µs")
    if path is not None:
        path.write_text(json.dumps({"steps": steps, "cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
