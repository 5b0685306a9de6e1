"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron_runtime.text_generation_server.generation import Generation
from megatron_runtime.text_generation_server.schema import CompletionRequest
from megatron_runtime.text_generation_server.service import Service
from megatron_runtime.text_generation_server.sse import EventStream, until_disconnect

DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, request: Request) -> Response:
    """Complete one or several prompts; choices come in the order of the prompts."""
    asked = await service.read(request, CompletionRequest)
    service.check_model(asked.model)
    prompts = [await service.encode(item) if isinstance(item, str) else item for item in asked.prompt]
    echoed = [item if isinstance(item, str) else service.tokenizer.decode(item) for item in asked.prompt]
    generation = service.generation(
        asked,
        prompts,
        param="prompt",
        max_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
        prefixes=echoed if asked.echo else None,
    )
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
    }
    if asked.stream:
        return EventStream(
            _events(generation, head, include_usage=asked.include_usage),
            keep_alive_seconds=service.settings.keep_alive_seconds,
            expired=service.expired,
        )
    pieces = await until_disconnect(request, generation.collect(), expired=service.expired)
    choices = [_choice(piece.index, piece.text, piece.finish_reason) for piece in pieces]
    return JSONResponse({**head, "choices": choices, "usage": generation.usage.as_json()})


async def _events(
    generation: Generation, head: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    async for piece in generation.stream():
        yield {**head, "choices": [_choice(piece.index, piece.text, piece.finish_reason)], **usage}
    if include_usage:
        yield {**head, "choices": [], "usage": generation.usage.as_json()}


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
