"""POST /v1/chat/completions: prompts, tool calls, and the chunks and messages of answers."""

from __future__ import annotations

import secrets
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_limits import check_structure
from megatron_runtime.server.errors import ApiError, invalid_value, shown
from megatron_runtime.server.formats.call_grammars import CallGrammar, list_of_calls
from megatron_runtime.server.formats.chat_format import ANY_CALLS, AnswerFormat, AnswerRequest, ChatFormat
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Event, Reasoning, Text
from megatron_runtime.server.formats.reasoning import AnswerParser
from megatron_runtime.server.openai.answer import (
    Piece,
    TokenLogProb,
    chat_log_probs,
    finite_log_prob,
    prompt_log_probs,
)
from megatron_runtime.server.openai.bodies import Lease
from megatron_runtime.server.openai.generation import respond
from megatron_runtime.server.openai.jobs import Options, OutputFormat, Prompt, enforceable, structured_output
from megatron_runtime.server.openai.schema import MAX_CALLS, ChatRequest, NamedTool, Tool
from megatron_runtime.server.openai.service import Service
from megatron_runtime.tokenization import Tokenizer

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Length of the ids of calls. Some chat templates accept only ids of nine letters and digits."""
_EFFORTS: Mapping[str, str] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The effort that the chat template gets, by the `reasoning_effort` of the request."""
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NO_PARAMETERS = frozenset({"type", "properties", "required", "title", "description", "$schema"})
"""Keys that can occur in the schema of a function without parameters."""


async def create_chat_completion(service: Service, request: Request) -> Response:
    """Answer a chat request."""
    body = await service.read(request, ChatRequest)
    conversation = await conversation_of(service, request, body)
    tokenizer = service.prompts.tokenizer
    choices = defaultdict[int, _ChatChoice](lambda: _ChatChoice(body, conversation, tokenizer))
    return await respond(
        service,
        request,
        body,
        [conversation.prompt],
        conversation.options,
        answer=conversation.answer,
        choice=lambda piece: choices[piece.index].whole(piece),
        chunks=lambda piece: choices[piece.index].chunks(piece),
        more=lambda pieces: _prompt_log_probs(body, pieces, tokenizer),
    )


def _prompt_log_probs(body: ChatRequest, pieces: Sequence[Piece], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `prompt_logprobs` of the answer in a dict, which is empty if the field is not requested."""
    if body.prompt_logprobs is None:
        return {}
    as_ids = bool(body.return_tokens_as_token_ids)
    return {"prompt_logprobs": prompt_log_probs(pieces[0].prompt_log_probs, tokenizer, as_ids=as_ids)}


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The tokenized prompt of a chat request, its generation options, and the format of its answers."""

    prompt: Prompt
    options: Options
    tools: _ToolUse
    answer: AnswerFormat
    parallel_calls: bool
    shows_reasoning: bool

    def reader(self) -> AnswerReader:
        """Return a new AnswerReader for one choice."""
        return AnswerReader(
            self.answer.parser(),
            parallel_calls=self.parallel_calls,
            shows_reasoning=self.shows_reasoning,
            call_id=self.answer.call_id,
        )


async def conversation_of(service: Service, request: Request, body: ChatRequest) -> PreparedChat:
    """Render and tokenize the conversation of a request. Raises ApiError 400, or 429 if too many requests are open."""
    service.check_in_flight(tenant=request.state.tenant)
    tools = _tool_use(body, service.chat_format)
    request.state.has_unread_calls = tools.is_unread
    variables = _template_variables(service, body)
    prompt = await _prompt_of(service, request, body, variables)
    last = body.messages[-1]
    answer = service.chat_format.answer(
        AnswerRequest(
            prompt=prompt.tokens,
            tools=tools.offered,
            forced=tools.forced,
            is_calls_or_json=tools.is_calls_or_json,
            continues=bool(body.continue_final_message),
            is_thought=bool(last.thought and not last.content),
            earlier_calls=sum(len(message.tool_calls or ()) for message in body.messages),
            variables=variables,
        )
    )
    options = Options(
        max_tokens=body.answer_limit,
        log_probs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_log_probs=body.prompt_logprobs,
        output_format=tools.output_format,
        markers=answer.markers,
        reasoning=answer.reasoning,
        reasoning_budget=_reasoning_budget(body),
        has_tools=bool(tools.offered),
        call_structure=tools.call_structure,
    )
    parallel_calls = body.parallel_tool_calls is not False
    return PreparedChat(
        prompt,
        options,
        tools,
        answer,
        parallel_calls=parallel_calls,
        shows_reasoning=body.include_reasoning is not False,
    )


async def _prompt_of(service: Service, request: Request, body: ChatRequest, variables: Mapping[str, Any]) -> Prompt:
    """Render and tokenize the messages. Raises ApiError 400 if the model cannot process the prompt."""
    lease = service.lease(request)
    work = service.prompts.encode_chat(
        body.messages,
        lease=lease,
        tools=body.offered_tools,
        variables=variables,
        continues=bool(body.continue_final_message),
        add_special=bool(body.add_special_tokens),
        is_cut=body.truncate_prompt_tokens is not None,
    )
    characters = sum(message.size for message in body.messages)
    rendered = await service.while_connected(request, work, characters=characters)
    tokens = rendered.tokens
    if rendered.media is not None:
        _check_without_media(body)
    if body.prevent_retokenization:
        tokens = await _with_earlier_tokens(service, body, tokens, lease)
    tokens = service.prompts.truncated(tokens, body)
    tokens = service.prompts.checked(tokens, param="messages", add_bos=body.add_BOS)
    return Prompt(tokens, param="messages", media=rendered.media)


def _check_without_media(body: ChatRequest) -> None:
    """Raise ApiError 400 for a field that is not allowed in a conversation with images, audio or video."""
    for name in ("add_BOS", "prevent_retokenization"):
        if getattr(body, name):
            raise invalid_value(name, "it cannot be combined with images, audio or video: leave one of them out")


def _template_variables(service: Service, request: ChatRequest) -> dict[str, Any]:
    """Return the variables for the chat template, from the request's variables, reasoning effort and prompt options.

    If the template has no variable for the reasoning effort, the effort is omitted, because many clients send an effort
    to every model.
    """
    given = request.chat_template_kwargs or {}
    effort, template = request.reasoning_effort, service.prompts.tokenizer.template_for(request.offered_tools)
    if request.add_generation_prompt is not None:
        given = {**given, "add_generation_prompt": request.add_generation_prompt}
    if effort is None:
        return dict(given)
    values = {"reasoning_effort": _EFFORTS[effort], "enable_thinking": effort != "none"}
    read = {name: values[name] for name in values if template is not None and name in template.variables}
    return {**read, **given}


def _reasoning_budget(request: ChatRequest) -> int | None:
    """Return the maximum number of reasoning tokens in the answer; None: no limit."""
    budget = request.thinking_token_budget
    return None if budget is None or budget < 0 else budget


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolUse:
    """Whether and how the choices of one request can call tools.

    offered:       schemas of the tools' arguments, by tool name; empty if no tool can be called.
    forced:        name of the tool that a grammar forces the answer to call; "*": any tools; None: no call is forced.
    output_format: the structured output for an answer that must be a tool call, or either a tool call or JSON; None:
                   the answer can be any text.
    is_unread:     whether the model's tool-call format is unknown, so that its tool calls are returned as text.
    call_structure: as in SamplingParams, for an answer that can be a tool call.
    """

    offered: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    forced: str | None = None
    output_format: OutputFormat | None = None
    call_structure: dict[str, Any] | None = None
    is_unread: bool = False

    @property
    def is_calls_or_json(self) -> bool:
        return self.output_format is not None and self.forced is None


def _tool_use(request: ChatRequest, chat_format: ChatFormat) -> _ToolUse:
    """Return how the choices of a request can call tools.

    Raises ApiError 400 for a request with tools if the server does not offer tools, or if the request also sets a
    structured output that is not JSON or that has no grammar together with the tools.
    """
    tools, choice = request.offered_tools, request.tool_choice
    if not tools:
        return _ToolUse()
    if not chat_format.offers_tools:
        message = "tools are not offered by this server: leave them out, or start it with another --tool-call-parser."
        raise ApiError(400, message, param="tools", code="invalid_value")
    text_format = structured_output(request)
    offered = {tool.function.name: tool.function.parameters or _NO_PARAMETERS for tool in tools}
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema, ignored = _parameters(next(tool for tool in tools if tool.function.name == name))
        return _ToolUse(offered=offered, forced=name, output_format=_forced(schema, ignored))
    if request.requires_a_call:
        schemas = {tool.function.name: _parameters(tool) for tool in tools}
        schema = list_of_calls(
            {name: schema for name, (schema, _) in schemas.items()}, is_single=request.parallel_tool_calls is False
        )
        forced = _forced(schema, sorted({keyword for _, ignored in schemas.values() for keyword in ignored}))
        return _ToolUse(offered=offered, forced=ANY_CALLS, output_format=forced)
    is_unread = chat_format.tool_format is None
    if request.continue_final_message:
        # The answer continues a text, so a text format applies to it and a tool call would not be at its beginning.
        return _ToolUse(offered=offered if text_format is None else {}, is_unread=is_unread)
    declared = {tool.function.name: _declared(tool) for tool in tools}
    grammar = chat_format.call_grammar(declared, is_single=request.parallel_tool_calls is False)
    if text_format is not None:
        return _ToolUse(offered=offered, output_format=_calls_or(text_format, grammar))
    structure = None if grammar is None else grammar.structure
    return _ToolUse(offered=offered, call_structure=structure, is_unread=is_unread)


def _calls_or(text_format: OutputFormat, calls: CallGrammar | None) -> OutputFormat:
    """Return the structured output of an answer that is either tool calls or has the format of the request.

    calls: grammar of the tool calls; None: the format of tool calls has no grammar.

    Raises ApiError 400 if there is no such grammar.
    """
    remedy = "leave one of them out, or use tool_choice 'none' or 'required'"
    if not text_format.is_json:
        kind = text_format.structure["type"]
        raise invalid_value(text_format.param, f"a {kind} cannot be combined with tools, only JSON can: {remedy}")
    if calls is None:
        problem = (
            "it cannot be combined with tools, because the format of the model's tool calls is unknown: start the "
            f"server with another --tool-call-parser, {remedy}"
        )
        raise invalid_value(text_format.param, problem)
    structure = {"type": "grammar", "value": calls.or_json(text_format.schema)}
    try:
        check_structure(structure)
    except InvalidSamplingParamsError as error:
        raise invalid_value(text_format.param, f"together with the tools, use {error.allowed}, or {remedy}") from error
    return replace(text_format, structure=structure, has_reasoning=calls.has_reasoning)


def _forced(schema: dict[str, Any], ignored: Sequence[str]) -> OutputFormat:
    return OutputFormat(structure={"type": "json_schema", "value": schema}, param="tool_choice", ignored=tuple(ignored))


def _parameters(tool: Tool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the JSON schema of a tool's arguments, and the keywords in the schema that are not enforced.

    Raises ApiError 400 if the schema allows no object, or if the tool is strict and its schema has a keyword that
    cannot be enforced.
    """
    declared = _declared(tool)
    if declared["type"] != "object":
        problem = f"the parameters of {tool.function.name!r} have type {shown(declared['type'])}: use type 'object'"
        raise invalid_value("tools", problem)
    return enforceable(declared, param="tools", is_strict=bool(tool.function.strict), closes=True)


def _declared(tool: Tool) -> Mapping[str, Any]:
    schema = tool.function.parameters
    has_none = not schema or (schema.get("properties") == {} and schema.keys() <= _OF_NO_PARAMETERS)
    if has_none or schema is None:
        return _NO_PARAMETERS
    kind = schema.get("type") or "object"
    return {**schema, "type": "object"} if kind == "object" or (isinstance(kind, list) and "object" in kind) else schema


async def _with_earlier_tokens(service: Service, request: ChatRequest, prompt: list[int], lease: Lease) -> list[int]:
    """Return the prompt with its beginning replaced by the tokens that the last assistant message contains.

    Tokenizing the text of an answer can give other tokens than the model generated, and training needs the generated
    tokens. An assistant message can therefore contain the tokens of its prompt and of its answer. If the message
    contains no tokens, return `prompt` unchanged.

    prompt: tokens of the whole conversation, computed from its text.

    Raises ApiError 400 if the end of the last assistant message cannot be located in the prompt.
    """
    messages, eos_ids = request.messages, service.prompts.tokenizer.eos_ids
    last = next((at for at in reversed(range(len(messages))) if messages[at].role == "assistant"), None)
    if last is None or messages[last].prompt_token_ids is None or messages[last].generation_token_ids is None:
        return prompt
    param = f"messages[{last}].generation_token_ids"
    earlier = [*(messages[last].prompt_token_ids or ()), *(messages[last].generation_token_ids or ())]
    if request.continue_final_message and last == len(messages) - 1:
        service.prompts.checked(earlier, param=param)
        return earlier[:-1] if earlier[-1] in eos_ids else earlier
    variables = {**_template_variables(service, request), "add_generation_prompt": False}
    rendered = await service.prompts.encode_chat(
        messages[: last + 1], lease=lease, tools=request.offered_tools, variables=variables
    )
    upto = rendered.tokens
    ends = [at for at, token in enumerate(upto) if token in eos_ids]
    # Text is never merged with special tokens, so both token lists are equal up to the end of the answer.
    if not ends or prompt[: ends[-1] + 1] != upto[: ends[-1] + 1]:
        problem = (
            "the chat template puts no end token after an answer, so its tokens cannot be separated from those of the "
            "next message. Leave prevent_retokenization out"
        )
        raise invalid_value(param, problem)
    service.prompts.checked(earlier, param=param)
    is_ended = earlier[-1] in eos_ids
    return [*earlier, *(() if is_ended else (prompt[ends[-1]],)), *prompt[ends[-1] + 1 :]]


class AnswerReader:
    """Converts the parts of one choice to events: reasoning, text and tool calls.

    call_id: returns the id for a tool call to which the model assigned no id, from the tool's name and the number of
             earlier calls. None: any id is valid.
    calls:   number of tool calls that have begun.
    """

    def __init__(
        self,
        parser: AnswerParser | None,
        *,
        parallel_calls: bool,
        shows_reasoning: bool = True,
        call_id: Callable[[str, int], str | None] = lambda name, number: None,
    ) -> None:
        self.calls = 0
        self._parser = parser
        self._call_id = call_id
        self._max_calls = MAX_CALLS if parallel_calls else 1
        self._shows_reasoning = shows_reasoning

    def read(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of `piece`, a part of the answer.

        Tool calls beyond the maximum number per answer are left out.
        """
        for event in self._events(piece):
            if isinstance(event, CallBegin):
                event = replace(event, id=event.id or self._call_id(event.name, self.calls))
                self.calls += 1
            if isinstance(event, Reasoning) and not self._shows_reasoning:
                continue
            if isinstance(event, Text | Reasoning) or self.calls <= self._max_calls:
                yield event

    def _events(self, piece: Piece) -> Sequence[Event]:
        parser = self._parser
        if parser is None:
            return ([Text(piece.text)] if piece.text else []) if piece.events is None else piece.events
        if piece.events is None:
            events = parser.feed(piece.text)
        else:
            events = []
            for event in piece.events:
                events += parser.feed(event.text) if isinstance(event, Text) else [event]
        return events if piece.finish_reason is None else [*events, *parser.finish()]


class _ChatChoice:
    """Converts the parts of one choice to chunks, which are the items of `choices` in the events of a stream."""

    def __init__(self, body: ChatRequest, conversation: PreparedChat, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tools = conversation.tools
        self._tokenizer = tokenizer
        self._prompt = conversation.prompt.tokens
        self._reader = conversation.reader()
        self._has_begun = False
        self._log_probs: list[TokenLogProb] = []
        self._token_ids: list[int] = []

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one part.

        The log-probabilities of a token are in the first chunk after the token has arrived.
        """
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk(piece.index, {"role": "assistant", "content": ""})
        self._log_probs += piece.log_probs
        self._token_ids += piece.token_ids
        for event in self._reader.read(piece):
            yield self._chunk(piece.index, self._delta(event))
        if piece.finish_reason is not None:
            yield self._chunk(piece.index, self._token_fields(piece), self._reason(piece))

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Return the item of `choices` for an answer without streaming. piece: the only part of the choice."""
        events = list(self._reader.read(piece))
        text = "".join(event.text for event in events if isinstance(event, Text))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                calls.append(_new_call(event))
            elif isinstance(event, CallArguments):
                calls[-1]["function"]["arguments"] += event.text
        # The content of a forced call is "". The content of a call that the model chose to make is null, unless the
        # model wrote text.
        no_text = None if self._tools.forced is None else ""
        message = {
            "role": "assistant",
            "content": text if text or not calls else no_text,
            "refusal": None,
            **self._token_fields(piece),
        }
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": piece.index,
            "message": message,
            "logprobs": self._described(piece.log_probs) if self._body.logprobs else None,
            "finish_reason": self._reason(piece),
        }
        return {**choice, "token_ids": piece.token_ids} if self._body.return_token_ids else choice

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        log_probs, self._log_probs = self._log_probs, []
        token_ids, self._token_ids = self._token_ids, []
        chunk = {
            "index": index,
            "delta": delta,
            "logprobs": self._described(log_probs) if log_probs and self._body.logprobs else None,
            "finish_reason": reason,
        }
        return {**chunk, "token_ids": token_ids} if self._body.return_token_ids else chunk

    def _described(self, log_probs: list[TokenLogProb]) -> dict[str, Any]:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_log_probs(log_probs, self._tokenizer, as_ids=as_ids)

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning(event.text)
        part = _new_call(event) if isinstance(event, CallBegin) else {"function": {"arguments": event.text}}
        return {"tool_calls": [{"index": self._reader.calls - 1, **part}]}

    def _reason(self, piece: Piece) -> str | None:
        # As in OpenAI's API, a call ends with "stop" if tool_choice names the tool.
        is_call = (
            piece.finish_reason == "stop" and self._reader.calls and not isinstance(self._body.tool_choice, NamedTool)
        )
        return "tool_calls" if is_call else piece.finish_reason

    def _token_fields(self, piece: Piece) -> dict[str, Any]:
        """Return the fields of a message that contain its tokens, or {} if the tokens are not requested."""
        body = self._body
        fields: dict[str, Any] = {}
        if body.prevent_retokenization or body.return_tokenized_data:
            fields = {"prompt_token_ids": self._prompt, "generation_token_ids": list(piece.generated)}
            if body.logprobs and piece.generated_log_probs is not None:
                fields["generation_log_probs"] = [finite_log_prob(value) for value in piece.generated_log_probs]
        if body.return_raw_text:
            fields["raw_text"] = self._tokenizer.decode([*self._prompt, *piece.generated], skip_special=False)
        return fields


def _reasoning(text: str) -> dict[str, str]:
    """Return the fields of a message for its reasoning: the same text under each of the two names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _new_call(event: CallBegin) -> dict[str, Any]:
    id_ = event.id or "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
    return {"id": id_, "type": "function", "function": {"name": event.name, "arguments": ""}}
