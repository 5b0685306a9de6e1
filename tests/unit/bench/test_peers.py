"""Comparison with other engines: a failed one is listed with its error, and a ratio above one means ours is better."""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "bench"))

from peer_bench import cells  # noqa: E402
from peer_bench.cells import HTTP, LOAD, OURS, START, Engine, measure_all, measure_starts  # noqa: E402
from peer_bench.processes import Worker, WorkerError  # noqa: E402
from peer_bench.report import Part, Report  # noqa: E402
from peer_bench.weights import MODELS  # noqa: E402

STEADY = """
import sys, time
sys.path.insert(0, ".")
from worker import serve

def load():
    def generate(prompts, new_tokens):
        time.sleep({seconds})
        print("output of a library on standard output")
        time.sleep({seconds} * new_tokens)
        return {seconds}
    return generate, 100

serve(load, libraries=("json",))
"""
CPUS = os.sched_getaffinity(0)
MODEL = MODELS["smollm2-135m"]


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on a loaded machine too, as other tests run at the same time."""
    monkeypatch.setattr(cells, "_IDLE_INTERVAL", 0.001)
    monkeypatch.setattr(cells, "_IDLE_LIMIT", 0.0)


def engine(name: str, program: str, *, weights: str = "4-bit") -> Engine:
    return Engine(name, weights, [sys.executable, "-c", program])


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "peers.json", {"cpus": 2}, bandwidth=1e10, compute=1e11, model=MODEL)


def rows_of(report: Report) -> dict[str, dict]:
    return {row["cell"]: row for row in json.loads(report.path.read_text())["rows"]}


def test_an_engine_that_fails_is_listed_and_the_others_are_measured(report: Report) -> None:
    group = [
        engine(OURS, STEADY.format(seconds=0.001)),
        engine("slow", STEADY.format(seconds=0.004)),
        engine("broken", "raise SystemExit('no such instruction')"),
    ]
    report.parts.append(Part("4-bit", "engines", group))
    measure_all(group, rounds=2, seconds_each=1e9, cpus=CPUS, after_round=report.write, memory_rate=lambda: 1e10)
    (part,) = json.loads(report.path.read_text())["parts"]
    assert {e["engine"]: e["failure"] for e in part["participants"]} == {
        OURS: None,
        "slow": None,
        "broken": "no such instruction",
    }
    rows = rows_of(report)
    assert {"decode b1", "decode b8", "decode b32", "prefill 512", "first token of 64 ms"} == set(rows)
    assert all(row["peer"] == "slow" for row in rows.values())
    assert rows["decode b8"]["all"]["slow"]["turns"] == 2
    assert all(worker.worker is None for worker in group)


def test_the_rate_of_the_memory_is_measured_before_and_after_each_figure(report: Report) -> None:
    ours, other = (engine(name, STEADY.format(seconds=0.0)) for name in (OURS, "other"))
    rates = itertools.chain([30e9, 50e9], itertools.repeat(40e9))
    group = [ours, other]
    report.parts.append(Part("4-bit", "engines", group))
    measure_all(group, rounds=1, seconds_each=1e9, cpus=CPUS, after_round=report.write, memory_rate=lambda: next(rates))
    turns = cells.DECODE[0].turns
    assert ours.rates["decode b1"] == [(30e9, 50e9)] + [(40e9, 40e9)] * (turns - 1)
    row = rows_of(report)["decode b1"]
    assert row["memory_gb_per_s"] == 40.0
    assert row["all"]["other"]["turns"] == turns
    assert row["all"]["other"]["turns_at_equal_memory_rates"] == turns - 1


@pytest.mark.parametrize(
    ("last_peer_rates", "ratio", "equal"),
    [((30e9, 31e9), 1.17, 3), ((30e9, 50e9), 1.22, 2), ((50e9, 50e9), 1.22, 2)],
    ids=["three turns", "a change during a turn, so all count", "a change between turns, so all count"],
)
def test_the_ratio_is_that_of_turns_in_which_both_met_the_same_memory(
    report: Report, last_peer_rates: tuple[float, float], ratio: float, equal: int
) -> None:
    ours, peer = engine(OURS, ""), engine("llama.cpp", "")
    ours.figures["decode b1"], peer.figures["decode b1"] = [16.6, 28.1, 16.6, 16.6], [15.6, 20.2, 13.0, 14.2]
    ours.rates["decode b1"] = [(30e9, 30e9), (52e9, 55e9), (31e9, 30e9), (30e9, 30e9)]
    peer.rates["decode b1"] = [(30e9, 31e9), (30e9, 50e9), (30e9, 30e9), last_peer_rates]
    report.parts.append(Part("bfloat16", "engines", [ours, peer]))
    report.write()
    entry = rows_of(report)["decode b1"]["all"]["llama.cpp"]
    assert (entry["ratio"], entry["turns_at_equal_memory_rates"]) == (ratio, equal)
    assert entry["figures"] == [15.6, 20.2, 13.0, 14.2]


def test_loads_are_measured_in_new_processes_until_the_first_token_too() -> None:
    short, long, broken = (engine(name, STEADY.format(seconds=0.05)) for name in (OURS, "long", "broken"))
    long.figures[LOAD.name] = [1000.0]
    broken.command[-1] = "raise SystemExit('no such instruction')"
    measure_starts([short, long, broken], rounds=2, cpus=CPUS)
    assert len(short.figures[LOAD.name]) == 2
    assert all(
        start > load + 0.1 for load, start in zip(short.figures[LOAD.name], short.figures[START.name], strict=True)
    )
    assert len(long.figures[START.name]) == 1
    assert (broken.failure, broken.figures) == ("no such instruction", {})
    assert short.worker is None


def test_an_engine_that_has_used_its_seconds_keeps_its_first_round(report: Report) -> None:
    group = [engine(OURS, STEADY.format(seconds=0.0))]
    report.parts.append(Part("4-bit", "engines", group))
    measure_all(group, rounds=3, seconds_each=1e-9, cpus=CPUS, after_round=report.write, memory_rate=lambda: 1e10)
    assert rows_of(report)["decode b8"]["all"][OURS]["turns"] == 1


def test_the_ratio_is_above_one_if_ours_is_better_for_rates_and_for_times(report: Report) -> None:
    ours, peer = engine(OURS, ""), engine("llama.cpp", "")
    for cell, own, other in ((HTTP[0], 30.0, 20.0), (LOAD, 0.5, 0.25)):
        ours.figures[cell.name], peer.figures[cell.name] = [own], [other]
    alone = engine(OURS, "")
    alone.figures[HTTP[0].name] = [40.0]
    report.parts.append(Part("4-bit", "servers", [ours, peer], alone))
    report.write()
    rows = rows_of(report)
    assert rows["http 1"]["ratio"] == 1.5
    assert rows["http 1"]["ratio_to_own_engine"] == 0.75
    assert rows["load s"]["ratio"] == 0.5
    assert "llama.cpp" in report.path.with_suffix(".svg").read_text()


def test_parts_that_a_run_does_not_measure_stay_in_the_file(report: Report) -> None:
    def measure(figure: float, weights: str, kind: Literal["engines", "servers"]) -> None:
        ours = engine(OURS, "")
        ours.figures[LOAD.name] = [figure]
        now = Report(
            report.path, {"at": figure}, bandwidth=1e10, compute=1e11, model=MODEL, parts=[Part(weights, kind, [ours])]
        )
        now.write()

    for figure, weights, kind in ((1, "float32", "engines"), (2, "4-bit", "servers"), (3, "4-bit", "engines")):
        measure(figure, weights, kind)
    measure(4, "float32", "engines")
    document = json.loads(report.path.read_text())
    shown = [
        (part["weights"], part["kind"], part["machine"]["at"], row["ours"])
        for part, row in zip(document["parts"], document["rows"], strict=True)
    ]
    assert document["machine"] == {"at": 4}
    assert shown == [("4-bit", "engines", 3, 3), ("4-bit", "servers", 2, 2), ("float32", "engines", 4, 4)]


def test_the_error_of_an_engine_that_ends_during_a_request_is_its_last_line() -> None:
    program = STEADY.format(seconds=0).replace("time.sleep(0 * new_tokens)", "sys.exit('out of memory')")
    worker = Worker([sys.executable, "-c", program], cpus=CPUS)
    with pytest.raises(WorkerError, match="out of memory"):
        worker.ask(batch=1, prompt_tokens=4, new_tokens=2, seed=1)
