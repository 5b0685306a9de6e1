"""The GPU campaign, dry: every step on the CPU with small shapes and without an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from soak import SOAK
from warm_python import WarmProcess

from bench.gpu import carry, page, server_steps
from bench.gpu.campaign import BOXES, MODEL, SERVER_STEPS, main, run_step, summary
from bench.gpu.report import DRY_SIZES, Campaign, Sizes, read_results
from megatron_runtime.checkpoints.source import StoredModel

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
    "vllm": ("vLLM is not installed",),
    "vllm_serve": ("vLLM is not installed",),
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


@pytest.mark.skipif(not SOAK, reason="compresses a checkout and starts four interpreters: run by make soak")
def test_bundles_carry_the_campaign_whose_steps_have_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step runs, one is ended at its time limit, and one does not fit in the time that is left."""
    wheels, bundles, there, out = (tmp_path / name for name in ("wheels", "bundles", "there", "out"))
    for folder in (wheels, there):
        folder.mkdir()
    (wheels / "a.whl").write_bytes(b"wheel")
    model = tmp_path / "model.gguf"
    model.write_bytes(os.urandom(1 << 20))
    # A file of the checkout that is not needed here takes time to compress.
    needed = [path for path in carry.checkout() if path.parts[0] in ("bench", "runtime", "kernels", "operator")]
    monkeypatch.setattr(carry, "checkout", lambda: iter(needed))
    monkeypatch.setattr(carry, "resolve", lambda _reference: StoredModel("GGUF", model))
    result = CliRunner().invoke(carry.main, ["pack", str(bundles), "--size", "1", "--wheels", str(wheels)])
    assert result.exit_code == 0, result.output
    paths = sorted(bundles.iterdir())
    assert len(paths) > 1
    assert all(path.stat().st_size <= 1 << 20 for path in paths)
    data = b"".join(path.read_bytes() for path in paths)
    subprocess.run(["tar", "-xz", "-C", str(there)], input=data, check=True)
    assert (there / "model.gguf").read_bytes() == model.read_bytes()
    assert (there / "wheels" / "a.whl").read_bytes() == b"wheel"
    (there / "site").mkdir()  # the wheels are installed
    boxes = ["--box", "facts=300", "--box", "engine=0", "--box", "moe=100000"]
    sizes = ["--size", "copy_elements=64", "--size", "turns=1000000000"]  # no machine ends the engine's step in time
    steps = ["--dry", "--steps", "facts,engine,moe", "--seconds", "400"]
    done = subprocess.run(
        ["bash", str(there / "bench" / "gpu" / "carried.sh"), *steps, *boxes, *sizes],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["step"], row["name"], row.get("of")): row for row in read_results(out)}
    assert rows["driver", "end", "facts"]["status"] == 0, (there / "results" / "facts.log").read_text()
    assert ("facts", "rates", None) in rows
    assert rows["driver", "end", "engine"]["status"] == "time limit"
    assert ("driver", "skipped", "moe") in rows
    assert "rates:" in done.stdout
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "logs.tar.gz"}


IMPORTED = (
    *("bench.gpu.campaign", "bench.gpu.model_steps", "bench.gpu.server_steps", "bench.gpu.page"),
    *("bench.gpu_engine", "bench.gpu_kernels", "bench.host_step"),
    *(
        "megatron_runtime.cli.__main__",
        "megatron_runtime.cli.containers",
        "megatron_runtime.cli.serve",
        "megatron_runtime.backends.native.build",
        "megatron_runtime.server.app",
    ),
    *("small_engine", "tests.gpu.test_engine_on_a_device", "tests.gpu.test_kernels_on_a_device"),
)
"""What runs on a machine with a GPU."""
PROGRAM = """
import importlib, importlib.metadata, re, sys

owners = importlib.metadata.packages_distributions()
present, modules = set(sys.argv[1].split(",")), sys.argv[2].split(",")

class Absent:
    def find_spec(self, name, path=None, target=None):
        found = {re.sub("[-_.]+", "-", owner).lower() for owner in owners.get(name.partition(".")[0], ())}
        if found and not found & present and not name.startswith(("megatron_", "bench", "tests")):
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)

sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""
"""Imports modules where only the packages of the first argument are installed."""


def test_everything_imports_without_the_projects_environment() -> None:
    """Without the packages that `make setup` installs in addition to the packages of the machine and of the bundles."""
    folders = [ROOT / name for name in ("runtime", "kernels", "operator", ".", "tests/support")]
    site = [path for path in sys.path if path.endswith("site-packages")]
    present = carry.closure(*carry.EXPECTED).union(carry.carried())
    done = subprocess.run(
        # -S: no .pth file of site-packages installs the project.
        [sys.executable, "-S", "-P", "-c", PROGRAM, ",".join(present), ",".join(IMPORTED)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *site])},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_page_shows_every_result_and_failures_first(tmp_path: Path) -> None:
    campaign = Campaign(folder=tmp_path, step="driver", dry=True, sizes=DRY_SIZES, model=MODEL, box=1)
    campaign.emit("begin", seconds=1, steps=[], dry=True)
    campaign.emit("end", of="moe", status="time limit")
    for step, name, figures in (
        ("facts", "versions", {"python": "3.12.3", "torch": "2.15.0", "triton": "3.9.0", "cpus": 16}),
        ("facts", "device", {"text": "NVIDIA H200, 580.1"}),
        ("facts", "rates", {"copy_terabytes_per_s": 4.1, "read_terabytes_per_s": 4.2, "teraflops": 790}),
        ("engine", "decode b1", {"tokens_per_s": 178.3, "percent": 66.2}),
        ("race", "staging during captures", {"failed": ["step: RuntimeError"]}),
        ("engine", "decode b8", {"tokens_per_s": 1365.04, "percent": 68.3}),
        ("engine", "first token 16", {"ms": 11.3, "all": [11.2, 11.3]}),
        ("products", "product qkv 1 rows", {"us": 20.0}),
        ("products", "product qkv 8 rows", {"us": 21.0}),
        ("products", "product qkv 8 rows", {"us": 22.0}),
        ("profile", "kernels b1", {"us_of_a_step": [["a|b", 32, 900.5], ["c", 1, 1.0]]}),
        ("server", "kill -9 of an engine", {"equal": [True, False], "failed": [], "exit": -9}),
        ("attention", "attention b1 of 1024", {"us": {"128": 9.0, "256": 8.0}}),
    ):
        replace(campaign, step=step).emit(name, **figures)
    result = CliRunner().invoke(page.main, [str(tmp_path), "--commit", "1234abcd"])
    assert result.exit_code == 0, result.output
    text = result.output
    assert text.startswith("# GPU campaign on NVIDIA H200, 20")
    assert "torch 2.15.0, triton 3.9.0" in " ".join(text.split())
    assert "- race, staging during captures: ['step: RuntimeError']\n- The step `moe` reached its time limit." in text
    for line in (
        "|  | tokens per s | percent |",
        "| decode b1 | 178.3 | 66.2 |",
        "| decode b8 | 1365 | 68.3 |",
        "| first token 16 | ms 11.3, all 11.2 / 11.3 |",
        "| us | 1 rows | 8 rows |",
        "| product qkv | 20 | 22 |",
        "| `a\\|b` | 32 | 900.5 |",
        "| kill -9 of an engine | equal 1 of 2, exit -9 |",
        "| attention b1 of 1024 | us 128 9, us 256 8 |",
    ):
        assert f"{line}\n" in text


def test_a_page_names_the_steps_whose_last_run_did_not_end() -> None:
    rows: list[dict[str, Any]] = [
        {"step": "driver", "name": "begin", "steps": ["facts", "moe", "race", "vllm"]},
        {"step": "driver", "name": "end", "of": "facts", "status": 0},
        {"step": "driver", "name": "end", "of": "moe", "status": 1},
        {"step": "driver", "name": "end", "of": "race", "status": "time limit"},
        {"step": "driver", "name": "skipped", "of": "vllm"},
        {"step": "driver", "name": "begin", "steps": ["moe", "facts"]},
        {"step": "driver", "name": "end", "of": "moe", "status": 0},
    ]
    assert page.unfinished(rows) == {
        "facts": "did not end",
        "race": "reached its time limit",
        "vllm": "was left out for lack of time",
    }


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
