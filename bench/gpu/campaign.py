"""Runs all tests and benchmarks that need a GPU, within a time limit. The most important steps run first.

See bench/gpu/README.md.

    python -m bench.gpu.campaign --out FOLDER
    python -m bench.gpu.campaign --out FOLDER --dry

Each step is a process with a time limit. The process writes each result to FOLDER/results.jsonl immediately, as a line
with step, name and figures. FOLDER/<step>.log has the output of a step. `--dry` runs the same steps on a CPU with small
shapes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.gpu.report import DRY_SIZES, ROOT, Campaign, Sizes, read_results

BOXES = {
    "facts": 25.0,
    "engine": 95.0,
    "race": 120.0,
    "profile": 40.0,
    "products": 25.0,
    "attention": 25.0,
    "sampling": 40.0,
    "memory": 150.0,
    "tests": 120.0,
    "server": 170.0,
    "bench_serve": 60.0,
    "moe": 120.0,
    "vllm": 240.0,
    "vllm_serve": 180.0,
}
"""The steps in order, with the maximum seconds of each."""
MIN_SHARE_OF_BOX = 0.3
"""A step is skipped if less than this share of its seconds is left."""
SERVER_STEPS = ("server", "bench_serve", "vllm", "vllm_serve")
"""Steps that start `megatron` processes and need the file of a model."""
MODEL = "builtin:smollm2-135m"
_SUMMARY_COLUMNS = 260
_EXIT_SECONDS = 3.0


def run_step(campaign: Campaign) -> None:
    """Run the step `campaign.step` in this process."""
    if campaign.step in SERVER_STEPS:
        from bench.gpu import server_steps as steps
    else:
        if campaign.dry:
            os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of Triton
        from bench.gpu import model_steps as steps
    getattr(steps, campaign.step)(campaign)


def run_in_process(step: str, box: float, campaign: Campaign, arguments: list[str]) -> int | str:
    """Run a step in its own process group for at most `box` seconds. Return its exit status, or "time limit"."""
    command = [sys.executable, "-P", "-m", "bench.gpu.campaign", *arguments, "--run", step, "--box", f"{step}={box:g}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    status: int | str
    with (campaign.folder / f"{step}.log").open("w") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment, cwd=ROOT
        )
        try:
            status = child.wait(box + _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = "time limit"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and its child processes
        child.wait()
    return status


def drive(campaign: Campaign, steps: list[str], boxes: dict[str, float], arguments: list[str]) -> None:
    """Run `steps` in order until campaign.box seconds have passed. boxes: time limit of each step in seconds.

    arguments: command-line arguments of each step's process.
    """
    begun = time.monotonic()
    campaign.emit("begin", seconds=campaign.box, steps=steps, dry=campaign.dry)
    for step in steps:
        left = begun + campaign.box - time.monotonic()
        if left < MIN_SHARE_OF_BOX * boxes[step]:
            campaign.emit("skipped", of=step, seconds_left=round(left))
            continue
        step_begun = time.monotonic()
        status = run_in_process(step, min(boxes[step], left), campaign, arguments)
        campaign.emit("end", of=step, status=status, seconds=round(time.monotonic() - step_begun, 1))
    campaign.emit("done", seconds=round(time.monotonic() - begun, 1))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines of text, one line per step with its results. Steps with errors come first."""

    def line(row: dict[str, Any]) -> str:
        figures = " ".join(f"{key}={value}" for key, value in row.items() if key not in ("step", "name", "time"))
        return f"{row['step']:12} {row['name']}: {figures}"[:_SUMMARY_COLUMNS]

    results = [row for row in rows if row["step"] != "driver"]
    return [line(row) for row in sorted(results, key=lambda row: "error" not in row and not row.get("failed"))]


def _boxes(values: tuple[str, ...]) -> dict[str, float]:
    boxes = dict(BOXES)
    for text in values:
        step, _, seconds = text.partition("=")
        if step not in BOXES:
            raise click.BadParameter(f"{text!r}: no step has this name: choose among {', '.join(BOXES)}")
        try:
            boxes[step] = float(seconds)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: want STEP=SECONDS") from error
    return boxes


def _steps(text: str) -> list[str]:
    steps = text.split(",")
    unknown = [step for step in steps if step not in BOXES]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: no step has this name: choose among {', '.join(BOXES)}")
    return steps


@click.command(help=__doc__)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the results.")
@click.option(
    "--seconds",
    type=float,
    default=sum(BOXES.values()),
    show_default=True,
    help="Time limit for all steps together, in seconds.",
)
@click.option("--steps", default=",".join(BOXES), show_default=True, help="Steps to run, in this order.")
@click.option("--box", multiple=True, metavar="STEP=SECONDS", help="Time limit for one step. Repeatable.")
@click.option(
    "--size", multiple=True, metavar="NAME=NUMBER", help="Override a value of bench.gpu.report.Sizes. Repeatable."
)
@click.option("--model", default=MODEL, show_default=True, help="Model for the steps that run a server.")
@click.option("--dry", is_flag=True, help="Run on a CPU, with the shapes of small models.")
@click.option("--run", type=click.Choice(list(BOXES)), hidden=True, help="Run one step in this process.")
def main(
    out: Path,
    seconds: float,
    steps: str,
    box: tuple[str, ...],
    size: tuple[str, ...],
    model: str,
    dry: bool,
    run: str | None,
) -> None:
    names, boxes = _steps(steps), _boxes(box)
    try:
        sizes = (DRY_SIZES if dry else Sizes()).with_values(size)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(folder=out, step="driver", dry=dry, sizes=sizes, model=model, box=seconds)
    if run is not None:
        run_step(replace(campaign, step=run, box=boxes[run]))
        sys.stdout.flush()
        os._exit(0)  # threads of a failed part must not keep the process running
    arguments = ["--out", str(out), "--model", model, *(f"--size={value}" for value in size), *(["--dry"] * dry)]
    drive(campaign, names, boxes, arguments)
    for line in summary(read_results(out)):
        click.echo(line)


if __name__ == "__main__":
    main()
