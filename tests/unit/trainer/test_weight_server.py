"""The weights that a trainer publishes, read as an engine's rank reads them, over CURVE and plain TCP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from random_checkpoint import (
    LLAMA,
    all_tensors,
    assert_equal_weights,
    random_model,
    random_tensors,
    write_model,
)

from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints import published as published_module
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.published import PublishedCheckpoint
from megatron_runtime.checkpoints.source import IN_MEMORY, ModelInMemory, resolve
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.distributed import weight_port
from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.distributed.weight_port import WeightPort
from megatron_runtime.models.layers.cpu import PackedLinears
from megatron_runtime.models.layers.linear import LinearFactory
from megatron_runtime.models.weights import load_weights
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import Control
from megatron_runtime.protocol.published_weights import WeightsUnavailableError, with_copies
from megatron_runtime.trainer import PublishError, WeightServer
from megatron_runtime.trainer.published import PublishedWeights
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.security import TRAINER, generate_key_files

MODEL = replace(LLAMA, num_layers=2)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for name, text in {**generate_key_files(), **generate_key_files(roles=(TRAINER,))}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
async def coordinator(keys: Path) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings(
        listen="127.0.0.1", client_port=0, engine_port=0, admin_port=0, keys_dir=keys, timing=Timing(recovery=0.0)
    )
    coordinator = Coordinator(settings)
    coordinator.start()
    yield coordinator
    coordinator.stop()


@pytest.fixture
async def serve(coordinator: Coordinator, keys: Path) -> AsyncIterator[Callable[..., object]]:
    """Start a trainer of these tensors."""
    servers: list[WeightServer] = []

    async def start(tensors: object) -> WeightServer:
        address = coordinator.transport.addresses[Role.ADMIN]
        servers.append(await asyncio.to_thread(WeightServer, tensors, coordinator=address, keys=keys))
        return servers[-1]

    yield start
    for server in servers:
        await asyncio.to_thread(server.close)


async def read(source: str, keys: Path | None) -> dict[str, torch.Tensor]:
    def run() -> dict[str, torch.Tensor]:
        checkpoint = PublishedCheckpoint(source, config=MODEL, keys_dir=keys)
        try:
            return {name: tensor.clone() for name, tensor in all_tensors(checkpoint).items()}
        finally:
            checkpoint.close()

    return await asyncio.to_thread(run)


async def test_every_tensor_arrives_as_it_was_published(coordinator, serve, keys) -> None:
    """Two updates of the same tensors, which the program changes in place."""
    tensors = random_tensors(MODEL)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    server = await serve(tensors)
    for epoch in (3, 7):
        source = await asyncio.to_thread(server.publish, epoch)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(1.0)
        received = await read(source, keys)
        assert received.keys() == before.keys()
        for name, tensor in before.items():
            assert received[name].dtype == tensor.dtype
            torch.testing.assert_close(received[name], tensor, rtol=0, atol=0)
        assert coordinator.core.verbs.epoch == epoch
        assert coordinator.core.verbs.source == source


async def test_ranks_cut_the_tensors_of_a_trainer_as_those_of_a_file(serve, keys, tmp_path, monkeypatch) -> None:
    """Four ranks read at once, in small blocks that no part begins with. Their digests are those of the files."""
    monkeypatch.setattr("megatron_runtime.protocol.published_weights._BLOCK_VALUES", 500)
    tensors = random_tensors(MODEL)
    base = random_model(MODEL, seed=5)
    files = str(write_model(tmp_path / "model", MODEL, tensors))
    source = await asyncio.to_thread((await serve(tensors)).publish, 1)
    sizes = ParallelSizes(tensor=2, pipeline=2)

    def stage(rank: int, where: str) -> tuple[str | None, list[torch.Tensor]]:
        shard = sizes.shard(rank)
        store = WeightStore(ModelInMemory(base, name="base"), torch.float32, shard=shard, keys_dir=keys)
        store.load()
        store.stage(where)
        store.swap()
        return store.digest, list(store.weights.tensors())

    of_trainer = await asyncio.gather(*(asyncio.to_thread(stage, rank, source) for rank in range(4)))
    for rank, (digest, weights) in enumerate(of_trainer):
        expected_digest, expected = stage(rank, files)
        assert digest == expected_digest
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    whole = load_weights(open_checkpoint(resolve(files)), torch.float32)
    assert len(list(whole.tensors())) > len(of_trainer[0][1])


async def test_bytes_that_were_not_published_are_not_used(serve, keys, monkeypatch) -> None:
    """Two blocks of the same shape arrive in each other's place."""
    server = await serve({name: torch.full((4, 8), float(number)) for number, name in enumerate("ab")})
    source = await asyncio.to_thread(server.publish, 1)
    held = next(iter(server._held.values())).tensors
    held._tensors.reverse()
    with pytest.raises(WeightsUnavailableError, match="other bytes than were published"):
        await read(source, keys)
    held._tensors.reverse()
    assert (await read(source, keys))["b"][0, 0] == 1.0
    forged = PublishedWeights({"a": torch.ones(2, 2)}, epoch=1)
    monkeypatch.setattr(PublishedWeights, "manifest", forged.manifest)
    with pytest.raises(WeightsUnavailableError, match="its manifest has another digest"):
        await read(source, keys)


async def test_an_engine_learns_what_the_trainer_holds(serve, keys) -> None:
    server = await serve({"a": torch.ones(2, 2)})
    first = await asyncio.to_thread(server.publish, 1)
    server._model["a"].add_(1.0)
    await asyncio.to_thread(server.publish, 2)
    with pytest.raises(WeightsUnavailableError, match="epochs that it holds: 2"):
        await read(first, keys)


async def test_the_last_copy_of_published_weights_is_not_released(serve, keys) -> None:
    """Released weights are received again, unless the trainer holds them no more. Its address may change."""
    server = await serve(random_tensors(MODEL))
    source = await asyncio.to_thread(server.publish, 1)
    base = ModelInMemory(random_model(MODEL, seed=5), name="base")
    store = WeightStore(base, torch.float32, keys_dir=keys)

    def release_and_load() -> bool:
        """Return whether load() finds the weights that release() had."""
        before = store.weights
        store.release()
        assert store.weights is None
        store.load()
        assert before is not None
        assert store.weights is not None
        assert_equal_weights(before, store.weights)
        return store.weights is before

    def receive() -> None:
        store.load()
        store.stage(source)
        store.swap()

    await asyncio.to_thread(receive)
    assert not await asyncio.to_thread(release_and_load)
    server._offer({})
    assert await asyncio.to_thread(release_and_load)
    restarted = await serve(random_tensors(MODEL))
    moved = await asyncio.to_thread(restarted.publish, 1)
    assert moved != source
    assert store.holds(moved)
    store.use_source(moved)
    assert not await asyncio.to_thread(release_and_load)


def holder(keys: Path, linears: Callable[[], LinearFactory], shard: Shard, *, offers: bool) -> WeightStore:
    """Return the weights of a rank, not loaded. offers: other ranks may get them."""
    base = ModelInMemory(random_model(MODEL, seed=5), name="base")
    port = partial(WeightPort, "127.0.0.1", 0, keys_dir=keys, role="engine")
    return WeightStore(base, torch.float32, linears, shard=shard, keys_dir=keys, open_port=port if offers else None)


@pytest.mark.parametrize(
    ("linears", "sizes"),
    [
        (LinearFactory, ParallelSizes()),
        (partial(PackedLinears, "float32"), ParallelSizes(tensor=2)),
        (partial(PackedLinears, "int4"), ParallelSizes(pipeline=2)),
    ],
    ids=["dense", "float32 panels of two tensor ranks", "int4 panels of two stages"],
)
async def test_ranks_get_the_weights_of_an_engine_when_the_trainer_is_gone(
    serve, keys, linears, sizes, monkeypatch
) -> None:
    """Bytes, digest and the next update are those of the engine, and the new rank offers them, too."""
    server = await serve(random_tensors(MODEL))
    source = await asyncio.to_thread(server.publish, 1)
    shard = sizes.shard(sizes.world - 1)
    living = holder(keys, linears, shard, offers=True)
    await asyncio.to_thread(living.load)
    assert living.copies == ()
    await asyncio.to_thread(living.stage, source)
    await asyncio.to_thread(living.swap)
    await asyncio.to_thread(server.close)
    for _ in range(2):
        started = holder(keys, linears, shard, offers=True)
        started.use_source(with_copies(source, living.copies * sizes.world))
        await asyncio.to_thread(started.load)
        assert started.digest == living.digest
        for (name, ours), (other, theirs) in zip(started.weights.stored(), living.weights.stored(), strict=True):
            assert name == other
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        living = started
    monkeypatch.setattr(published_module, "ANSWER_SECONDS", 0.5)
    await asyncio.to_thread(living.release)
    assert living.weights is None
    await asyncio.to_thread(living.load)  # the last copy was kept
    await asyncio.to_thread(living.stage, IN_MEMORY)
    await asyncio.to_thread(living.swap)
    late = holder(keys, linears, shard, offers=False)
    late.use_source(with_copies(source, living.copies * sizes.world))
    with pytest.raises(WeightsUnavailableError, match=r"no trainer .*; the engine at .* does not hold session"):
        await asyncio.to_thread(late.load)


async def test_a_rank_gets_no_weights_of_another_part_or_format(serve, keys, caplog) -> None:
    """It gets them from the trainer instead."""
    server = await serve(random_tensors(MODEL))
    source = await asyncio.to_thread(server.publish, 1)
    living = holder(keys, LinearFactory, ParallelSizes(tensor=2).shard(0), offers=True)
    living.use_source(source)
    await asyncio.to_thread(living.load)
    for linears, shard, cause in (
        (LinearFactory, ParallelSizes(tensor=2).shard(1), "it holds 'rank 0 of tensor 2"),
        (partial(PackedLinears, "bfloat16"), ParallelSizes(tensor=2).shard(0), "it stores other tensors"),
    ):
        store = holder(keys, linears, shard, offers=False)
        store.use_source(with_copies(source, living.copies * 2))
        await asyncio.to_thread(store.load)
        assert cause in caplog.text
        alone = holder(keys, linears, shard, offers=False)
        alone.use_source(source)
        await asyncio.to_thread(alone.load)
        assert store.digest == alone.digest


async def test_a_trainer_is_known_by_the_keys_that_its_files_have_now(serve, keys) -> None:
    server = await serve({"a": torch.ones(2, 2)})
    source = await asyncio.to_thread(server.publish, 1)
    for name, text in generate_key_files(roles=(TRAINER,)).items():
        (keys / name).write_text(text)
    assert (await read(source, keys))["a"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


async def test_a_trainer_without_an_answer_is_unavailable(keys, monkeypatch) -> None:
    monkeypatch.setattr(published_module, "ANSWER_SECONDS", 0.2)
    source = f"trainer://127.0.0.1:1/1-{'0' * 64}"
    with pytest.raises(WeightsUnavailableError, match="no trainer answered at tcp://"):
        await read(source, keys)


async def test_a_client_key_does_not_open_the_trainer(serve, keys, tmp_path, monkeypatch) -> None:
    source = await asyncio.to_thread((await serve({"a": torch.ones(2, 2)})).publish, 1)
    stolen = tmp_path / "stolen"
    stolen.mkdir()
    for name, text in generate_key_files(roles=("engine",)).items():
        (stolen / name).write_text(text)
    (stolen / "trainer.pub").write_bytes((keys / "trainer.pub").read_bytes())
    monkeypatch.setattr(published_module, "ANSWER_SECONDS", 0.5)
    with pytest.raises(WeightsUnavailableError, match="no trainer answered"):
        await read(source, stolen)


async def test_a_reader_that_stops_ends_its_connection_only(serve, keys, monkeypatch) -> None:
    """The connection of a silent reader ends after the deadline, and others are served."""
    monkeypatch.setattr(weight_port, "EXCHANGE_SECONDS", 0.5)
    source = await asyncio.to_thread((await serve({"a": torch.ones(2, 2)})).publish, 1)
    silent = await asyncio.to_thread(PublishedCheckpoint, source, config=MODEL, keys_dir=keys)
    assert await asyncio.to_thread(silent._stream._socket.recv, 1) == b"", "the trainer closes it"
    with pytest.raises(WeightsUnavailableError, match="the connection ended at tensor 'a'"):
        await asyncio.to_thread(silent.read, "a")
    assert (await read(source, keys))["a"].sum() == 4
    silent.close()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([[1.0, float("nan")]]), "tensor 'a' has values that are not finite"),
        (torch.ones(2, 2, dtype=torch.float64), "tensor 'a' of type float64"),
        (torch.ones(0, 2), "tensor 'a' of type float32, shape \\(0, 2\\)"),
    ],
)
async def test_what_cannot_be_published_is_rejected_before_any_engine_hears_of_it(
    coordinator, serve, tensor, message
) -> None:
    server = await serve({"a": tensor})
    with pytest.raises(ValueError, match=message):
        await asyncio.to_thread(server.publish, 1)
    assert coordinator.core.verbs.epoch == 0


async def test_epochs_only_rise_and_a_repeated_update_changes_nothing(coordinator, serve) -> None:
    server = await serve({"a": torch.ones(2, 2)})
    source = await asyncio.to_thread(server.publish, 5)
    assert await asyncio.to_thread(server.publish, 5) == source
    server._model["a"].add_(1.0)
    for epoch in (4, 5):
        with pytest.raises(PublishError, match=f"epoch {epoch} is not above 5") as rejected:
            await asyncio.to_thread(server.publish, epoch)
        assert rejected.value.is_committed is False
    assert coordinator.core.verbs.source == source
    await asyncio.to_thread(server.set_generation_epoch, 9)
    assert (await asyncio.to_thread(server.status)).epoch == 9


@pytest.mark.parametrize("kind", sorted({Header.PAUSE, Header.STOP, Header.DRAIN, Header.SET_ADAPTERS}), ids=str)
async def test_a_trainer_may_not_send_the_other_verbs(coordinator, serve, kind) -> None:
    server = await serve({"a": torch.ones(2, 2)})
    control = Control(kind=kind, operation_id="theirs", fence=1 << 52)
    with pytest.raises(ControlRejectedError, match="Control is not for your role"):
        await asyncio.to_thread(server._control, control)
    assert coordinator.core.verbs.fence == 0


async def test_the_fence_of_a_trainer_is_ignored(coordinator, serve) -> None:
    server = await serve({"a": torch.ones(2, 2)})
    control = Control(kind=Header.SET_GENERATION_EPOCH, epoch=2, operation_id="theirs", fence=1 << 52)
    await asyncio.to_thread(server._control, control)
    assert (coordinator.core.verbs.epoch, coordinator.core.verbs.fence) == (2, 0)
