"""A rank that is gone, stopped, stalled or fails ends its engine or fails its order, which names it."""

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
from rank_program import HANGS_NOW
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_runtime.cli.processes import cause
from megatron_runtime.distributed.watch import HEARTBEAT_SECONDS

GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}] * 2
PROMPTS = [[1, 5, 9, 3], [7] * 20]
FIRST_STEP = 6
"""Of a request; before it the ranks describe themselves, load, and warm up in three steps."""
STEP_TIMEOUT_SECONDS = 3.0


@pytest.fixture
def told(llama: Callable[..., str]) -> dict[str, Any]:
    return {
        "model": llama(4, 2),
        "tensor": 2,
        "pipeline": 1,
        "expert": 1,
        "prompts": PROMPTS,
        "sampling": GREEDY,
    }


def last_words(directory: Path, rank: int) -> dict[str, Any]:
    return json.loads((directory / f"rank-{rank}.end").read_text())


@pytest.fixture
def report_end(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., None]:
    """report_end(rank=… or since=…): print how long ago that rank began to hang, or how long ago that was (`-s`)."""

    def report(*, rank: int | None = None, since: float | None = None) -> None:
        now = time.monotonic()
        if rank is not None:
            said = (tmp_path / f"rank-{rank}").read_text()
            since = float(said.partition(HANGS_NOW)[2].split()[0])
        assert since is not None
        print(f"\n{request.node.name}: the engine ended {now - since:.1f} s after")

    return report


@pytest.mark.long
def test_a_killed_rank_ends_all_others_which_name_it(start, told: dict[str, Any], tmp_path: Path, report_end) -> None:
    engine = start({**told, "pipeline": 2, "forever": True})
    assert engine.told() == "step"
    killed = time.monotonic()
    engine.processes[3].kill()
    assert engine.exit_codes() == [1, 1, 1, -signal.SIGKILL]
    report_end(since=killed)
    for rank in (0, 1, 2):
        said = last_words(tmp_path, rank)
        assert (said["reason"], said["rank"]) == ("RankLost", 3)
        assert said["message"].startswith("rank 3: its connection ended")
        assert "starts again with all its ranks" in said["remedy"]


def test_a_stopped_rank_ends_all_others_which_name_it(start, told: dict[str, Any], tmp_path: Path, report_end) -> None:
    engine = start({**told, "forever": True})
    assert engine.told() == "step"
    stopped = time.monotonic()
    os.kill(engine.processes[1].pid, signal.SIGSTOP)
    engine.processes[0].join(LONG_SECONDS)
    report_end(since=stopped)
    assert engine.processes[0].exitcode == 1
    assert (last_words(tmp_path, 0)["reason"], last_words(tmp_path, 0)["rank"]) == ("RankLost", 1)


def test_no_rank_outlives_the_first(start, told: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**told, "forever": True})
    assert engine.told() == "step"
    engine.processes[0].kill()
    assert engine.exit_codes() == [-signal.SIGKILL, 1]
    assert (last_words(tmp_path, 1)["reason"], last_words(tmp_path, 1)["rank"]) == ("RankLost", 0)


def test_a_step_that_fails_on_one_rank_ends_the_engine_with_its_error(
    start, told: dict[str, Any], tmp_path: Path
) -> None:
    engine = start({**told, "forever": True, "fail": [1, "execute_part", 1]})
    assert engine.exit_codes() == [1, 1]
    for rank in (0, 1):
        assert last_words(tmp_path, rank)["rank"] == 1
        assert last_words(tmp_path, rank)["message"] == "rank 1: execute_part fails as told"


@pytest.mark.parametrize(
    ("rank", "how", "after"),
    [
        (1, "blocks", 9),
        (0, "loops", 9),
        (1, "loops", FIRST_STEP - 1),
        (1, "computes for ever", 9),
    ],
)
def test_a_rank_that_hangs_in_a_step_ends_the_engine_which_names_it(
    start, told: dict[str, Any], tmp_path: Path, report_end, rank: int, how: str, after: int
) -> None:
    hang = {"forever": True, "hang": [rank, how, after], "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**told, **hang})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=rank)
    for each in (0, 1):
        said = last_words(tmp_path, each)
        assert (said["reason"], said["rank"]) == ("RankLost", rank)
        assert said["message"].startswith(f"rank {rank}: no rank has made progress for ")
        assert f"rank {rank} is in layer 1 of step {after + 1}" in said["message"]
        assert re.search(rf"rank {1 - rank} is in exchange \d+, of layer 1, of step {after + 1}", said["message"])
    assert "in begin_and_hang" in (tmp_path / f"rank-{rank}").read_text()


def test_a_rank_that_hangs_in_a_collective_ends_the_engine_which_names_it(
    start, told: dict[str, Any], tmp_path: Path, report_end
) -> None:
    hang = {"forever": True, "hang": [1, "blocks in a collective", 9], "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**told, **hang})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=1)
    for each in (0, 1):
        said = last_words(tmp_path, each)
        assert (said["reason"], said["rank"]) == ("RankLost", 1)
        places = re.search(r"rank 0 is in exchange (\d+),.*; rank 1 is in exchange (\d+), of layer 1,", said["message"])
        assert places is not None, said
        assert int(places[2]) < int(places[1])


def test_a_rank_that_computes_for_ever_in_its_pipeline_stage_is_named(
    start, told: dict[str, Any], tmp_path: Path, report_end
) -> None:
    stages = {"tensor": 1, "pipeline": 2, "forever": True, "step_timeout_seconds": STEP_TIMEOUT_SECONDS}
    engine = start({**told, **stages, "hang": [0, "computes for ever", 9]})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=0)
    assert "rank 0 is in layer 1 of step 10" in last_words(tmp_path, 1)["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interpreter_that_hangs_ends_the_engine_and_writes_where(
    start, told: dict[str, Any], tmp_path: Path, report_end, rank: int
) -> None:
    engine = start({**told, "forever": True, "hang": [rank, "holds the interpreter", 9]})
    assert engine.exit_codes() == [1, 1]
    report_end(rank=rank)
    said = last_words(tmp_path, 1 - rank)
    assert (said["reason"], said["rank"]) == ("RankLost", rank)
    # On a loaded machine the other rank may look only when the hung one has ended itself.
    words = re.fullmatch(
        rf"rank {rank}: (its connection ended.*|its interpreter has sent no heartbeat for (\d+\.\d) s)", said["message"]
    )
    assert words is not None, said
    assert words[2] is None or float(words[2]) >= HEARTBEAT_SECONDS
    assert "in begin_and_hang" in (tmp_path / f"rank-{rank}").read_text()


@pytest.mark.parametrize(
    ("after", "step_timeout"), [(FIRST_STEP - 3, 1), (9, 60)], ids=["in the warm-up", "in a step of a request"]
)
def test_a_slow_step_is_not_a_hang(start, told: dict[str, Any], after: int, step_timeout: float) -> None:
    engine = start({**told, "hang": [1, "computes", after], "step_timeout_seconds": step_timeout})
    assert {index: len(answer["tokens"]) for index, answer in engine.told().items()} == {0: 12, 1: 12}
    assert engine.exit_codes() == [0, 0]


def test_an_order_that_one_rank_cannot_do_is_undone_and_can_be_given_again(start, told: dict[str, Any]) -> None:
    engine = start({**told, "fail": [1, "load", 1]})
    assert engine.told() == "rank 1: load: load fails as told"
    assert {index: len(answer["tokens"]) for index, answer in engine.told().items()} == {0: 12, 1: 12}
    assert engine.exit_codes() == [0, 0]


def test_sigterm_of_any_rank_asks_the_first_to_end_in_order(start, told: dict[str, Any]) -> None:
    engine = start({**told, "forever": True})
    assert engine.told() == "step"
    engine.processes[1].terminate()
    while (said := engine.told()) != "leave":
        assert said == "step"


def test_a_rank_that_does_not_come_is_named(start, told: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**told, "pipeline": 2, "rendezvous_seconds": 3}, ranks=[0, 1, 3])
    assert engine.exit_codes() == [1, 1, 1]
    said = last_words(tmp_path, 0)
    assert (said["reason"], said["rank"]) == ("RendezvousFailed", 2)
    assert "missing are ranks [2] of 4" in said["message"]
    assert "check that all pods of the engine run" in said["remedy"]


def test_a_model_that_cannot_be_spread_so_is_refused(start, told: dict[str, Any], tmp_path: Path) -> None:
    engine = start({**told, "tensor": 1, "expert": 2})
    assert engine.exit_codes() == [1, 1]
    for rank in (0, 1):
        assert "expert_parallel_size=2: this model has no experts: use 1" in (tmp_path / f"rank-{rank}").read_text()


@pytest.mark.parametrize(("codes", "to_blame"), [((1, -9), 1), ((-9, 1), 0), ((1, 3), 0), ((-11, -9), 0)])
def test_of_ranks_that_ended_together_the_one_a_signal_ended_is_to_blame(codes: tuple[int, int], to_blame: int) -> None:
    """Rank 0 may leave, because another was killed, before anybody has looked."""
    failures = {rank: ProcessFailure(rank, 1000 + rank, code, "no file") for rank, code in enumerate(codes)}
    for failure in failures.values():
        failure.timestamp = 1
    assert cause(failures) == (to_blame, failures[to_blame])
