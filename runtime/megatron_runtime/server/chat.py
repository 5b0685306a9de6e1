"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.server.chat_choice import ChatChoice, Delta, Message
from megatron_runtime.server.generation import Generation, Piece
from megatron_runtime.server.logprobs import TokenLogProb, chat_log_probs, plain_log_probs
from megatron_runtime.server.retokenization import with_earlier_tokens
from megatron_runtime.server.schema import ChatRequest
from megatron_runtime.server.service import Prompt, Service
from megatron_runtime.server.sse import until_disconnect
from megatron_runtime.server.tool_choice import ToolUse, tool_use


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    asked = await service.read(request, ChatRequest)
    service.check_model(asked.model)
    service.check_in_flight(tenant=request.state.tenant)
    tools = tool_use(asked, parser=service.tool_parser)
    prompt = await service.while_connected(
        request,
        service.encode_chat(asked.messages, tools=asked.offered_tools, variables=asked.chat_template_kwargs),
        characters=sum(len(message.content) for message in asked.messages),
    )
    if asked.prevent_retokenization:
        prompt = await with_earlier_tokens(service, asked, prompt)
    if asked.add_BOS:
        prompt = service.with_bos(prompt)
    service.check_tokens(prompt, param="messages")
    generation = service.generation(
        asked,
        [Prompt(prompt, param="messages")],
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        log_probs=(asked.top_logprobs or 0) if asked.logprobs else None,
        form=None if tools is None else tools.form,
        markers=() if tools is None else tools.markers,
        tenant=request.state.tenant,
    )
    answer = _ChatAnswer(
        service, asked, tools, prompt, {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
    )
    if asked.stream:
        return service.stream(answer.events(generation))
    pieces = await until_disconnect(request, generation.collect(), expired=service.expired)
    return await answer.whole(pieces, generation)


@dataclass(frozen=True, slots=True)
class _ChatAnswer:
    """The JSON of one answer, whole or as events.

    prompt: the prompt's tokens.
    head:   id and time, the same in every event.
    """

    service: Service
    asked: ChatRequest
    tools: ToolUse | None
    prompt: list[int]
    head: dict[str, Any]

    async def events(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        head = {"object": "chat.completion.chunk", **self.head, "model": self.asked.model}
        usage: dict[str, Any] = {"usage": None} if self.asked.include_usage else {}
        choices: dict[int, ChatChoice] = {}
        async for piece in generation.stream():
            choice = choices.get(piece.index) or choices.setdefault(piece.index, self._choice(piece.index))
            made_by = {"system_fingerprint": generation.weights.fingerprint}
            for delta in choice.feed(piece):
                yield {**head, **made_by, "choices": [self._delta(delta)], **usage}
        if self.asked.include_usage:
            made_by = {"system_fingerprint": generation.weights.fingerprint}
            yield {**head, **made_by, "choices": [], "usage": generation.usage.as_json()}

    async def whole(self, pieces: list[Piece], generation: Generation) -> Response:
        fields = {
            "object": "chat.completion",
            **self.head,
            "model": self.asked.model,
            "system_fingerprint": generation.weights.fingerprint,
            "usage": generation.usage.as_json(),
        }
        return await self.service.whole(fields, (self._whole_choice(piece) for piece in pieces))

    def _choice(self, index: int) -> ChatChoice:
        if self.tools is None:
            return ChatChoice(index, carried=self._carried)
        return ChatChoice(
            index,
            parser=self.tools.parser(),
            is_named=self.tools.is_named,
            is_single=self.asked.parallel_tool_calls is False,
            carried=self._carried,
        )

    def _carried(self, piece: Piece) -> dict[str, Any]:
        """What the message says of its making, as far as it was asked for."""
        asked = self.asked
        told: dict[str, Any] = {}
        if asked.prevent_retokenization or asked.return_tokenized_data:
            told = {"prompt_token_ids": self.prompt, "generation_token_ids": list(piece.generated)}
            if asked.logprobs and piece.generated_log_probs is not None:
                told["generation_log_probs"] = plain_log_probs(piece.generated_log_probs)
        if asked.return_raw_text:
            tokens = [*self.prompt, *piece.generated]
            told["raw_text"] = self.service.tokenizer.decode(tokens, skip_special=False)
        return told

    def _delta(self, delta: Delta) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            "delta": delta.delta,
            "logprobs": self._log_probs(delta.log_probs) if delta.log_probs else None,
            "finish_reason": delta.finish_reason,
        }
        return {**choice, "token_ids": delta.token_ids} if self.asked.return_token_ids else choice

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        # A call that was forced has no text beside it; one that the model chose may have.
        message = Message(empty="" if self.tools is not None and self.tools.form is not None else None)
        for delta in self._choice(piece.index).feed(piece):
            message.add(delta)
        choice = {
            "index": piece.index,
            "message": message.as_json(),
            "logprobs": self._log_probs(message.log_probs) if self.asked.logprobs else None,
            "finish_reason": message.finish_reason,
        }
        return {**choice, "token_ids": message.token_ids} if self.asked.return_token_ids else choice

    def _log_probs(self, entries: list[TokenLogProb]) -> dict[str, Any]:
        return chat_log_probs(entries, self.service.tokenizer)
