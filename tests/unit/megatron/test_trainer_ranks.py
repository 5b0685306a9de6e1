"""A trainer whose ranks hold parts of a GPTModel publishes the whole model, and an engine of one rank receives it."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eventually import LONG_SECONDS
from gpt_models import fill, make_gpt
from gpt_program import Send, begin_single_rank, in_processes
from megatron.core import parallel_state
from random_checkpoint import all_tensors, assert_equal_weights

from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.checkpoints.published import PublishedCheckpoint, newest
from megatron_runtime.checkpoints.source import Trainer as Publisher
from megatron_runtime.checkpoints.torch_dist.live_model import LiveModelCheckpoint
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.protocol.published_weights import PublishedSource
from megatron_runtime.trainer import PublishError, WeightServer
from megatron_runtime.trainer import ranks as ranks_module
from megatron_runtime.trainer.published import PublishedWeights

SEEDS = (1, 2)


@dataclass(frozen=True)
class Trainer:
    """A trainer. more: of its TransformerConfig, and of initialize_model_parallel()."""

    case: str
    sizes: ParallelSizes
    world: int
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.case}, tensor {self.sizes.tensor} pipeline {self.sizes.pipeline} expert {self.sizes.expert}"


TRAINERS = [
    Trainer("qwen3, tied", ParallelSizes(tensor=2, pipeline=2), 4),
    Trainer(
        "qwen3_moe, a dense layer",
        ParallelSizes(tensor=2, expert=2),
        4,  # two data parallel ranks, between which the experts are divided
        {"expert_tensor_parallel_size": 1},
    ),
]


def _begin_trainer(trainer: Trainer, rank: int, port: int) -> Any:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=trainer.world)
    sizes = trainer.sizes
    parallel_state.initialize_model_parallel(
        sizes.tensor, sizes.pipeline, expert_model_parallel_size=sizes.expert, **trainer.more
    )
    return make_gpt(trainer.case, sizes=sizes, **trainer.more)


def _publish_and_receive(
    rank: int, port: int, send: Send, trainer: Trainer, engine_port: int, sources: Queue[str], received: Queue[int]
) -> None:
    """Publish the weights of each seed from the first ranks. The last process is the engine."""
    ranks_module._BUCKET_BYTES = 1000  # of several messages for each matrix
    if rank == trainer.world:
        send(_receive_all(trainer, engine_port, sources, received))
        return
    model = _begin_trainer(trainer, rank, port)
    with WeightServer(model, group=dist.group.WORLD) as server:
        for seed in SEEDS:
            fill(model, seed)
            source = server.publish(seed)
            if rank == 0:
                sources.put(source)
                assert received.get(timeout=LONG_SECONDS) == seed
            dist.barrier()


def _receive_all(trainer: Trainer, port: int, sources: Queue[str], received: Queue[int]) -> list[Any]:
    begin_single_rank(port)
    whole = make_gpt(trainer.case)
    engine = WeightStore(model_in_memory(whole), torch.float32)
    engine.load()
    compared = []
    for seed in SEEDS:
        source = sources.get(timeout=LONG_SECONDS)
        fill(whole, seed)
        expected = LiveModelCheckpoint(whole)
        published = PublishedCheckpoint(source, config=expected.config, keys_dir=None)
        tensors, wanted = all_tensors(published), all_tensors(expected)
        assert list(tensors) == list(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)
        published.close()
        assert PublishedSource.parse(source).digest == PublishedWeights(whole, epoch=seed).digest
        engine.stage(source)
        engine.swap()
        unsharded = WeightStore(model_in_memory(whole), torch.float32)
        unsharded.load()
        assert engine.weights is not None
        assert unsharded.weights is not None
        assert_equal_weights(engine.weights, unsharded.weights)
        assert engine.digest == unsharded.digest
        compared.append(len(wanted))
        received.put(seed)
    return compared


@pytest.mark.parametrize("trainer", TRAINERS, ids=str)
def test_an_engine_of_one_rank_gets_the_weights_of_all_ranks(trainer: Trainer) -> None:
    """Two updates, in which every rank has other weights."""
    (engine_port,) = free_ports(1)
    fork = multiprocessing.get_context("fork")
    compared = in_processes(trainer.world + 1, _publish_and_receive, trainer, engine_port, fork.Queue(), fork.Queue())
    assert compared[0] > 20
    assert compared == [compared[0]] * len(SEEDS)


def _fail_and_publish(rank: int, port: int, send: Send) -> None:
    model = _begin_trainer(Trainer("llama", ParallelSizes(tensor=2), 2), rank, port)
    with pytest.raises(UnsupportedModelError, match="give WeightServer a group of all these ranks"):
        PublishedWeights(model, epoch=1)
    with WeightServer(model, group=dist.group.WORLD) as server:
        norm = model.decoder.final_layernorm.weight.data
        norm.fill_(float("nan"))
        _require_rejection(rank, server, "values that are not finite")
        norm.fill_(1.0)
        if rank == 1:
            server._model = {}
        _require_rejection(rank, server, "rank 1 of the trainer's group: model is dict")
        server._model = model
        source = server.publish(2)
        if rank == 1:
            with pytest.raises(RuntimeError, match="call this method on its rank 0"):
                server.status()
            os._exit(0)  # killed before the next update
        with pytest.raises(PublishError, match="rank 1 of the trainer's group is lost") as lost:
            server.publish(3)
        assert lost.value.is_committed is False
        send((source, str(newest(Publisher(server.address)))))


def _require_rejection(rank: int, server: WeightServer, cause: str) -> None:
    """Each rank raises an error with the cause, and knows that nothing was committed."""
    with pytest.raises(PublishError if rank else ValueError, match=cause) as rejected:
        server.publish(1)
    assert getattr(rejected.value, "is_committed", False) is False


def test_an_error_of_one_rank_ends_the_call_on_all_ranks() -> None:
    """The next call publishes. If a rank is lost after it, rank 0 still offers what was published."""
    source, offered = in_processes(2, _fail_and_publish)
    assert offered == source
