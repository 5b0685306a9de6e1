"""What every route shares: limits, tokenization, sampling parameters, readiness."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from megatron_runtime.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams
from megatron_runtime.text_generation_server.backend import Backend
from megatron_runtime.text_generation_server.errors import ApiError, context_length_error, from_validation
from megatron_runtime.text_generation_server.generation import Generation, Job, choice_seed
from megatron_runtime.text_generation_server.metrics import ServerMetrics
from megatron_runtime.text_generation_server.schema import ChatRequest, GenerationRequest
from megatron_runtime.text_generation_server.settings import ServerSettings
from megatron_runtime.tokenization import ChatTemplateError, Tokenizer

TEXT_TOKENIZED_IN_PLACE = 4096
"""Characters; longer texts are tokenized on a thread, so that other streams go on meanwhile."""

MAX_JOBS = 1024

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(slots=True)
class Service:
    """One per server process."""

    settings: ServerSettings
    backend: Backend
    tokenizer: Tokenizer
    metrics: ServerMetrics
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

    def authorize(self, request: Request) -> None:
        """Raise ApiError 401 unless the request carries one of the API keys, where any are set."""
        if not self.settings.api_keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.settings.api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "Incorrect or missing API key: send the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )

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

    async def encode(self, text: str) -> list[int]:
        if len(text) <= TEXT_TOKENIZED_IN_PLACE:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        messages = [message.for_template() for message in request.messages]
        try:
            text = self.tokenizer.render_chat(messages, variables=request.chat_template_kwargs)
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param="messages", code="invalid_value") from error
        if len(text) <= TEXT_TOKENIZED_IN_PLACE:
            return self.tokenizer.encode(text, add_special=False)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=False)

    def generation(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        *,
        param: str,
        max_tokens: int | None,
        prefixes: Sequence[str] | None = None,
    ) -> Generation:
        """Return the jobs of a request, ready to run.

        param: the field that holds the prompt, for errors.  max_tokens: None means up to the sequence limit.
        Raises ApiError 400 for a prompt that is empty, too long or outside the vocabulary.
        """
        choices = request.n or 1
        if len(prompts) * choices > MAX_JOBS:
            raise ApiError(400, f"Prompts times n may not exceed {MAX_JOBS}: ask for fewer.", param="n")
        jobs = []
        for place, prompt in enumerate(prompts):
            named = param if len(prompts) == 1 else f"{param}[{place}]"
            budget = self._budget(prompt, max_tokens, param=named)
            for choice in range(choices):
                params = self._sampling(request, budget=budget, choice=choice)
                jobs.append(
                    Job(
                        index=place * choices + choice,
                        prompt=prompt,
                        params=params,
                        end_ids=self._end_ids(request),
                        counts_prompt=choice == 0,
                        prefix=prefixes[place] if prefixes else "",
                    )
                )
        return Generation(
            backend=self.backend,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            jobs=jobs,
            coordinator_wait_seconds=self.settings.coordinator_wait_seconds,
        )

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

    def _budget(self, prompt: list[int], wanted: int | None, *, param: str) -> int | None:
        if not prompt:
            raise ApiError(400, f"Invalid value for {param}: it has no tokens.", param=param, code="invalid_value")
        outside = next((id_ for id_ in prompt if not 0 <= id_ < self.tokenizer.vocab_size), None)
        if outside is not None:
            message = f"Invalid value for {param}: token id {outside} is not in 0..{self.tokenizer.vocab_size - 1}."
            raise ApiError(400, message, param=param, code="invalid_value")
        limit = self.sequence_limit
        if limit is None:
            return wanted
        room = limit - len(prompt)
        if room < 1:
            raise context_length_error(prompt_length=len(prompt), limit=limit, param=param)
        return room if wanted is None else min(wanted, room)

    def _end_ids(self, request: GenerationRequest) -> frozenset[int]:
        own = () if request.ignore_eos else self.tokenizer.eos_ids
        return frozenset((*own, *(request.stop_token_ids or ())))

    def _sampling(self, request: GenerationRequest, *, budget: int | None, choice: int) -> SamplingParams:
        temperature = 1.0 if request.temperature is None else request.temperature
        greedy = temperature == 0
        eos = self.tokenizer.eos_ids
        ends_at_eos = bool(eos) and not request.ignore_eos
        further = [*(eos[1:] if ends_at_eos else ()), *(request.stop_token_ids or ())]
        chosen: dict[str, Any] = {
            "temperature": temperature,
            "top_k": 1 if greedy else max(request.top_k or 0, 0),
            "top_p": 0.0 if greedy else request.top_p or 0.0,
            "num_tokens_to_generate": budget,
            "min_tokens": request.min_tokens or 0,
            "termination_id": eos[0] if ends_at_eos else IGNORE_EOS,
            "stop_token_ids": further or None,
            "stop_words": request.stop or None,
            "seed": choice_seed(request.seed, choice=choice),
            "streaming": bool(request.stream),
        }
        try:
            return SamplingParams(**chosen)
        except InvalidSamplingParamsError as error:
            raise ApiError(400, f"{error}.", param=error.field, code="invalid_value") from error
