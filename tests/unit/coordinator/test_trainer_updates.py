"""UPDATE_WEIGHTS from a trainer: everywhere or nowhere, under epochs that rise."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.transport.control_calls import ControlRejectedError

OLD, NEW = (f"trainer://10.0.0.1:7000/{epoch}-{str(epoch) * 64}" for epoch in (1, 2))
HEALS = Timing(heartbeat=0.02, suspect=30.0, dead=60.0, client_dead=60.0, recovery=0.0)


def update(link: Any, source: str, epoch: int, **fields: Any) -> Any:
    return link.control(
        Header.UPDATE_WEIGHTS, **{"operation_id": f"op-{epoch}", "fence": 1, "source": source, "epoch": epoch, **fields}
    )


async def pool(stage: Any, **second: Any) -> Any:
    coordinator = stage.coordinator(timing=HEALS)
    engines = [await stage.engine("engine-0"), await stage.engine("engine-1", **second)]
    link = await stage.admin()
    return coordinator, engines, link


@pytest.mark.parametrize("fault", ["failing", "mute"])
async def test_an_engine_that_cannot_stage_them_makes_all_keep_the_old_weights(stage, fault) -> None:
    coordinator, engines, link = await pool(stage)
    await update(link, OLD, 1)
    setattr(engines[1], fault, {Header.UPDATE_WEIGHTS})
    with pytest.raises(ControlRejectedError, match="not every engine succeeded: engine-1") as rejected:
        await update(link, NEW, 2, timeout_seconds=60.0 if fault == "failing" else 0.3)
    assert rejected.value.ack.evicted == []
    for engine in engines:
        await engine.until(lambda engine=engine: [commit.discard for commit in engine.commits] == [None, True])
        assert (engine.epoch, engine.source) == (1, OLD)
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.source) == (1, OLD)
    assert len(coordinator.core.engines.serving()) == 2


async def test_an_engine_that_is_lost_does_not_stop_the_update_and_gets_it_when_it_returns(stage) -> None:
    coordinator, engines, link = await pool(stage, mute={Header.UPDATE_WEIGHTS})
    answer = update(link, NEW, 2)
    await engines[1].until(lambda: engines[1].controls)
    engines[1].close()
    assert (await answer).engines["engine-0"].ok
    again = await stage.engine("engine-1", serving=False, revision="another")
    assert (again.acks[0].source, again.acks[0].epoch) == (NEW, 2)
    assert coordinator.core.verbs.epoch == 2


async def test_an_engine_that_joins_learns_where_its_weights_are(stage) -> None:
    """Of a living engine of the same revision and ranks that has the last weights."""
    copies = ("tcp://10.0.0.9:5560",)
    stage.coordinator(timing=HEALS)
    holder, link = await stage.engine("engine-0", revision="r1", copies=copies), await stage.admin()
    early = await stage.engine("engine-1", serving=False, revision="r1")
    assert early.acks[0].copies is None, "its weights are files"
    await update(link, NEW, 2)
    for name, fields, expected in (
        ("engine-2", {"revision": "r1"}, copies),
        ("engine-3", {"revision": "r2"}, None),
        ("engine-4", {"revision": "r1", "ranks": 2}, None),
    ):
        joined = await stage.engine(name, serving=False, **fields)
        assert (joined.acks[0].source, joined.acks[0].copies) == (NEW, expected)
    holder.close()
    await stage.until(lambda: not stage.coordinators[-1].core.engines.serving())
    assert (await stage.engine("engine-5", serving=False, revision="r1")).acks[0].copies is None


async def test_an_update_without_engines_counts_for_those_that_come(stage) -> None:
    stage.coordinator(timing=HEALS)
    await update(await stage.admin(), NEW, 2)
    engine = await stage.engine(serving=False, revision="r1")
    assert (engine.acks[0].source, engine.acks[0].epoch) == (NEW, 2)


async def test_files_after_a_trainer_are_for_the_revisions_that_have_them(stage) -> None:
    """The engines' own weights return with an update from files, which evicts an engine that cannot read them."""
    _, engines, link = await pool(stage)
    await update(link, NEW, 2)
    engines[1].failing = {Header.UPDATE_WEIGHTS}
    ack = await update(link, "/models/3", 3)
    assert ack.evicted == ["engine-1"]
    other = await stage.engine("engine-2", serving=False, revision="another")
    assert other.acks[0].source is None


async def test_a_trainer_that_is_restarted_at_another_address_publishes_the_same_weights_again(stage) -> None:
    """All engines learn the address, without an update: those that serve, and those that wait for the weights."""
    copies = ("tcp://10.0.0.9:5560",)
    coordinator = stage.coordinator(timing=HEALS)
    serving, link = await stage.engine("engine-0", revision="r1", copies=copies), await stage.admin()
    await update(link, NEW, 2)
    moved = NEW.replace("10.0.0.1", "10.0.0.2")
    assert (await update(link, moved, 2, operation_id="again")).ok
    waiting = await stage.engine("engine-1", serving=False, revision="r1")
    assert (waiting.acks[0].source, waiting.acks[0].epoch, waiting.acks[0].copies) == (moved, 2, copies)
    await serving.until(lambda: serving.source == moved)
    await serving.until(lambda: coordinator.core.engines.named("engine-0").source == moved)
    assert serving.acted[Header.UPDATE_WEIGHTS] == 1
    with pytest.raises(ControlRejectedError, match="epoch 2 is not above 2"):
        await update(link, moved.replace("222", "333"), 2, operation_id="others")


async def test_epochs_rise_and_the_last_update_may_be_repeated(stage) -> None:
    _, engines, link = await pool(stage)
    await update(link, NEW, 2)
    assert (await update(link, NEW, 2, operation_id="again")).ok
    for epoch in (1, 2):
        with pytest.raises(ControlRejectedError, match=f"epoch {epoch} is not above 2") as rejected:
            await update(link, OLD, epoch, operation_id=f"old-{epoch}")
        assert rejected.value.code == ErrorCode.INVALID_REQUEST
    assert engines[0].acted[Header.UPDATE_WEIGHTS] == 1
