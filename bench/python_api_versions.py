"""Compares the time of `MegatronLLM.generate` and `generate_stream` in direct mode between this checkout and another.

    python bench/python_api_versions.py --against ../other --json python_api_versions.json

Each checkout runs in one process, with its own virtual environment .venv. While one process is measured, the other is
idle. Each round makes the same calls in both, in alternating order. Within a round, the wall-clock times and the CPU
times of the processes are compared.
"""

from __future__ import annotations

import contextlib
import json  # noqa: TID251 - the other checkout, which runs this file too, may lack strict_json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

REPOSITORY = Path(__file__).parents[1]
THIS, OTHER = "this", "other"
MODEL = "builtin:smollm2-135m"
CALLS = ("generate", "generate, 8 prompts", "generate_stream")
MAX_RATIO = 1.03
"""The goal: maximum ratio of this checkout's time to the other checkout's time."""


def serve() -> None:
    """Run as the process of a checkout: read one call per line, make the call, and write the seconds that it took.

    Uses only the public interface.
    """
    import psutil

    from megatron_runtime.requests.config import InferenceConfig

    try:
        from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams
    except ModuleNotFoundError:  # an earlier checkout
        from megatron_runtime.apis import MegatronLLM, SamplingParams

    config = InferenceConfig(max_sequence_length=512, buffer_size_gb=0.25, enable_prefix_caching=False)
    llm = MegatronLLM.from_pretrained(sys.argv[2], inference_config=config, threads=int(sys.argv[3]))
    process = psutil.Process()

    def run(call: str, tokens: int, seed: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, min_tokens=tokens)
        prompts = [[(seed * 31 + row * 7 + place) % 1000 + 5 for place in range(16)] for row in range(8)]
        if call == "generate_stream":
            received = sum(len(chunk.token_ids) for chunk in llm.generate_stream(prompts[0], params))
            assert received == tokens, (received, tokens)
        elif call == "generate":
            assert llm.generate(prompts[0], params).generated_length == tokens
        else:
            assert len(llm.generate(prompts, params)) == len(prompts)

    for line in sys.stdin:
        call, tokens, seed = json.loads(line)
        begun, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
        run(call, tokens, seed)
        print(json.dumps([time.perf_counter() - begun, sum(process.cpu_times()[:2]) - cpu]), flush=True)


@contextlib.contextmanager
def checkout(path: Path, model: str, threads: int) -> Any:
    """Start the process of a checkout. Yield a function that makes a call in the started process.

    The function returns the wall-clock seconds and the CPU seconds of the call.
    """
    command = [str(path / ".venv/bin/python"), "-P", str(Path(__file__).absolute()), "--serve", model, str(threads)]
    with subprocess.Popen(command, cwd=path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(*arguments: Any) -> list[float]:
            print(json.dumps(arguments), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise click.ClickException(f"the process of {path} ended: see its messages above")
            seconds: list[float] = json.loads(line)
            return seconds

        yield call
        process.stdin.close()


def compare(calls: dict[str, Callable[..., list[float]]], call: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure `call` in this checkout and in the other, in alternation.

    Return the median times of both checkouts, the ratio of their fastest times, and the median ratio of the rounds.
    """
    measured: dict[str, list[list[float]]] = {THIS: [], OTHER: []}
    for number in range(rounds):
        for name in sorted(calls, reverse=number % 2 == 1):
            measured[name].append(calls[name](call, tokens, number))
    row: dict[str, Any] = {"call": call, "tokens": tokens}
    for place, figure in enumerate(("wall_ms", "cpu_ms")):
        pairs = [(one[place], two[place]) for one, two in zip(measured[THIS], measured[OTHER], strict=True)]
        row[figure] = {
            THIS: round(1e3 * median(one for one, _ in pairs), 3),
            OTHER: round(1e3 * median(two for _, two in pairs), 3),
            "fastest_ratio": round(min(one for one, _ in pairs) / max(min(two for _, two in pairs), 1e-9), 3),
            "ratio": round(median(one / max(two, 1e-9) for one, two in pairs), 3),
        }
    return row


@click.command()
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--model", default=MODEL, show_default=True, help="Model reference that both checkouts can read.")
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Number of tokens per answer."
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Number of torch threads per engine."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(*, against: Path, model: str, rounds: int, tokens: int, threads: int, json_file: Path | None) -> None:
    """Compare the time of Python API calls between this checkout and another."""
    from peers import commit

    from megatron_runtime.cli.bench.report import machine

    rows = []
    with checkout(REPOSITORY, model, threads) as this, checkout(against.absolute(), model, threads) as other:
        calls = {THIS: this, OTHER: other}
        for call in CALLS:
            compare(calls, call, tokens, 2)  # warm-up
            rows.append(compare(calls, call, tokens, rounds))
            wall, cpu = rows[-1]["wall_ms"], rows[-1]["cpu_ms"]
            click.echo(
                f"{call}, {tokens} tokens: {wall[THIS]} and {wall[OTHER]} ms, ratio {wall['ratio']}, of the fastest "
                f"{wall['fastest_ratio']} (goal {MAX_RATIO}); CPU time, ratio {cpu['ratio']}"
            )
    if json_file is not None:
        facts = machine() | {"commit": commit(), "model": model, "threads": threads}
        json_file.write_text(json.dumps({"machine": facts, "rounds": rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["--serve"] else main()
