"""A minimal EngineBackend, written against engine/backend.py alone: no thread, no scheduler, no torch.

One task on the event loop generates a token for every open request at each tick. As a program it is an engine process:
`python toy_backend.py COORDINATOR NAME HEALTH_PORT KEYS_DIR`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_runtime.engine import worker
from megatron_runtime.engine.backend import (
    BackendInfo,
    BackendListener,
    Capability,
    EngineBackend,
    RankResults,
)
from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.protocol.headers import ErrorCode

TICK_SECONDS = 0.01
DONE = RankResults(1)


def toy_answer(prompt: Sequence[int], length: int) -> list[int]:
    """Return the answer to `prompt`: tokens that depend on the prompt and their position."""
    return [1000 + (31 * sum(prompt) + 7 * place) % 20_000 for place in range(length)]


@dataclass(eq=False)
class _Open:
    """A request in progress. deadline: on the event loop's clock."""

    request: EngineRequest
    answer: list[int]
    given: int
    deadline: float | None


class ToyBackend(EngineBackend):
    """A backend whose only capability is suspension."""

    def __init__(self, settings: EngineSettings) -> None:
        self.info = BackendInfo(
            name="toy",
            vocab_size=49_152,
            eos_ids=(),
            max_sequence_length=settings.max_sequence_length or 2048,
            max_requests=64,
            capabilities=frozenset({Capability.SUSPEND}),
        )
        self._open: dict[int, _Open] = {}
        self._running = False
        self._has_memory = False
        self._steps = 0
        self._task: asyncio.Task[None] | None = None

    def stats(self) -> BackendStats:
        return BackendStats(steps=self._steps, num_running=len(self._open))

    async def start(self, listener: BackendListener) -> None:
        self._listener = listener
        self._task = asyncio.create_task(self._run())

    async def load(self) -> None:
        self._has_memory = True

    async def stop(self, cause: BaseException | None = None) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def tokenizer(self) -> None:
        """None: its tokens have no text, so requests with stop texts are rejected."""

    def submit(self, request: EngineRequest) -> None:
        params, prompt = request.sampling_params, request.prompt_tokens.tolist()
        room = self.info.max_sequence_length - len(prompt)
        if room < 1:
            rejection = RequestOutput(request.request_id, [], len(prompt), "error")
            rejection.error, rejection.error_code = "the prompt is too long: shorten it", ErrorCode.INVALID_REQUEST
            self._listener.on_outputs([rejection])
            return
        answer = toy_answer(prompt, min(room, params.num_tokens_to_generate or room))
        seconds = request.deadline_seconds
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._open[request.request_id] = _Open(request, answer, len(request.generated_tokens), deadline)

    def abort(self, request_id: int) -> asyncio.Future[object]:
        self._open.pop(request_id, None)
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def pause(self) -> RankResults:
        self._running = False  # a tick has no await in it, so none is in progress
        return DONE

    async def unpause(self) -> RankResults:
        self._running = True
        return DONE

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        self._has_memory = False
        return DONE

    async def restore_memory(self) -> RankResults:
        self._has_memory = True
        return DONE

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._running and self._open:
                assert self._has_memory, "a step without memory"
                self._steps += 1
                self._listener.on_outputs([self._next(one) for one in list(self._open.values())])

    def _next(self, one: _Open) -> RequestOutput:
        output = RequestOutput(one.request.request_id, [], len(one.request.prompt_tokens))
        if one.deadline is not None and asyncio.get_running_loop().time() > one.deadline:
            output.finish_reason, output.error, output.error_code = "error", "its time is over", ErrorCode.DEADLINE
        else:
            output.new_tokens = one.answer[one.given : one.given + 1]
            one.given += 1
            output.finish_reason = "length" if one.given >= len(one.answer) else None
        if output.finish_reason is not None:
            del self._open[one.request.request_id]
        return output


if __name__ == "__main__":
    coordinator, name, health_port, keys_dir = sys.argv[1:]
    worker.run(
        EngineSettings(coordinator=coordinator, name=name, health_port=int(health_port), keys_dir=Path(keys_dir)),
        ToyBackend,
    )
