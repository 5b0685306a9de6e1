"""The process of a rank that is not rank 0: it does what rank 0 orders, and ends when the engine ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType

from megatron_runtime.backends.native.engine_part import EnginePart, PartExecutor
from megatron_runtime.backends.native.ranked.follower_channel import FollowerChannel
from megatron_runtime.backends.native.ranked.plan_channel import STEPS, Kind, Order
from megatron_runtime.backends.native.ranked.plan_codec import decode_plan, encode_result
from megatron_runtime.distributed.errors import RankError
from megatron_runtime.distributed.groups import GroupError
from megatron_runtime.distributed.step_progress import StepProgress
from megatron_runtime.engine.termination import write_termination_message

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 3.0
"""How long a rank that failed waits for rank 0 to end the engine with the cause."""


def end_with(error: RankError) -> None:
    """End this process now: its threads may hang in a collective that no other rank will enter."""
    print(f"the engine ends: {error}", file=sys.stderr, flush=True)
    write_termination_message(error)
    os._exit(1)


class RankProcess:
    """Takes orders until rank 0 says END.

    progress:   where it writes how far it has come.
    is_sampler: this rank answers steps with what it sampled.
    """

    def __init__(
        self,
        rank: int,
        executor: PartExecutor,
        channel: FollowerChannel,
        *,
        progress: StepProgress,
        is_sampler: bool,
    ) -> None:
        self._rank = rank
        self._part = EnginePart(executor)
        self._executor = executor
        self._channel = channel
        self._progress = progress
        self._is_sampler = is_sampler

    def run(self) -> None:
        """Block until the engine ends. SIGTERM asks rank 0 to end it in order."""

        def leave(_number: int, _frame: FrameType | None) -> None:
            self._channel.leave()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        while (order := self._channel.orders.get()).kind is not Kind.END:
            if order.kind in STEPS:
                self._step(order)
            elif order.body[0] == "stage_weights":
                # Steps go on meanwhile.
                threading.Thread(target=self._perform, args=(order,), name="stage", daemon=True).start()
            else:
                self._perform(order)
            self._progress.end(order.number)
        self._channel.close()

    def _step(self, order: Order) -> None:
        self._progress.begin(order.number, is_warm_up=order.kind is Kind.WARM_UP)
        try:
            parts = self._executor.execute_part(decode_plan(order.body))
        except Exception as error:
            logger.exception("step %d failed", order.number)
            self._channel.fail(str(error), is_consequence=isinstance(error, GroupError))
            # Not at once: a rank that goes first would be taken for the cause.
            threading.Event().wait(LAST_WORDS_SECONDS)
            end_with(RankError(self._rank, str(error)))
        if self._is_sampler:
            self._channel.answer(order, [[rows, encode_result(result)] for rows, result in parts])

    def _perform(self, order: Order) -> None:
        name, argument = order.body
        try:
            answer = self._part.perform(name, argument)
        except Exception as error:
            logger.exception("%s failed", name)
            self._channel.answer(order, [f"{name}: {error}", None])
        else:
            self._channel.answer(order, [None, answer])
