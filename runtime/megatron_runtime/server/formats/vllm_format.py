"""`ChatFormat` with vLLM's renderer and parsers, for servers whose engines run vLLM.

Decision 033 gives the reasons. vLLM renders and tokenizes conversations like vLLM's own server, and vLLM's parsers
parse the answers. If vLLM lacks a parser that the model needs, this server's parsers parse the answers. This server
always provides the grammars of tool calls and the limits on reasoning tokens. It also chooses the form in which a
conversation is rendered (see conversation.py).
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_runtime.protocol.answer_formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from megatron_runtime.protocol.media import Media, MediaItem, media_digest
from megatron_runtime.server.formats.call_grammars import CallGrammar
from megatron_runtime.server.formats.chat_format import (
    AnswerParserError,
    AnswerRequest,
    AsyncAnswerParser,
    ChatFormat,
    NativeAnswerFormat,
    NativeChatFormat,
    RenderedChat,
)
from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.formats.reasoning import FORMATS, AnswerParser, ReasoningUse
from megatron_runtime.server.formats.recognition import CALL, opens_reasoning, written_calls
from megatron_runtime.server.formats.vllm_processes import UnusableError, VllmProcesses
from megatron_runtime.tokenization import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateRejectedError,
    ChatTemplateUnusableError,
    Detokenizer,
    Tokenizer,
    tokenizer_location,
)

logger = logging.getLogger(__name__)


async def chat_format_of(
    tokenizer: Tokenizer, *, backend: str, model: str, tool_call_parser: str, reasoning_parser: str
) -> ChatFormat:
    """Return the chat format of a server, and log its name.

    backend: backend of the engines. With "vllm", vLLM's renderer and parsers are used if vLLM is installed and
             supports the model. Otherwise, this server's renderer and parsers are used.
    model:   reference of the model.
    tool_call_parser, reasoning_parser: "auto", "none", the name of a format of this server or, with the backend "vllm",
        the name of a vLLM parser.

    Raises ValueError for an unknown name.
    """
    if backend == "vllm":
        native = NativeChatFormat(
            tokenizer,
            tool_call_parser=tool_call_parser if tool_call_parser in TOOL_CALL_PARSERS else "auto",
            reasoning_parser=reasoning_parser if reasoning_parser in REASONING_PARSERS else "auto",
        )
        processes: VllmProcesses | None = None
        try:
            directory = _directory(model)
            template, tool_template = tokenizer.chat_template, tokenizer.template_for([{}])
            setup = {
                "directory": str(directory),
                "tools": tool_call_parser,
                "reasoning": reasoning_parser,
                "tool_format": native.tool_format,
                "reasoning_format": native.reasoning_format,
                "is_open": opens_reasoning(template, FORMATS.get(native.reasoning_format or "")),
                "written": [] if tool_template is None else list(written_calls(tool_template, [CALL])),
                "call": CALL,
            }
            processes = VllmProcesses(setup)
            parsers = await processes.start()
        except UnusableError as error:
            logger.warning("vLLM's renderer and parsers are not used, the formats of this server are: %s", error)
        except BaseException:
            if processes is not None:
                processes.close()
            raise
        else:
            return VllmChatFormat(tokenizer, native, processes, parsers)
    return NativeChatFormat(tokenizer, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)


def _directory(model: str) -> Path:
    """Return the local directory of a model. Raises UnusableError if vLLM cannot read this reference."""
    if importlib.util.find_spec("vllm") is None:
        raise UnusableError("the package vllm is not installed")
    directory = tokenizer_location(model)
    if not directory.is_dir() or not (directory / "config.json").exists():
        raise UnusableError(f"{directory} is not a directory with a config.json, which vLLM needs")
    return directory


class VllmChatFormat:
    """A ChatFormat with vLLM's renderer and parsers in child processes, and this server's tokenizer and grammars.

    native:    this server's format for the same model.
    processes: vLLM's processes, which have been started.
    parsers:   result of VllmProcesses.start().
    """

    def __init__(
        self, tokenizer: Tokenizer, native: NativeChatFormat, processes: VllmProcesses, parsers: Mapping[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._native = native
        self._processes = processes
        self._tools: str | None = parsers["tools"]
        self._reasoning: str | None = parsers["reasoning"]
        self._skips_special: tuple[bool, bool] = tuple(parsers["skips_special"])
        self._numbers_calls: bool = parsers["numbers_calls"]
        # Only one implementation parses an answer. If vLLM lacks a parser that the model needs, NativeChatFormat parses
        # the whole answer.
        self._reads = (self._tools is not None or native.tool_format is None) and (
            self._reasoning is not None or native.reasoning_format is None
        )
        self.offers_tools = native.offers_tools
        self.takes: Collection[str] = parsers["takes"]
        self.tool_format = _name(self._tools) if self._reads else native.tool_format
        self.reasoning_format = _name(self._reasoning) if self._reads else native.reasoning_format
        self._markers = tuple(tokenizer.token_bytes(token).decode() for token in sorted(tokenizer.special_ids))
        logger.info(
            "conversations are rendered by vLLM; tool calls: format %s; reasoning: format %s",
            self.tool_format or "unknown",
            self.reasoning_format or "none",
        )

    def render(self, conversation: ChatTemplateInput) -> RenderedChat:
        """Return the prompt for a conversation as tokens, or as text if the prompt ends within a message.

        Raises ChatTemplateError.
        """
        rendering = _Rendering(self._tokenizer, self._processes, conversation)
        text = conversation.render(rendering)
        return rendering.rendered.get(text) or RenderedChat(text=text)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the tokens of a text. Raises ValueError if the text cannot be encoded."""
        return self._native.encode(text, add_special=add_special)

    def decoder(self, *, skip_special: bool = True) -> Detokenizer:
        """Return an incremental decoder for one sequence of tokens.

        skip_special: whether to omit the text of special tokens.
        """
        return self._native.decoder(skip_special=skip_special)

    def answer(self, request: AnswerRequest) -> NativeAnswerFormat | VllmAnswerFormat:
        """Return the structure of the answers to a request."""
        native = self._native.answer(request)
        if self._reads and request.is_calls_or_json:
            # vLLM's parsers of some formats hold back or drop JSON that is not a tool call.
            return VllmAnswerFormat(request, native, None, markers=native.markers, numbers_calls=self._numbers_calls)
        may_call = bool(request.tools) and request.forced is None
        is_text = self._reasoning is None and not may_call
        if not self._reads or (is_text and request.forced is None):
            return native
        skips_special = is_text or self._skips_special[may_call and self._tools is not None]
        return VllmAnswerFormat(
            request,
            native,
            None if is_text else self._processes,
            markers=() if skips_special else self._markers,
            numbers_calls=self._numbers_calls,
        )

    def call_grammar(self, tools: Mapping[str, Mapping[str, Any]], *, is_single: bool) -> CallGrammar | None:
        """Return the grammar of an answer that calls tools. See ChatFormat.call_grammar()."""
        return self._native.call_grammar(tools, is_single=is_single)

    def close(self) -> None:
        """Stop vLLM's processes. Idempotent."""
        self._processes.close()


def _name(parser: str | None) -> str | None:
    """Return the name of a vLLM parser for /v1/models and the log; None if `parser` is None."""
    return None if parser is None else f"vllm:{parser}"


@dataclass(frozen=True, slots=True)
class VllmAnswerFormat:
    """The AnswerFormat of answers that vLLM's parsers parse.

    If a grammar forces a tool call, the tool call is JSON, which this server's parser parses after the reasoning. If a
    grammar restricts the answer to tool calls or JSON, this server's parser parses the whole answer.

    processes:     vLLM's processes; None: the answer needs no vLLM parser.
    markers:       special tokens that the parsers need as text.
    numbers_calls: whether the id of a tool call contains its number in the conversation, as in Kimi's format.
    """

    request: AnswerRequest
    native: NativeAnswerFormat
    processes: VllmProcesses | None
    markers: tuple[str, ...]
    numbers_calls: bool

    @property
    def reasoning(self) -> ReasoningUse | None:
        """The tokens that mark the reasoning; None: the model has no known markers."""
        return self.native.reasoning

    def parser(self) -> AnswerParser | None:
        """Return a parser for the text that vLLM's parser extracts, or None if this text needs no further parsing."""
        return self.native.parser() if self.processes is None else self.native.forced_parser()

    def async_parser(self) -> AsyncAnswerParser | None:
        """Return a new vLLM parser for one choice, or None if the answer needs no vLLM parser."""
        if self.processes is None:
            return None
        tools = [] if self.request.forced is not None else self.request.tools.items()
        request = {
            "tools": [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools],
            "variables": self.request.variables,
            "earlier_calls": self.request.earlier_calls,
        }
        return self.processes.answer(request, self.request.prompt)

    def call_id(self, name: str, number: int) -> str:
        """Return the id that vLLM's server would assign to a tool call if the parser has assigned no id."""
        if self.numbers_calls:
            return f"functions.{name}:{self.request.earlier_calls + number}"
        return f"chatcmpl-tool-{secrets.token_hex(8)}"


class _Rendering:
    """Renders a conversation, in each of the forms that conversation.py tries, with vLLM.

    rendered: tokens and media of each rendered prompt, by the text of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, processes: VllmProcesses, conversation: ChatTemplateInput) -> None:
        self.rendered: dict[str, RenderedChat] = {}
        self._tokenizer = tokenizer
        self._processes = processes
        self._media = conversation.media
        self._continues = conversation.continues and bool(conversation.media)

    def template_for(self, tools: Sequence[Any] | None) -> ChatTemplate | None:
        return self._tokenizer.template_for(tools)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        conversation = {
            "messages": list(messages),
            "tools": tools,
            "variables": variables or {},
            "continues": self._continues,
        }
        try:
            reply = self._processes.render(conversation, self._media)
        except AnswerParserError as error:
            if self._media:
                # Most likely the decoded data are too large, because workers have limits for memory and time.
                raise ChatTemplateError(f"the images, audio or video cannot be read: {error}") from error
            raise ChatTemplateUnusableError(f"the conversation cannot be rendered: {error}") from error
        if (reason := reply.get("rejected")) is not None:
            raise ChatTemplateRejectedError(f"the conversation cannot be rendered: {reason}")
        tokens = array("i")
        tokens.frombytes(reply["tokens"])
        text: str = reply["text"]
        media = None
        if self._media:
            items = [
                MediaItem(kind, media_digest(kind, data), offset, length, data)
                for (kind, data), (offset, length) in zip(self._media, reply["spans"], strict=True)
            ]
            media = Media(reply["template"], tuple(sorted(items, key=lambda item: item.offset)))
        self.rendered[text] = RenderedChat(tokens=tokens.tolist(), media=media)
        return text
