"""Renders conversations to text through the model's chat template.

Some templates do not support tools, require that user and assistant alternate, or reject system messages. Some expect
the arguments of a tool call as an object, or accept only call ids of nine characters. This module therefore converts a
conversation to several forms, and renders the first form that the template accepts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.tokenization import ChatTemplate, ChatTemplateError, ChatTemplateRejectedError

THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which chat templates read a message's reasoning: for Qwen and DeepSeek, for gpt-oss, and for Gemma."""

Message: TypeAlias = Mapping[str, Any]

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"

_ID_CHARACTERS = 9
"""Number of letters and digits in a call id. Mistral's templates accept only ids of this length."""
_TOOL_INSTRUCTIONS = (
    "You can call these functions, given as JSON between <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and its arguments as one JSON object between {_CALL_OPEN}{_CALL_CLOSE}:"
    f'\n{_CALL_OPEN}\n{{{{"name": "function-name", "arguments": {{{{"argument": "value"}}}}}}}}\n'
    f"{_CALL_CLOSE}"
)
"""A description of tools in the Hermes format, for chat templates that do not support tools."""
_TRIMMED = "\n\t\n"
"""White space after the mark that `_unfinished` adds to a message. It is missing in the prompt if the template trims
messages.
"""


class Renderer(Protocol):
    """Renders a conversation through the model's chat template. A Tokenizer is a Renderer."""

    def template_for(self, tools: Sequence[Any] | None) -> ChatTemplate | None:
        """Return the chat template for a request with these tools, or None if the model has no chat template."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text for a conversation. Raises ChatTemplateError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """One way to write a conversation as messages and tools for a chat template.

    has_all_system_text: whether the prompt must contain the text of every system message. Some templates drop system
                         messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    has_all_system_text: bool = False

    def is_complete(self, text: str) -> bool:
        """Return whether the prompt `text` has all the text that this form requires.

        If has_all_system_text is set, the prompt must contain the text of every system message.
        """
        system = (message["content"] for message in self.messages if message["role"] == "system")
        texts = [part["text"] for content in system for part in _parts(content) if part["type"] == "text"]
        return not self.has_all_system_text or all(part.strip() in text for part in texts)


@dataclass(frozen=True, slots=True)
class ChatTemplateInput:
    """The messages of a request in the form that chat templates read, and the other inputs of the prompt.

    tools:     functions that the model can call, as JSON.
    variables: variables of the chat template.
    continues: whether the answer continues the last message. If so, the prompt ends within this message.
    media:     kind (one of protocol.media.KINDS) and file of each image, audio and video. The content of a message is a
               text or a list of parts. A part is {"type": "text", "text"}, or {"type": "media", "number"}, whose number
               is an index into `media`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    continues: bool = False
    media: Sequence[tuple[str, bytes]] = ()

    def render(self, renderer: Renderer) -> str:
        """Return the prompt text for this conversation.

        Raises ChatTemplateError if the template rejects all forms of the messages, or if the last message cannot be
        continued.
        """
        if self.continues and not self.media:  # a renderer of media ends the prompt at the last message itself
            return self._unfinished(renderer)
        rejection: ChatTemplateRejectedError | None = None
        accepted: str | None = None
        for form in self._forms(renderer):
            try:
                text = renderer.render_chat(form.messages, tools=form.tools, variables=self.variables)
            except ChatTemplateRejectedError as error:
                rejection = rejection or error
            else:
                if form.is_complete(text):
                    return text
                accepted = accepted or text  # the text may be complete but escaped, for example in JSON
        if accepted is None:
            assert rejection is not None
            raise rejection
        return accepted

    def _unfinished(self, renderer: Renderer) -> str:
        """Return the prompt up to the end of the last message's text, without the tokens that end the message.

        To locate the end of the text, this method renders the message with a mark after its text. If the message has no
        text yet, the mark is after its reasoning.
        """
        *earlier, last = self.messages
        if last.get("tool_calls"):
            raise ChatTemplateError("the last message has tool_calls: a message with calls cannot be continued")
        mark = f"end-{secrets.token_hex(8)}"
        is_thought = not last["content"] and THOUGHT_FIELDS[0] in last
        fields = {name: last[name] + mark + _TRIMMED for name in (THOUGHT_FIELDS if is_thought else ("content",))}
        variables = {**self.variables, "add_generation_prompt": False}
        marked = replace(self, messages=[*earlier, {**last, **fields}], variables=variables, continues=False)
        before, separator, after = marked.render(renderer).rpartition(mark)
        if not separator:
            raise ChatTemplateError(
                "the model's chat template leaves the text of the last message out: it cannot be continued"
            )
        return before if after.startswith(_TRIMMED) else before.rstrip()

    def _forms(self, renderer: Renderer) -> Iterator[_Form]:
        template = renderer.template_for(self.tools)
        if template is None or "tools" in template.variables:
            yield _Form(messages=self.messages, tools=self.tools or None)
            if any(message.get("tool_calls") for message in self.messages):
                yield _Form(messages=[_strict(message) for message in self.messages], tools=self.tools or None)
            if _has_late_system(self.messages):
                late = [_strict(message) for message in _with_first_system(self.messages)]
                yield _Form(messages=late, tools=self.tools or None)
            return
        plain = [_without_calls(message) for message in self.messages]
        if not self.tools and plain == self.messages:
            yield _Form(messages=plain, tools=None)  # if the template rejects this form too, the client gets this error
            if _has_late_system(plain):
                yield _Form(messages=_merged(_with_first_system(plain)), tools=None)
            return
        if self.tools:
            described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
            instructions = _TOOL_INSTRUCTIONS.format(tools=described)
            at = 1 if plain and plain[0]["role"] == "system" else 0
            plain.insert(at, {"role": "system", "content": instructions})
        yield _Form(messages=_merged(plain), tools=None, has_all_system_text=True)
        yield _Form(messages=_merged(_without_system(plain)), tools=None)


def _strict(message: Message) -> Message:
    """Return the message with an object as the arguments of each tool call, and with call ids of nine characters."""
    strict = dict(message)
    if "tool_call_id" in strict:
        strict["tool_call_id"] = _short_id(strict["tool_call_id"])
    if "tool_calls" in strict:
        strict["tool_calls"] = [
            {**call, "id": _short_id(call["id"]), "function": _with_object(call["function"])}
            for call in strict["tool_calls"]
        ]
    return strict


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function["arguments"]
    return function if isinstance(arguments, dict) else {**function, "arguments": {"arguments": arguments}}


def _short_id(id_: str) -> str:
    characters = [character for character in id_ if character.isascii() and character.isalnum()]
    return "".join(characters[-_ID_CHARACTERS:]).rjust(_ID_CHARACTERS, "0")


def _without_calls(message: Message) -> dict[str, Any]:
    """Return the message with its tool calls or its tool result written as text.

    The role of the returned message is system, user or assistant.
    """
    if message["role"] == "tool":
        return {"role": "user", "content": _joined(["<tool_response>", message["content"], "</tool_response>"], "\n")}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{_CALL_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CALL_CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    return {**kept, "content": _joined([kept["content"], *calls] if kept["content"] else calls or [""], "\n")}


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _joined(contents: Sequence[Any], separator: str) -> Any:
    """Join the contents of messages. Return a text if all contents are texts, otherwise a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(contents)
    return [part for content in contents for part in _parts(content)]


def _without_system(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with each system message converted to a user message."""
    for message in messages:
        yield {**message, "role": "user"} if message["role"] == "system" else message


def _has_late_system(messages: Sequence[Message]) -> bool:
    """Return whether a system message follows another message. Some templates reject this."""
    return any(message["role"] == "system" for message in messages[1:])


def _with_first_system(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the first message unchanged, and the others with each system message converted to a user message."""
    yield messages[0]
    yield from _without_system(messages[1:])


def _merged(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the messages, with adjacent messages of the same role joined, so that user and assistant alternate."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if not merged or merged[-1]["role"] != message["role"]:
            merged.append(dict(message))
            continue
        last = merged[-1]
        for name in ("content", *THOUGHT_FIELDS):
            texts = [each[name] for each in (last, message) if each.get(name)]
            if texts:
                last[name] = _joined(texts, "\n\n")
    return merged
