"""Many ranks as one executor: rank 0 sends every step and every order to all ranks, numbered and in order."""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_runtime.backends.native.executor import Executor, Int64, StepPlan, StepResult
from megatron_runtime.backends.native.micro_batches import merge
from megatron_runtime.backends.native.ranked.channel import Kind, LeaderChannel
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.groups import GroupError
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.watch import StepProgress
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.engine.termination import write_termination_message
from megatron_runtime.protocol.headers import Header

_LONG = frozenset(
    {"load", "unload", "release_weights", "release_kv", "stage_weights", "swap_weights", "drop_staged", "profile"}
)
"""Orders that may hold the interpreter for longer than a heartbeat may take, such as freeing much memory."""

_AGREED = ("num_pages", "page_size", "vocab_size", "max_sequence_length")
"""What must be equal on all ranks."""
ENDING_SECONDS = 1.0
"""From the loss of a rank to the end of this process: time to notify the coordinator and the other ranks."""


def end_with(error: RankError, *, own_rank: int | None = None) -> None:
    """End this process now: its threads may hang in a collective that no other rank will enter.

    own_rank: of this process. If it is the one that failed, standard error gets a traceback of every thread.
    """
    print(f"the engine ends: {error}", file=sys.stderr, flush=True)
    if error.rank == own_rank:
        faulthandler.dump_traceback(all_threads=True)
    write_termination_message(error)
    os._exit(1)


class PartExecutor(Executor, Protocol):
    """An executor that holds a part of a model and runs it together with other ranks."""

    @property
    def has_cache(self) -> bool: ...

    def execute_part(self, plan: StepPlan) -> list[tuple[Int64, StepResult]]:
        """Run this rank's part of `plan`. Returns the results of the rows that this rank sampled, which may be none."""


class EnginePart:
    """Performs orders, the same on every rank. Only `stage_weights` may run beside another order."""

    def __init__(self, executor: PartExecutor) -> None:
        self.executor = executor
        self._loaded: tuple[bool, bool] = (False, False)
        """What the last load() loaded: weights, cache."""
        self._kept_pages: Int64 | None = None
        self._orders: dict[str, Callable[[Any], Any]] = {
            "describe": lambda _: {name: getattr(executor, name) for name in _AGREED},
            "load": lambda _: self._load(),
            "unload": lambda _: self._unload(),
            "release_weights": lambda _: executor.release_weights(),
            "release_kv": self._release_kv,
            "use_source": executor.use_source,
            "stage_weights": executor.stage_weights,
            "swap_weights": lambda _: self._swap_weights(),
            "drop_staged": lambda _: executor.drop_staged(),
            "profile": executor.profile,
            "confirm": lambda _: None,
        }

    def perform(self, name: str, argument: Any) -> Any:
        """Perform one order and return the answer."""
        return self._orders[name](argument)

    def _load(self) -> str:
        executor = self.executor
        had_weights, had_cache = executor.has_weights, executor.has_cache
        self._loaded = (False, False)
        executor.load()
        self._loaded = (not had_weights, not had_cache)
        return executor.digest

    def _unload(self) -> None:
        """Undo the last load, which failed on another rank."""
        weights, cache = self._loaded
        self._loaded = (False, False)
        if weights:
            self.executor.release_weights()
        if cache:
            self.executor.release_kv(self._kept_pages)

    def _release_kv(self, keep_pages: Int64 | None) -> None:
        self._kept_pages = keep_pages
        self.executor.release_kv(keep_pages)

    def _swap_weights(self) -> str:
        self.executor.swap_weights()
        return self.executor.digest


class RankedExecutor:
    """Implements Executor, and backend.Ranks: each rank acknowledges each order; what fails names the rank.

    local:    rank 0's own part.
    progress: of rank 0's steps.
    warm_up:  steps to run once, after the first load.
    """

    def __init__(
        self,
        local: PartExecutor,
        channel: LeaderChannel,
        sizes: ParallelSizes,
        *,
        progress: StepProgress,
        warm_up: Sequence[StepPlan],
    ) -> None:
        self._local = local
        self._part = EnginePart(local)
        self._channel = channel
        self._progress = progress
        self._warm_up = list(warm_up)
        self._everyone = range(sizes.world)
        last_stage = (sizes.pipeline - 1) * sizes.expert * sizes.tensor
        self._samplers = [last_stage + expert * sizes.tensor for expert in range(sizes.expert)]
        self._digest = ""
        self.count = sizes.world
        self.vocab_size = local.vocab_size
        self.eos_ids = local.eos_ids
        self.max_sequence_length = local.max_sequence_length
        self.page_size = local.page_size
        self.num_pages = local.num_pages
        described = self._everywhere("describe", None)
        for rank, found in described.items():
            for name, value in described[0].items():
                if found[name] != value:
                    raise RankError(rank, f"{name} is {found[name]} there, {value} on rank 0: start all ranks alike")

    @property
    def has_weights(self) -> bool:
        return self._local.has_weights

    @property
    def digest(self) -> str:
        """Of what the ranks hold, in their order."""
        return self._digest

    def load(self) -> None:
        try:
            digests = self._everywhere("load", None)
        except Exception:
            if self._channel.failure is None:
                self._everywhere("unload", None)
            raise
        self._note_digests(digests)
        while self._warm_up:
            self._run(self._warm_up[0], Kind.WARM_UP)
            del self._warm_up[0]

    def release_weights(self) -> None:
        self._everywhere("release_weights", None)

    def release_kv(self, keep_pages: Int64 | None) -> None:
        self._everywhere("release_kv", keep_pages)

    def use_source(self, source: str) -> None:
        self._everywhere("use_source", source)

    def stage_weights(self, source: str) -> None:
        self._everywhere("stage_weights", source)

    def swap_weights(self) -> None:
        self._note_digests(self._everywhere("swap_weights", None))

    def drop_staged(self) -> None:
        self._everywhere("drop_staged", None)

    def profile(self, active: bool) -> None:
        self._everywhere("profile", active)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._run(plan, Kind.STEP)

    def _run(self, plan: StepPlan, kind: Kind) -> StepResult:
        channel = self._channel
        if channel.failure is not None:
            raise channel.failure
        number = channel.post(kind, plan, answers=self._samplers)
        self._progress.begin(number)
        try:
            parts = self._local.execute_part(plan)
        except GroupError as error:
            # A failed collective does not name the rank that is gone.
            raise channel.blame(number) from error
        except RuntimeError as error:
            raise RankError(0, str(error)) from error
        self._progress.end(number)
        for answer in channel.collect(number).values():
            parts += answer
        return merge(parts, len(plan.query_lengths))

    # --- Ranks --------------------------------------------------------------------------------------------------

    async def confirm(self, signal: Header) -> RankResults:
        """Every rank has done all that came before: it takes orders one after the other."""
        try:
            await asyncio.to_thread(self._everywhere, "confirm", signal.name)
        except RankError as error:
            return RankResults.of_failure(error, ranks=self.count)
        return RankResults(self.count)

    def watch(self, *, on_failure: Callable[[BaseException], object], on_leave: Callable[[], object]) -> None:
        """Set what happens when a rank is lost or is asked to end. Both are called on another thread.

        on_failure: called with the error; ENDING_SECONDS later this process ends, even if its threads hang.
        on_leave:   called when another rank received SIGTERM.
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
        """End the other ranks: in order, or with the cause of this engine's failure. Idempotent."""
        if failure is None:
            self._channel.close()
        else:
            rank, cause = (failure.rank, failure.cause) if isinstance(failure, RankError) else (0, str(failure))
            self._channel.fail(rank, cause)

    def _everywhere(self, name: str, argument: Any) -> dict[int, Any]:
        """Have every rank perform an order. Returns the answers by rank; raises the first error, naming its rank."""
        kind = Kind.LONG_COMMAND if name in _LONG else Kind.COMMAND
        number = self._channel.post(kind, [name, argument], answers=self._everyone)
        failure: Exception | None = None
        answers: dict[int, Any] = {}
        try:
            answers[0] = self._part.perform(name, argument)
        except Exception as error:
            failure = error
        for rank, (error_text, answer) in sorted(self._channel.collect(number).items()):
            answers[rank] = answer
            if error_text is not None and failure is None:
                failure = RankError(rank, error_text)
        if failure is not None:
            raise failure
        return answers

    def _note_digests(self, digests: dict[int, Any]) -> None:
        self._digest = hashlib.sha256("".join(digests[rank] for rank in self._everyone).encode()).hexdigest()
