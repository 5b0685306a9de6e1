"""POST /v1/completions, /v1/tokenize and /v1/detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.server.errors import context_length_error, invalid_value
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.openai.answer import Piece, completion_log_probs, prompt_log_probs
from megatron_runtime.server.openai.bodies import Lease
from megatron_runtime.server.openai.generation import respond
from megatron_runtime.server.openai.jobs import Options, Prompt, check_vocabulary
from megatron_runtime.server.openai.prompts import TEXT_TOKENIZED_IN_PLACE
from megatron_runtime.server.openai.schema import CompletionRequest, DetokenizeRequest, TokenizeRequest
from megatron_runtime.server.openai.service import Service

DEFAULT_MAX_TOKENS = 16
_TEXTS_AT_ONCE = 1024
"""Number of tokens that are converted to JSON before other requests run."""
_LISTS_AT_ONCE = 8
"""Number of token lists that are checked before other requests run."""


async def create_completion(service: Service, request: Request) -> Response:
    """Complete one or several prompts. The choices are in the order of the prompts."""
    body = await service.read(request, CompletionRequest)
    service.check_in_flight(tenant=request.state.tenant)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise invalid_value("max_tokens", "0 leaves no answer; use at least 1, or echo for the prompt alone")
    service.check_choices(len(body.prompt) * (body.n or 1), tenant=request.state.tenant)
    prompts = await tokenized_prompts(service, request, body)
    options = Options(
        max_tokens=max_tokens,
        log_probs=body.logprobs,
        echoes_log_probs=bool(body.echo) and body.logprobs is not None,
        prompt_log_probs=body.prompt_logprobs,
    )
    tokenizer, as_ids = service.prompts.tokenizer, bool(body.return_tokens_as_token_ids)

    def choice(piece: Piece) -> dict[str, Any]:
        log_probs = None
        if body.logprobs is not None:
            log_probs = completion_log_probs(piece.log_probs, tokenizer, as_ids=as_ids)
        fields = {"index": piece.index, "text": piece.text, "logprobs": log_probs, "finish_reason": piece.finish_reason}
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_log_probs(piece.prompt_log_probs, tokenizer, as_ids=as_ids)
        return {**fields, "token_ids": piece.token_ids} if body.return_token_ids else fields

    return await respond(service, request, body, prompts, options, choice=choice, chunks=lambda piece: (choice(piece),))


async def tokenized_prompts(service: Service, request: Request, body: CompletionRequest) -> list[Prompt]:
    """Return the tokenized prompts of a request. Raises ApiError 400 if a prompt is too long."""
    characters = sum(len(item) for item in body.prompt if isinstance(item, str))
    work = _prompts(service, body, characters, service.lease(request))
    return await service.while_connected(request, work, characters=characters)


async def _prompts(service: Service, body: CompletionRequest, characters: int, lease: Lease) -> list[Prompt]:
    """Return the tokenized prompts of a request. Tokenize short texts on the event loop, and long texts in threads.

    characters: total length of the texts in the request.
    """
    prompts, in_place, limit = service.prompts, characters <= TEXT_TOKENIZED_IN_PLACE, service.prompts.sequence_limit
    tokenized = []
    given: Sequence[str | list[int]] = body.prompt
    for place, item in enumerate(given):
        param = "prompt" if len(body.prompt) == 1 else f"prompt[{place}]"
        if isinstance(item, str):
            tokens = await prompts.encode(
                item,
                lease=lease,
                param=param,
                add_special=body.add_special_tokens is not False,
                in_place=in_place,
                is_cut=body.truncate_prompt_tokens is not None,
            )
        else:
            tokens = item
            if place % _LISTS_AT_ONCE == _LISTS_AT_ONCE - 1:
                await asyncio.sleep(0)
        tokens = prompts.truncated(tokens, body)
        if limit is not None and len(tokens) > limit:
            raise context_length_error(prompt_length=len(tokens), limit=limit, param=param)
        tokens = prompts.checked(tokens, param=param, add_bos=body.add_BOS)
        echoed = None
        if body.echo:
            has_all = isinstance(item, str) and body.truncate_prompt_tokens is None
            is_whole = body.max_tokens == 0  # a character that begins in the prompt belongs to the answer
            echoed = str(item) if has_all else await prompts.decode(tokens, lease=lease, is_whole=is_whole)
        tokenized.append(Prompt(tokens, param=param, echoed=echoed))
    return tokenized


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of the prompt for a text or a conversation."""
    body = await service.read(request, TokenizeRequest)
    prompts, lease = service.prompts, service.lease(request)
    if body.prompt is not None:
        characters = len(body.prompt)
        add_special = body.add_special_tokens is not False
        encoding = prompts.encode(body.prompt, lease=lease, param="prompt", add_special=add_special)
        tokens = await service.while_connected(request, encoding, characters=characters)
    else:
        messages, variables = body.messages or [], dict(body.chat_template_kwargs or {})
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        characters = sum(message.size for message in messages)
        continues = bool(body.continue_final_message)
        rendering = prompts.encode_chat(
            messages, lease=lease, tools=body.tools or (), variables=variables, continues=continues
        )
        tokens = (await service.while_connected(request, rendering, characters=characters)).tokens
    fields = {"count": len(tokens), "max_model_len": prompts.sequence_limit}
    ids = await _json_list(tokens, lambda token: token, lease)
    parts = [to_json(fields)[:-1], b',"tokens":[', ids, b"]"]
    if body.return_token_strs:
        text_of = prompts.tokenizer.token_bytes
        texts = await _json_list(tokens, lambda token: text_of(token).decode(errors="replace"), lease)
        parts += [b',"token_strs":[', texts, b"]"]
    return service.answer(request, b"".join([*parts, b"}"]))


async def _json_list(tokens: Sequence[int], value_of: Callable[[int], Any], lease: Lease) -> bytes:
    """Return `value_of(token)` for each token as JSON, separated by commas and without brackets.

    A long list is converted in parts, and other requests can run between the parts. The lease counts the bytes. Raises
    ApiError 429 if the server would hold too many bytes.
    """
    parts = []
    for start in range(0, len(tokens), _TEXTS_AT_ONCE):
        parts.append(to_json([value_of(token) for token in tokens[start : start + _TEXTS_AT_ONCE]])[1:-1])
        lease.add(len(parts[-1]) + 1)
        await asyncio.sleep(0)
    return b",".join(parts)


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text for the token ids in the request, including the text of special tokens."""
    body = await service.read(request, DetokenizeRequest)
    tokens, prompts = body.tokens, service.prompts
    if prompts.sequence_limit is not None and len(tokens) > prompts.sequence_limit:
        raise context_length_error(prompt_length=len(tokens), limit=prompts.sequence_limit, param="tokens")
    check_vocabulary(tokens, prompts.tokenizer, param="tokens")
    text = await prompts.decode(tokens, lease=service.lease(request), skip_special=False)
    return service.answer(request, to_json({"prompt": text}))
