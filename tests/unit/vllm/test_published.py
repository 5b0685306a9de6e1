"""Weights of a trainer in vLLM engines: received into shared memory, loaded under a pause, passed to other engines."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_runtime.protocol.published_weights import PublishedSource, WeightsUnavailableError, with_copies
from megatron_runtime.trainer import WeightServer
from megatron_runtime.transport.security import generate_key_files

from .conftest import Running, Start, answer, lines, weights_of

PROMPT = [11, 12, 13]


class Trainer:
    """Publishes the tensors of a model. The fake vLLM answers by the last byte of the last one."""

    def __init__(self, model: Path, keys: Path | None = None) -> None:
        self.tensors = load_file(model / "model.safetensors")
        self._last = list(self.tensors)[-1]
        self._keys = keys
        self.server = WeightServer(self.tensors, keys=keys)

    def publish(self, epoch: int) -> str:
        self.tensors[self._last].view(-1)[-1] = 2.0 ** (8 * epoch)  # float32: its last byte depends on the exponent
        return self.server.publish(epoch)

    def restart(self) -> None:
        port = int(self.server.address.rpartition(":")[2])
        self.server.close()
        self.server = WeightServer(self.tensors, keys=self._keys, port=port)


@pytest.fixture
def memory(tmp_path: Path, fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that stands for the shared memory of this machine."""
    from megatron_runtime.backends.vllm import shared_memory

    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", directory)
    return directory


@pytest.fixture
def trainer(model: Path, memory: Path) -> Iterator[Trainer]:
    trainer = Trainer(model)
    yield trainer
    trainer.server.close()


def received_in(memory: Path) -> Path:
    """Return the directory of the only weights in shared memory."""
    (directory,) = memory.glob("*/*")
    return directory


def sessions(memory: Path) -> list[str]:
    """Return the names of the weights in shared memory."""
    return sorted(path.name for path in memory.glob("*/*"))


async def update(running: Running, source: str, epoch: int) -> None:
    assert not (await running.backend.stage_weights(source, epoch)).failed
    assert not (await running.backend.load_staged_weights()).failed
    assert not (await running.backend.commit_weights()).failed


async def check(running: Running, weights: int, request_id: int = 1) -> Any:
    """Compare an answer, and return its last output."""
    running.submit(request_id, PROMPT, num_tokens_to_generate=5)
    [last] = await running.listener.end_of(request_id)
    assert running.listener.tokens(request_id) == answer(PROMPT, 5, weights)
    return last


async def test_published_weights_are_loaded_under_a_pause_and_the_memory_of_older_ones_is_freed(
    running: Running, trainer: Trainer, model: Path, memory: Path, fake_vllm: Path
) -> None:
    assert running.backend.copies == ()
    used = {weights_of(model)}
    for epoch in (2, 4):
        source = trainer.publish(epoch)
        reference = PublishedSource.parse(source)
        await update(running, source, epoch)
        assert sessions(memory) == [reference.session]
        received = received_in(memory)
        assert (received / "config.json").read_text() == (model / "config.json").read_text()
        used.add(weights_of(received))
        assert (await check(running, weights_of(received), epoch)).summary.policy_epoch == [(0, epoch)]
        assert running.backend.stats().weights_digest == reference.digest
        assert len(running.backend.copies) == 1
    assert len(used) == 3
    assert lines(fake_vllm, "reload_weights") == 2
    await running.backend.stop()
    assert sessions(memory) == []


@pytest.mark.parametrize("with_keys", [True, False])
async def test_an_engine_that_starts_gets_the_weights_from_another_engine(
    start: Start, model: Path, memory: Path, tmp_path: Path, with_keys: bool
) -> None:
    """Also a copy of a copy. The trainer is gone."""
    keys = tmp_path if with_keys else None
    if with_keys:
        for name, text in generate_key_files(roles=("server", "engine", "client", "trainer")).items():
            (tmp_path / name).write_text(text)
    trainer = Trainer(model, keys)
    first = await start(keys_dir=keys)
    await first.backend.load()
    source = trainer.publish(2)
    await update(first, source, 2)
    trainer.server.close()
    holder = first
    for _ in range(2):
        other = await start(keys_dir=keys)
        await other.backend.adopt_weights(with_copies(source, holder.backend.copies), 2)
        await other.backend.load()
        await other.backend.unpause()
        received = Path(other.backend._directory)
        assert received.parent.parent == memory
        assert weights_of(received) != weights_of(model)
        assert (await check(other, weights_of(received))).summary.policy_epoch == [(0, 2)]
        assert other.backend.stats().weights_digest == first.backend.stats().weights_digest
        await holder.backend.stop()
        holder = other


async def test_an_engine_that_starts_waits_until_the_trainer_publishes_again(
    start: Start, trainer: Trainer, memory: Path
) -> None:
    source = trainer.publish(2)
    trainer.restart()
    running = await start()
    for _ in range(2):
        await running.backend.adopt_weights(source, 2)
        with pytest.raises(WeightsUnavailableError, match="Publish again"):
            await running.backend.load()
    assert sessions(memory) == []
    assert trainer.publish(2) == source
    await running.backend.load()
    await running.backend.unpause()
    received = received_in(memory)
    await check(running, weights_of(received))


async def test_the_previous_weights_return_and_are_offered_again_if_the_update_is_discarded(
    running: Running, start: Start, trainer: Trainer, memory: Path
) -> None:
    source = trainer.publish(2)
    await update(running, source, 2)
    received = received_in(memory)
    weights = weights_of(received)
    assert not (await running.backend.stage_weights(trainer.publish(4), 4)).failed
    assert not (await running.backend.load_staged_weights()).failed
    assert len(sessions(memory)) == 2
    await running.backend.discard_weights()
    assert sessions(memory) == [PublishedSource.parse(source).session]
    await check(running, weights)
    trainer.server.close()
    other = await start()
    await other.backend.adopt_weights(with_copies(source, running.backend.copies), 2)
    await other.backend.load()


@pytest.mark.parametrize("can_sleep", [True, False])
async def test_a_resume_needs_no_trainer(
    start: Start, trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch, can_sleep: bool
) -> None:
    monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", str(int(can_sleep)))
    running = await start()
    await running.backend.load()
    source = trainer.publish(2)
    await update(running, source, 2)
    received = received_in(memory)
    trainer.server.close()
    await running.backend.release_memory()
    await running.backend.adopt_weights(with_copies(source, ("tcp://127.0.0.1:1",)), 2)  # the same weights
    assert not (await running.backend.restore_memory()).failed
    await running.backend.unpause()
    await check(running, weights_of(received))


async def test_a_suspended_engine_receives_at_the_resume_what_was_published_meanwhile(
    start: Start, trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_CAN_SLEEP", "1")
    running = await start()
    await running.backend.load()
    await running.backend.release_memory()
    await running.backend.adopt_weights(trainer.publish(2), 2)
    assert sessions(memory) == []
    assert not (await running.backend.restore_memory()).failed
    await running.backend.unpause()
    received = received_in(memory)
    await check(running, weights_of(received))


async def test_the_same_weights_may_be_published_again(running: Running, trainer: Trainer, memory: Path) -> None:
    source = trainer.publish(2)
    await update(running, source, 2)
    received = received_in(memory)
    weights = weights_of(received)
    await update(running, source, 2)
    await check(running, weights)


async def test_tensors_of_another_model_are_rejected_and_those_in_use_stay(
    running: Running, model: Path, memory: Path, other_weights: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    sharded = {"decoder.final_layernorm.weight": tensors[name]}
    for changed, words in (
        ({name: tensors[name][:8]}, rf"tensor {name} of the trainer is \(8,\), the weights in use have \(64,\)"),
        ({name: None}, f"tensor {name} of the trainer is absent"),
        (sharded, "tensor decoder.final_layernorm.weight of the trainer is .* whole tensors with the names"),
    ):
        values = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
        with closing(WeightServer(values)) as server:
            staged = await running.backend.stage_weights(server.publish(2), 2)
        assert staged.failed
        assert re.search(words, staged.error), staged.error
    assert sessions(memory) == []
    await check(running, weights_of(model))
    # Files may follow on a trainer's weights of another type.
    with closing(WeightServer({key: value.bfloat16() for key, value in tensors.items()})) as server:
        await update(running, server.publish(2), 2)
    await update(running, str(other_weights), 3)
    assert sessions(memory) == []
    assert running.backend.copies == ()
    await check(running, weights_of(other_weights), 2)


async def test_an_engine_of_several_pods_rejects_a_trainer(start: Start, trainer: Trainer) -> None:
    running = await start()
    running.backend._followers = SimpleNamespace()
    staged = await running.backend.stage_weights(trainer.publish(2), 2)
    running.backend._followers = None
    assert "of several pods" in staged.error


def test_weights_that_do_not_fit_are_rejected_with_the_remedy(
    trainer: Trainer, model: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_runtime.backends.vllm import published

    monkeypatch.setattr(published.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    place = memory / "root" / "new"
    place.parent.mkdir()
    with pytest.raises(ValueError, match=r"has 1 MiB free: raise the memory limit .* --shm-size"):
        published.receive(trainer.publish(2), place, model=model, current=model, keys_dir=None)
    assert not place.exists()


def test_what_a_killed_engine_left_in_shared_memory_is_removed(memory: Path) -> None:
    from megatron_runtime.backends.vllm.shared_memory import SharedMemory

    killed, living = (memory / f"megatron-weights-{name}" for name in ("killed", "living"))
    for directory in (killed, living):
        (directory / "1-ab").mkdir(parents=True)
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    engine = SharedMemory()
    place = Path(engine.path("2-cd"))
    assert (killed.exists(), living.exists(), place.parent.exists()) == (False, True, True)
    SharedMemory().path("3-ef")
    assert place.parent.exists(), "its engine runs"
    engine.close()
    assert not place.parent.exists()
    os.close(descriptor)
