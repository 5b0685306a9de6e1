"""POST /tokenize and /detokenize: the vocabulary as the server uses it."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.schema import DetokenizeRequest, TokenizeRequest
from megatron_runtime.server.service import Service

_TEXTS_AT_ONCE = 1024
"""Tokens; other requests are served before the next ones become texts."""


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation, as a prompt of it would have them."""
    asked = await service.read(request, TokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model)
    if asked.prompt is not None:
        text = asked.prompt
        work = service.encode(text, param="prompt", add_special=asked.add_special_tokens is not False)
        tokens = await service.while_connected(request, work, characters=len(text))
    else:
        variables = dict(asked.chat_template_kwargs or {})
        if asked.add_generation_prompt is not None:
            variables["add_generation_prompt"] = asked.add_generation_prompt
        messages = asked.messages or []
        tokens = await service.while_connected(
            request,
            service.encode_chat(messages, tools=asked.tools or (), variables=variables),
            characters=sum(len(message.content) for message in messages),
        )
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.sequence_limit, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = await _token_texts(service, tokens)
    return Response(to_json(answer), media_type="application/json")


async def _token_texts(service: Service, tokens: list[int]) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(tokens), _TEXTS_AT_ONCE):
        batch = tokens[start : start + _TEXTS_AT_ONCE]
        texts += [service.tokenizer.token_bytes(token).decode(errors="replace") for token in batch]
        await asyncio.sleep(0)
    return texts


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text of token ids, special tokens written out."""
    asked = await service.read(request, DetokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model)
    limit = service.tokenizer.vocab_size
    outside = next((token for token in asked.tokens if token >= limit), None)
    if outside is not None:
        message = f"Invalid value for tokens: token id {outside} is not in 0..{limit - 1}."
        raise ApiError(400, message, param="tokens", code="invalid_value")
    text = await service.decode(asked.tokens, skip_special=False)
    return Response(to_json({"prompt": text}), media_type="application/json")
