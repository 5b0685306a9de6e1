"""An engine without a model: one task generates a token of every running request at each tick."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

TICK_SECONDS = 0.005
FORCED = "megatron_forced_tokens"
EOS = 2


def next_token(context: Sequence[int], weights: int = 0) -> int:
    """Return the token after `context`, which depends on all of its tokens and on the weights."""
    return 1000 + (31 * sum(context) + 7 * len(context) + 101 * weights) % 20_000


class AsyncLLM:
    """steps: ticks with work. calls: of the methods that change the engine, in order."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.steps = 0
        self.is_paused_now = False
        self.is_dead = False
        self.weights = self._read_weights(config.args.model)
        self.calls: list[str] = []
        self._requests: dict[str, _Request] = {}
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    def _read_weights(directory: str) -> int:
        return (Path(directory) / "model.safetensors").read_bytes()[-1]

    @classmethod
    def from_vllm_config(cls, config: VllmConfig) -> AsyncLLM:
        return cls(config)

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        request = self._requests[request_id] = _Request(prompt["prompt_token_ids"], params)
        try:
            while True:
                output = await request.queue.get()
                if output is None:
                    raise EngineDeadError
                yield output
                if output.finished:
                    return
        finally:
            self._requests.pop(request_id, None)

    async def _run(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(TICK_SECONDS)
            if self._requests and not self.is_paused_now:
                self.steps += 1
                for request in list(self._requests.values()):
                    request.step(self.weights)
        for request in self._requests.values():
            request.queue.put_nowait(None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        self.calls.append("pause")
        self.is_paused_now = True
        await asyncio.sleep(0.02)

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.is_paused_now = False

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        assert method == "reload_weights"
        assert self.is_paused_now, "weights are swapped under pause"
        self.calls.append(method)
        self.weights = self._read_weights(kwargs["weights_path"])
        return [None]

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        if self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def die(self) -> None:
        self.is_dead = True


class _Request:
    def __init__(self, prompt: list[int], params: Any) -> None:
        self.queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._context = list(prompt)
        self._params = params
        self._generated: list[int] = []
        self._prompt_length = len(prompt)

    def step(self, weights: int) -> None:
        params, count = self._params, len(self._generated)
        forced = (params.extra_args or {}).get(FORCED, [])
        token = forced[count] if count < len(forced) else next_token(self._context, weights)
        self._context.append(token)
        self._generated.append(token)
        reason, stop = None, None
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        if token in ends and len(self._generated) > params.min_tokens and count >= len(forced):
            reason, stop = "stop", token if token in params.stop_token_ids else None
        elif len(self._generated) >= params.max_tokens:
            reason = "length"
        found = None
        if params.logprobs is not None:
            found = [
                {
                    token: Logprob(-0.5, 1),
                    **{token + place: Logprob(-1.0 - place, place + 1) for place in range(1, params.logprobs)},
                }
            ]
        output = RequestOutput([CompletionOutput([token], found, reason, stop)], reason is not None)
        if params.prompt_logprobs is not None:
            own = [{token: Logprob(-0.25, 1)} for token in self._context[1 : self._prompt_length]]
            output.prompt_logprobs = [None, *own] if len(self._generated) == 1 else []
        self.queue.put_nowait(output)
