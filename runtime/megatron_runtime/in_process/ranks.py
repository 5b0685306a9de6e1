"""The ranks of a user's program under torchrun: their engines, this process's rank, and the exchange of data between
ranks.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_runtime.backends.native.build import select_executor
from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.native.ranked.executor import Follower, join, lead
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.checkpoints.torch_dist.live_model import is_megatron_model, unwrapped
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.rendezvous import LOOPBACK, open_store
from megatron_runtime.distributed.shard import RENDEZVOUS_PORT, IndivisibleError, ParallelSizes, RankIdentity
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.secrets import integer
from megatron_runtime.requests.config import InferenceConfig

_DIMENSIONS = ("tensor", "pipeline", "expert")

MAX_TEXT_BYTES = 512
"""Size limit of a text that the first rank sends to the other ranks."""

_builds = count()


def parallel_sizes(model: Any, **given: int | None) -> ParallelSizes:
    """Return the number of ranks of one engine by dimension.

    given: sizes by dimension ("tensor", "pipeline", "expert"). If a size is None, it is the larger of two sizes: the
           size in the configuration of a Megatron-Core model, and the size in Megatron-Core's initialised parallel
           state. If neither exists, it is 1.
    """
    if is_megatron_model(model):
        model = unwrapped(model)
    return ParallelSizes(**{name: given.get(name) or _configured(model, name) for name in _DIMENSIONS})


def _configured(model: Any, dimension: str) -> int:
    size: int = getattr(getattr(model, "config", None), f"{dimension}_model_parallel_size", None) or 1
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        size = max(size, getattr(state, f"get_{dimension}_model_parallel_world_size")())
    return size


def global_rank() -> int:
    """Return the rank of this process in the program, from torch.distributed or, if it is not initialised, from
    torchrun.

    Returns 0 if the program uses neither.
    """
    return dist.get_rank() if _is_initialized() else integer(os.environ, "RANK", 0)


def world_size() -> int:
    """Return the number of ranks of the program, from torch.distributed or, if it is not initialised, from torchrun.

    Returns 1 if the program uses neither.
    """
    return dist.get_world_size() if _is_initialized() else integer(os.environ, "WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the index of this process among the processes of its host."""
    return integer(os.environ, "LOCAL_RANK", 0)


def local_world() -> int:
    """Return the number of processes of the program on this host."""
    return integer(os.environ, "LOCAL_WORLD_SIZE", 1)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


class ProgramRanks:
    """All ranks of the program. Without torch.distributed, or with one rank, its methods return immediately.

    group: the group of all ranks; None for one rank. It communicates through host memory, because the GPUs of other
           ranks may be running a step.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    @classmethod
    async def join(cls) -> Self:
        """Return the ranks of the program. Every rank must call this method, and must later make the same calls."""
        if not _is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        group = await asyncio.to_thread(dist.new_group, backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "it has every rank"
        return cls(group)

    async def wait(self) -> None:
        """Wait until every rank has called this method."""
        if self.group is not None:
            await asyncio.to_thread(dist.barrier, group=self.group)

    async def text_of_first(self, text: str) -> str:
        """Return, on every rank, the `text` that the first rank has passed.

        A text longer than MAX_TEXT_BYTES is truncated.
        """
        if self.group is None:
            return text
        data = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
        tensor = torch.tensor(list(data), dtype=torch.uint8)
        await asyncio.to_thread(dist.broadcast, tensor, src=0, group=self.group)
        return bytes(tensor.tolist()).rstrip(b"\0").decode(errors="ignore")


def rank_of_engine(sizes: ParallelSizes) -> RankIdentity:
    """Return this process's rank in its engine. Ranks with consecutive global numbers form an engine.

    Raises IndivisibleError if the program's ranks cannot be divided into whole engines.
    """
    world = world_size()
    if world % sizes.world:
        raise IndivisibleError(
            f"{world} ranks were started, an engine has tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert "
            f"{sizes.expert} = {sizes.world}: start a multiple of that with torchrun (--nnodes x --nproc-per-node)"
        )
    engine, rank = divmod(global_rank(), sizes.world)
    return RankIdentity(
        rank=rank,
        world=sizes.world,
        local_rank=local_rank(),
        local_world=local_world(),
        address=os.environ.get("MASTER_ADDR", LOOPBACK),
        port=integer(os.environ, "MASTER_PORT", RENDEZVOUS_PORT),
        engine=engine,
        engines=world // sizes.world,
        build_index=next(_builds),
    )


def executor_of_ranks(
    source: ModelSource, text: ModelText, config: InferenceConfig, sizes: ParallelSizes, **options: Any
) -> tuple[Executor, InferenceConfig, Follower | None]:
    """Return this rank's executor, the configuration of all ranks, and the follower.

    The follower executes the first rank's commands on this rank. It is None on the first rank.

    Every rank of the program calls this function.

    Every rank uses the smallest `buffer_size_gb` of all ranks for its KV cache, because the default depends on the
    host. If the program has not initialised torch.distributed, this function initialises it.

    options: options of select_executor(), except its options for ranks and KV cache.

    Raises IndivisibleError or RankError.
    """
    if not _is_initialized():
        if os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")  # the engine's groups have their own backend
    identity = rank_of_engine(sizes)
    settings = EngineSettings(
        coordinator="",
        name=f"engine-{identity.engine}",
        max_requests=config.request_slots,
        max_tokens=config.step_tokens,
        parallel=sizes,
    )
    store = open_store(identity, timeout_seconds=settings.rendezvous_seconds)
    store.set(f"buffer_size_gb/{identity.rank}", str(config.buffer_size_gb))
    config = config.for_engine()
    config.buffer_size_gb = min(float(store.get(f"buffer_size_gb/{rank}")) for rank in range(identity.world))
    options |= {"local_rank": identity.local_rank, "kv_cache_memory": config.buffer_bytes}

    def make_part(opened: ModelSource, groups: Groups) -> TorchExecutor:
        return select_executor(opened, text, config, groups=groups, **options)

    # No watchdog, because the program's own code may hold the interpreter lock.
    if identity.rank == 0:
        return lead(settings, identity, lambda: source, make_part, has_watchdog=False), config, None
    follower = join(settings, identity, lambda: source, make_part, has_watchdog=False)
    return follower.part.executor, config, follower
