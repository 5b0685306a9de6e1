"""POST /v1/chat/completions: tools, conversations that continue from generated tokens, deltas and messages."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.server.errors import ApiError, invalid_value
from megatron_runtime.server.openai.answer import TokenLogProb, chat_log_probs, finite_log_prob
from megatron_runtime.server.openai.generation import Piece
from megatron_runtime.server.openai.jobs import Options, Prompt, structured_output
from megatron_runtime.server.openai.schema import ChatRequest, NamedTool, Tool
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.tools import (
    CallArguments,
    CallBegin,
    Event,
    NamedParser,
    RequiredParser,
    Text,
    ToolParser,
)

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Nine letters and digits: some chat templates accept no other ids."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = await service.read(request, ChatRequest)
    service.check_model(body.model)
    service.check_in_flight(tenant=request.state.tenant)
    tools = _tool_use(body, parser=service.tool_parser)
    prompt = await service.while_connected(
        request,
        service.prompts.encode_chat(body.messages, tools=body.offered_tools, variables=body.chat_template_kwargs),
        characters=sum(len(message.content) for message in body.messages),
    )
    if body.prevent_retokenization:
        prompt = await _with_earlier_tokens(service, body, prompt)
    if body.add_BOS:
        prompt = service.prompts.with_bos(prompt)
    service.prompts.check(prompt, param="messages")
    options = Options(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        log_probs=(body.top_logprobs or 0) if body.logprobs else None,
        forced_format=tools.forced_format,
        markers=tools.markers,
        tenant=request.state.tenant,
    )
    generation = service.generation(body, [Prompt(prompt, param="messages")], options)
    answer = _ChatAnswer(service, body, tools, prompt)
    return await service.respond(
        request,
        generation,
        body,
        id_prefix="chatcmpl",
        object_type="chat.completion",
        chunk_type="chat.completion.chunk",
        choice=answer.choice,
        chunks=answer.chunks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolUse:
    """How the choices of one request may call tools.

    parser:   makes a parser for one choice; None if no tool can be called.
    markers:  special tokens that the parser needs as text.
    forced_format: the structured output of an answer that has to be a call.
    is_named: the request names the one tool.
    """

    parser: Callable[[], ToolParser] | None = None
    markers: tuple[str, ...] = ()
    forced_format: dict[str, Any] | None = None
    is_named: bool = False


def _tool_use(request: ChatRequest, *, parser: type[ToolParser] | None) -> _ToolUse:
    """Return how calls are made. Raises ApiError 400.

    parser: reads the calls that the model chooses to make; None if this server offers no tools.
    """
    tools, choice = request.offered_tools, request.tool_choice
    if not tools:
        return _ToolUse()
    if parser is None:
        raise ApiError(
            400,
            "tools are not offered by this server: leave them out, or start it with another --tool-call-parser.",
            param="tools",
            code="invalid_value",
        )
    if (own := structured_output(request)) is not None:
        message = f"{own[1]} cannot be combined with tools: leave one of them out, or use tool_choice 'none'."
        raise ApiError(400, message, param=own[1], code="invalid_value")
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema = next(_parameters(tool) for tool in tools if tool.function.name == name)
        forced = {"type": "json_schema", "value": schema}
        return _ToolUse(parser=lambda: NamedParser(name), forced_format=forced, is_named=True)
    if choice == "required":
        schema = _schema_of_any_call(tools, is_single=request.parallel_tool_calls is False)
        forced = {"type": "json_schema", "value": schema}
        return _ToolUse(parser=lambda: RequiredParser(names), forced_format=forced)
    return _ToolUse(parser=lambda: parser(names), markers=parser.markers)


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool.function.parameters or _NO_PARAMETERS


def _schema_of_any_call(tools: list[Tool], *, is_single: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _moved(_parameters(tool), to=f"#/items/anyOf/{place}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    limit = {"maxItems": 1} if is_single else {}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def _moved(schema: Any, *, to: str) -> Any:
    """A copy of a schema whose references into itself still hold when it stands at the pointer `to`."""
    if isinstance(schema, list):
        return [_moved(item, to=to) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, to=to) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


async def _with_earlier_tokens(service: Service, request: ChatRequest, prompt: list[int]) -> list[int]:
    """Return the prompt with the tokens that the last answer carries in place of those that its text would have.

    The text of an answer, tokenized again, may give other tokens than those that the model wrote. For training they
    must be the same, so a message may carry its tokens, and the next prompt begins with them.

    prompt: the whole conversation, tokenized from its text.
    Raises ApiError 400 for an answer whose end cannot be found in the prompt.
    """
    messages, eos_ids = request.messages, service.prompts.tokenizer.eos_ids
    last = next((at for at in reversed(range(len(messages))) if messages[at].role == "assistant"), None)
    if last is None or messages[last].prompt_token_ids is None or messages[last].generation_token_ids is None:
        return prompt
    param = f"messages[{last}].generation_token_ids"
    earlier = [*(messages[last].prompt_token_ids or ()), *(messages[last].generation_token_ids or ())]
    variables = {**(request.chat_template_kwargs or {}), "add_generation_prompt": False}
    upto = await service.prompts.encode_chat(messages[: last + 1], tools=request.offered_tools, variables=variables)
    ends = [at for at, token in enumerate(upto) if token in eos_ids]
    # Special tokens are never merged with text, so up to the end of the answer both are tokenized alike.
    if not ends or prompt[: ends[-1] + 1] != upto[: ends[-1] + 1]:
        problem = (
            "the chat template puts no end token after an answer, so its tokens cannot be told from those of the next "
            "message. Leave prevent_retokenization out"
        )
        raise invalid_value(param, problem)
    service.prompts.check(earlier, param=param)
    is_ended = earlier[-1] in eos_ids
    return [*earlier, *(() if is_ended else (prompt[ends[-1]],)), *prompt[ends[-1] + 1 :]]


@dataclass(frozen=True, slots=True)
class _Delta:
    """The part of a choice in one event; the last one has the finish reason and what the message carries."""

    delta: dict[str, Any]
    finish_reason: str | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class _ChatChoice:
    """Turns the pieces of one choice into deltas.

    tools:     how calls are found in the text.
    is_single: only the first call is given out.
    """

    def __init__(self, tools: _ToolUse, *, is_single: bool) -> None:
        self._parser = None if tools.parser is None else tools.parser()
        self._is_named = tools.is_named
        self._is_single = is_single
        self._calls = 0
        self._has_begun = False
        self._log_probs: list[TokenLogProb] = []
        self._token_ids: list[int] = []

    def feed(self, piece: Piece, carried: Callable[[Piece], dict[str, Any]]) -> Iterator[_Delta]:
        """Yield the deltas of one piece. Log-probabilities go with the first delta that follows their token."""
        if not self._has_begun:
            self._has_begun = True
            yield _Delta({"role": "assistant", "content": ""})
        self._log_probs += piece.log_probs
        self._token_ids += piece.token_ids
        for event in self._events(piece):
            delta = self._delta(event)
            if delta is not None:
                yield self._next(delta)
        reason = piece.finish_reason
        if reason is not None:
            # A forced call of a named tool ends with "stop", as OpenAI's does.
            ends_with_calls = reason == "stop" and self._calls and not self._is_named
            yield self._next(carried(piece), "tool_calls" if ends_with_calls else reason)

    def _events(self, piece: Piece) -> list[Event]:
        if self._parser is None:
            return [Text(piece.text)] if piece.text else []
        events = self._parser.feed(piece.text)
        return events if piece.finish_reason is None else [*events, *self._parser.finish()]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text}
        self._calls += isinstance(event, CallBegin)
        if self._is_single and self._calls > 1:
            return None
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": event.text}}]}
        id_ = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
        call = {"index": self._calls - 1, "id": id_, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}

    def _next(self, delta: dict[str, Any], reason: str | None = None) -> _Delta:
        log_probs, self._log_probs = self._log_probs, []
        token_ids, self._token_ids = self._token_ids, []
        return _Delta(delta, reason, log_probs, token_ids)


class _ChatAnswer:
    """The JSON of the choices of one answer, whole or as parts of events.

    prompt: the prompt's tokens.
    """

    def __init__(self, service: Service, body: ChatRequest, tools: _ToolUse, prompt: list[int]) -> None:
        self._tokenizer = service.prompts.tokenizer
        self._body = body
        self._tools = tools
        self._prompt = prompt
        self._choices: dict[int, _ChatChoice] = {}

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        choice = self._choices.get(piece.index)
        if choice is None:
            choice = self._choices[piece.index] = self._new_choice()
        for delta in choice.feed(piece, self._carried):
            chunk = {
                "index": piece.index,
                "delta": delta.delta,
                "logprobs": chat_log_probs(delta.log_probs, self._tokenizer) if delta.log_probs else None,
                "finish_reason": delta.finish_reason,
            }
            yield {**chunk, "token_ids": delta.token_ids} if self._body.return_token_ids else chunk

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a whole choice: its deltas put together."""
        text, carried = "", self._carried(piece)
        calls: list[dict[str, Any]] = []
        log_probs: list[TokenLogProb] = []
        token_ids: list[int] = []
        reason = None
        for delta in self._new_choice().feed(piece, lambda _: {}):
            reason = delta.finish_reason
            log_probs += delta.log_probs
            token_ids += delta.token_ids
            text += delta.delta.get("content", "")
            for part in delta.delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        # A forced call has no text beside it; one that the model chose may have.
        no_text = None if self._tools.forced_format is None else ""
        message = {"role": "assistant", "content": text if text or not calls else no_text, "refusal": None, **carried}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": piece.index,
            "message": message,
            "logprobs": chat_log_probs(log_probs, self._tokenizer) if self._body.logprobs else None,
            "finish_reason": reason,
        }
        return {**choice, "token_ids": token_ids} if self._body.return_token_ids else choice

    def _new_choice(self) -> _ChatChoice:
        return _ChatChoice(self._tools, is_single=self._body.parallel_tool_calls is False)

    def _carried(self, piece: Piece) -> dict[str, Any]:
        """What the message says about its tokens, as far as the request asks for it."""
        body = self._body
        carried: dict[str, Any] = {}
        if body.prevent_retokenization or body.return_tokenized_data:
            carried = {"prompt_token_ids": self._prompt, "generation_token_ids": list(piece.generated)}
            if body.logprobs and piece.generated_log_probs is not None:
                carried["generation_log_probs"] = [finite_log_prob(value) for value in piece.generated_log_probs]
        if body.return_raw_text:
            carried["raw_text"] = self._tokenizer.decode([*self._prompt, *piece.generated], skip_special=False)
        return carried
