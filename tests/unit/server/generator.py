"""An in-process backend: the true vocabulary, tokens from a script instead of a model, everything observable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.tokenization import Tokenizer

ANSWER = "The llama 🦙 says: naïve café, 東京 and 42. Then it stops — really."


class ScriptedStream:
    """The stream of one request; closing it early counts as an abort."""

    def __init__(self, backend: ScriptedBackend, prompt: list[int], params: SamplingParams) -> None:
        self._backend = backend
        self._events = backend.generate(prompt, params)

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._events

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]


class ScriptedBackend:
    """Answers greedy requests with ANSWER, sampled ones with tokens drawn from their seed.

    gate:     while clear, no token is generated after the first `free_tokens`.
    reject:   raised instead of accepting a request.
    failure:  the error of a FAILED reply, after the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.connected = True
        self.reject: Exception | None = None
        self.failure: dict[str, Any] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.free_tokens = 1
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.open = 0
        self.aborted = 0
        self._tokenizer = tokenizer
        self._changed = asyncio.Condition()

    def add_request(self, prompt: list[int], sampling_params: SamplingParams) -> asyncio.Future[Any]:
        if self.reject is not None:
            raise self.reject
        return asyncio.ensure_future(self._whole(prompt, sampling_params))

    def add_request_streaming(self, prompt: list[int], sampling_params: SamplingParams) -> ScriptedStream:
        if self.reject is not None:
            raise self.reject
        return ScriptedStream(self, prompt, sampling_params)

    async def until(self, *, open_requests: int | None = None, aborted: int | None = None) -> None:
        """Wait until the counts are as given."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    (open_requests is None or self.open == open_requests)
                    and (aborted is None or self.aborted == aborted)
                )
            )

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[dict[str, Any]]:
        self.requests.append((prompt, params))
        await self._count(opened=1)
        ended = False
        try:
            tokens, text, reason = self._script(params)
            sent = 0
            for done in range(1, len(tokens) + 1):
                if done > self.free_tokens:
                    await self.gate.wait()
                await asyncio.sleep(0)
                releasable = self._releasable(tokens[:done], params)
                if releasable > sent and done < len(tokens):
                    yield {"partial": {"new_tokens": tokens[sent:releasable]}}
                    sent = releasable
            ended = True
            yield {"final": self._reply(prompt, tokens, text=text, reason=reason)}
        finally:
            await self._count(opened=-1, aborted=0 if ended else 1)

    async def _whole(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        stream = self.generate(prompt, params)
        try:
            async for event in stream:
                if "final" in event:
                    return event["final"]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        raise AssertionError("no final")

    def _script(self, params: SamplingParams) -> tuple[list[int], str | None, str]:
        """All tokens, the authoritative text if a stop string was matched, and why it ends."""
        if params.is_greedy:
            tokens = [*self._tokenizer.encode(ANSWER), self._tokenizer.eos_ids[0]]
        else:
            draw = random.Random(params.seed)
            tokens = [draw.randrange(20, self._tokenizer.vocab_size) for _ in range(40)]
        ends = {params.termination_id, *(params.stop_token_ids or ())}
        reason = "length"
        for at, token in enumerate(tokens, start=1):
            if token in ends and at > params.min_tokens:
                tokens, reason = tokens[:at], "stop"
                break
        for count in range(1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:count])
            found = [text.index(stop) for stop in params.stop_words or () if stop in text]
            if found:
                tokens, cut = tokens[:count], text[: min(found)]
                return tokens, cut, "stop"
        limit = params.num_tokens_to_generate
        if limit is not None and len(tokens) > limit:
            return tokens[:limit], None, "length"
        return tokens, None, reason

    def _releasable(self, tokens: list[int], params: SamplingParams) -> int:
        hold = max((len(stop) for stop in params.stop_words or ()), default=1) - 1
        limit = len(self._tokenizer.decode(tokens)) - hold
        count = len(tokens)
        while hold and count and len(self._tokenizer.decode(tokens[:count])) > limit:
            count -= 1
        return count

    def _reply(self, prompt: list[int], tokens: list[int], *, text: str | None, reason: str) -> dict[str, Any]:
        return {
            "status": "FAILED" if self.failure else "COMPLETED",
            "finish_reason": "error" if self.failure else reason,
            "generated_tokens": tokens,
            "generated_text": text,
            "generated_length": len(tokens),
            "prompt_length": len(prompt),
            "num_cached_tokens": 3,
            "error": self.failure,
        }

    async def _count(self, *, opened: int, aborted: int = 0) -> None:
        self.open += opened
        self.aborted += aborted
        async with self._changed:
            self._changed.notify_all()
