"""Open requests of a client, from submission to the final answer. This module does not import torch."""

from __future__ import annotations

import asyncio
import base64
import copy
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.epochs import add_epochs
from megatron_runtime.protocol.media import Media
from megatron_runtime.protocol.messages import (
    DETAILS,
    Final,
    MalformedMessageError,
    Partial,
    RequestMeta,
    Submit,
    pack,
    token_list_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.requests.async_stream import AsyncStream, BlockingStream
from megatron_runtime.requests.capabilities import needs_of
from megatron_runtime.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class Serializable(Protocol):
    """Sampling parameters of any class whose serialize() returns fields of SamplingParams."""

    def serialize(self) -> dict[str, Any]: ...


TOKEN_BYTES = 4

PER_TOKEN_DETAILS = {"log_probs": "generated_log_probs", "top_n_logprobs": "generated_top_n_logprobs"}
"""Keys of per-token details in a partial answer, mapped to the keys of the same details in the reply."""
_MERGED = frozenset({"new_tokens", *(f"new_{name}" for name in PER_TOKEN_DETAILS)})
PROMPT_DETAILS = ("prompt_log_probs", "prompt_top_n_logprobs")

_REPLY_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("finish_reason", "stop_reason", "generated_text", "prompt_length", "generated_length", "error")),
    **dict.fromkeys((*PER_TOKEN_DETAILS.values(), *PROMPT_DETAILS)),
    **dict.fromkeys(("policy_epoch", "kv_cache_epoch", "routing_indices")),
    "status": "COMPLETED",
    "num_cached_tokens": 0,
}
"""Values of the reply fields that an engine may leave out."""


def _token_of(kv_meta: Any) -> bytes:
    """Return the token of a KV handoff in `kv_meta`, or b"" if the value is invalid. With b"", the KV is not used."""
    text = kv_meta.get("handoff") if isinstance(kv_meta, dict) else None
    try:
        token = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return b""
    return token if len(token) <= limits.MAX_HANDOFF_BYTES else b""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request, from its submission to its final answer.

    generated: tokens received in partial answers. The client sends these tokens to a restarted coordinator, and no
               later answer may contradict them.
    epochs:    epochs of the weights that sampled the tokens in `generated`, by token index.
    details:   details of each token in `generated`, such as log-probabilities. An engine that continues the request
               does not have these details.
    submitted, deadline: times on the clock of time.perf_counter().
    future, stream: receives the answer. Exactly one of the two is set. It can belong to the event loop of another
                    thread.
    on_tokens: called with the number of tokens that have just arrived.
    media:     images, audio and video of the prompt, including their data.
    handoff:   token of a KV handoff from an earlier answer. With the token, this request can use the KV blocks of the
               earlier request. Empty: none.
    """

    request_id: int
    uid: bytes
    meta: RequestMeta
    prompt: bytes
    params: bytes
    sampling_params: SamplingParams
    submitted: float
    deadline: float | None = None
    future: asyncio.Future[Any] | None = None
    stream: AsyncStream | BlockingStream | None = None
    on_tokens: Callable[[int], object] | None = None
    timer: asyncio.TimerHandle | None = None
    generated: bytearray = field(default_factory=bytearray)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    details: dict[str, list[Any]] = field(default_factory=dict)
    media: Media | None = None
    handoff: bytes = b""

    @classmethod
    def make(
        cls,
        prompt: str | Sequence[int],
        params: Serializable,
        *,
        streaming: bool,
        record: bool = False,
        deadline_seconds: float | None = None,
        engine: str = "",
        tenant: str = "",
        adapter: str = "",
        request_id: str = "",
        traceparent: str = "",
        session: str = "",
        on_tokens: Callable[[int], object] | None = None,
        media: Media | None = None,
        kv_meta: Any = None,
    ) -> Self:
        """Return a request with id 0 and a random uid. Its submission time is now.

        If `params` has no seed, the request gets a random seed.

        params: SamplingParams, or another object whose serialize() returns fields of SamplingParams.
        record: whether to request the text of the answer and the times of its tokens; see SamplingParams.return_record.

        Raises InvalidSamplingParamsError for invalid parameters, and ValueError for media without data.
        """
        if media is not None and not all(item.data for item in media.items):
            raise ValueError("media have an item without data: give the file of each")
        now = time.perf_counter()
        params = copy.copy(SamplingParams.of(params))
        params.return_record |= record
        return cls(
            request_id=0,
            uid=secrets.token_bytes(limits.UID_BYTES),
            meta=RequestMeta(
                streaming=streaming or on_tokens is not None,
                seed=params.seed if params.seed is not None else secrets.randbits(64),
                text=isinstance(prompt, str),
                priority=params.priority,
                cache_salt=params.cache_salt or "",
                engine=engine,
                tenant=tenant,
                adapter=adapter,
                request_id=request_id,
                traceparent=traceparent,
                needs=needs_of(params, has_media=media is not None),
                session=session,
            ),
            prompt=prompt.encode() if isinstance(prompt, str) else tokens_to_bytes(prompt),
            params=pack(params.serialize()),
            sampling_params=params,
            submitted=now,
            deadline=now + deadline_seconds if deadline_seconds is not None else None,
            on_tokens=on_tokens,
            media=media,
            handoff=_token_of(kv_meta),
        )

    @property
    def held(self) -> int:
        """The number of generated tokens that the client has received."""
        return len(self.generated) // TOKEN_BYTES

    @property
    def size(self) -> int:
        size = len(self.prompt) + len(self.params) + len(self.generated)
        return size if self.media is None else size + len(self.media.template) + self.media.data_bytes

    @property
    def is_done(self) -> bool:
        """Whether the caller has cancelled the future or closed the stream."""
        return self.future.done() if self.future is not None else self.stream is not None and self.stream.finished

    def complete(self, result: Any) -> None:
        """Deliver the final answer `result` to the future or the stream."""
        if self.stream is not None:
            self.stream.put({"final": result})
            self.stream.finish()
        self._settle(lambda future: future.set_result(result))

    def fail(self, error: Exception) -> None:
        """Deliver an error instead of the answer."""
        if self.stream is not None:
            self.stream.finish(error)
        self._settle(lambda future: future.set_exception(error))

    def end(self) -> None:
        """Cancel the future or end the stream, without an answer and without an error."""
        if self.stream is not None:
            self.stream.finish()
        self._settle(lambda future: future.cancel())

    def _settle(self, action: Callable[[asyncio.Future[Any]], object]) -> None:
        """Run `action` on the future's event loop. Do nothing if the future is done when the loop runs the action."""
        future = self.future
        if future is None:
            return

        def act() -> None:
            if not future.done():
                action(future)

        loop = future.get_loop()
        if loop is not running_loop() and loop.is_running():
            loop.call_soon_threadsafe(act)
        elif not loop.is_closed():  # a closed loop has no task that awaits the future
            act()

    def submit(self, *, known_media: Collection[bytes] = ()) -> Submit:
        """Return the SUBMIT message to send now, with the remaining time and the tokens that the client has received.

        known_media: digests of media that the coordinator already has. The message omits the data of these media.
        """
        meta = self.meta
        if self.deadline is not None:
            meta = meta._replace(deadline_ms=max(0, int((self.deadline - time.perf_counter()) * 1000)))
        media = self.media
        if media is not None and known_media:
            media = media.without(known_media)
        bodies = self.prompt, bytes(self.generated), self.params
        return Submit(self.uid, meta, *bodies, media, tuple(self.epochs), self.handoff)

    def take_partial(self, offset: int, tokens: bytes, details: Any) -> dict[str, Any] | None:
        """Store the new tokens of a partial answer, and return the stream item with these tokens.

        Returns None if no token is new. Also returns None, and stores nothing, if tokens before `offset` are missing
        because a connection was lost. The coordinator sends all tokens again after the next SUBMIT.

        offset: index, in the answer, of the first token in `tokens`.
        """
        known = self.held - offset
        new = tokens[TOKEN_BYTES * known :] if known >= 0 else b""
        if not new:
            return None
        self.generated += new
        frame: dict[str, Any] = {"request_id": self.request_id, "new_tokens": token_list_from_bytes(new)}
        if isinstance(details, dict):
            self._add_details(frame, details, known)
        return frame

    def _add_details(self, frame: dict[str, Any], details: dict[str, Any], known: int) -> None:
        before = self.held - len(frame["new_tokens"])
        for name in PER_TOKEN_DETAILS:
            values = details.get(name)
            if isinstance(values, list):
                frame[f"new_{name}"] = values[known:]
                held = self.details.setdefault(name, [])
                if len(held) == before:  # tokens that were sent again have no details, so the lists have a gap
                    held.extend(values[known:])
        for name in PROMPT_DETAILS:
            if name in details and name not in self.details:
                frame[name] = self.details[name] = details[name]

    def reply(self, final: Final) -> dict[str, Any]:
        """Return the reply map of this request for a FINAL message. Raises MalformedMessageError."""
        body = unpack(final.reply, DETAILS)
        if not isinstance(body, dict):
            raise MalformedMessageError(f"reply is {type(body).__name__}: want a map")
        tokens = token_list_from_bytes(final.tokens)
        reply = {**_REPLY_DEFAULTS, **body, "request_id": self.request_id, "generated_tokens": tokens}
        self._complete_details(reply)
        if reply["generated_length"] is None:
            reply["generated_length"] = len(tokens)
        if self.meta.text:
            reply["prompt"] = self.prompt.decode()
        else:
            if reply["prompt_length"] is None:
                reply["prompt_length"] = len(self.prompt) // TOKEN_BYTES
            if self.sampling_params.return_prompt_tokens:
                reply["prompt_tokens"] = token_list_from_bytes(self.prompt)
        reply["latency"] = time.perf_counter() - self.submitted
        return reply

    def _complete_details(self, reply: dict[str, Any]) -> None:
        """After a failover, prepend the log-probabilities from earlier engines to the log-probabilities in `reply`.

        If some of them are missing, `reply` keeps `log_probs_from`, the index of the first token that has
        log-probabilities.
        """
        start = reply.get("log_probs_from") or 0
        wanted = {name: key for name, key in PER_TOKEN_DETAILS.items() if reply[key] is not None}
        if all(len(self.details.get(name, ())) >= start for name in wanted):
            for name, key in wanted.items():
                reply[key] = self.details.get(name, [])[:start] + reply[key]
            reply.pop("log_probs_from", None)
        for name in PROMPT_DETAILS:
            if reply[name] is None:
                reply[name] = self.details.get(name)


def failed_reply(error: dict[str, Any]) -> dict[str, Any]:
    """Return the reply map for a request that could not be submitted.

    error: the map that output_stage.error_map() returns for the error.
    """
    failed = {"status": "FAILED", "finish_reason": "error", "error": error}
    return {**_REPLY_DEFAULTS, **failed, "request_id": 0, "generated_tokens": [], "generated_length": 0}


def partial_frames(
    message: Partial, find: Callable[[bytes], PendingRequest | None]
) -> Iterator[tuple[PendingRequest, dict[str, Any]]]:
    """Yield each request that has new tokens in a PARTIAL message, with the stream item for these tokens.

    find: returns the open request with a uid, or None.
    """
    try:
        details = unpack(message.extras, DETAILS) if message.extras else {}
    except MalformedMessageError as error:
        logger.warning("the details of a partial cannot be read; its tokens are used without them: %s", error)
        details = {}
    position = 0
    for entry in message.entries:
        tokens = message.tokens[position : position + TOKEN_BYTES * entry.count]
        position += len(tokens)
        request = find(entry.uid)
        if request is not None:
            own = details.get(entry.uid) if isinstance(details, dict) else None
            held = request.held
            frame = request.take_partial(entry.offset, tokens, own)
            if frame is not None:
                new = request.held - held
                first = (position - len(tokens)) // TOKEN_BYTES + entry.count - new
                add_epochs(request.epochs, message.epochs, first=first, count=new, at=held)
                yield request, frame


def merge_partials(unread: dict[str, Any], item: dict[str, Any]) -> bool:
    """Add the tokens of a stream item to the unread item before it, and return True. See AsyncStream.

    Change nothing and return False if one of the items is the final answer, or if the details of the items cannot be
    joined.
    """
    frame, added = unread.get("partial"), item.get("partial")
    if frame is None or added is None or frame.keys() != added.keys():
        return False
    names = frame.keys() - {"request_id"}
    if not names <= _MERGED or any(len(frame[name]) != len(frame["new_tokens"]) for name in names):
        return False
    for name in names:
        frame[name] += added[name]
    return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop of this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
