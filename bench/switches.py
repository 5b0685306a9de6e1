"""The gain of the switches that change the components of an engine: engines with and without them, interleaved.

    python bench/switches.py --json switches.json

Every setting is an engine in its own process, which sleeps while another one is measured. In each round every engine
runs every cell once. A gain is the median over the rounds of (time without) / (time with), both of the same round, with
minimum and maximum. bench/step_switches.py measures the switches of a compiled step more precisely, in one process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
from peer_bench.processes import Worker

from megatron_kernels.cpu.switches import Switch
from megatron_runtime.cli.bench.report import machine

CELLS = {"b1": (1, 64, 25), "b8": (8, 64, 13), "prefill 512": (1, 512, 1)}
"""Sequences, tokens of each prompt, generated tokens. The time of the first token is not part of the decode time."""
_CONTROL = "the same again"
"""Another process of the same setting: its difference is the noise of a gain."""
_HELP = {"show_default": True}


@dataclass(slots=True)
class Setting:
    """An engine, and its seconds for each cell by round."""

    name: str
    worker: Worker
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, seed: int) -> None:
        for name, (batch, prompt_tokens, new_tokens) in CELLS.items():
            reply = self.worker.ask(batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed)
            took = reply["seconds"] - (reply["first_seconds"] if new_tokens > 1 else 0.0)
            self.seconds.setdefault(name, []).append(took)


def gains(usual: Setting, other: Setting) -> dict[str, list[float]]:
    """Return [median, minimum, maximum] of (time without) / (time with) of each cell over the rounds."""
    ratios = {
        cell: [without / took for took, without in zip(seconds, other.seconds[cell], strict=True)]
        for cell, seconds in usual.seconds.items()
    }
    return {cell: [round(one, 3) for one in (median(r), min(r), max(r))] for cell, r in ratios.items()}


def _environments(dtype: str) -> dict[str, dict[str, str]]:
    if dtype == "float32":
        # The switches of the compiled step have no effect on torch.
        native = {Switch.NATIVE.value: "0"}
        return {Switch.NATIVE: native, Switch.PACKED_LINEAR: {**native, Switch.PACKED_LINEAR.value: "0"}}
    return {Switch.CACHE_IN_BFLOAT16: {Switch.CACHE_IN_BFLOAT16.value: "0"}}


@click.command()
@click.option("--model", default="builtin:smollm2-135m", **_HELP)
@click.option("--dtype", "dtypes", multiple=True, default=["int4", "bfloat16", "float32"], **_HELP)
@click.option("--rounds", type=click.IntRange(min=1), default=3, **_HELP)
@click.option("--threads", type=click.IntRange(min=1), default=2, **_HELP)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
def main(*, model: str, dtypes: tuple[str, ...], rounds: int, threads: int, json_file: Path | None) -> None:
    """Measure an engine with each switch on and off."""
    cpus = set(sorted(os.sched_getaffinity(0))[:threads])
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for dtype in dtypes:
        environments = {"": {}, **_environments(dtype), _CONTROL: {}}
        settings: list[Setting] = []
        try:
            for name, environment in environments.items():
                assignments = [f"{key}={value}" for key, value in environment.items()]
                command = ["env", *assignments, sys.executable, "ours.py", model, dtype, str(threads)]
                settings.append(Setting(name, Worker(command, cpus=cpus)))
            for number in range(rounds + 1):
                for setting in settings:
                    setting.measure(seed=number)
                    if number == 0:  # the warm-up round
                        setting.seconds.clear()
        finally:
            for setting in settings:
                setting.worker.close()
        usual, *others = settings
        # Torch without oneDNN's layout is compared with torch.
        base = {Switch.PACKED_LINEAR: next((s for s in others if s.name == Switch.NATIVE), usual)}
        found[dtype] = {other.name: gains(base.get(other.name, usual), other) for other in others}  # type: ignore[call-overload]
        for name, cells in found[dtype].items():
            figures = "  ".join(f"{cell} {v[0]:.2f} ({v[1]:.2f}-{v[2]:.2f})" for cell, v in cells.items())
            click.echo(f"{dtype:9} {name:28} {figures}")
    if json_file is not None:
        options = {"model": model, "rounds": rounds, "threads": threads}
        document = {"benchmark": "switches", "machine": machine(), "options": options, "gains": found}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
