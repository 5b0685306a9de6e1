"""A killed, stopped, stalled or failed rank ends its engine or fails its order. The error names the rank."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import LONG_SECONDS
from machine import scaled
from rank_program import HANGS_NOW
from soak import size
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_runtime.cli.processes import cause
from megatron_runtime.distributed.watch import HEARTBEAT_SECONDS

GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}] * 2
PROMPTS = [[1, 5, 9, 3], [7] * 20]
FIRST_STEP = 9
"""Number of the first step of a request. Before it: sizes, load, three warm-up steps, captures, digest, copies."""
LAST_WARM_UP_STEP = 5
STEP_TIMEOUT_SECONDS = 3.0


@pytest.fixture
def options(llama: Callable[..., str]) -> dict[str, Any]:
    return {
        "model": llama(4, 2),
        "tensor": 2,
        "pipeline": 1,
        "expert": 1,
        "prompts": PROMPTS,
        "sampling": GREEDY,
    }


def termination_message(directory: Path, rank: int) -> dict[str, Any]:
    return json.loads((directory / f"rank-{rank}.end").read_text())


@pytest.fixture
def report_end(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., None]:
    """report_end(rank=… or since=…): print how long ago that rank began to hang, or how long ago that was (`-s`)."""

    def report(*, rank: int | None = None, since: float | None = None) -> None:
        now = time.monotonic()
        if rank is not None:
            log = (tmp_path / f"rank-{rank}").read_text()
            since = float(log.partition(HANGS_NOW)[2].split()[0])
        assert since is not None
        print(f"\n{request.node.name}: the engine ended {now - since:.1f} s after")

    return report


@pytest.mark.long
def test_a_killed_rank_ends_all_others_which_name_it(
    start, options: dict[str, Any], tmp_path: Path, report_end
) -> None:
    engine = start({**options, "pipeline": 2, "forever": True})
    assert engine.next_message() == "step"
    killed = time.monotonic()
    engine.processes[3].kill()
    assert engine.exit_codes() == [1, 1, 1, -signal.SIGKILL]
    report_end(since=killed)
    for rank in (0, 1, 2):
        written = termination_message(tmp_path, rank)
        assert (written["reason"], written["rank"]) == ("RankLost", 3)
        assert written["message"].startswith("rank 3: its connection closed")
        assert "starts again with all its ranks" in written["remedy"]


def test_a_stopped_rank_ends_all_others_which_name_it(
    start, options: dict[str, Any], tmp_path: Path, report_end
) -> None:
    engine = start({**options, "forever": True})
    assert engine.next_message() == "step"
    stopped = time.monotonic()
    os.kill(engine.processes[1].pid, signal.SIGSTOP)
    engine.processes[0].join(LONG_SECONDS)
    report_end(since=stopped)
    assert engine.processes[0].exitcode == 1
    assert (termination_message(tmp_path, 0)["reason"], termination_message(tmp_path, 0)["rank"]) == ("RankLost", 1)


def test_no_rank_outlives_the_first(start, options: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**options, "forever": True})
    assert engine.next_message() == "step"
    engine.processes[0].kill()
    assert engine.exit_codes() == [-signal.SIGKILL, 1]
    assert (termination_message(tmp_path, 1)["reason"], termination_message(tmp_path, 1)["rank"]) == ("RankLost", 0)


def test_a_step_that_fails_on_one_rank_ends_the_engine_with_its_error(
    start, options: dict[str, Any], tmp_path: Path
) -> None:
    engine = start({**options, "forever": True, "fail": [1, "execute_part", 1]})
    assert engine.exit_codes() == [1, 1]
    for rank in (0, 1):
        assert termination_message(tmp_path, rank)["rank"] == 1
        assert termination_message(tmp_path, rank)["message"] == "rank 1: execute_part fails: injected fault"


@pytest.mark.parametrize(
    ("rank", "how", "after"),
    [
        (1, "blocks", FIRST_STEP - 1),
        (0, "blocks", 9),
        *size([], soak=[(0, "loops", 9), (1, "blocks", 9), (1, "loops", FIRST_STEP - 1), (1, "computes for ever", 9)]),
    ],
)
def test_a_rank_that_hangs_in_a_step_ends_the_engine_which_names_it(
    start, options: dict[str, Any], tmp_path: Path, report_end, rank: int, how: str, after: int
) -> None:
    hang = {"forever": True, "hang": [rank, how, after], "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**options, **hang})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=rank)
    for each in (0, 1):
        written = termination_message(tmp_path, each)
        assert (written["reason"], written["rank"]) == ("RankLost", rank)
        assert written["message"].startswith(f"rank {rank}: no rank has made progress for ")
        assert f"rank {rank} is in layer 1 of step {after + 1}" in written["message"]
        assert re.search(rf"rank {1 - rank} is in exchange \d+, of layer 1, of step {after + 1}", written["message"])
    assert "in begin_and_hang" in (tmp_path / f"rank-{rank}").read_text()


def test_a_rank_that_hangs_in_a_collective_ends_the_engine_which_names_it(
    start, options: dict[str, Any], tmp_path: Path, report_end
) -> None:
    hang = {"forever": True, "hang": [1, "blocks in a collective", 9], "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**options, **hang})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=1)
    for each in (0, 1):
        written = termination_message(tmp_path, each)
        assert (written["reason"], written["rank"]) == ("RankLost", 1)
        places = re.search(
            r"rank 0 is in exchange (\d+),.*; rank 1 is in exchange (\d+), of layer 1,", written["message"]
        )
        assert places is not None, written
        assert int(places[2]) < int(places[1])


def test_a_pipeline_stage_that_hangs_is_named(start, options: dict[str, Any], tmp_path: Path, report_end) -> None:
    stages = {"tensor": 1, "pipeline": 2, "forever": True, "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**options, **stages, "hang": [0, size("blocks", soak="computes for ever"), 9]})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=0)
    assert "rank 0 is in layer 1 of step 10" in termination_message(tmp_path, 1)["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_hung_interpreter_ends_the_engine_with_a_traceback(
    start, options: dict[str, Any], tmp_path: Path, report_end, rank: int
) -> None:
    engine = start({**options, "forever": True, "hang": [rank, "holds the interpreter", 9]})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=rank)
    written = termination_message(tmp_path, 1 - rank)
    assert (written["reason"], written["rank"]) == ("RankLost", rank)
    # On a loaded machine the other rank may look only when the hung one has ended itself.
    words = re.fullmatch(
        rf"rank {rank}: (its connection closed.*|its interpreter has sent no heartbeat for (\d+\.\d) s)",
        written["message"],
    )
    assert words is not None, written
    assert words[2] is None or float(words[2]) >= HEARTBEAT_SECONDS
    assert "in begin_and_hang" in (tmp_path / f"rank-{rank}").read_text()


@pytest.mark.parametrize(
    ("after", "step_timeout"),
    [(LAST_WARM_UP_STEP - 1, 1), (FIRST_STEP, scaled(60))],
    ids=["in the warm-up", "in a step of a request"],
)
def test_a_slow_step_is_not_a_hang(start, options: dict[str, Any], after: int, step_timeout: float) -> None:
    engine = start({**options, "hang": [1, "computes", after], "step_timeout_seconds": step_timeout})
    assert {index: len(answer["tokens"]) for index, answer in engine.next_message().items()} == {0: 12, 1: 12}
    assert engine.exit_codes() == [0, 0]


def test_order_that_fails_on_one_rank_is_rolled_back_and_can_be_retried(start, options: dict[str, Any]) -> None:
    engine = start({**options, "fail": [1, "load", 1]})
    assert engine.next_message() == "rank 1: load: load fails: injected fault"
    assert {index: len(answer["tokens"]) for index, answer in engine.next_message().items()} == {0: 12, 1: 12}
    assert engine.exit_codes() == [0, 0]


def test_sigterm_to_any_rank_drains_the_engine(start, options: dict[str, Any]) -> None:
    engine = start({**options, "forever": True})
    assert engine.next_message() == "step"
    engine.processes[1].terminate()
    while (message := engine.next_message()) != "leave":
        assert message == "step"


def test_a_rank_that_is_missing_at_the_rendezvous_is_named(start, options: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**options, "pipeline": 2, "rendezvous_seconds": 3}, ranks=[0, 1, 3])
    assert engine.exit_codes() == [1, 1, 1]
    written = termination_message(tmp_path, 0)
    assert (written["reason"], written["rank"]) == ("RendezvousFailed", 2)
    assert "missing ranks: [2] of 4" in written["message"]
    assert "check that all pods of the engine run" in written["remedy"]


def test_parallel_sizes_that_do_not_fit_the_model_are_rejected(start, options: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**options, "tensor": 1, "expert": 2})
    assert engine.exit_codes() == [1, 1]
    for rank in (0, 1):
        assert "expert_parallel_size=2: this model has no experts: use 1" in (tmp_path / f"rank-{rank}").read_text()


@pytest.mark.parametrize(("codes", "expected"), [((1, -9), 1), ((-9, 1), 0), ((1, 3), 0), ((-11, -9), 0)])
def test_of_ranks_that_ended_together_the_one_ended_by_a_signal_is_the_cause(
    codes: tuple[int, int], expected: int
) -> None:
    """Rank 0 may exit because another rank was killed, before the agent has looked."""
    failures = {rank: ProcessFailure(rank, 1000 + rank, code, "no file") for rank, code in enumerate(codes)}
    for failure in failures.values():
        failure.timestamp = 1
    assert cause(failures) == (expected, failures[expected])
