"""Measures how long a model takes to load after `import torch`.

    python bench/load.py --against ../before

Every load runs in its own process. `total` is the time from the end of `import torch` until the engine is ready. This
time has two parts. `import_own` is the import of our modules. `load` reads the file's headers, verifies and packs the
weights, and allocates the KV cache. `cpu` is the CPU time of all threads. The figures do not include the tokenizer,
which an engine loads when a request needs text. With --against, loads of this version alternate with loads of another
version, whose `runtime` and `kernels` are in the given directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import click

from megatron_runtime.cli.bench.report import machine
from megatron_runtime.protocol import strict_json as json

_ROOT = Path(__file__).resolve().parent.parent
_WORKER = Path(__file__).with_name("load_worker.py")
_SECONDS = 120
_HELP = {"show_default": True}


def load(root: Path, *, model: str, dtype: str, threads: int) -> dict[str, float]:
    """Load the model once with the code in the checkout `root`. Return the measured seconds, by name of the figure."""
    path = os.pathsep.join(str(root / part) for part in ("runtime", "kernels"))
    done = subprocess.run(
        [sys.executable, str(_WORKER), model, dtype, str(threads)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        raise click.ClickException(f"{root}, {dtype}: {done.stderr.strip()[-300:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def summary(runs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return [median, minimum, maximum] of each figure."""
    figures = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: [round(one, 3) for one in (median(v), min(v), max(v))] for name, v in figures.items()}


@click.command()
@click.option("--model", default="builtin:smollm2-135m", **_HELP)
@click.option("--dtype", "dtypes", multiple=True, default=["int4", "bfloat16", "float32"], **_HELP)
@click.option("--rounds", type=click.IntRange(min=1), default=5, **_HELP)
@click.option("--threads", type=click.IntRange(min=1), default=2, **_HELP)
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkout of another version to compare with.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(
    *, model: str, dtypes: tuple[str, ...], rounds: int, threads: int, against: Path | None, json_file: Path | None
) -> None:
    """Measure how long a model takes to load, several times, each time in a new process."""
    versions = {"before": against.resolve()} if against is not None else {}
    versions["now"] = _ROOT
    runs: dict[str, list[dict[str, float]]] = {}
    # Warm-up of the page cache and of the interpreter's bytecode cache.
    for root in versions.values():
        load(root, model=model, dtype=dtypes[0], threads=threads)
    for _ in range(rounds):
        for dtype in dtypes:
            for name, root in versions.items():
                runs.setdefault(f"{dtype}, {name}", []).append(load(root, model=model, dtype=dtype, threads=threads))
    figures = {name: summary(values) for name, values in runs.items()}
    for name, values in figures.items():
        click.echo(f"{name:18}" + "  ".join(f"{key} {v[0]:.2f} ({v[1]:.2f}-{v[2]:.2f})" for key, v in values.items()))
    if json_file is not None:
        options = {"model": model, "rounds": rounds, "threads": threads}
        document = {"benchmark": "load", "machine": machine(), "options": options, "seconds": figures}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
