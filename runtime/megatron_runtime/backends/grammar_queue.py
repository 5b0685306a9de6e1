"""The grammars of requests that wait to be compiled, off the event loop and fair between tenants. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime.backends.text import ModelText
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.process.fair_lanes import FairLanes
from megatron_runtime.sampling.grammar_limits import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:
    from megatron_runtime.sampling.structured_output import GrammarState

COMPILE_SECONDS_PER_MINUTE = 20.0
"""Time to compile new grammars that each tenant has, in each engine. Usual grammars take less than is charged."""


class GrammarQueue:
    """Begins the grammars of requests: one new grammar at a time, round robin over tenants.

    A grammar that was compiled before does not wait for new ones. A request without a tenant has a share like the
    others, and no budget. All methods run on the event loop.
    """

    def __init__(self, text: ModelText | None) -> None:
        self._text = text
        self._lanes = FairLanes(
            {"known": 1, "new": 1}, what="Compiling grammars", seconds_per_minute=COMPILE_SECONDS_PER_MINUTE
        )
        self._tasks: dict[int, asyncio.Task[GrammarState | None]] = {}

    async def begin(self, request: EngineRequest) -> GrammarState | None:
        """Return the grammar state of a request after its generated tokens.

        Raises:
            InvalidSamplingParamsError: the structure is not valid.
            BudgetExceededError: its tenant has used its time for new grammars.
            TimeoutError: the deadline of the request has passed.
        """
        assert self._text is not None
        params = request.sampling_params
        # Looking up a description beyond the limits takes long, and begin_grammar() rejects it at once.
        is_known = request.params_bytes > 2 * MAX_GRAMMAR_BYTES or self._text.is_grammar_known(params)
        generated = request.generated_tokens.tolist()
        call = partial(self._text.begin_grammar, params, generated, tenant=request.tenant)
        async with asyncio.timeout(request.deadline_seconds):
            lane = "known" if is_known else "new"
            return await self._lanes.run(lane, request.tenant, call, is_metered=request.has_tenant and not is_known)

    def add(self, request: EngineRequest, *, on_done: Callable[[asyncio.Task[GrammarState | None]], None]) -> None:
        """Call `on_done` with the task of begin() when it has ended, unless the request was dropped."""

        def done(task: asyncio.Task[GrammarState | None]) -> None:
            if self._tasks.get(request.request_id) is task:
                del self._tasks[request.request_id]
            if not task.cancelled():
                on_done(task)

        task = self._tasks[request.request_id] = asyncio.create_task(self.begin(request))
        task.add_done_callback(done)

    def drop(self, request_id: int) -> None:
        """Remove a request that was aborted, if it is in the queue."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        self._lanes.close()
