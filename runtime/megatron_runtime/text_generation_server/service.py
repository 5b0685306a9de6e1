"""What every route shares: limits, tokenization, jobs, readiness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from megatron_runtime.text_generation_server.auth import ApiKeys, tenant_salt
from megatron_runtime.text_generation_server.backend import Backend
from megatron_runtime.text_generation_server.errors import ApiError, context_length_error, from_validation
from megatron_runtime.text_generation_server.generation import Generation, Job
from megatron_runtime.text_generation_server.metrics import ServerMetrics
from megatron_runtime.text_generation_server.sampling import FIELD_NAMES, form_of, sampling_params
from megatron_runtime.text_generation_server.schema import ChatMessage, GenerationRequest, Tool
from megatron_runtime.text_generation_server.settings import ServerSettings
from megatron_runtime.text_generation_server.sse import EventStream
from megatron_runtime.text_generation_server.tools import ToolParser
from megatron_runtime.text_generation_server.tools.prompt import as_plain_messages
from megatron_runtime.tokenization import ChatTemplateError, Tokenizer

TEXT_TOKENIZED_IN_PLACE = 4096
"""Characters; longer texts are tokenized on a thread, so that other streams go on meanwhile."""

MAX_JOBS = 1024

_Model = TypeVar("_Model", bound=BaseModel)


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
                f"The model {name!r} does not exist: this server offers {self.settings.served_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def read(self, request: Request, model: type[_Model]) -> _Model:
        """Return the validated body. Raises ApiError 400 or 413."""
        body = await self._body(request)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False, include_context=False)) from error

    async def _body(self, request: Request) -> bytes:
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"The request body is larger than {limit} bytes: shorten it.", code="body_too_large")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        if len(text) <= TEXT_TOKENIZED_IN_PLACE:
            return self.tokenizer.encode(text, add_special=add_special)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)

    def with_bos(self, tokens: list[int]) -> list[int]:
        """The same tokens after the one that begins a sequence, where the model has one and they do not begin so."""
        first = self.tokenizer.bos_id
        return tokens if first is None or tokens[:1] == [first] else [first, *tokens]

    async def encode_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, with the tools described in it. Raises ApiError 400."""
        rendered = [message.for_template() for message in messages]
        described = [tool.for_template() for tool in tools] or None
        template = self.tokenizer.chat_template
        if template is not None and not template.reads_tools:
            rendered, described = as_plain_messages(rendered, described), None
        try:
            text = self.tokenizer.render_chat(rendered, tools=described, variables=variables)
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param=error.variable or "messages", code="invalid_value") from error
        return await self.encode(text, add_special=False)

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
        self._check_room(len(prompts) * choices)
        self._check_priority(request)
        cache_salt = tenant_salt("" if self.settings.share_prefix_cache else tenant, request.cache_salt)
        own = form_of(request)
        form_field = "tool_choice" if own is None else own[1]
        form = form if own is None else own[0]
        end_ids, visible = self._end_ids(request), self._ids_of(markers)
        jobs = []
        for place, prompt in enumerate(prompts):
            budget = self._budget(prompt, max_tokens)
            for choice in range(choices):
                params = sampling_params(
                    request,
                    self.tokenizer,
                    budget=budget,
                    choice=choice,
                    form=form,
                    log_probs=log_probs,
                    prompt_log_probs=prompt_log_probs,
                    cache_salt=cache_salt,
                )
                jobs.append(
                    Job(
                        index=place * choices + choice,
                        prompt=prompt.tokens,
                        params=params,
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

    def stream(self, events: AsyncGenerator[dict[str, Any]]) -> EventStream:
        return EventStream(events, keep_alive_seconds=self.settings.keep_alive_seconds, expired=self.expired)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one HTTP request as open."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        while self.in_flight:
            await self._idle.wait()

    def check_tokens(self, tokens: Sequence[int], *, param: str) -> None:
        """Raise ApiError 400 for a prompt that is empty or outside the vocabulary."""
        if not tokens:
            raise ApiError(400, f"Invalid value for {param}: it has no tokens.", param=param, code="invalid_value")
        outside = next((id_ for id_ in tokens if not 0 <= id_ < self.tokenizer.vocab_size), None)
        if outside is not None:
            message = f"Invalid value for {param}: token id {outside} is not in 0..{self.tokenizer.vocab_size - 1}."
            raise ApiError(400, message, param=param, code="invalid_value")

    def _check_room(self, choices: int) -> None:
        """Raise ApiError 429 where these choices would be too many; requests that wait for a coordinator count too."""
        limit = self.settings.max_open_requests
        if max(self.metrics.open_requests + choices, self.in_flight) > limit:
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
        wanted = None if wanted is None else max(wanted, 1)
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
