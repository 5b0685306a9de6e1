"""Compares the engine on a CUDA device with vLLM and transformers.

The model has the shape of Llama 8B and random weights.

    python bench/gpu_engine.py --json gpu.jsonl --seconds 120
    python bench/gpu_engine.py --with vllm --with transformers

All engines run in one process. The first line of the file describes the run. A line for each cell follows as soon as
the cell is measured. All engines use the same shape, type and prompts, and sample greedily up to the maximum length.
They alternate in each cell. The decode time is the time of a run with many new tokens minus the time of a run with one
new token. The bound of a decode step is the size of its weights, keys and values divided by the bandwidth of a large
copy. The bound of a prompt is its operations divided by the rate of a large matrix product. Both rates are measured.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.gpu.report import append_line
from bench.gpu_kernels import Ceilings, measure_ceilings
from bench.random_model import LLAMA_8B, RandomCheckpoint
from megatron_runtime.backends.native.cuda.executor import CudaExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import num_parameters
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

RUNS = 3
OURS = "ours"

Generate = Callable[[list[list[int]], int], None]
"""Generates a number of tokens for each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    batch: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    dtype: torch.dtype
    device: torch.device
    config: ModelConfig = LLAMA_8B

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self.prompt_tokens + self.new_tokens, self.prefill_tokens + 1)

    @property
    def kv_cache_bytes(self) -> int:
        """Size in bytes of a KV cache that is sufficient for every cell, in pages of 16 tokens."""
        decode = max(self.batch) * (-(-(self.prompt_tokens + self.new_tokens) // 16) + 1)
        pages = max(decode, -(-self.longest // 16) + 1) + 1
        return pages * self.config.kv_elements_per_token * self.dtype.itemsize * 16


@dataclass(frozen=True, slots=True)
class Rate:
    """An engine's tokens per second: median, minimum and maximum of its turns."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, turns: list[float]) -> Rate:
        return cls(round(statistics.median(turns), 1), round(min(turns), 1), round(max(turns), 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of one cell. ratios: our median divided by the median of each peer."""

    cell: str
    ours: Rate
    percent_of_bound: float
    peers: dict[str, Rate]
    ratios: dict[str, float]


def our_engine(options: Options) -> Generate:
    """Return a function that generates with the engine of `megatron engine`, without a coordinator."""
    config, rows, longest = options.config, max(options.batch), options.longest
    executor = CudaExecutor(
        ModelInMemory(RandomCheckpoint(config, options.dtype, options.device), name="random weights"),
        ModelText(_no_tokenizer),
        dtype=str(options.dtype).removeprefix("torch."),
        kv_cache_memory=options.kv_cache_bytes,
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
    engine = EngineCore(executor, inference)
    executor.load()
    nothing = np.empty(0, dtype=np.int32)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, top_k=1)
        for number, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(number, np.array(prompt, dtype=np.int32), nothing, params))
        while engine.has_work:
            engine.step()

    return generate


def vllm_engine(options: Options) -> Generate:
    """Return a function that generates with vLLM's engine in this process, with random weights and CUDA graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    with tempfile.TemporaryDirectory() as directory:
        _transformers_config(options).save_pretrained(directory)
        engine = vllm.LLM(
            directory,
            dtype=str(options.dtype).removeprefix("torch."),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=options.longest,
            max_num_seqs=max(options.batch),
            max_num_batched_tokens=max(options.prefill_tokens, *options.batch),
            kv_cache_memory_bytes=options.kv_cache_bytes,
            gpu_memory_utilization=0.5,  # only a check at the start, because the size of the cache is set
            enable_prefix_caching=False,
        ).llm_engine
    numbers = count()

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        wanted = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, wanted)
        while engine.has_unfinished_requests():
            engine.step()

    return generate


def transformers_engine(options: Options) -> Generate:
    """Return a function that generates with transformers' continuous batching."""
    from transformers import GenerationConfig, LlamaForCausalLM

    with options.device:
        model = LlamaForCausalLM._from_config(_transformers_config(options), dtype=options.dtype).eval()
    run: Any = model.generate_batch

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        wanted = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = run(inputs=prompts, generation_config=wanted, progress_bar=False)
        short = [name for name, output in outputs.items() if len(output.generated_tokens) != new_tokens]
        if len(outputs) != len(prompts) or short:
            raise RuntimeError(
                f"transformers answered {len(outputs)} of {len(prompts)} prompts, {len(short)} too short"
            )

    return generate


def _transformers_config(options: Options) -> Any:
    from transformers import LlamaConfig

    config = options.config
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        architectures=["LlamaForCausalLM"],
    )


PEERS: dict[str, Callable[[Options], Generate]] = {"vllm": vllm_engine, "transformers": transformers_engine}
"""Peers to compare with on request, by the name of their package."""


def measure(
    engines: dict[str, Generate],
    options: Options,
    *,
    clock: Callable[[], float] = time.perf_counter,
    until: float | None = None,
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Measure every cell. Yield the name of the cell, and the tokens per second of each turn by engine.

    until: monotonic time after which no cell starts; None means no limit.
    """

    def is_over() -> bool:
        return until is not None and time.monotonic() >= until

    def seconds(generate: Generate, prompts: list[list[int]], new_tokens: int) -> float:
        begun = clock()
        generate(prompts, new_tokens)
        return clock() - begun

    def in_turns(turn: Callable[[Generate], float]) -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(RUNS):
            for name, generate in engines.items():
                rates[name].append(turn(generate))
        return rates

    for batch in options.batch:
        if is_over():
            return
        prompts = _prompts(options, batch, options.prompt_tokens)
        for generate in engines.values():
            generate(prompts, 4)  # warm-up

        def decode(generate: Generate, prompts: list[list[int]] = prompts) -> float:
            whole, first = seconds(generate, prompts, options.new_tokens), seconds(generate, prompts, 1)
            return len(prompts) * (options.new_tokens - 1) / (whole - first)

        yield f"decode b{batch}", in_turns(decode)
    if is_over():
        return
    prompts = _prompts(options, 1, options.prefill_tokens)
    for generate in engines.values():
        generate(prompts, 1)
    yield (
        f"prefill {options.prefill_tokens}",
        in_turns(lambda generate: options.prefill_tokens / seconds(generate, prompts, 1)),
    )


def bounds(options: Options, ceilings: Ceilings) -> dict[str, float]:
    """Return, by cell, the upper bound of the tokens per second."""
    config, size = options.config, options.dtype.itemsize
    weights = num_parameters(config) - config.vocab_size * config.hidden_size  # a token reads one row of the embedding
    upper_bounds = {}
    for batch in options.batch:
        cached = batch * (options.prompt_tokens + options.new_tokens / 2) * config.kv_elements_per_token
        upper_bounds[f"decode b{batch}"] = batch * ceilings.bytes_per_second / ((weights + cached) * size)
    tokens = options.prefill_tokens
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * (tokens + 1)
    upper_bounds[f"prefill {tokens}"] = tokens * ceilings.flops_per_second / (2 * (weights - head) * tokens + attention)
    return upper_bounds


def row_of(cell: str, turns: dict[str, list[float]], maximum: float) -> Row:
    """Return the results of one cell, which is one measured workload.

    turns:   tokens per second in each turn of an engine, by name of the engine.
    maximum: theoretical bound of the cell, in tokens per second.
    """
    rates = {name: Rate.of(values) for name, values in turns.items()}
    ours = rates.pop(OURS)
    return Row(
        cell=cell,
        ours=ours,
        percent_of_bound=round(100 * ours.median / maximum, 1),
        peers=rates,
        ratios={name: round(ours.median / rate.median, 2) for name, rate in rates.items()},
    )


def _prompts(options: Options, count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return random.integers(1, options.config.vocab_size, (count, length)).tolist()  # type: ignore[no-any-return]


def _no_tokenizer() -> Any:
    raise RuntimeError("prompts are token ids here")


@click.command(help=__doc__)
@click.option(
    "--json",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append one JSON line per cell to this file.",
)
@click.option("--seconds", type=float, help="Seconds after which no new cell begins.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--batch", default="1,8,64", show_default=True, help="Batch sizes to measure. Each size is one run.")
@click.option(
    "--prompt-tokens", default=1024, show_default=True, help="Number of prompt tokens per request in the decode cells."
)
@click.option("--new-tokens", default=128, show_default=True)
@click.option("--prefill-tokens", default=8192, show_default=True, help="Number of prompt tokens in the prefill cell.")
@click.option(
    "--with", "peers", type=click.Choice(list(PEERS)), multiple=True, help="Peer to measure as well. Repeatable."
)
def main(
    path: Path | None,
    seconds: float | None,
    dtype: str,
    batch: str,
    prompt_tokens: int,
    new_tokens: int,
    prefill_tokens: int,
    peers: tuple[str, ...],
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
    begun = time.monotonic()
    ceilings = measure_ceilings(options.device, options.dtype)
    device = torch.cuda.get_device_name(options.device)
    gigabytes, teraflops = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e12
    click.echo(f"{device}: copy {gigabytes:.0f} GB/s, product {teraflops:.0f} TFLOP/s")
    engines = {OURS: our_engine(options), **{name: PEERS[name](options) for name in peers}}
    run = {
        "device": device,
        "versions": {"torch": torch.__version__, **{name: version(name) for name in ("triton", *peers)}},
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "ceilings": asdict(ceilings),
    }
    if path is not None:
        append_line(path, run)
    maximum = bounds(options, ceilings)
    for cell, turns in measure(engines, options, until=None if seconds is None else begun + seconds):
        row = row_of(cell, turns, maximum[cell])
        if path is not None:
            append_line(path, asdict(row))
        beside = "".join(f"  {name} {rate.median:.1f} ({row.ratios[name]:.2f})" for name, rate in row.peers.items())
        click.echo(f"{cell:16} {row.ours.median:10.1f} tok/s  {row.percent_of_bound:5.1f} % of the bound{beside}")


if __name__ == "__main__":
    main()
