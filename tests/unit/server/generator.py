"""A client of the coordinator in the process: the built-in vocabulary, and scripted tokens instead of a model."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.lifecycle import CoordinatorState, EngineState
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import (
    AdapterStatus,
    Charge,
    EngineStatus,
    FailedRequest,
    Quota,
    Reserve,
    StatusReply,
)
from megatron_runtime.requests.quotas import Quotas
from megatron_runtime.requests.request import pack_array
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

OnTokens = Callable[[int], object]
FAILED_UID = "ab" * limits.UID_BYTES
"""A request that the coordinator reports as failed."""
ANSWER = "The llama 🦙 says: naïve café, 東京 and 42. Then it stops — really."


def log_prob(token: int, place: int) -> float:
    """The log-probability that the backend gives a token at a place of its sequence."""
    return -((token * 31 + place) % 97) / 8


def top(token: int, place: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens at a place; the token itself is rarely among them."""
    return [((token + 7 * rank) % 49152, -rank / 4 - place / 1024) for rank in range(1, count + 1)]


class ScriptedStream:
    """The stream of one request; closing it early counts as an abort."""

    def __init__(
        self, backend: ScriptedBackend, prompt: list[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> None:
        self._backend = backend
        self._events = backend.generate(prompt, params, on_tokens)

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._events

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined]


class ScriptedBackend:
    """Answers greedy requests with `answer`, a text or its tokens, sampled ones with tokens drawn from their seed.

    gate:     while clear, no token is generated after the first `free_tokens`.
    reject:   raised instead of accepting a request.
    failure:  the error of a FAILED reply, after the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.connected = True
        self.quotas = Quotas()
        self.reject: Exception | None = None
        self.failure: dict[str, Any] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.free_tokens = 1
        self.requests: list[tuple[list[int], SamplingParams]] = []
        self.tenants: list[str] = []
        """The tenant of each request."""
        self.tasks: tuple[str, ...] = ("generate",)
        """What its engines do. With a pooling model each text has the score 0.5."""
        self.adapters = AdapterList()
        self.adapters_asked: list[str] = []
        """The adapter of each request."""
        self.request_ids: list[str] = []
        """The id of the HTTP request of each request."""
        self.media: list[Media | None] = []
        """Images, audio and video of each request."""
        self.open = 0
        self.aborted = 0
        self.status_requests = 0
        self.answer: str | list[int] = ANSWER
        self.times: dict[str, float] = {}
        """Times in the final reply."""
        self.has_hidden_states = True
        """Whether it returns hidden states; an engine of an earlier release does not."""
        self.hidden_states_end_with = -1.0
        self.forgets_log_probs_after: int | None = None
        """From this token on partials come without log-probabilities; the final reply has them."""
        self._tokenizer = tokenizer
        self._changed = asyncio.Condition()

    def status(self, *, timeout_seconds: float = 5.0) -> asyncio.Future[StatusReply]:
        """Return the report of a coordinator with two engines, of which one is draining."""
        self.status_requests += 1
        future: asyncio.Future[StatusReply] = asyncio.get_running_loop().create_future()
        if not self.connected:
            future.set_exception(CoordinatorUnreachableError("no STATUS_REPLY from tcp://coordinator"))
            return future
        engine = EngineStatus(name="engine-0", state=EngineState.RUNNING, serving=True, epoch=7, ranks=2, in_flight=3)
        draining = EngineStatus(name="engine-1", state=EngineState.RUNNING, serving=True, draining=True)
        failed = FailedRequest(uid=FAILED_UID, engines=["engine-0"], at=1.0)
        reply = StatusReply(incarnation=1, state=CoordinatorState.RUNNING, epoch=7, queued=5, in_flight=3)
        adapters = [AdapterStatus(name=each.name, source=each.source, engines=1) for each in self.adapters.adapters]
        future.set_result(
            reply.model_copy(
                update={"engines": [engine, draining], "failed_requests": [failed], "adapters": adapters},
            )
        )
        return future

    async def reserve(self, reserve: Reserve) -> Quota:
        return self.quotas.reserve(time.monotonic(), reserve)

    def charge(self, charge: Charge) -> None:
        self.quotas.charge(time.monotonic(), charge)

    def add_request(self, prompt: list[int], sampling_params: SamplingParams, **options: Any) -> asyncio.Future[Any]:
        self._accept(options)
        return asyncio.ensure_future(self._whole(prompt, sampling_params, options.get("on_tokens")))

    def add_request_streaming(
        self, prompt: list[int], sampling_params: SamplingParams, **options: Any
    ) -> ScriptedStream:
        self._accept(options)
        return ScriptedStream(self, prompt, sampling_params, options.get("on_tokens"))

    def _accept(self, options: dict[str, Any]) -> None:
        if self.reject is not None:
            raise self.reject
        self.tenants.append(options.get("tenant", ""))
        self.adapters_asked.append(options.get("adapter", ""))
        self.request_ids.append(options.get("request_id", ""))
        self.media.append(options.get("media"))

    async def until(self, *, open_requests: int | None = None, aborted: int | None = None) -> None:
        """Wait until the counts are as given."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    (open_requests is None or self.open == open_requests)
                    and (aborted is None or self.aborted == aborted)
                )
            )

    async def generate(
        self, prompt: list[int], params: SamplingParams, on_tokens: OnTokens | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        self.requests.append((prompt, params))
        await self._count(opened=1)
        ended = False
        try:
            tokens, text, reason = self._script(prompt, params)
            sent, details = 0, self._prompt_details(prompt, params)
            releasable_after = self._releasable(prompt, tokens, params)
            for done in range(1, len(tokens) + 1):
                if done > self.free_tokens:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if on_tokens is not None:
                    on_tokens(1)
                releasable = releasable_after[done]
                if releasable > sent and done < len(tokens):
                    yield {"partial": {**self._partial(tokens, sent, releasable, params), **details}}
                    sent, details = releasable, {}
            ended = True
            yield {"final": {**self._reply(prompt, tokens, params, text=text, reason=reason)}}
        finally:
            await self._count(opened=-1, aborted=0 if ended else 1)

    def _partial(self, tokens: list[int], start: int, end: int, params: SamplingParams) -> dict[str, Any]:
        partial: dict[str, Any] = {"new_tokens": tokens[start:end]}
        if params.return_log_probs:
            known = end if self.forgets_log_probs_after is None else min(end, self.forgets_log_probs_after)
            places = range(start, max(start, known))
            partial["new_log_probs"] = [log_prob(tokens[place], place) for place in places]
            partial["new_top_n_logprobs"] = [top(tokens[place], place, params.top_n_logprobs) for place in places]
        return partial

    def _prompt_details(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        if not params.return_log_probs or params.skip_prompt_log_probs:
            return {}
        places = range(1, len(prompt))
        return {
            "prompt_log_probs": [log_prob(prompt[place], place) for place in places],
            "prompt_top_n_logprobs": [top(prompt[place], place, params.top_n_logprobs) for place in places],
        }

    async def _whole(
        self, prompt: list[int], params: SamplingParams, on_tokens: OnTokens | None = None
    ) -> dict[str, Any]:
        stream = self.generate(prompt, params, on_tokens)
        try:
            async for event in stream:
                if "final" in event:
                    return event["final"]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        raise AssertionError("no final")

    def _script(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], str | None, str]:
        """All tokens, the authoritative text if a stop string was matched, and why it ends."""
        if params.pooling is not None:
            return [], None, "stop"
        if params.is_greedy:
            answer = self.answer if isinstance(self.answer, list) else self._tokenizer.encode(self.answer)
            tokens = [*answer, self._tokenizer.eos_ids[0]]
        else:
            draw = random.Random(params.seed)
            tokens = [draw.randrange(20, self._tokenizer.vocab_size) for _ in range(40)]
        ends = {params.termination_id, *(params.stop_token_ids or ())}
        reason = "length"
        for at, token in enumerate(tokens, start=1):
            if token in ends and at > params.min_tokens:
                tokens, reason = tokens[:at], "stop"
                break
        stops = params.stop_words or ()
        hold = max(map(len, stops), default=1) - 1
        text = ""
        for count, further in enumerate(self._texts(prompt, tokens) if stops else (), start=1):
            before, text = len(text), text + further
            found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, before - hold))) >= 0]
            if found and count >= params.min_tokens:
                at, stop = min(found)
                end = at + len(stop) if params.detokenize_stop_sequence else at
                return tokens[:count], text[:end], "stop"
        limit = params.num_tokens_to_generate
        if limit is not None and len(tokens) > limit:
            return tokens[:limit], None, "length"
        return tokens, None, reason

    def _releasable(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> list[int]:
        """After so many tokens: how many of them are no part of what may become a stop text."""
        hold = max((len(stop) for stop in params.stop_words or ()), default=1) - 1
        if not hold:
            return list(range(len(tokens) + 1))
        ends = list(accumulate((len(text) for text in self._texts(prompt, tokens)), initial=0))
        return [
            bisect_right(ends, end - hold, hi=count + 1) - 1 if end >= hold else 0 for count, end in enumerate(ends)
        ]

    def _texts(self, prompt: list[int], tokens: list[int]) -> Iterator[str]:
        """What each of them adds to the text; a character comes when it is complete, as an engine sees it."""
        detokenizer = self._tokenizer.detokenizer(after=prompt)
        return (detokenizer.feed((token,)) for token in tokens)

    def _reply(
        self, prompt: list[int], tokens: list[int], params: SamplingParams, *, text: str | None, reason: str
    ) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if params.pooling is not None:
            details["pooled"] = pack_array(np.array([0.5], dtype="<f4"))
        if params.return_hidden_state and self.has_hidden_states:
            details["hidden_state"] = struct.pack("<3f", len(prompt), sum(prompt) % 7, self.hidden_states_end_with)
        if params.return_log_probs:
            likeliest = [top(token, place, params.top_n_logprobs) for place, token in enumerate(tokens)]
            details |= {
                "generated_log_probs": [log_prob(token, place) for place, token in enumerate(tokens)],
                "generated_top_n_logprobs": likeliest,
                **self._prompt_details(prompt, params),
            }
        return {
            **self.times,
            **details,
            "status": "FAILED" if self.failure else "COMPLETED",
            "finish_reason": "error" if self.failure else reason,
            "generated_tokens": tokens,
            "generated_text": text,
            "stop_reason": None if text is None else self._stop_of(prompt, tokens, params),
            "generated_length": len(tokens),
            "prompt_length": len(prompt),
            "num_cached_tokens": 3,
            "error": self.failure,
        }

    def _stop_of(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> str:
        """The stop string that ended the answer."""
        text = "".join(self._texts(prompt, tokens))
        return min((text.find(stop), stop) for stop in params.stop_words or () if stop in text)[1]

    async def _count(self, *, opened: int, aborted: int = 0) -> None:
        self.open += opened
        self.aborted += aborted
        async with self._changed:
            self._changed.notify_all()
