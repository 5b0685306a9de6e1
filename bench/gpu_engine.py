"""The engine on a CUDA device next to transformers' continuous batching: an 8B Llama shape, random weights, one run.

    python bench/gpu_engine.py --json gpu.json

Both have the same shape, type and prompts, and generate all tokens greedily. The decode time is the time of a run of
many new tokens minus that of a run of one new token. The bound of a decode step is its weights, keys and values divided
by the bandwidth of a large copy. The bound of a prompt is its operations divided by the rate of a large matrix product.
Both rates are measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.gpu_kernels import Ceilings, measure_ceilings
from bench.random_model import LLAMA_8B, RandomCheckpoint
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import num_parameters
from megatron_runtime.sampling_params import IGNORE_EOS, SamplingParams

RUNS = 3

Generate = Callable[[list[list[int]], int], None]
"""Generate a number of tokens for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    batch: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    dtype: torch.dtype
    device: torch.device
    config: ModelConfig = LLAMA_8B


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens per second: median, minimum and maximum of the runs. peer: None if it did not run."""

    cell: str
    ours: float
    ours_least: float
    ours_most: float
    percent_of_bound: float
    peer: float | None = None
    ratio: float | None = None


def our_engine(options: Options) -> Generate:
    """Return the engine of `megatron engine`, without a coordinator."""
    config = options.config
    longest = max(options.prompt_tokens + options.new_tokens, options.prefill_tokens + 1)
    rows = max(options.batch)
    page_bytes = config.kv_elements_per_token * options.dtype.itemsize * 16
    pages = rows * (-(-longest // 16) + 1) + 1
    executor = CudaExecutor(
        ModelInMemory(RandomCheckpoint(config, options.dtype, options.device), name="random weights"),
        ModelText(_no_tokenizer),
        dtype=str(options.dtype).removeprefix("torch."),
        kv_cache_memory=pages * page_bytes,
        max_sequence_length=longest,
        max_rows=rows,
        max_tokens=max(options.prefill_tokens, rows),
        graph_rows=rows if options.device.type == "cuda" else 0,
        device=options.device,
    )
    inference = InferenceConfig(
        max_requests=rows,
        max_tokens=max(options.prefill_tokens, rows),
        max_sequence_length=longest,
        enable_prefix_caching=False,
    )
    engine = DynamicInferenceEngine(executor, inference)
    executor.load()
    nothing = np.empty(0, dtype=np.int32)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, top_k=1)
        for number, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(number, np.array(prompt, dtype=np.int32), nothing, params))
        while engine.has_work:
            engine.step()

    return generate


def transformers_engine(options: Options) -> Generate:
    """Return transformers' engine. Raises ImportError or AttributeError if it has no continuous batching."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = options.config
    with options.device:
        model = LlamaForCausalLM._from_config(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
            ),
            dtype=options.dtype,
        ).eval()
    run: Any = model.generate_batch

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        wanted = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = run(inputs=prompts, generation_config=wanted, progress_bar=False)
        short = [name for name, output in found.items() if len(output.generated_tokens) != new_tokens]
        if len(found) != len(prompts) or short:
            raise RuntimeError(f"transformers answered {len(found)} of {len(prompts)} prompts, {len(short)} too short")

    return generate


def measure(
    generate: Generate, options: Options, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return tokens per second of each run, by cell."""
    found: dict[str, list[float]] = {}

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        begun = clock()
        generate(prompts, new_tokens)
        return clock() - begun

    for batch in options.batch:
        prompts = _prompts(options, batch, options.prompt_tokens)
        generate(prompts, 4)  # warm-up
        found[f"decode b{batch}"] = [
            batch * (options.new_tokens - 1) / (seconds(prompts, options.new_tokens) - seconds(prompts, 1))
            for _ in range(RUNS)
        ]
    prompts = _prompts(options, 1, options.prefill_tokens)
    generate(prompts, 1)
    found[f"prefill {options.prefill_tokens}"] = [options.prefill_tokens / seconds(prompts, 1) for _ in range(RUNS)]
    return found


def bounds(options: Options, ceilings: Ceilings) -> dict[str, float]:
    """Return the upper bound of tokens per second, by cell."""
    config, size = options.config, options.dtype.itemsize
    weights = num_parameters(config) - config.vocab_size * config.hidden_size  # a token reads one row of the embedding
    found = {}
    for batch in options.batch:
        cached = batch * (options.prompt_tokens + options.new_tokens / 2) * config.kv_elements_per_token
        found[f"decode b{batch}"] = batch * ceilings.bytes_per_second / ((weights + cached) * size)
    tokens = options.prefill_tokens
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
    found[f"prefill {tokens}"] = tokens * ceilings.flops_per_second / (2 * (weights - head) * tokens + attention)
    return found


def rows_of(ours: dict[str, list[float]], peers: dict[str, list[float]], most: dict[str, float]) -> list[Row]:
    rows = []
    for cell, runs in ours.items():
        median = statistics.median(runs)
        row = Row(
            cell=cell,
            ours=round(median, 1),
            ours_least=round(min(runs), 1),
            ours_most=round(max(runs), 1),
            percent_of_bound=round(100 * median / most[cell], 1),
        )
        if cell in peers:
            peer = statistics.median(peers[cell])
            row = replace(row, peer=round(peer, 1), ratio=round(median / peer, 2))
        rows.append(row)
    return rows


def _prompts(options: Options, count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return random.integers(1, options.config.vocab_size, (count, length)).tolist()  # type: ignore[no-any-return]


def _no_tokenizer() -> Any:
    raise RuntimeError("prompts are token ids here")


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--batch", default="1,8,64", show_default=True, help="Requests at once, each size a run.")
@click.option("--prompt-tokens", default=1024, show_default=True, help="Of each request of the decode cells.")
@click.option("--new-tokens", default=128, show_default=True)
@click.option("--prefill-tokens", default=8192, show_default=True, help="Of the prompt of the prefill cell.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Run transformers as well.")
def main(
    path: Path | None, dtype: str, batch: str, prompt_tokens: int, new_tokens: int, prefill_tokens: int, peer: bool
) -> None:
    if not torch.cuda.is_available():
        click.echo("no CUDA device: use `make bench` to measure engines on a CPU", err=True)
        sys.exit(2)
    options = Options(
        batch=tuple(int(size) for size in batch.split(",")),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens=prefill_tokens,
        dtype=getattr(torch, dtype),
        device=torch.device("cuda"),
    )
    ceilings = measure_ceilings(options.device, options.dtype)
    device = torch.cuda.get_device_name(options.device)
    gigabytes, teraflops = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e12
    click.echo(f"{device}: copy {gigabytes:.0f} GB/s, product {teraflops:.0f} TFLOP/s")
    ours = measure(our_engine(options), options)
    torch.cuda.empty_cache()
    peers: dict[str, list[float]] = {}
    if peer:
        try:
            peers = measure(transformers_engine(options), options)
        except (ImportError, AttributeError, RuntimeError) as error:
            click.echo(f"transformers is skipped: {error}", err=True)
    rows = rows_of(ours, peers, bounds(options, ceilings))
    for row in rows:
        beside = f"  transformers {row.peer:10.1f}  ratio {row.ratio:5.2f}" if row.peer is not None else ""
        click.echo(f"{row.cell:16} {row.ours:10.1f} tok/s  {row.percent_of_bound:5.1f} % of the bound{beside}")
    if path is not None:
        report = {
            "device": device,
            "torch": torch.__version__,
            "dtype": dtype,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "ceilings": asdict(ceilings),
            "rows": [asdict(row) for row in rows],
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
