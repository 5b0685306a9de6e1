"""Runs an engine on several ranks. Rank 0 sends all steps and other commands (called orders) to all ranks.

Orders are numbered and executed in sequence. lead() and join() connect the processes. Each process builds its part of
the model, and all processes execute the orders of rank 0.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_runtime.backends.native.backend import Ranks
from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan, StepResult
from megatron_runtime.backends.native.micro_batches import (
    CPU,
    GPU,
    StepLimits,
    expert_of_pages,
    merge,
    warm_up_plans,
)
from megatron_runtime.backends.native.ranked.channel import STEPS, FollowerChannel, Kind, LeaderChannel, Message
from megatron_runtime.backends.native.torch_executor import TorchExecutor, torch_device
from megatron_runtime.checkpoints.source import ModelInMemory, ModelSource
from megatron_runtime.distributed.errors import RankError, RendezvousError
from megatron_runtime.distributed.groups import GroupError, Groups
from megatron_runtime.distributed.rendezvous import LOOPBACK, Meeting, open_store, prepare_together
from megatron_runtime.distributed.shard import ParallelSizes, RankIdentity
from megatron_runtime.distributed.watch import WARM_UP_SECONDS, StepProgress
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_signals
from megatron_runtime.process.health import HealthServer, serve_on_thread
from megatron_runtime.process.logs import write_termination_message
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol.headers import Header

logger = logging.getLogger(__name__)

OpenModel = Callable[[], ModelSource]
MakePart = Callable[[ModelSource, Groups], TorchExecutor]

FAILED_SECONDS = 3.0
"""Maximum seconds that a failed rank waits until rank 0 stops the engine with the cause."""
_SIZES = ("num_pages", "page_size", "vocab_size", "max_sequence_length")
"""Attributes of an executor that must be equal on all ranks."""
ENDING_SECONDS = 1.0
"""Seconds from the loss of a rank to the exit of this process.

Meanwhile, the process notifies the coordinator and the other ranks.
"""


def end_with(error: RankError, *, own_rank: int | None = None) -> None:
    """Terminate this process at once, because its threads may hang in a collective operation that no other rank will
    enter.

    own_rank: rank of this process. If `error` names this rank, a traceback of every thread is written to standard
              error.
    """
    print(f"the engine exits: {error}", file=sys.stderr, flush=True)
    if error.rank == own_rank:
        faulthandler.dump_traceback(all_threads=True)
    write_termination_message(error)
    os._exit(1)


class EnginePart:
    """The part of an engine on one rank, which executes orders.

    Only `stage_weights` may run concurrently with another order.

    on_answers: called with the answers that share_answers() has sent to this rank, and with None when the engine ends.
    """

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.on_answers: Callable[[dict[str, Any] | None], object] = lambda _answers: None
        self._orders: dict[str, Callable[..., Any]] = {
            "use_pages": executor.use_pages,
            "sizes": lambda: {name: getattr(executor, name) for name in (*_SIZES, "page_bytes", "kv_layout")},
            "digest": lambda: executor.digest,
            "copies": lambda: executor.copies,
            "load": executor.load,
            "unload": executor.unload,
            "prepare": executor.prepare,
            "release_weights": executor.release_weights,
            "release_kv": executor.release_kv,
            "use_source": executor.use_source,
            "stage_weights": executor.stage_weights,
            "swap_weights": executor.swap_weights,
            "drop_staged": executor.drop_staged,
            "profile": executor.profile,
            "read_blocks": lambda pages: executor.read_blocks(pages, range(len(pages))),
            "write_blocks": lambda pages, data: executor.write_blocks(pages, range(len(pages)), data),
            "confirm": lambda: None,
            "answers": lambda answers: self.on_answers(answers),
        }

    def perform(self, name: str, *arguments: Any) -> Any:
        """Execute one order, and return its answer."""
        return self._orders[name](*arguments)


class RankedExecutor(Ranks):
    """An Executor of several ranks. Every rank acknowledges each order. An error names the rank that failed.

    digest:   digest over the digests of all ranks.
    copies:   as in Executor.
    local:    the executor of rank 0's part.
    progress: object that records the progress of rank 0's steps.
    warm_up:  function that gets the number of pages, and returns the steps to run once after the first load.
    measures: whether each rank has measured its memory. If so, the number of pages is the maximum that fits on every
              rank.

    Raises RankError if the ranks differ in one of the attributes that _SIZES lists.
    """

    def __init__(
        self,
        local: TorchExecutor,
        channel: LeaderChannel,
        sizes: ParallelSizes,
        *,
        progress: StepProgress,
        warm_up: Callable[[int], list[StepPlan]],
        measures: bool,
    ) -> None:
        self._local = local
        self._part = EnginePart(local)
        self._channel = channel
        self._progress = progress
        last_stage = (sizes.pipeline - 1) * sizes.expert * sizes.tensor
        self._samplers = [last_stage + expert * sizes.tensor for expert in range(sizes.expert)]
        self.digest = ""
        self.copies: tuple[str, ...] = ()
        self.controller = local.controller
        self.count = sizes.world
        self.vocab_size = local.vocab_size
        self.eos_ids = local.eos_ids
        self.max_sequence_length = local.max_sequence_length
        self.short_length = local.short_length
        self.page_size = local.page_size
        if measures:
            self._everywhere("use_pages", min(own["num_pages"] for own in self._everywhere("sizes").values()))
        self.num_pages = local.num_pages
        self.kv_cache_bytes = local.kv_cache_bytes
        self.expert_size = sizes.expert
        self.records_routing = local.records_routing
        self._sizes = sizes
        self._warm_up = warm_up(self.num_pages)
        of_ranks = self._everywhere("sizes")
        for rank, own in of_ranks.items():
            for name in _SIZES:
                if own[name] != (value := getattr(local, name)):
                    raise RankError(rank, f"{name} is {own[name]} there, {value} on rank 0: start all ranks alike")
        self._page_bytes = [own["page_bytes"] for own in of_ranks.values()]
        self.page_bytes = sum(self._page_bytes[rank] for rank in self._holders(expert_rank=0))
        layouts = hashlib.sha256("\n".join(own["kv_layout"] for own in of_ranks.values()).encode()).hexdigest()
        self.kv_layout = f"{local.kv_layout}, {sizes.product}, {layouts[:8]}"

    @property
    def has_weights(self) -> bool:
        return self._local.has_weights

    def holds(self, source: str) -> bool:
        return self._local.holds(source)

    def load(self) -> None:
        try:
            self._everywhere("load")
            if self._warm_up:
                PROGRESS.report(Stage.COMPILE)
            while self._warm_up:
                self._run(self._warm_up[0], Kind.WARM_UP)
                del self._warm_up[0]
            self._everywhere("prepare")
        except Exception:
            if self._channel.failure is None:
                self._everywhere("unload")
            raise
        self._update_digest()

    def release_weights(self) -> None:
        self._everywhere("release_weights")

    def release_kv(self, keep_pages: Int64 | None) -> None:
        self._everywhere("release_kv", keep_pages)

    def read_blocks(self, table: Int32, blocks: range) -> bytes:
        pages, holders = table[blocks.start : blocks.stop], self._holders_of(table)
        answers = self._order(Kind.BLOCKS, ["confirm"], {rank: ["read_blocks", pages] for rank in holders})
        parts = [np.frombuffer(answers[rank], np.uint8).reshape(len(pages), -1) for rank in holders]
        return np.concatenate(parts, axis=1).tobytes()

    def write_blocks(self, table: Int32, blocks: range, data: bytes) -> None:
        pages, holders = table[blocks.start : blocks.stop], self._holders_of(table)
        ends = np.cumsum([self._page_bytes[rank] * table.shape[1] for rank in holders])
        parts = np.split(np.frombuffer(data, np.uint8).reshape(len(pages), -1), ends[:-1], axis=1)
        orders = {rank: ["write_blocks", pages, part.tobytes()] for rank, part in zip(holders, parts, strict=True)}
        self._order(Kind.BLOCKS, ["confirm"], orders)

    def _holders_of(self, table: Int32) -> list[int]:
        """Return the ranks that hold the keys and values of a prompt, in order. For `table`, see read_blocks()."""
        return self._holders(expert_rank=int(expert_of_pages(table[:1, 0], self.expert_size)[0]))

    def _holders(self, *, expert_rank: int) -> list[int]:
        return [rank for rank in range(self.count) if self._sizes.shard(rank).expert_rank == expert_rank]

    def use_keys(self, keys_dir: Path | None) -> None:
        """Use the CURVE keys in this directory for this rank's connections to trainers from now on."""
        self._local.use_keys(keys_dir)

    def use_memory(self, model: ModelInMemory) -> None:
        """Use `model` for the model reference IN_MEMORY on this rank. Every rank has its own model."""
        self._local.use_memory(model)

    def use_source(self, source: str) -> None:
        self._everywhere("use_source", source)

    def stage_weights(self, source: str) -> None:
        self._everywhere("stage_weights", source)

    def swap_weights(self) -> None:
        self._everywhere("swap_weights")
        self._update_digest()

    def drop_staged(self) -> None:
        self._everywhere("drop_staged")

    def profile(self, active: bool) -> None:
        self._everywhere("profile", active)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._run(plan, Kind.STEP)

    def _run(self, plan: StepPlan, kind: Kind) -> StepResult:
        channel = self._channel
        if channel.failure is not None:
            raise channel.failure
        number = channel.post(kind, plan)
        self._progress.begin(number)
        try:
            parts = self._local.execute_part(plan)
        except GroupError as error:
            # A failed collective does not name the rank that made it fail.
            raise channel.blame(number) from error
        except RuntimeError as error:
            raise RankError(0, str(error)) from error
        self._progress.end(number)
        for answer in channel.collect(number, self._samplers).values():
            parts += answer
        return merge(parts, plan)

    # --- Ranks --------------------------------------------------------------------------------------------------

    async def confirm(self, signal: Header) -> RankResults:
        """Wait until every rank has executed all earlier orders. Return, for each rank, whether it succeeded."""
        try:
            await asyncio.to_thread(self._everywhere, "confirm")
        except RankError as error:
            return RankResults.of_failure(error, ranks=self.count)
        return RankResults(self.count)

    def share_state(self, state: str, *, has_joined: bool = False) -> None:
        """Report the engine's EngineState to the other ranks. For has_joined, see LeaderChannel.share_state()."""
        self._channel.share_state(state, has_joined=has_joined)

    def share_answers(self, answers: dict[str, Any]) -> None:
        """Send the answers of a generate() call to all ranks.

        The program calls generate() on all ranks, and each rank returns these answers.
        """
        self._everywhere("answers", answers)

    def watch(self, *, on_failure: Callable[[BaseException], object], on_leave: Callable[[], object]) -> None:
        """Set the callbacks for a lost rank and for SIGTERM of a rank. Both are called on another thread.

        on_failure: called with the error. This process exits ENDING_SECONDS later, even if its threads hang.
        on_leave:   called when another rank has received SIGTERM.
        """

        def lost(error: RankError) -> None:
            until = time.monotonic() + ENDING_SECONDS
            on_failure(error)
            self._channel.fail(error.rank, error.cause)
            threading.Event().wait(max(0.0, until - time.monotonic()))
            end_with(error, own_rank=0)

        self._channel.on_leave = on_leave
        self._channel.on_lost = lost

    def end(self, failure: BaseException | None) -> None:
        """Stop the other ranks. Idempotent.

        failure: cause to report to them if this engine failed; None for a normal stop.
        """
        if failure is None:
            self._channel.close()
        else:
            rank, cause = (failure.rank, failure.cause) if isinstance(failure, RankError) else (0, str(failure))
            self._channel.fail(rank, cause)

    def _everywhere(self, name: str, *arguments: Any) -> dict[int, Any]:
        """Make every rank execute the order `name`, and return the answers by rank. Raises the errors of _order()."""
        return self._order(Kind.COMMAND, [name, *arguments])

    def _order(self, kind: Kind, order: list[Any], by_rank: Mapping[int, list[Any]] | None = None) -> dict[int, Any]:
        """Make every rank execute an order, and return the answers by rank, in the order of the ranks.

        order:   name and arguments of the order.
        by_rank: orders that replace `order` for some ranks.

        Raises the first error of a rank. The error names the rank.
        """
        number = self._channel.post(kind, order, by_rank)
        failure: Exception | None = None
        answers: dict[int, Any] = {}
        try:
            answers[0] = self._part.perform(*(by_rank or {}).get(0, order))
        except Exception as error:
            failure = error
        for rank, (error_text, answer) in sorted(self._channel.collect(number, range(self.count)).items()):
            answers[rank] = answer
            if error_text is not None and failure is None:
                failure = RankError(rank, error_text)
        if failure is not None:
            raise failure
        return answers

    def _update_digest(self) -> None:
        digests = self._everywhere("digest")
        self.digest = hashlib.sha256("".join(digests[rank] for rank in range(self.count)).encode()).hexdigest()
        copies = self._everywhere("copies")
        addresses = tuple(address for rank in range(self.count) for address in copies[rank])
        self.copies = addresses if len(addresses) == self.count else ()


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank other than rank 0, which executes orders until rank 0 sends END."""

    rank: int
    part: EnginePart
    channel: FollowerChannel
    groups: Groups
    meeting: Meeting

    def run(self) -> None:
        """Execute orders until the engine ends. Any thread can call this."""
        if self.groups.device.type == "cuda":
            torch.cuda.set_device(self.groups.device)
        while (order := self.channel.orders.get()).kind is not Kind.END:
            if order.kind in STEPS:
                self._step(order)
            elif order.body[0] == "stage_weights":
                # On another thread, so that steps continue.
                threading.Thread(target=self._perform, args=(order,), name="stage", daemon=True).start()
            else:
                self._perform(order)
            self.groups.progress.end(order.number)
        self.part.on_answers(None)
        self.channel.close()
        self.meeting.close()

    def _step(self, order: Message) -> None:
        self.groups.progress.begin(order.number)
        try:
            parts = self.part.executor.execute_part(order.body)
        except Exception as error:
            logger.exception("step %d failed", order.number)
            self.channel.fail(str(error), is_consequence=isinstance(error, GroupError))
            # If this rank exited at once, rank 0 could report it as the cause.
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


def lead(
    settings: EngineSettings,
    identity: RankIdentity,
    open_model: OpenModel,
    make_part: MakePart,
    *,
    has_watchdog: bool = True,
) -> RankedExecutor:
    """Start rank 0, and return the executor for all ranks. The other ranks wait for orders of this executor.

    open_model:   returns the model's files. It is called before everything that has a timeout, because a download can
                  take long and its duration differs between machines.
    has_watchdog: whether to terminate this process if its interpreter hangs.

    Raises RankError, the errors of `open_model` and `make_part`, and RendezvousError, which names the missing rank.
    """
    source, meeting, groups = _connect(settings, identity, open_model)
    part = make_part(source, groups)
    pushes = {rank: meeting.connect(rank) for rank in range(1, identity.world)}
    channel = LeaderChannel(
        meeting.pull,
        pushes,
        progress=groups.progress,
        step_timeout_seconds=settings.step_timeout_seconds,
        has_watchdog=has_watchdog,
    )
    channel.start(timeout_seconds=settings.rendezvous_seconds)
    logger.info("all %d ranks are connected", identity.world)
    config = settings.inference_config
    limits = StepLimits(tokens=config.step_tokens, rows=config.request_slots, length=part.max_sequence_length)
    sizes = StepLimits(*map(min, GPU if groups.device.type == "cuda" else CPU, limits))
    return RankedExecutor(
        part,
        channel,
        settings.parallel,
        progress=groups.progress,
        warm_up=lambda pages: warm_up_plans(settings.parallel, sizes, num_pages=pages, page_size=part.page_size),
        measures=settings.kv_cache_memory is None,
    )


def join(
    settings: EngineSettings,
    identity: RankIdentity,
    open_model: OpenModel,
    make_part: MakePart,
    *,
    has_watchdog: bool = True,
) -> Follower:
    """Connect a rank other than rank 0 to rank 0.

    The returned Follower executes no orders until run() is called. For arguments and errors, see lead().
    """
    source, meeting, groups = _connect(settings, identity, open_model)
    part = make_part(source, groups)
    channel = FollowerChannel(
        identity.rank,
        pull=meeting.pull,
        push=meeting.connect(0),
        progress=groups.progress,
        on_lost=partial(end_with, own_rank=identity.rank),
        has_watchdog=has_watchdog,
    )
    channel.start(timeout_seconds=settings.rendezvous_seconds)
    return Follower(identity.rank, EnginePart(part), channel, groups, meeting)


def follow(settings: EngineSettings, identity: RankIdentity, open_model: OpenModel, make_part: MakePart) -> None:
    """Run a rank other than rank 0 in this process until the engine ends. Raises the errors of lead().

    On SIGTERM or SIGINT, the rank asks rank 0 to drain and stop the engine.
    """
    missing = ["the other ranks of the engine"]
    if settings.health_port is not None and identity.local_rank == 0:
        serve_on_thread(HealthServer(missing=lambda: missing, port=settings.health_port))
    follower = join(settings, identity, open_model, make_part)
    missing.clear()
    for number in end_signals():
        signal.signal(number, lambda _number, _frame: follower.channel.leave())
    follower.run()


def _connect(
    settings: EngineSettings, identity: RankIdentity, open_model: OpenModel
) -> tuple[ModelSource, Meeting, Groups]:
    """Open the model, then connect this rank to all other ranks by sockets and process groups.

    Raises RankError if this fails.
    """
    if identity.address in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch_device(settings.device, local_rank=identity.local_rank)
    store = open_store(identity, timeout_seconds=settings.rendezvous_seconds)
    source = prepare_together(store, identity, open_model, timeout_seconds=settings.rendezvous_seconds)
    until = time.monotonic() + settings.rendezvous_seconds
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
            engine=identity.engine,
            engines=identity.engines,
            folder=identity.folder,
        )
    except RuntimeError as error:
        raise RendezvousError(identity.rank, f"it cannot connect to the other ranks: {error}") from error
    return source, meeting, groups
