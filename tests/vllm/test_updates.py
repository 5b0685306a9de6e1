"""An update of two vLLM engines, from files or a trainer: both load them under a pause, or both keep the old ones."""

from __future__ import annotations

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from eventually import eventually
from fleet import until_serving, until_status
from safetensors.torch import load_file, save_file

from megatron_runtime.process.children import child_environment
from megatron_runtime.protocol.headers import Header
from megatron_runtime.trainer import WeightServer
from megatron_runtime.transport.control_calls import ControlRejectedError

from .conftest import START_SECONDS, Pool
from .test_engine import answers, check, load_of, prompts

pytestmark = pytest.mark.timeout(1800)

PLUGIN = Path(__file__).with_name("failing_reload")


@pytest.fixture(scope="module")
def other_weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with another last norm."""
    directory = Path(shutil.copytree(model, tmp_path_factory.mktemp("other") / "model"))
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].flip(0).contiguous()
            save_file(tensors, path, metadata={"format": "pt"})
    return directory


async def test_if_one_engine_cannot_load_new_weights_both_answer_with_the_old_ones(
    pool: Pool, other_weights: Path
) -> None:
    """The failed engine starts again with the weights of the other. Later both take the new ones."""
    path = os.pathsep.join([str(PLUGIN), child_environment()["PYTHONPATH"]])
    await pool.start()
    await pool.engine("good", "vllm")
    await pool.engine("bad", "vllm", environment={"PYTHONPATH": path})
    await until_serving(pool.admin, ("good", "bad"), seconds=START_SECONDS)
    wanted = prompts(8)
    expected = await answers(pool, wanted)

    load = load_of(pool, wanted)
    await load.until(40)
    with pytest.raises(ControlRejectedError, match=r"bad: UPDATE_WEIGHTS: loading .*the disk of this engine failed"):
        await pool.control(Header.UPDATE_WEIGHTS, source=str(other_weights), epoch=5)
    assert await pool.fleet.engines["bad"].ended() == 1
    await check(load, expected)
    status = await until_status(pool.admin, lambda status: len(status.engines) == 1, what="the failed engine has left")
    assert [(engine.name, engine.epoch, engine.source) for engine in status.engines] == [("good", 0, "")]

    await pool.engine("bad", "vllm")
    await until_serving(pool.admin, ("good", "bad"), seconds=START_SECONDS)
    assert await answers(pool, wanted) == expected

    load = load_of(pool, wanted)
    await load.until(40)
    await pool.control(Header.UPDATE_WEIGHTS, source=str(other_weights), epoch=6)
    await load.finish(seconds=START_SECONDS)
    for record in load.records:
        assert [epoch for _, epoch in record.final["policy_epoch"]] in ([0, 6], [6])

    async def have_one_digest() -> bool:
        engines = (await pool.admin.status()).engines
        return len({engine.digest for engine in engines if engine.digest}) == 1

    await eventually(have_one_digest, what="both engines report the new weights")
    assert await answers(pool, wanted) != expected


async def test_weights_of_a_trainer_are_those_of_the_files_and_pass_from_engine_to_engine(
    pool: Pool, model: Path, other_weights: Path
) -> None:
    """An engine that starts when the trainer and its own files are of no use gets them from the other engine."""
    await pool.start(first="vllm", second="vllm")
    wanted = prompts(8)
    old = await answers(pool, wanted)
    await pool.control(Header.UPDATE_WEIGHTS, source=str(other_weights), epoch=1)
    new = await answers(pool, wanted)
    assert all(one != other for one, other in zip(old, new, strict=True))
    await pool.control(Header.UPDATE_WEIGHTS, source=str(model), epoch=2)
    assert await answers(pool, wanted) == old

    tensors = load_file(other_weights / "model.safetensors")
    admin, keys = f"127.0.0.1:{pool.fleet.admin_port}", pool.fleet.keys_dir
    server = await asyncio.to_thread(partial(WeightServer, tensors, coordinator=admin, keys=keys))
    load = load_of(pool, wanted)
    await load.until(40)
    source = await asyncio.to_thread(server.publish, 3)
    await load.finish(seconds=START_SECONDS)
    for record in load.records:
        assert [epoch for _, epoch in record.final["policy_epoch"]] in ([2], [2, 3], [3])  # [2]: it ended meanwhile
    assert await answers(pool, wanted) == new
    await asyncio.to_thread(server.close)

    await pool.fleet.engines.pop("second").kill()
    await until_status(pool.admin, lambda status: len(status.engines) == 1, what="the killed engine has left")
    await pool.engine("second", "vllm")
    status = await until_status(
        pool.admin,
        lambda status: [engine.serving and bool(engine.digest) for engine in status.engines] == [True, True],
        what="both engines serve",
        seconds=START_SECONDS,
    )
    assert {(engine.epoch, engine.source) for engine in status.engines} == {(3, source)}
    assert len({engine.digest for engine in status.engines}) == 1
    await pool.fleet.engines.pop("first").kill()
    assert await answers(pool, wanted) == new
