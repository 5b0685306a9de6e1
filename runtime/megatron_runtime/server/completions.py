"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.server.errors import ApiError, context_length_error
from megatron_runtime.server.generation import Generation, Piece
from megatron_runtime.server.logprobs import completion_log_probs
from megatron_runtime.server.schema import CompletionRequest
from megatron_runtime.server.service import MAX_JOBS, TEXT_TOKENIZED_IN_PLACE, Prompt, Service
from megatron_runtime.server.sse import until_disconnect

DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, request: Request) -> Response:
    """Complete one or several prompts; choices come in the order of the prompts."""
    asked = await service.read(request, CompletionRequest)
    service.check_model(asked.model)
    service.check_in_flight(tenant=request.state.tenant)
    max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    if max_tokens == 0 and not asked.echo:
        message = "Invalid value for max_tokens: 0 leaves no answer; use at least 1, or echo for the prompt alone."
        raise ApiError(400, message, param="max_tokens", code="invalid_value")
    given: Sequence[str | list[int]] = asked.prompt
    if len(given) * (asked.n or 1) > MAX_JOBS:
        raise ApiError(400, f"Prompts times n may not exceed {MAX_JOBS}: ask for fewer.", param="n")
    characters = sum(len(item) for item in given if isinstance(item, str))
    prompts = await service.while_connected(
        request, _prompts(service, given, asked, in_place=characters <= TEXT_TOKENIZED_IN_PLACE), characters=characters
    )
    generation = service.generation(
        asked,
        prompts,
        max_tokens=max_tokens,
        log_probs=asked.logprobs,
        prompt_log_probs=bool(asked.echo) and asked.logprobs is not None,
        tenant=request.state.tenant,
    )
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
    }
    if asked.stream:
        return service.stream(_events(service, generation, asked, head))
    pieces = await until_disconnect(request, generation.collect(), expired=service.expired)
    made_by = {"system_fingerprint": generation.weights.fingerprint}
    fields = {**head, **made_by, "usage": generation.usage.as_json()}
    return await service.whole(fields, (_choice(service, asked, piece) for piece in pieces))


async def _prompts(
    service: Service, given: Sequence[str | list[int]], asked: CompletionRequest, *, in_place: bool
) -> list[Prompt]:
    """in_place: all texts together are short."""
    return [await _prompt(service, item, place, asked, in_place=in_place) for place, item in enumerate(given)]


async def _prompt(
    service: Service, item: str | list[int], place: int, asked: CompletionRequest, *, in_place: bool
) -> Prompt:
    param = "prompt" if len(asked.prompt) == 1 else f"prompt[{place}]"
    tokens = await service.encode(item, param=param, in_place=in_place) if isinstance(item, str) else item
    limit = service.sequence_limit
    if limit is not None and len(tokens) > limit:
        raise context_length_error(prompt_length=len(tokens), limit=limit, param=param)
    if asked.add_BOS:
        tokens = service.with_bos(tokens)
    service.check_tokens(tokens, param=param)
    echoed = None
    if asked.echo:
        echoed = item if isinstance(item, str) else await service.decode(item)
    return Prompt(tokens, param=param, echoed=echoed)


async def _events(
    service: Service, generation: Generation, asked: CompletionRequest, head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
    async for piece in generation.stream():
        made_by = {"system_fingerprint": generation.weights.fingerprint}
        yield {**head, **made_by, "choices": [_choice(service, asked, piece)], **usage}
    if asked.include_usage:
        made_by = {"system_fingerprint": generation.weights.fingerprint}
        yield {**head, **made_by, "choices": [], "usage": generation.usage.as_json()}


def _choice(service: Service, asked: CompletionRequest, piece: Piece) -> dict[str, Any]:
    log_probs = None
    if asked.logprobs is not None:
        log_probs = completion_log_probs(piece.log_probs, service.tokenizer)
    choice = {"index": piece.index, "text": piece.text, "logprobs": log_probs, "finish_reason": piece.finish_reason}
    return {**choice, "token_ids": list(piece.token_ids)} if asked.return_token_ids else choice
