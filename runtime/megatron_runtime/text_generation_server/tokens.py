"""POST /tokenize and /detokenize: the vocabulary as the server uses it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron_runtime.text_generation_server.errors import ApiError
from megatron_runtime.text_generation_server.schema import DetokenizeRequest, TokenizeRequest
from megatron_runtime.text_generation_server.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of a text or of a conversation, as a prompt of it would have them."""
    asked = await service.read(request, TokenizeRequest)
    if asked.model is not None:
        service.check_model(asked.model)
    if asked.prompt is not None:
        tokens = await service.encode(asked.prompt, add_special=asked.add_special_tokens is not False)
    else:
        variables = dict(asked.chat_template_kwargs or {})
        if asked.add_generation_prompt is not None:
            variables["add_generation_prompt"] = asked.add_generation_prompt
        tokens = await service.encode_chat(asked.messages or [], tools=asked.tools or (), variables=variables)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.sequence_limit, "tokens": tokens}
    if asked.return_token_strs:
        texts = [service.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]
        answer["token_strs"] = texts
    return JSONResponse(answer)


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
    return JSONResponse({"prompt": service.tokenizer.decode(asked.tokens, skip_special=False)})
