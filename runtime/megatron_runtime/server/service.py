"""What every route shares: limits, tokenization, jobs, readiness."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.client.pending import TOKEN_BYTES
from megatron_runtime.protocol.messages import pack
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.auth import ApiKeys, tenant_salt
from megatron_runtime.server.backend import Backend
from megatron_runtime.server.errors import ApiError, context_length_error, from_validation, shown
from megatron_runtime.server.generation import Generation, Job
from megatron_runtime.server.json_limits import JsonLimitError, JsonScan
from megatron_runtime.server.metrics import ServerMetrics
from megatron_runtime.server.origin import check_content_type
from megatron_runtime.server.sampling import FIELD_NAMES, choice_params, form_of, sampling_params
from megatron_runtime.server.schema import ChatMessage, GenerationRequest, Tool
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.server.sse import EventStream, until_disconnect
from megatron_runtime.server.text_work import MAX_MEDIUM_BYTES, Lane, TextWork
from megatron_runtime.server.tools import ToolParser
from megatron_runtime.server.tools import without_tool_roles
from megatron_runtime.tokenization import ChatTemplateError, ChatTemplateUnusableError, Tokenizer

TEXT_TOKENIZED_IN_PLACE = 4096
"""Characters; longer texts are tokenized in a thread of `TextWork`, while the event loop serves other requests."""

_DECODED_AT_ONCE = 256
"""Tokens; other requests are served before the next ones are decoded."""

MAX_JOBS = 1024
MAX_SENT_BYTES = 32 << 20
"""Of one request, over all its choices: each choice is sent to the coordinator with its prompt and parameters."""

_Model = TypeVar("_Model", bound=BaseModel)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt.

    param:  the field that it came from, for errors.
    echoed: its text, where the answer begins with it.
    """

    tokens: list[int]
    param: str
    echoed: str | None = None


@dataclass(slots=True)
class Service:
    """One per server process.

    tool_parser: reads the calls in answers; None where tools are not offered.
    """

    settings: ServerSettings
    backend: Backend
    tokenizer: Tokenizer
    metrics: ServerMetrics
    api_keys: ApiKeys
    tool_parser: type[ToolParser] | None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: int = 0
    """Open HTTP requests, probes included."""
    in_flight_by_tenant: collections.Counter[str] = field(default_factory=collections.Counter)
    """Open HTTP requests that carry an API key, or could."""
    body_bytes: int = 0
    """Of request bodies that are not complete yet."""
    text_work: TextWork = field(default_factory=TextWork)
    expired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the drain time is over: what is still open is answered with an error."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sequence_limit(self) -> int | None:
        """Most tokens of prompt and answer together."""
        limits = [self.settings.max_sequence_length, self.tokenizer.context_length]
        return min((limit for limit in limits if limit is not None), default=None)

    def missing(self) -> list[str]:
        """What keeps this server from being ready, one phrase each."""
        missing = []
        if not self.backend.connected:
            where = f" at {self.settings.coordinator}" if self.settings.coordinator else ""
            missing.append(f"connection to the coordinator{where}")
        if self.draining:
            missing.append("the server is shutting down")
        return missing

    def check_model(self, name: str) -> None:
        if name != self.settings.served_name:
            raise ApiError(
                404,
                f"The model {shown(name)} does not exist: this server offers {self.settings.served_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def read(self, request: Request, model: type[_Model]) -> _Model:
        """Return the validated body. Raises ApiError 400, 413 or 415."""
        check_content_type(request.headers)
        scan = JsonScan()
        body = await self._body(request, scan)
        try:
            return model.model_validate_json(body, context=scan)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_context=False)) from error

    async def _body(self, request: Request, scan: JsonScan) -> bytes:
        """Return the body. Bodies of all requests together are limited while they arrive."""
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"The request body is larger than {limit} bytes: shorten it.", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks, size = [], 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self.body_bytes += len(chunk)
                if size > limit:
                    raise too_large
                if self.body_bytes > self.settings.max_bodies_bytes:
                    message = "This server receives too many large request bodies at once: try again."
                    raise ApiError(429, message, code="too_many_requests", retry_after_seconds=1)
                scan.feed(chunk)
                chunks.append(chunk)
        except JsonLimitError as error:
            raise ApiError(400, f"The request body is too complex: {error}.", code="body_too_complex") from error
        finally:
            self.body_bytes -= size
        return b"".join(chunks)

    async def encode(
        self, text: str, *, param: str, add_special: bool = True, in_place: bool | None = None
    ) -> list[int]:
        """Return the tokens of a text.

        param:    the field that it came from, for errors.
        in_place: on the event loop; None means for a short text.
        Raises ApiError 400 for a text that cannot be tokenized, or that is longer than the sequence limit whatever its
        tokens are, and 503 where too much text waits to be tokenized.
        """
        encode = partial(self._encode, text, param=param, add_special=add_special)
        if len(text) <= TEXT_TOKENIZED_IN_PLACE if in_place is None else in_place:
            return encode()
        size = _bytes_at_most(text)
        return await self.text_work.run(Lane.MEDIUM if size <= MAX_MEDIUM_BYTES else Lane.LONG, size, encode)

    async def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens, however many there are, between other requests."""
        detokenizer = self.tokenizer.detokenizer(skip_special=skip_special)
        pieces = []
        for start in range(0, len(tokens), _DECODED_AT_ONCE):
            pieces.append(detokenizer.feed(tokens[start : start + _DECODED_AT_ONCE]))
            await asyncio.sleep(0)
        return "".join([*pieces, detokenizer.finish()])

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, _T], *, characters: int) -> _T:
        """Await the tokenization of a prompt; that of a long one is dropped when the client leaves.

        characters: of text in it.
        """
        if characters <= TEXT_TOKENIZED_IN_PLACE:
            return await work
        return await until_disconnect(request, work, expired=self.expired)

    def with_bos(self, tokens: list[int]) -> list[int]:
        """The same tokens after the one that begins a sequence, where the model has one and they do not begin so."""
        first = self.tokenizer.bos_id
        return tokens if first is None or tokens[:1] == [first] else [first, *tokens]

    async def encode_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, with the tools described in it.

        Raises ApiError 400, and what encode() raises; 500 for a chat template that renders no conversation.
        """
        rendered = [message.for_template() for message in messages]
        described = [tool.for_template() for tool in tools] or None
        template = self.tokenizer.chat_template
        if template is not None and not template.reads_tools:
            rendered, described = without_tool_roles(rendered, described), None
        render = partial(self.tokenizer.render_chat, rendered, tools=described, variables=variables)
        size = sum(_bytes_at_most(message["content"]) for message in rendered)
        try:
            text = await self.text_work.run(Lane.RENDER, size, render)
        except ChatTemplateUnusableError as error:
            raise ApiError(500, f"{error}.", code="chat_template_unusable") from error
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param=error.variable or "messages", code="invalid_value") from error
        return await self.encode(text, param="messages", add_special=False)

    def _encode(self, text: str, *, param: str, add_special: bool) -> list[int]:
        limit = self.sequence_limit
        if limit is not None and len(text) > TEXT_TOKENIZED_IN_PLACE:
            fewest = self.tokenizer.bound.fewest_tokens(text)
            if fewest > limit:
                raise context_length_error(prompt_length=fewest, limit=limit, param=param, is_bound=True)
        try:
            return self.tokenizer.encode(text, add_special=add_special)
        except ValueError as error:
            message = f"Invalid value for {param}: {error}."
            raise ApiError(400, message, param=param, code="invalid_value") from error

    def generation(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int | None,
        log_probs: int | None,
        prompt_log_probs: bool = False,
        form: dict[str, Any] | None = None,
        markers: Sequence[str] = (),
        tenant: str = "",
    ) -> Generation:
        """Return the jobs of a request, ready to run.

        max_tokens: None means up to the sequence limit; 0 gives the prompt alone.
        log_probs:  how many of the likeliest tokens to report at each place; None reports no log-probabilities.
        form:       what the answer must look like; None means what the request itself asks for.
        markers:    special tokens that are text all the same.
        tenant:     whose share of the engines, and whose part of the prefix cache, the jobs use; empty: this server's.
        Raises ApiError 400 for a prompt that is too long, or sampling parameters that are wrong.
        """
        choices = request.n or 1
        if len(prompts) * choices > MAX_JOBS:
            raise ApiError(400, f"Prompts times n may not exceed {MAX_JOBS}: ask for fewer.", param="n")
        self._check_room(self.metrics.open_requests, tenant=tenant, more=len(prompts) * choices)
        self._check_priority(request)
        cache_salt = tenant_salt("" if self.settings.share_prefix_cache else tenant, request.cache_salt)
        own = form_of(request)
        form_field = "tool_choice" if own is None else own[1]
        form = form if own is None else own[0]
        end_ids, visible = self._end_ids(request), self._ids_of(markers)
        shared = sampling_params(
            request,
            self.tokenizer,
            form=form,
            log_probs=log_probs,
            prompt_log_probs=prompt_log_probs,
            cache_salt=cache_salt,
        )
        _check_sent_bytes(shared, prompts, choices=choices, form_field=form_field)
        jobs = []
        for place, prompt in enumerate(prompts):
            budget = self._budget(prompt, max_tokens)
            for choice in range(choices):
                jobs.append(
                    Job(
                        index=place * choices + choice,
                        prompt=prompt.tokens,
                        params=choice_params(shared, budget=budget, seed=request.seed, choice=choice),
                        end_ids=end_ids,
                        visible=visible,
                        counts_prompt=choice == 0,
                        prefix=prompt.echoed,
                        prompt_only=max_tokens == 0,
                        tenant=tenant,
                    )
                )
        return Generation(
            backend=self.backend,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            jobs=jobs,
            field_names={**FIELD_NAMES, "structured_output": form_field},
            coordinator_wait_seconds=self.settings.coordinator_wait_seconds,
        )

    async def whole(self, fields: dict[str, Any], choices: Iterable[dict[str, Any]]) -> Response:
        """Return an answer of many choices, each encoded on its own: other requests run between them."""
        encoded = []
        for choice in choices:
            encoded.append(to_json(choice))
            await asyncio.sleep(0)
        body = b'%b,"choices":[%b]}' % (to_json(fields)[:-1], b",".join(encoded))
        return Response(body, media_type="application/json")

    def stream(self, events: AsyncGenerator[dict[str, Any]]) -> EventStream:
        return EventStream(events, keep_alive_seconds=self.settings.keep_alive_seconds, expired=self.expired)

    @contextmanager
    def serving(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Count one HTTP request as open.

        state: of the request; identify() notes its tenant there.
        """
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()
            if (tenant := state.get("tenant")) is not None:
                self.in_flight_by_tenant[tenant] -= 1
                if not self.in_flight_by_tenant[tenant]:
                    del self.in_flight_by_tenant[tenant]

    def identify(self, request: Request) -> None:
        """Note the tenant of a request in its state. Raises ApiError 401 where it carries none of the API keys."""
        tenant = self.api_keys.tenant(request.headers.get("authorization", ""))
        if tenant is None:
            message = "Incorrect or missing API key: send the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")
        request.state.tenant = tenant
        self.in_flight_by_tenant[tenant] += 1

    async def wait_idle(self) -> None:
        while self.in_flight:
            await self._idle.wait()

    def check_tokens(self, tokens: Sequence[int], *, param: str) -> None:
        """Raise ApiError 400 for a prompt that is empty or outside the vocabulary."""
        if not tokens:
            raise ApiError(400, f"Invalid value for {param}: it has no tokens.", param=param, code="invalid_value")
        if min(tokens) < 0 or max(tokens) >= self.tokenizer.vocab_size:
            outside = next(id_ for id_ in tokens if not 0 <= id_ < self.tokenizer.vocab_size)
            message = f"Invalid value for {param}: token id {outside} is not in 0..{self.tokenizer.vocab_size - 1}."
            raise ApiError(400, message, param=param, code="invalid_value")

    def check_in_flight(self, *, tenant: str) -> None:
        """Raise ApiError 429 for a new request where too many are open, those that wait for a coordinator included."""
        self._check_room(self.in_flight_by_tenant, tenant=tenant, more=0)

    def _check_room(self, open_by_tenant: collections.Counter[str], *, tenant: str, more: int) -> None:
        """Raise ApiError 429 where `more` would be too many beside those that are open.

        A full server still accepts requests of a tenant that has less than its fair share of the limit. So no tenant
        keeps others out, and at most twice the limit is open.
        """
        limit = self.settings.max_open_requests
        share = limit // len({*open_by_tenant, tenant})
        if open_by_tenant.total() + more > limit and open_by_tenant[tenant] + more > share:
            message = f"This server has {limit} requests open, or would have: try again."
            raise ApiError(429, message, code="too_many_requests", retry_after_seconds=1)

    def _check_priority(self, request: GenerationRequest) -> None:
        if request.priority and not self.settings.allow_priority:
            message = (
                f"Invalid value for priority: {request.priority} is not 0, and this server lets no request choose its "
                "priority. Leave the field out, or start the server with --allow-priority (spec.server.allowPriority)."
            )
            raise ApiError(400, message, param="priority", code="invalid_value")

    def _budget(self, prompt: Prompt, wanted: int | None) -> int | None:
        """Most tokens to generate: at least one, so that an engine has something to do."""
        wanted = None if wanted is None else min(max(wanted, 1), (1 << 31) - 1)
        limit = self.sequence_limit
        if limit is None:
            return wanted
        room = limit - len(prompt.tokens)
        if room < 1:
            raise context_length_error(prompt_length=len(prompt.tokens), limit=limit, param=prompt.param)
        return room if wanted is None else min(wanted, room)

    def _end_ids(self, request: GenerationRequest) -> frozenset[int]:
        own = () if request.ignore_eos else self.tokenizer.eos_ids
        return frozenset((*own, *(request.stop_token_ids or ())))

    def _ids_of(self, markers: Sequence[str]) -> frozenset[int]:
        ids = (self.tokenizer.token_id(marker) for marker in markers)
        return frozenset(id_ for id_ in ids if id_ is not None and id_ in self.tokenizer.special_ids)


def _check_sent_bytes(shared: SamplingParams, prompts: Sequence[Prompt], *, choices: int, form_field: str) -> None:
    """Raise ApiError 400 for a small body that would become a large amount of work."""
    try:
        each = len(pack(shared.serialize()))
    except OverflowError as error:
        message = f"Invalid value for {form_field}: it has a number beyond 64 bits; use a smaller one."
        raise ApiError(400, message, param=form_field, code="invalid_value") from error
    sent = choices * sum(each + TOKEN_BYTES * len(prompt.tokens) for prompt in prompts)
    if sent > MAX_SENT_BYTES:
        message = (
            f"Prompts and parameters of all choices take {sent} bytes, at most {MAX_SENT_BYTES} are allowed: ask for "
            "fewer choices or prompts at once."
        )
        raise ApiError(400, message, param="n", code="request_too_large")


def _bytes_at_most(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
