"""Converts the outputs of engine steps to messages. Handles stop texts, PARTIALs grouped by destination, and FINALs.

Tokens that can be part of a stop text are held back, because a sent token cannot be withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from megatron_runtime.engine.engine_request import RequestOutput, RequestSummary, TopLogProbs
from megatron_runtime.process import tracing
from megatron_runtime.process.fair_lanes import BudgetExceededError
from megatron_runtime.process.logs import of_request
from megatron_runtime.process.tracing import Tracer
from megatron_runtime.protocol.epochs import add_epochs
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    Dispatch,
    Final,
    Frames,
    Partial,
    PartialEntry,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
)
from megatron_runtime.requests.errors import PERMANENT_CODES, serialize_error
from megatron_runtime.requests.request import pack_array
from megatron_runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)


_SMALLER = {True: "ask for fewer log-probabilities", False: "shorten the text, or ask for fewer dimensions"}
"""Advice how a client can get a smaller answer, by whether the request generates tokens."""
_PROMPT_TOKENS = 256
"""Number of tokens at the end of a prompt that a decoder can depend on."""

LikeliestTokens: TypeAlias = TopLogProbs | dict[str, float]
"""The most likely tokens at one position, in descending order."""


class StopText(NamedTuple):
    """A stop text that was found in an answer. start: index of its first character in the answer's text."""

    start: int
    text: str


class StopMatcher:
    """A matcher that searches the text of one answer for stop texts, token by token.

    The searched text includes special tokens that occur in a stop text. These special tokens are not part of the
    answer's text.

    after: the last tokens of the prompt, which the detokenizer needs to decode the first tokens of the answer.
    """

    def __init__(
        self, stop_words: Sequence[str], tokenizer: Tokenizer, *, after: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._stops = [stop for stop in stop_words if stop]
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._special = tokenizer.special_tokens_in(self._stops)
        self._detokenizer = tokenizer.detokenizer(after=after, visible=self._special)
        self._min_tokens = min_tokens
        self._special_places: list[tuple[int, int]] = []
        """Start and end index of each special token in the searched text."""
        self._parts: list[str] = []
        self._length = 0
        """Length of the text of all parts."""
        self._tail = ""
        """The last `_hold` characters of the text. A stop text can begin in these characters."""
        self._ends: deque[int] = deque()
        """Length of the text after each token that can be part of a stop text."""
        self._num_releasable = 0

    def append(self, token: int) -> None:
        """Append a token, and do not search for stop texts.

        Use this method for tokens that were sent to the client earlier. Such tokens cannot complete a stop text.
        """
        self._append(token)

    def feed(self, token: int) -> StopText | None:
        """Append a token. Return the first stop text that the token completes, or None if it completes none."""
        searched = len(self._tail)
        start = self._length - searched
        text = self._append(token)
        if self._num_releasable + len(self._ends) < self._min_tokens:
            return None
        # A stop text that ends within the earlier tokens was skipped: the answer had fewer than min_tokens.
        places = ((text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops)
        return min((StopText(start + at, stop) for at, stop in places if at >= 0), default=None)

    def _append(self, token: int) -> str:
        """Append a token, and return the text to search for stop texts: the end of the earlier text plus the token's
        text.
        """
        text = self._detokenizer.feed((token,))
        self._parts.append(text)
        self._length += len(text)
        if token in self._special:
            self._special_places.append((self._length - len(self._special[token]), self._length))
        self._ends.append(self._length)
        text = self._tail + text
        self._tail = text[max(0, len(text) - self._hold) :]
        return text

    def text_before(self, match: StopText) -> str:
        """Return the answer's text before a stop text."""
        searched = "".join(self._parts)[: match.start]
        parts, at = [], 0
        for begin, end in self._special_places:
            parts.append(searched[at:begin])
            at = end
        return "".join([*parts, searched[at:]])

    def releasable(self) -> int:
        """Return the number of tokens at the beginning of the answer that cannot be part of a stop text."""
        limit = self._length - self._hold
        while self._ends and self._ends[0] <= limit:
            self._ends.popleft()
            self._num_releasable += 1
        return self._num_releasable


@dataclass(slots=True)
class LogProbDetails:
    """Log-probabilities of one request, from token index `first` on. Another engine has reported the earlier tokens.

    text_of: returns the text of a token. The maps of the most likely tokens have these texts as keys. None: the most
             likely tokens are (id, value) pairs.
    """

    first: int
    text_of: Callable[[int], str] | None = None
    chosen: list[float] = field(default_factory=list)
    top: list[LikeliestTokens] = field(default_factory=list)
    prompt: list[float] | None = None
    prompt_top: list[LikeliestTokens] | None = None

    def take(self, output: RequestOutput) -> None:
        self.chosen += output.new_log_probs or ()
        self.top += map(self._named, output.new_top_n_logprobs or ())
        if output.prompt_log_probs is not None:
            self.prompt = output.prompt_log_probs
            if output.prompt_top_n_logprobs is not None:
                self.prompt_top = list(map(self._named, output.prompt_top_n_logprobs))

    def _named(self, likeliest: TopLogProbs) -> LikeliestTokens:
        """Return the log-probabilities of the most likely tokens, by the text of the token.

        If several tokens have the same text, the highest log-probability is kept. Return `likeliest` if `text_of` is
        None.
        """
        if self.text_of is None:
            return likeliest
        named: dict[str, float] = {}
        for token, log_prob in likeliest:
            named.setdefault(self.text_of(token), log_prob)
        return named

    def of_partial(self, start: int, stop: int) -> dict[str, Any]:
        """Return the log-probabilities of tokens `start` to `stop` - 1.

        If the first token is included, the result also has the log-probabilities of the prompt.
        """
        part = slice(start - self.first, stop - self.first)
        extras: dict[str, Any] = {"log_probs": self.chosen[part]}
        if self.top:
            extras["top_n_logprobs"] = self.top[part]
        if start == self.first:
            extras.update(self._of_prompt())
        return extras

    def of_final(self) -> dict[str, Any]:
        reply: dict[str, Any] = {"generated_log_probs": self.chosen, **self._of_prompt()}
        if self.top:
            reply["generated_top_n_logprobs"] = self.top
        if self.first:
            reply["log_probs_from"] = self.first
        return reply

    def _of_prompt(self) -> dict[str, Any]:
        named = {"prompt_log_probs": self.prompt, "prompt_top_n_logprobs": self.prompt_top}
        return {name: values for name, values in named.items() if values is not None}


def error_map(code: ErrorCode, error: BaseException | str) -> dict[str, Any]:
    """Return the `error` map of a reply. It includes the invalid parameter or the retry time, if the error has one."""
    if isinstance(error, str):
        return {"code": int(code), "type": code.name, "message": error}
    described = {"code": int(code), **serialize_error(error)}
    if code in PERMANENT_CODES:
        described["is_transient"] = False
    if isinstance(error, ValueError) and (field := getattr(error, "field", "")):
        described["field"] = field
    if isinstance(error, BudgetExceededError):
        described["retry_after_seconds"] = error.retry_after_seconds
    return described


@dataclass(slots=True)
class OpenDispatch:
    """A dispatch in progress.

    tokens: all generated tokens.
    sent:   number of leading tokens that have been sent.
    epochs: epochs of the weights that sampled the tokens, by token index.
    """

    dispatch: Dispatch
    params: SamplingParams
    tokens: list[int]
    sent: int
    matcher: StopMatcher | None
    epochs: list[tuple[int, int]] = field(default_factory=list)
    details: LogProbDetails | None = None
    times: list[float] | None = None
    """Times at which the request was added and each new token arrived; None unless a record is requested."""
    added: float = 0.0
    """Time at which the request was added, in seconds since 1970; 0 unless requests are traced."""


class OutputStage:
    """The open requests of this engine by dispatch id. Builds the messages that report their tokens.

    send:         sends the frames of a message to the coordinator; returns False if the message is too large.
    finish_early: aborts a request in the backend, because a stop text has ended it.
    tokenizer:    returns the model's tokenizer; None if the tokens have no text.
    on_forget:    called with the dispatch id of each request that ends.
    tracer:       records a span of each traced request; None if requests are not traced.
    clock:        returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        send: Callable[[Frames], bool | None],
        finish_early: Callable[[int], object],
        tokenizer: Callable[[], Tokenizer | None],
        on_forget: Callable[[int], None] = lambda dispatch_id: None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.open: dict[int, OpenDispatch] = {}
        self.idle = asyncio.Event()
        """Set while no request is open."""
        self.idle.set()
        self._send = send
        self._finish_early = finish_early
        self._tokenizer = tokenizer
        self._on_forget = on_forget
        self._tracer = tracer
        self._clock = clock

    def add(self, dispatch: Dispatch, params: SamplingParams, generated: Sequence[int]) -> None:
        matcher = None
        if params.stop_words:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                self.reject(dispatch, ErrorCode.INVALID_REQUEST, "stop_words need a model with a tokenizer")
                return
            matcher = StopMatcher(
                params.stop_words, tokenizer, after=_end_of_prompt(dispatch), min_tokens=params.min_tokens
            )
            for token in generated:
                matcher.append(token)
        self.open[dispatch.dispatch_id] = OpenDispatch(
            dispatch=dispatch,
            params=params,
            tokens=list(generated),
            sent=len(generated),
            matcher=matcher,
            epochs=list(dispatch.epochs),
            details=LogProbDetails(len(generated), self._text_of(params)) if params.wants_log_probs else None,
            times=[self._clock()] if params.return_record else None,
            added=time.time() if self._tracer is not None else 0.0,
        )
        self.idle.clear()

    def _text_of(self, params: SamplingParams) -> Callable[[int], str] | None:
        """Return a function that returns the text of a token.

        Returns None if the request needs no text or the tokens have no text.
        """
        tokenizer = self._tokenizer() if params.return_record and params.top_n_logprobs else None
        return None if tokenizer is None else lambda token: tokenizer.token_bytes(token).decode(errors="replace")

    def forget(self, dispatch_id: int, *, output: RequestOutput | None = None, error: str = "aborted") -> None:
        """Remove a request that has ended. output: the last output of the request; None if `error` ended it."""
        request = self.open.pop(dispatch_id, None)
        if self._tracer is not None and request is not None and request.dispatch.meta.traceparent:
            _trace(self._tracer, request, output, error=error)
        self._on_forget(dispatch_id)
        if not self.open:
            self.idle.set()

    def reject(self, dispatch: Dispatch, code: ErrorCode, error: BaseException | str) -> None:
        """Answer a request with an error."""
        if logger.isEnabledFor(logging.DEBUG):
            extra = of_request(dispatch.meta.request_id)
            logger.debug("request %s rejected: %s %s", dispatch.uid.hex(), code.name, error, extra=extra)
        self.forget(dispatch.dispatch_id, error=str(error))
        reply = {"status": "FAILED", "finish_reason": "error", "error": error_map(code, error)}
        self._send(Final(dispatch.dispatch_id, dispatch.uid, dispatch.generated, pack(reply)).to_frames())

    def step(self, outputs: Iterable[RequestOutput]) -> None:
        """Send the outputs of one engine step: one PARTIAL for each destination, then the finals."""
        partials: dict[int, list[tuple[OpenDispatch, int]]] = {}
        finals: list[tuple[OpenDispatch, RequestOutput, StopText | None]] = []
        for output in outputs:
            request = self.open.get(output.request_id)
            if request is None:
                continue
            if request.params.num_tokens_to_generate == 0:
                output = _without_tokens(output)
            found = self._take(request, output)
            if found is not None and output.finish_reason is None:
                self._finish_early(output.request_id)
            if found is not None or output.finish_reason is not None:
                finals.append((request, output, found))
                continue
            upto = len(request.tokens)
            if request.matcher is not None:
                upto = max(request.sent, request.matcher.releasable())
            if request.dispatch.meta.streaming and upto - request.sent >= request.params.streaming_interval:
                partials.setdefault(request.dispatch.route, []).append((request, upto))
        for route, ready in partials.items():
            self._send_partial(route, ready)
        for request, output, found in finals:
            self.forget(output.request_id, output=output)
            self._send_final(request, output, found)

    def _take(self, request: OpenDispatch, output: RequestOutput) -> StopText | None:
        if request.details is not None:
            request.details.take(output)
        if request.times is not None and output.new_tokens:
            request.times += [self._clock()] * len(output.new_tokens)
        if output.epoch is not None:
            add_epochs(
                request.epochs, [(0, output.epoch)], first=0, count=len(output.new_tokens), at=len(request.tokens)
            )
        for token in output.new_tokens:
            request.tokens.append(token)
            if request.matcher is not None:
                found = request.matcher.feed(token)
                if found is not None:
                    return found
        return None

    def _send_partial(self, route: int, ready: list[tuple[OpenDispatch, int]]) -> None:
        entries: list[PartialEntry] = []
        tokens: list[int] = []
        epochs: list[tuple[int, int]] = []
        extras = {}
        for request, upto in ready:
            dispatch = request.dispatch
            add_epochs(epochs, request.epochs, first=request.sent, count=upto - request.sent, at=len(tokens))
            entries.append(PartialEntry(dispatch.uid, dispatch.dispatch_id, request.sent, upto - request.sent))
            tokens += request.tokens[request.sent : upto]
            if request.details is not None:
                extras[dispatch.uid] = request.details.of_partial(request.sent, upto)
            request.sent = upto
        details = pack(extras) if extras else b""
        self._send(Partial(route, entries, tokens_to_bytes(tokens), details, epochs).to_frames())

    def _send_final(self, request: OpenDispatch, output: RequestOutput, found: StopText | None) -> None:
        failed = output.finish_reason == "error"
        if logger.isEnabledFor(logging.DEBUG):
            extra = of_request(request.dispatch.meta.request_id)
            logger.debug(
                "request %s ended: %s", request.dispatch.uid.hex(), output.finish_reason or "stop", extra=extra
            )
        reply: dict[str, Any] = {
            "status": "FAILED" if failed else "COMPLETED",
            "finish_reason": "stop" if found else output.finish_reason,
            "prompt_length": output.prompt_length,
            "generated_length": len(request.tokens),
            "num_cached_tokens": output.num_cached_tokens,
        }
        if output.summary is not None:
            reply.update((name, getattr(output.summary, name)) for name in RequestSummary.__slots__)
            reply["events"] = [event.serialize() for event in output.summary.events]
        if request.times is not None:
            reply.update(self._record(request, output))
        if found is not None and request.matcher is not None:
            kept = found.text if request.params.detokenize_stop_sequence else ""
            reply["generated_text"] = request.matcher.text_before(found) + kept
            reply["stop_reason"] = found.text
        elif output.stop_token is not None:
            reply["stop_reason"] = output.stop_token
        if request.details is not None:
            reply.update(request.details.of_final())
        if output.hidden_state is not None:
            reply["hidden_state"] = output.hidden_state.astype("<f4").tobytes()
        if output.pooled is not None:
            reply["pooled"] = pack_array(output.pooled.astype("<f4"))
        if output.label is not None:
            reply["label"] = output.label
        if output.routing is not None:
            reply["routing_indices"] = pack_array(output.routing)
        if failed:
            reply["error"] = error_map(output.error_code, output.error or "the request failed")
        dispatch = request.dispatch
        final = Final(dispatch.dispatch_id, dispatch.uid, tokens_to_bytes(request.tokens), pack(reply))
        if self._send(final.to_frames()) is False:
            size = sum(map(len, final.to_frames()))
            self.reject(
                dispatch, ErrorCode.TOO_LARGE, f"the answer has {size} bytes: {_SMALLER[output.pooled is None]}"
            )

    def _record(self, request: OpenDispatch, output: RequestOutput) -> dict[str, Any]:
        """Return the fields `ttft`, `tpot` and `generated_text` of the reply map.

        These are the seconds to the first token, the seconds between tokens, and the answer's text. The times are
        measured on this engine. After a failover, the reply therefore has no `ttft`.
        """
        assert request.times is not None
        added, *arrived = request.times
        record: dict[str, Any] = {"tpot": [round(after - before, 6) for before, after in pairwise(arrived)]}
        if arrived and not request.dispatch.generated:
            record["ttft"] = arrived[0] - added
        tokenizer = self._tokenizer()
        if tokenizer is not None:
            record["generated_text"] = tokenizer.answer_text(
                request.tokens,
                after=_end_of_prompt(request.dispatch),
                stop_token=output.stop_token,
                keeps_end=request.params.detokenize_stop_sequence,
            )
        return record


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """Return `output` without tokens, with only the results for the prompt.

    Used for a request that generates no tokens.
    """
    return replace(
        output,
        new_tokens=[],
        new_log_probs=None,
        new_top_n_logprobs=None,
        stop_token=None,
        finish_reason="length" if output.finish_reason == "stop" else output.finish_reason,
        routing=None if output.routing is None else output.routing[: output.prompt_length - 1],
    )


def _end_of_prompt(dispatch: Dispatch) -> list[int]:
    """Return the last tokens of the prompt, which are needed to decode the answer's first tokens."""
    tokens: list[int] = tokens_from_bytes(dispatch.prompt)[-_PROMPT_TOKENS:].tolist()
    return tokens


def _trace(tracer: Tracer, request: OpenDispatch, output: RequestOutput | None, *, error: str) -> None:
    """Record the span of a request that has ended."""
    dispatch, params, now = request.dispatch, request.params, time.time()
    attributes: dict[str, Any] = {
        tracing.REQUEST_ID: dispatch.meta.request_id or dispatch.uid.hex(),
        tracing.MAX_TOKENS: params.num_tokens_to_generate,
        tracing.TEMPERATURE: params.temperature,
        tracing.TOP_P: params.top_p,
        tracing.COMPLETION_TOKENS: len(request.tokens),
        tracing.END_TO_END: now - request.added,
        "megatron.adapter": dispatch.meta.adapter or None,
        "megatron.continued_tokens": len(dispatch.generated) // 4 or None,
    }
    if output is not None:
        attributes[tracing.PROMPT_TOKENS] = output.prompt_length
        attributes["megatron.cached_tokens"] = output.num_cached_tokens
        error = str(output.error or "the request failed") if output.finish_reason == "error" else ""
        if (times := output.summary) is not None:
            attributes[tracing.TIME_IN_QUEUE] = times.queue_seconds
            attributes[tracing.TIME_IN_PREFILL] = times.prefill_seconds
            attributes[tracing.TIME_IN_DECODE] = times.decode_seconds
            attributes[tracing.TIME_IN_INFERENCE] = times.prefill_seconds + times.decode_seconds
            if not dispatch.generated:
                attributes[tracing.TIME_TO_FIRST_TOKEN] = times.queue_seconds + times.prefill_seconds
    traceparent = dispatch.meta.traceparent
    tracer.record(
        "llm_request", traceparent=traceparent, start=request.added, end=now, attributes=attributes, error=error
    )
