"""`ChatFormat`, the interface between the HTTP API and model-specific code: prompts, and the structure of answers.

The API handles conversations, text, reasoning and tool calls. Engines handle tokens. A server has one ChatFormat, which
converts conversations to tokens, and generated text to reasoning, text and tool calls. Every route converts its
requests to chat requests before it uses the ChatFormat.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.media import Media
from megatron_runtime.sampling.grammar_dialects import normalised
from megatron_runtime.server.formats.call_grammars import CallGrammar, without_annotations, written_with
from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.formats.parser import Event, NamedParser, RequiredParser, ToolParser
from megatron_runtime.server.formats.reasoning import AnswerParser, ReasoningFormat, ReasoningUse
from megatron_runtime.server.formats.recognition import recognised
from megatron_runtime.server.formats.table import ToolFormat
from megatron_runtime.tokenization import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as a prompt.

    text:   text of the prompt, without the special tokens that the model expects around a text.
    tokens: tokens of the prompt, if the format renders conversations to tokens instead of text.
    media:  images, audio and video of the conversation, with the positions of their tokens.
    """

    text: str = ""
    tokens: list[int] | None = None
    media: Media | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """The properties of a request that affect the parsing of its answers.

    prompt:     tokens of the prompt.
    tools:      JSON schema of the arguments of each tool that may be called, by tool name.
    forced:     what a grammar forces the answer to be. "*": a list of tool calls; the name of a tool: the arguments of
                this tool; None: no grammar forces a tool call.
    is_calls_or_json: whether a grammar restricts the answer to tool calls or JSON.
    continues:  whether the answer continues the last message of the prompt.
    is_thought: whether the continued message ends within its reasoning.
    earlier_calls: number of tool calls in the conversation.
    variables:  variables of the chat template.
    """

    prompt: Sequence[int]
    tools: Mapping[str, Mapping[str, Any]]
    forced: str | None = None
    is_calls_or_json: bool = False
    continues: bool = False
    is_thought: bool = False
    earlier_calls: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)


ANY_CALLS = "*"
"""Value of `AnswerRequest.forced` for an answer that must be a list of tool calls, of any tools."""


class AsyncAnswerParser(Protocol):
    """A parser in another process, for the answer of one choice."""

    async def feed(self, text: str, tokens: Sequence[int], *, is_last: bool) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes. Raises AnswerParserError.

        text:    next part of the answer.
        tokens:  tokens of this part. For the last part, also the tokens that ended the answer.
        is_last: whether this is the last part.
        """
        ...

    def close(self) -> None:
        """Discard the parser. Idempotent."""
        ...


class AnswerParserError(RuntimeError):
    """The answer of a choice cannot be parsed. The message gives the reason."""


class AnswerFormat(Protocol):
    """The structure of the answers to one request.

    markers:   special tokens of the vocabulary that the parsers need as text.
    reasoning: the tokens that mark the reasoning; None: the model does not mark its reasoning.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def reasoning(self) -> ReasoningUse | None: ...

    def parser(self) -> AnswerParser | None:
        """Return a new parser for one choice, or None if the whole answer is text.

        The state of a parser depends only on the text that it has read, and not on how the text was split. If a parser
        is lost, a new parser therefore reads the text so far to restore the state. The events of this second reading
        are dropped, because the client has already received the events.
        """
        ...

    def async_parser(self) -> AsyncAnswerParser | None:
        """Return a new parser for one choice that runs in another process, or None if the format has no such parser.

        If the result is not None, it reads the whole answer, and the parser that parser() returns reads only the Text
        events of this result.
        """
        ...

    def call_id(self, name: str, number: int) -> str | None:
        """Return the id for a tool call to which the parser has assigned no id. Return None if any id is valid.

        name:   name of the function.
        number: index of the tool call in its answer, from 0.
        """
        ...


class ChatFormat(Protocol):
    """Converts conversations to tokens, and describes the structure of answers.

    Thread-safe. render() and encode() can block.

    tool_format:      name of the tool-call format for /v1/models and the log; None: unknown, so tool calls are returned
                      as text.
    reasoning_format: name of the reasoning format; None: reasoning is part of the text.
    offers_tools:     whether requests can have tools.
    takes:            the kinds of media that conversations can contain: any of "image", "audio" and "video".
    """

    @property
    def tool_format(self) -> str | None: ...

    @property
    def reasoning_format(self) -> str | None: ...

    @property
    def offers_tools(self) -> bool: ...

    @property
    def takes(self) -> Collection[str]: ...

    def render(self, conversation: ChatTemplateInput) -> RenderedChat:
        """Return the prompt for a conversation. Raises ChatTemplateError."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text. Raises ValueError if the text cannot be encoded."""
        ...

    def decoder(self, *, skip_special: bool = True) -> Detokenizer:
        """Return an incremental decoder for one sequence of tokens.

        skip_special: whether to omit the text of special tokens.
        """
        ...

    def answer(self, request: AnswerRequest) -> AnswerFormat:
        """Return the AnswerFormat for a request. It creates the parsers of the answers."""
        ...

    def close(self) -> None:
        """Stop the processes that this format uses. Idempotent."""
        ...

    def call_grammar(self, tools: Mapping[str, Mapping[str, Any]], *, is_single: bool) -> CallGrammar | None:
        """Return the grammar of an answer that calls tools, or None if the format of tool calls is unknown.

        tools:     JSON schema of the arguments of each tool, by tool name.
        is_single: whether the answer can have only one tool call.
        """
        ...


@dataclass(frozen=True, slots=True)
class NativeAnswerFormat:
    """The AnswerFormat of a model whose tool calls and reasoning have a format in this package's tables."""

    request: AnswerRequest
    calls: ToolFormat | None
    reasoning: ReasoningUse | None

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the parsers need as text."""
        call_markers = self.calls.markers if self.calls is not None and self._may_call else ()
        return (*call_markers, *(() if self.reasoning is None else self.reasoning.format.markers))

    @property
    def _may_call(self) -> bool:
        return bool(self.request.tools) and self.request.forced is None

    def parser(self) -> AnswerParser | None:
        """Return a new parser for one choice, or None if the whole answer is text."""
        calls: AnswerParser | None = self.forced_parser()
        if self.calls is not None and self._may_call:
            make = self.calls.calls_or_json if self.request.is_calls_or_json else self.calls
            calls = make(self.request.tools)
        return calls if self.reasoning is None else self.reasoning.parser(calls)

    def forced_parser(self) -> ToolParser | None:
        """Return a parser for the text after the reasoning if a grammar forces tool calls, otherwise None."""
        if self.request.forced is None:
            return None
        if self.request.forced == ANY_CALLS:
            return RequiredParser(self.request.tools)
        return NamedParser(self.request.forced)

    def async_parser(self) -> None:
        """Return None, because the parser that parser() returns parses the whole answer."""
        return

    def call_id(self, name: str, number: int) -> None:
        """Return None, because the chat templates of this runtime accept any id."""
        return


_KEPT_GRAMMARS = 64
_KEPT_CHARACTERS = 256 << 10
"""Limits of the cache of grammars: the number of tool lists, and the length of one list as JSON."""


class NativeChatFormat:
    """A ChatFormat with the model's chat template, this runtime's tokenizer, and a format from table.py and
    reasoning.py.

    tool_call_parser, reasoning_parser: as for recognised(). The constructor raises the errors of recognised().
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_call_parser: str, reasoning_parser: str) -> None:
        self._tokenizer = tokenizer
        formats = recognised(
            tool_call_parser,
            reasoning_parser,
            template=tokenizer.chat_template,
            tool_template=tokenizer.template_for([{}]),
        )
        self._calls: ToolFormat | None = formats.tools
        self._reasoning: ReasoningFormat | None = formats.reasoning
        special = {} if self._calls is None else tokenizer.special_tokens_in(self._calls.texts)
        self._written = written_with(special)
        # The grammar is cached, because an agent sends the same tools with each request.
        self._kept_grammar = lru_cache(maxsize=_KEPT_GRAMMARS)(self._grammar)
        self.tool_format = None if formats.tools is None else formats.tools.name
        self.reasoning_format = formats.reasoning_name
        self.offers_tools = formats.offers_tools
        self.takes: Collection[str] = ()

    def render(self, conversation: ChatTemplateInput) -> RenderedChat:
        """Return the prompt for a conversation, as text. Raises ChatTemplateError."""
        return RenderedChat(text=conversation.render(self._tokenizer))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text. Raises ValueError if the text cannot be encoded."""
        return self._tokenizer.encode(text, add_special=add_special)

    def decoder(self, *, skip_special: bool = True) -> Detokenizer:
        """Return an incremental decoder for one sequence of tokens.

        skip_special: whether to omit the text of special tokens.
        """
        return self._tokenizer.detokenizer(skip_special=skip_special)

    def answer(self, request: AnswerRequest) -> NativeAnswerFormat:
        """Return the AnswerFormat for a request. It creates the parsers of the answers."""
        reasoning: ReasoningUse | None = None
        if self._reasoning is not None:
            reasoning = ReasoningUse.of(
                self._reasoning,
                request.prompt,
                self._tokenizer,
                continues=request.continues,
                is_thought=request.is_thought,
            )
        return NativeAnswerFormat(request, self._calls, reasoning)

    def close(self) -> None:
        """Do nothing, because this format uses no processes."""

    def call_grammar(self, tools: Mapping[str, Mapping[str, Any]], *, is_single: bool) -> CallGrammar | None:
        """Return the grammar of an answer that calls tools. See ChatFormat.call_grammar()."""
        if self._calls is None:
            return None
        text = json.dumps(tools)
        make = self._kept_grammar if len(text) <= _KEPT_CHARACTERS else self._grammar
        return make(self._calls, text, is_single)

    def _grammar(self, calls: ToolFormat, tools: str, is_single: bool) -> CallGrammar:
        schemas = {
            name: without_annotations(normalised(schema, closes=True)[0]) for name, schema in json.loads(tools).items()
        }
        return calls.grammar(schemas, self._written, is_single)
