"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron_runtime.text_generation_server.generation import Generation, Piece
from megatron_runtime.text_generation_server.schema import ChatRequest
from megatron_runtime.text_generation_server.service import Service
from megatron_runtime.text_generation_server.sse import EventStream, until_disconnect


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    asked = await service.read(request, ChatRequest)
    service.check_model(asked.model)
    prompt = await service.encode_chat(asked)
    generation = service.generation(
        asked, [prompt], param="messages", max_tokens=asked.max_completion_tokens or asked.max_tokens
    )
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
    if asked.stream:
        return EventStream(
            _events(generation, {"object": "chat.completion.chunk", **head}, include_usage=asked.include_usage),
            keep_alive_seconds=service.settings.keep_alive_seconds,
            expired=service.expired,
        )
    pieces = await until_disconnect(request, generation.collect(), expired=service.expired)
    return JSONResponse(
        {
            "object": "chat.completion",
            **head,
            "choices": [_whole_choice(piece) for piece in pieces],
            "usage": generation.usage.as_json(),
        }
    )


async def _events(
    generation: Generation, head: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    begun: set[int] = set()
    async for piece in generation.stream():
        if piece.index not in begun:
            begun.add(piece.index)
            yield {**head, "choices": [_delta(piece.index, {"role": "assistant", "content": ""})], **usage}
        if piece.text:
            yield {**head, "choices": [_delta(piece.index, {"content": piece.text})], **usage}
        if piece.finish_reason is not None:
            yield {**head, "choices": [_delta(piece.index, {}, piece.finish_reason)], **usage}
    if include_usage:
        yield {**head, "choices": [], "usage": generation.usage.as_json()}


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _whole_choice(piece: Piece) -> dict[str, Any]:
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}
