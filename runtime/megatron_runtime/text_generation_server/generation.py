"""Run the choices of one request on the backend, all at once, and count what they used."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.inference_client import RequestRejectedError
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.text_generation_server.answer import AnswerText
from megatron_runtime.text_generation_server.backend import Backend
from megatron_runtime.text_generation_server.errors import ApiError, from_reply_error
from megatron_runtime.text_generation_server.metrics import ServerMetrics
from megatron_runtime.tokenization import Tokenizer

_MERGE_QUEUE_EVENTS = 64
_RECONNECT_CHECK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate.

    index:  its place in the answer.
    counts_prompt: whether its prompt enters the usage: the first of the n choices of a prompt does.
    prefix: text put before the generated text (echo).
    end_ids: tokens that may end the answer and are no part of its text.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    end_ids: frozenset[int]
    counts_prompt: bool = True
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one choice; the last one says why it ended."""

    index: int
    text: str
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request, summed over prompts and choices."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, job: Job, reply: dict[str, Any]) -> None:
        if job.counts_prompt:
            self.prompt += len(job.prompt)
            self.cached += reply.get("num_cached_tokens") or 0
        self.completion += reply.get("generated_length") or len(reply.get("generated_tokens") or ())

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Generation:
    """The jobs of one HTTP request.

    coordinator_wait_seconds: how long they wait for a coordinator that is away.
    """

    backend: Backend
    tokenizer: Tokenizer
    metrics: ServerMetrics
    jobs: Sequence[Job]
    coordinator_wait_seconds: float
    usage: Usage = field(default_factory=Usage)

    async def collect(self) -> list[Piece]:
        """Return every choice whole, in order. Cancelled or failed, it aborts what is still open."""
        await self._until_connected()
        tasks = [asyncio.create_task(self._collect_one(job)) for job in self.jobs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _cancel(tasks)

    async def _until_connected(self) -> None:
        """A coordinator that restarts costs its clients a wait, not an error."""
        try:
            async with asyncio.timeout(self.coordinator_wait_seconds):
                while not self.backend.connected:  # noqa: ASYNC110 - only while the coordinator is away
                    await asyncio.sleep(_RECONNECT_CHECK_SECONDS)
        except TimeoutError as error:
            message = f"The coordinator has not answered for {self.coordinator_wait_seconds:g} s: try again."
            raise ApiError(503, message, code="coordinator_unreachable", retry_after_seconds=5) from error

    async def _collect_one(self, job: Job) -> Piece:
        with self.metrics.request(len(job.prompt)) as observed:
            async with _rejections():
                reply = await self.backend.add_request(job.prompt, job.params)
            reason = _finish_reason(reply)
            text = job.prefix + AnswerText(self.tokenizer, end_ids=job.end_ids).finish(reply)
            self.usage.add(job, reply)
            observed.finished(reason, tokens=len(reply["generated_tokens"]))
            return Piece(job.index, text, reason)

    async def stream(self) -> AsyncGenerator[Piece]:
        """Yield pieces as they come, choices interleaved. Closed early, it aborts what is still open."""
        await self._until_connected()
        if len(self.jobs) == 1:
            async with aclosing(self._stream_one(self.jobs[0])) as pieces:
                async for piece in pieces:
                    yield piece
            return
        merged: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(_MERGE_QUEUE_EVENTS)
        tasks = [asyncio.create_task(self._forward(job, merged)) for job in self.jobs]
        try:
            remaining = len(tasks)
            while remaining:
                event = await merged.get()
                if event is None:
                    remaining -= 1
                elif isinstance(event, BaseException):
                    raise event
                else:
                    yield event
        finally:
            await _cancel(tasks)

    async def _forward(self, job: Job, merged: asyncio.Queue[Piece | BaseException | None]) -> None:
        try:
            async with aclosing(self._stream_one(job)) as pieces:
                async for piece in pieces:
                    await merged.put(piece)
            await merged.put(None)
        except Exception as error:
            await merged.put(error)

    async def _stream_one(self, job: Job) -> AsyncGenerator[Piece]:
        answer = AnswerText(self.tokenizer, end_ids=job.end_ids)
        with self.metrics.request(len(job.prompt)) as observed:
            async with _rejections():
                stream = self.backend.add_request_streaming(job.prompt, job.params)
            async with aclosing(stream):
                if job.prefix:
                    yield Piece(job.index, job.prefix)
                async for event in _translated(stream):
                    if "final" in event:
                        reply = event["final"]
                        reason = _finish_reason(reply)
                        self.usage.add(job, reply)
                        observed.finished(reason, tokens=len(reply["generated_tokens"]))
                        yield Piece(job.index, answer.finish(reply), reason)
                        return
                    tokens = event["partial"]["new_tokens"]
                    observed.tokens(len(tokens), at=time.perf_counter())
                    text = answer.feed(tokens)
                    if text:
                        yield Piece(job.index, text)
        raise ApiError(500, "the engine's stream ended without a final answer")


def choice_seed(seed: int | None, *, choice: int) -> int | None:
    """Return the 64-bit seed of one of n choices: the given one for the first, derived and independent for the rest."""
    if seed is None:
        return None
    seed &= (1 << 64) - 1
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@asynccontextmanager
async def _rejections() -> AsyncGenerator[None]:
    """Turn the client's refusals into answers."""
    try:
        yield
    except RequestRejectedError as error:
        raise from_reply_error(
            {
                "code": error.code,
                "message": str(error),
                "type": getattr(error, "type", None),
                "retry_after_seconds": error.retry_after_seconds,
            }
        ) from error


async def _translated(stream: Any) -> AsyncIterator[dict[str, Any]]:
    async with _rejections():
        async for event in stream:
            yield event


def _finish_reason(reply: dict[str, Any]) -> str:
    if reply.get("status") == "FAILED" or reply.get("error"):
        raise from_reply_error(reply.get("error"))
    reason: str = reply.get("finish_reason") or "stop"
    if reason not in ("stop", "length"):
        raise ApiError(503, f"generation ended early ({reason}): try again", code=reason, retry_after_seconds=1)
    return reason


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
