"""What the switches of an engine give that decide what it is made of: one with it and one without, by turns.

    python bench/switches.py --json switches.json

Every setting is an engine in a process of its own, which sleeps while another is measured. In each round every engine
runs every cell once; a gain is the median over the rounds of (time without) / (time with), both of the same round, with
least and most. Switches of a compiled step are measured more finely, in one process: bench/step_switches.py.
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
"""Sequences, tokens of each prompt, tokens generated. The first token's time is not the decode's."""
_CONTROL = "the same again"
"""Another process of the same setting: what it differs by, a switch may differ by without a cause."""
_HELP = {"show_default": True}


@dataclass(slots=True)
class Setting:
    """An engine, and the seconds it took for each cell by round."""

    name: str
    worker: Worker
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, seed: int) -> None:
        for name, (batch, prompt_tokens, new_tokens) in CELLS.items():
            asked = self.worker.ask(batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed)
            took = asked["seconds"] - (asked["first_seconds"] if new_tokens > 1 else 0.0)
            self.seconds.setdefault(name, []).append(took)


def gains(usual: Setting, other: Setting) -> dict[str, list[float]]:
    """[median, least, most] of how many times longer each cell takes without; rounds one by one."""
    ratios = {
        cell: [without / took for took, without in zip(seconds, other.seconds[cell], strict=True)]
        for cell, seconds in usual.seconds.items()
    }
    return {cell: [round(one, 3) for one in (median(r), min(r), max(r))] for cell, r in ratios.items()}


def _environments(dtype: str) -> dict[str, dict[str, str]]:
    if dtype == "float32":
        # Where torch runs, the compiled step's own switches change nothing.
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
                    if number == 0:  # what is made at first use
                        setting.seconds.clear()
        finally:
            for setting in settings:
                setting.worker.close()
        usual, *others = settings
        # Without oneDNN's layout torch is compared with torch.
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
