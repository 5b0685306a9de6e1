"""The processes of an engine of many ranks: they connect, each builds its part, and all follow the orders of rank 0."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron_runtime.backends.native.micro_batches import CPU, GPU, StepSizes, warm_up_plans
from megatron_runtime.backends.native.ranked.channel import STEPS, FollowerChannel, Kind, LeaderChannel, Message
from megatron_runtime.backends.native.ranked.executor import EnginePart, RankedExecutor, end_with
from megatron_runtime.backends.native.torch_executor import TorchExecutor, torch_device
from megatron_runtime.distributed.errors import RankError, RendezvousError
from megatron_runtime.distributed.groups import GroupError, Groups
from megatron_runtime.distributed.rendezvous import LOOPBACK, Meeting, open_store
from megatron_runtime.distributed.shard import RankIdentity
from megatron_runtime.distributed.watch import WARM_UP_SECONDS
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.health import HealthServer

logger = logging.getLogger(__name__)

GREETING_SECONDS = 60.0
"""From the rendezvous to the first message of the slowest rank: it reads the model's headers."""
FAILED_SECONDS = 3.0
"""How long a failed rank waits for rank 0 to end the engine with the cause."""

MakePart = Callable[[Groups], TorchExecutor]


@dataclass(frozen=True, slots=True)
class _Follower:
    """A rank other than rank 0: performs orders until rank 0 sends END."""

    rank: int
    part: EnginePart
    channel: FollowerChannel
    groups: Groups

    def run(self) -> None:
        """Block until the engine ends. On SIGTERM or SIGINT, ask rank 0 to end the engine in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.channel.leave())
        while (order := self.channel.orders.get()).kind is not Kind.END:
            if order.kind in STEPS:
                self._step(order)
            elif order.body[0] == "stage_weights":
                # On another thread, so that steps continue.
                threading.Thread(target=self._perform, args=(order,), name="stage", daemon=True).start()
            else:
                self._perform(order)
            self.groups.progress.end(order.number)
        self.channel.close()

    def _step(self, order: Message) -> None:
        self.groups.progress.begin(order.number)
        try:
            parts = self.part.executor.execute_part(order.body)
        except Exception as error:
            logger.exception("step %d failed", order.number)
            self.channel.fail(str(error), is_consequence=isinstance(error, GroupError))
            # If this rank ended at once, rank 0 could report it as the cause.
            time.sleep(FAILED_SECONDS)
            end_with(RankError(self.rank, str(error)))
        if self.groups.shard.has_head and self.groups.shard.tensor_rank == 0:  # this rank has sampled
            self.channel.answer(order, parts)

    def _perform(self, order: Message) -> None:
        name, *arguments = order.body
        try:
            answer = self.part.perform(name, *arguments)
        except Exception as error:
            logger.exception("%s failed", name)
            self.channel.answer(order, [f"{name}: {error}", None])
        else:
            self.channel.answer(order, [None, answer])


def lead(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> RankedExecutor:
    """Start rank 0. Return the executor of all ranks, which wait for its orders.

    Raises RendezvousError naming the missing rank, RankError, and the errors of `make_part`.
    """
    meeting, groups = _connect(settings, identity)
    part = make_part(groups)
    pushes = {rank: meeting.connect(rank) for rank in range(1, identity.world)}
    channel = LeaderChannel(
        meeting.pull,
        pushes,
        progress=groups.progress,
        step_timeout_seconds=settings.step_timeout_seconds,
        has_watchdog=True,
    )
    channel.start(timeout_seconds=GREETING_SECONDS)
    logger.info("all %d ranks are connected", identity.world)
    limits = StepSizes(tokens=settings.max_tokens, rows=settings.max_requests, length=part.max_sequence_length)
    sizes = (GPU if groups.device.type == "cuda" else CPU).at_most(limits)
    warm_up = warm_up_plans(settings.parallel, sizes, num_pages=part.num_pages, page_size=part.page_size)
    return RankedExecutor(part, channel, settings.parallel, progress=groups.progress, warm_up=warm_up)


def follow(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> None:
    """Run another rank: perform the orders of rank 0 until the engine ends. Raises the errors of lead()."""
    missing = ["the other ranks of the engine"]
    if settings.health_port is not None and identity.local_rank == 0:
        _serve_probes(missing, port=settings.health_port)
    meeting, groups = _connect(settings, identity)
    part = make_part(groups)
    channel = FollowerChannel(
        identity.rank,
        pull=meeting.pull,
        push=meeting.connect(0),
        progress=groups.progress,
        on_lost=partial(end_with, own_rank=identity.rank),
        has_watchdog=True,
    )
    channel.start(timeout_seconds=GREETING_SECONDS)
    missing.clear()
    _Follower(identity.rank, EnginePart(part), channel, groups).run()
    meeting.close()


def _connect(settings: EngineSettings, identity: RankIdentity) -> tuple[Meeting, Groups]:
    """Connect this rank to all other ranks, by sockets and process groups. Raises RendezvousError."""
    if identity.address in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch_device(settings.device, local_rank=identity.local_rank)
    until = time.monotonic() + settings.rendezvous_seconds
    store = open_store(identity, timeout_seconds=settings.rendezvous_seconds)
    store.set(f"device/{identity.rank}", device.type)
    meeting = Meeting(identity, store, keys_dir=settings.keys_dir)
    meeting.wait_for_all(until=until)
    for rank in range(identity.world):
        other = store.get(f"device/{rank}").decode()
        if other != device.type:
            raise RendezvousError(
                rank, f"it runs on {other}, rank {identity.rank} on {device.type}: give all ranks the same --device"
            )
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


def _serve_probes(missing: list[str], *, port: int) -> None:
    """Answer the probes of this pod on a thread until the process ends. Raises OSError if the port is in use."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(HealthServer(missing=lambda: missing, port=port).start())
    threading.Thread(target=loop.run_forever, name="probes", daemon=True).start()
