"""Many ranks as one executor, on rank 0: every step and every order goes to all of them, in order and numbered."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_runtime.backends.native.engine_part import EnginePart, PartExecutor
from megatron_runtime.backends.native.executor import Int64, StepPlan, StepResult
from megatron_runtime.backends.native.rank_process import end_with
from megatron_runtime.backends.native.ranked.leader_channel import LeaderChannel
from megatron_runtime.backends.native.ranked.micro_batches import merge
from megatron_runtime.backends.native.ranked.plan_channel import Kind
from megatron_runtime.backends.native.ranked.plan_codec import decode_result, encode_plan
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.groups import GroupError
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.step_progress import StepProgress
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.protocol.headers import Header

_LONG = frozenset(
    {"load", "unload", "release_weights", "release_kv", "stage_weights", "swap_weights", "drop_staged", "profile"}
)
"""Orders that may hold an interpreter for longer than it may be silent: to free much memory takes a while, too, and
so does a profiler that writes what it recorded.
"""

ENDING_SECONDS = 1.0
"""From the news that a rank is lost to the end of the process, for the coordinator and the others to be told."""


class RankedExecutor:
    """Implements Executor, and backend.Ranks: each rank acknowledges each order; what fails names the rank.

    local:         rank 0's own part.
    progress:      where rank 0 writes how far it has come.
    warm_up:       run once, after the first load.
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
        self._sizes = sizes
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
        self._require_agreement()

    def _require_agreement(self) -> None:
        described = self._everywhere("describe", None)
        for rank, found in described.items():
            for name, value in described[0].items():
                if found[name] != value:
                    raise RankError(rank, f"{name} is {found[name]} there, {value} on rank 0: start all ranks alike")

    # --- Executor -----------------------------------------------------------------------------------------------

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
        number = channel.post(kind, encode_plan(plan), answers=self._samplers)
        self._progress.begin(number, is_warm_up=kind is Kind.WARM_UP)
        try:
            parts = self._local.execute_part(plan)
        except GroupError as error:
            # An exchange that fails does not say who is gone.
            raise channel.blame(number) from error
        except RuntimeError as error:
            raise RankError(0, str(error)) from error
        self._progress.end(number)
        for answer in channel.collect(number).values():
            parts += [(rows, decode_result(items)) for rows, items in answer]
        return merge(parts, len(plan.query_lengths))

    # --- Ranks --------------------------------------------------------------------------------------------------

    async def confirm(self, signal: Header) -> RankResults:
        """Every rank has done all that came before: it takes orders one after the other."""
        try:
            await asyncio.to_thread(self._everywhere, "confirm", signal.name)
        except RankError as error:
            return RankResults.of_failure(error, ranks=self.count)
        return RankResults(self.count)

    # --- the process --------------------------------------------------------------------------------------------

    def watch(self, *, on_failure: Callable[[BaseException], object], on_leave: Callable[[], object]) -> None:
        """on_failure: called on another thread when a rank is lost; soon after, the process ends, whatever its threads
        hang in. on_leave: called on another thread when a rank was told to end.
        """

        def lost(error: RankError) -> None:
            until = time.monotonic() + ENDING_SECONDS
            on_failure(error)
            self._channel.fail(error.rank, error.cause)
            threading.Event().wait(max(0.0, until - time.monotonic()))
            end_with(error)

        self._channel.on_leave = on_leave
        self._channel.on_lost = lost

    def end(self, failure: BaseException | None) -> None:
        """End the other ranks: in order, or with the cause of this engine's failure. Idempotent."""
        if failure is None:
            self._channel.close()
        else:
            rank, cause = (failure.rank, failure.cause) if isinstance(failure, RankError) else (0, str(failure))
            self._channel.fail(rank, cause)

    # --- orders -------------------------------------------------------------------------------------------------

    def _everywhere(self, name: str, argument: Any) -> dict[int, Any]:
        """Have every rank perform an order. Returns the answers by rank; raises what failed first, naming the rank."""
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
