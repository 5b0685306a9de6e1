"""How the ranks of one engine begin: they meet, each builds its part, and rank 0 leads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.backends.native.rank_process import RankProcess, end_with
from megatron_runtime.backends.native.ranked.follower_channel import FollowerChannel
from megatron_runtime.backends.native.ranked.leader_channel import LeaderChannel
from megatron_runtime.backends.native.ranked.warm_up import GPU, PROCESSOR, StepSizes, warm_up_plans
from megatron_runtime.backends.native.ranked_executor import RankedExecutor
from megatron_runtime.backends.native.select import torch_device
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.distributed.errors import RendezvousError
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.distributed.identity import RankIdentity
from megatron_runtime.distributed.interpreter_watch import InterpreterWatch
from megatron_runtime.distributed.rendezvous import LOOPBACK, Meeting, open_store
from megatron_runtime.distributed.step_watch import WARM_UP_SECONDS, StepWatch
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.health import HealthServer

logger = logging.getLogger(__name__)

GREETING_SECONDS = 60.0
"""From the moment that the ranks have met to the first message of the slowest: it reads the model's headers."""

MakePart = Callable[[Groups], TorchExecutor]


def lead(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> RankedExecutor:
    """Rank 0: return the executor of all ranks, which wait for its orders.

    Raises RendezvousError naming the rank that does not come, and what `make_part` raises.
    """
    meeting, groups = _meet(settings, identity)
    part = make_part(groups)
    pushes = {rank: meeting.connect(rank) for rank in range(1, identity.world)}
    channel = LeaderChannel(meeting.pull, pushes, watch=_watch(settings, groups), interpreter=InterpreterWatch())
    channel.start(timeout_seconds=GREETING_SECONDS)
    logger.info("all %d ranks are there", identity.world)
    return RankedExecutor(
        part, channel, settings.parallel, progress=groups.progress, warm_up=_warm_up(settings, part, groups)
    )


def follow(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> None:
    """Another rank: do what rank 0 orders until the engine ends. Raises as lead() does."""
    missing = ["the other ranks of the engine"]
    with _probes(settings, identity, missing):
        meeting, groups = _meet(settings, identity)
        part = make_part(groups)
        channel = FollowerChannel(
            identity.rank,
            pull=meeting.pull,
            push=meeting.connect(0),
            watch=_watch(settings, groups),
            interpreter=InterpreterWatch(),
            on_lost=end_with,
        )
        channel.start(timeout_seconds=GREETING_SECONDS)
        missing.clear()
        shard = groups.shard
        RankProcess(
            identity.rank,
            part,
            channel,
            progress=groups.progress,
            is_sampler=shard.has_head and shard.tensor_rank == 0,
        ).run()
        meeting.close()


def _warm_up(settings: EngineSettings, part: TorchExecutor, groups: Groups) -> list[StepPlan]:
    most = StepSizes(tokens=settings.max_tokens, rows=settings.max_requests, length=part.max_sequence_length)
    usual = GPU if groups.device.type == "cuda" else PROCESSOR
    return warm_up_plans(settings.parallel, usual.at_most(most), num_pages=part.num_pages, page_size=part.page_size)


def _watch(settings: EngineSettings, groups: Groups) -> StepWatch:
    return StepWatch(
        groups.progress, step_timeout_seconds=settings.step_timeout_seconds, compiles=groups.device.type == "cuda"
    )


def _meet(settings: EngineSettings, identity: RankIdentity) -> tuple[Meeting, Groups]:
    if identity.address in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch_device(settings.device, local_rank=identity.local_rank)
    until = time.monotonic() + settings.rendezvous_seconds
    store = open_store(identity, timeout_seconds=settings.rendezvous_seconds)
    store.set(_device_key(identity.rank), device.type)
    meeting = Meeting(identity, store, keys_dir=settings.keys_dir)
    meeting.wait_for_all(until=until)
    _require_one_kind(store, identity, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        groups = Groups(
            store,
            settings.parallel,
            rank=identity.rank,
            device=device,
            timeout=timedelta(seconds=max(WARM_UP_SECONDS, settings.step_timeout_seconds)),
        )
    except RuntimeError as error:
        raise RendezvousError(identity.rank, f"it cannot connect to the other ranks: {error}") from error
    return meeting, groups


def _require_one_kind(store: dist.Store, identity: RankIdentity, device: torch.device) -> None:
    """Ranks on GPUs and ranks on processors cannot exchange anything."""
    for rank in range(identity.world):
        found = store.get(_device_key(rank)).decode()
        if found != device.type:
            raise RendezvousError(
                rank, f"it runs on {found}, rank {identity.rank} on {device.type}: give all ranks the same --device"
            )


def _device_key(rank: int) -> str:
    return f"device/{rank}"


@contextmanager
def _probes(settings: EngineSettings, identity: RankIdentity, missing: list[str]) -> Iterator[None]:
    """Answer the pod's probes, from a thread of its own: the first rank of each pod does."""
    if settings.health_port is None or identity.local_rank != 0:
        yield
        return
    port = settings.health_port
    loop = asyncio.new_event_loop()
    server = HealthServer(missing=lambda: missing, port=port)
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, name="probes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.stop())
        loop.close()
