"""The processes of an engine of many ranks: they meet, each builds its part, rank 0 leads and the others follow."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch

from megatron_runtime.backends.native.micro_batches import CPU, GPU, StepSizes, warm_up_plans
from megatron_runtime.backends.native.ranked.channel import STEPS, FollowerChannel, Kind, LeaderChannel, Message
from megatron_runtime.backends.native.ranked.executor import EnginePart, RankedExecutor, end_with
from megatron_runtime.backends.native.select import torch_device
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.distributed.errors import RankError, RendezvousError
from megatron_runtime.distributed.groups import GroupError, Groups
from megatron_runtime.distributed.rendezvous import LOOPBACK, Meeting, open_store
from megatron_runtime.distributed.shard import RankIdentity
from megatron_runtime.distributed.watch import WARM_UP_SECONDS, StepProgress
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.health import HealthServer

logger = logging.getLogger(__name__)

GREETING_SECONDS = 60.0
"""From the rendezvous to the first message of the slowest rank: it reads the model's headers."""
FAILED_SECONDS = 3.0
"""How long a rank that failed waits for rank 0 to end the engine with the cause."""

MakePart = Callable[[Groups], TorchExecutor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A rank other than rank 0: performs orders until rank 0 sends END.

    part:       what it performs them with.
    progress:   of this rank's steps.
    is_sampler: this rank answers steps with the tokens that it sampled.
    """

    rank: int
    part: EnginePart
    channel: FollowerChannel
    progress: StepProgress
    is_sampler: bool

    def run(self) -> None:
        """Block until the engine ends. SIGTERM and SIGINT ask rank 0 to end it in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.channel.leave())
        while (order := self.channel.orders.get()).kind is not Kind.END:
            if order.kind in STEPS:
                self._step(order)
            elif order.body[0] == "stage_weights":
                # Steps continue meanwhile.
                threading.Thread(target=self._perform, args=(order,), name="stage", daemon=True).start()
            else:
                self._perform(order)
            self.progress.end(order.number)
        self.channel.close()

    def _step(self, order: Message) -> None:
        self.progress.begin(order.number)
        try:
            parts = self.part.executor.execute_part(order.body)
        except Exception as error:
            logger.exception("step %d failed", order.number)
            self.channel.fail(str(error), is_consequence=isinstance(error, GroupError))
            # If this rank ended at once, rank 0 could take it for the cause.
            time.sleep(FAILED_SECONDS)
            end_with(RankError(self.rank, str(error)))
        if self.is_sampler:
            self.channel.answer(order, parts)

    def _perform(self, order: Message) -> None:
        name, argument = order.body
        try:
            answer = self.part.perform(name, argument)
        except Exception as error:
            logger.exception("%s failed", name)
            self.channel.answer(order, [f"{name}: {error}", None])
        else:
            self.channel.answer(order, [None, answer])


def lead(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> RankedExecutor:
    """Start rank 0. Returns the executor of all ranks, which wait for its orders.

    Raises RendezvousError naming the rank that is missing, and what `make_part` raises.
    """
    meeting, groups = _meet(settings, identity)
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
    most = StepSizes(tokens=settings.max_tokens, rows=settings.max_requests, length=part.max_sequence_length)
    sizes = (GPU if groups.device.type == "cuda" else CPU).at_most(most)
    warm_up = warm_up_plans(settings.parallel, sizes, num_pages=part.num_pages, page_size=part.page_size)
    return RankedExecutor(part, channel, settings.parallel, progress=groups.progress, warm_up=warm_up)


def follow(settings: EngineSettings, identity: RankIdentity, make_part: MakePart) -> None:
    """Be another rank: perform the orders of rank 0 until the engine ends. Raises what lead() raises."""
    missing = ["the other ranks of the engine"]
    with _probes(settings, identity, missing):
        meeting, groups = _meet(settings, identity)
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
        shard = groups.shard
        RankProcess(
            rank=identity.rank,
            part=EnginePart(part),
            channel=channel,
            progress=groups.progress,
            is_sampler=shard.has_head and shard.tensor_rank == 0,
        ).run()
        meeting.close()


def _meet(settings: EngineSettings, identity: RankIdentity) -> tuple[Meeting, Groups]:
    if identity.address in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch_device(settings.device, local_rank=identity.local_rank)
    until = time.monotonic() + settings.rendezvous_seconds
    store = open_store(identity, timeout_seconds=settings.rendezvous_seconds)
    store.set(f"device/{identity.rank}", device.type)
    meeting = Meeting(identity, store, keys_dir=settings.keys_dir)
    meeting.wait_for_all(until=until)
    for rank in range(identity.world):
        found = store.get(f"device/{rank}").decode()
        if found != device.type:
            raise RendezvousError(
                rank, f"it runs on {found}, rank {identity.rank} on {device.type}: give all ranks the same --device"
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


@contextmanager
def _probes(settings: EngineSettings, identity: RankIdentity, missing: list[str]) -> Iterator[None]:
    """Answer the pod's probes from a separate thread. Only the first rank of each pod does."""
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
