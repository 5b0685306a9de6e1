"""The GPU campaign, dry: every step on the CPU with small shapes and without an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from warm_python import WarmProcess

from bench.gpu import server_steps
from bench.gpu.campaign import BOXES, MODEL, SERVER_STEPS, main, run_step, summary
from bench.gpu.report import DRY_SIZES, Campaign, Sizes, read_results

ROOT = Path(__file__).parents[3]
RESULTS = {
    "facts": ("versions", "rates"),
    "engine": ("load", "decode b1", "decode b3", "prefill 48", "first token 16", "first request"),
    "race": ("staging during captures", "update"),
    "profile": ("host b1", "kernels b1", "host b3", "kernels b3"),
    "products": ("product qkv 1 rows", "product head 3 rows"),
    "attention": ("attention b1 of 40", "attention b3 of 40"),
    "sampling": (
        "sample flat greedy 1 rows",
        "sample steep top_p 0.95 3 rows",
        "step with presence penalty and top-p b3",
    ),
    "memory": ("suspend persist", "suspend offload", "suspend recompute"),
    "tests": ("tests/gpu",),
    "server": (
        "first request",
        "3 streams",
        "equal to float32 answers of a CPU",
        "pause and unpause",
        "suspend and resume",
        "update of the weights",
        "kill -9 of an engine",
        "drain of an engine",
        "structured output",
        "log-probabilities",
        "stop",
    ),
    "bench_serve": ("bench serve 1",),
    "moe": ("moe decode b1", "moe decode b3"),
}
"""Results that each step must have."""


def start_warm(command: Sequence[str], environment: Mapping[str, str], log: Path) -> WarmProcess:
    return WarmProcess(
        *command[1:], environment=environment, log=log
    )  # the fork server imports no module of its folder


@pytest.mark.parametrize("step", BOXES)
@pytest.mark.long
def test_every_step_runs_dry(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_steps, "start_process", start_warm)
    run_step(Campaign(folder=tmp_path, step=step, dry=True, sizes=DRY_SIZES, model=MODEL, box=BOXES[step]))
    rows = read_results(tmp_path)
    failed = [row for row in rows if "error" in row or row.get("failed")]
    logs = "".join(path.read_text() for path in tmp_path.glob("*.process.log")) if step in SERVER_STEPS else ""
    assert not failed, logs
    assert set(RESULTS[step]) <= {row["name"] for row in rows}, logs
    assert not [row for row in rows if "equal" in row and row["equal"] is not True and not all(row["equal"])]


def test_the_script_carries_the_model_and_runs_steps_within_their_time_limits(tmp_path: Path) -> None:
    """One step runs, one is ended at its time limit, and one does not fit in the time that is left."""
    out, state, model = tmp_path / "out", tmp_path / "state", tmp_path / "model.gguf"
    model.write_bytes(bytes(range(256)) * 10)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").touch()
    (state / "site").mkdir(parents=True)  # the wheels are installed
    environment = {"BUNDLES": str(tmp_path / "bundles"), "STATE": str(state), "OUT": str(out), "PYTHON": sys.executable}

    def campaign(*arguments: str) -> str:
        command = ["bash", str(ROOT / "bench" / "gpu" / "campaign.sh"), *arguments]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "limit 64 MiB" in campaign("prepare", str(tmp_path / "wheels"), str(model))
    boxes = ["--box", "facts=300", "--box", "engine=0", "--box", "moe=100000"]
    sizes = ["--size", "copy_elements=64", "--size", "turns=1000000000"]  # no machine ends the engine's step in time
    printed = campaign("1", "--dry", "--steps", "facts,engine,moe", "--seconds", "400", *boxes, *sizes)
    rows = {(row["step"], row["name"], row.get("of")): row for row in read_results(out)}
    assert rows["driver", "end", "facts"]["status"] == 0, (state / "phase-1" / "facts.log").read_text()
    assert ("facts", "rates", None) in rows
    assert rows["driver", "end", "engine"]["status"] == "time limit"
    assert ("driver", "skipped", "moe") in rows
    assert "rates:" in printed
    campaign("2", "--dry", "--seconds", "0")
    assert (state / "model.gguf").read_bytes() == model.read_bytes()
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "logs-phase-1.tar.gz", "logs-phase-2.tar.gz"}


def test_errors_come_first_in_the_summary() -> None:
    rows: list[dict[str, Any]] = [
        {"step": "driver", "name": "begin", "time": 1},
        {"step": "moe", "name": "a", "time": 1, "ms": 2.5},
        {"step": "race", "name": "b", "time": 1, "failed": ["staging: ValueError"]},
        {"step": "engine", "name": "c", "time": 1, "error": "ValueError: no"},
    ]
    assert [line.split()[0] for line in summary(rows)] == ["race", "engine", "moe"]


def test_sizes_are_arguments() -> None:
    assert Sizes().with_values(["batches=1,2", "streams=3"]) == Sizes(batches=(1, 2), streams=3)
    for value in ("rows=1", "streams=1,2", "streams=", "batches=1,x", "streams=0"):
        with pytest.raises(ValueError, match=value.partition("=")[0]):
            Sizes().with_values([value])


@pytest.mark.parametrize(
    "arguments", [["--steps", "facts,none"], ["--box", "none=1"], ["--box", "facts=x"], ["--size", "none=1"]]
)
def test_an_unknown_argument_is_an_error(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert arguments[1].partition(",")[2] in result.output
