"""`megatron engine --tensor-parallel 2` beside a coordinator: every rank confirms verbs, and a rank is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from eventually import LONG_SECONDS
from fleet import Fleet, Load, until_serving, until_status
from soak import SOAK

from megatron_runtime.protocol.headers import Header
from megatron_runtime.transport.control_calls import ControlRejectedError

PROMPTS = [[1, 5, 9, 3 + index] for index in range(6)]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The processes of an engine's ranks by their numbers."""
    return {int(child.environ()["RANK"]): child for child in psutil.Process(launcher).children() if child.cmdline()}


@pytest.mark.timeout(280)
async def test_every_rank_confirms_every_verb_and_a_killed_rank_loses_no_request(
    fleet: Fleet, llama: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = llama(4, 2)
    options = ("--backend", "native", "--model", model, "--dtype", "float32", "--threads", "1")
    memory = ("--kv-cache-memory", "4Mi", "--block-size-tokens", "16")
    await fleet.coordinator()
    ranked = await fleet.engine("engine-0", *options, *memory, "--tensor-parallel", "2", warm=False)
    await fleet.engine("engine-1", *options, *memory)
    link = await fleet.admin()
    await until_serving(link, fleet.engines, seconds=120)
    status = await link.status()
    assert {engine.name: engine.ranks for engine in status.engines} == {"engine-0": 2, "engine-1": 1}
    with pytest.raises(ControlRejectedError, match="no engine succeeded") as rejected:
        await link.control(Header.START_CUDA_PROFILER, operation_id="profile", fence=1)
    for name in fleet.engines:
        assert f"{name}: START_CUDA_PROFILER failed: the CPU has no CUDA profiler" in rejected.value.message
    for kind in (Header.PAUSE, Header.SUSPEND, Header.RESUME, Header.UPDATE_WEIGHTS, Header.UNPAUSE):
        new = {"epoch": 1, "source": model} if kind is Header.UPDATE_WEIGHTS else {}
        ack = await link.control(kind, operation_id=kind.name, fence=1, **new)
        assert ack.ok, ack.error
        assert (ack.ranks, ack.total_ranks) == (3, 3)
    client = await fleet.client()

    def load() -> Load:
        load = Load([client])
        for prompt in PROMPTS:
            load.add(prompt, 60, temperature=0.0)
        return load

    undisturbed = load()
    await undisturbed.finish()
    answers = [record.final["generated_tokens"] for record in undisturbed.records if record.final is not None]
    ranks = ranks_of(ranked.pid)
    assert sorted(ranks) == [0, 1]
    disturbed = load()
    await disturbed.until(30)
    ranks[1].kill()
    await disturbed.finish()
    for record, answer in zip(disturbed.records, answers, strict=True):
        record.check(answer)
    assert await ranked.ended() == 1
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values())
    said = capfd.readouterr().err
    assert "rank 1: its connection closed" in said
    assert "rank 1 ended with signal SIGKILL, and the engine with it" in said
    await until_status(
        link,
        lambda status: [engine.name for engine in status.engines] == ["engine-1"],
        seconds=30,
        what="the engine that lost a rank has left",
    )


@pytest.mark.skipif(not SOAK, reason="starts three interpreters for what test_lost_ranks.py shows: run by make soak")
@pytest.mark.timeout(280)
async def test_an_engine_of_ranks_ends_in_order_at_sigterm(fleet: Fleet, llama: Callable[..., str]) -> None:
    await fleet.coordinator()
    options = ("--backend", "native", "--model", llama(4, 2), "--dtype", "float32", "--threads", "1")
    ranked = await fleet.engine(
        "engine-0", *options, "--kv-cache-memory", "4Mi", "--pipeline-parallel", "2", warm=False
    )
    link = await fleet.admin()
    await until_serving(link, fleet.engines, seconds=120)
    client = await fleet.client()
    load = Load([client])
    load.add(PROMPTS[0], 200, temperature=0.0)
    await load.until(5)
    ranked.process.send_signal(signal.SIGTERM)
    await load.finish()  # what was begun is finished first
    assert load.records[0].final is not None
    assert len(load.records[0].final["generated_tokens"]) == 200
    async with asyncio.timeout(LONG_SECONDS):
        assert await ranked.ended() == 0
