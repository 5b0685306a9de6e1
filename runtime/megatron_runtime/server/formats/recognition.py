"""Detects the formats of a model's tool calls and reasoning from its chat template.

The template renders a conversation with one tool call. The model has the format whose parser detects this tool call in
the rendered text. If no tool call is in the rendered text, the template's source is searched for the texts that begin a
tool call, because the template may describe the format to the model. Each server process detects the formats once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.formats.reasoning import FORMATS, ReasoningFormat
from megatron_runtime.server.formats.table import PARSERS, ToolFormat
from megatron_runtime.tokenization import ChatTemplate, ChatTemplateError, ChatTemplateRejectedError

logger = logging.getLogger(__name__)

_TOOL = "lookup_place"
_ARGUMENTS = {"place": "Rome"}
CALL: tuple[str, Mapping[str, Any]] = (_TOOL, _ARGUMENTS)
"""The tool call in the conversation that is rendered to detect formats."""
TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Look up a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Its name."}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
)
"""The tools in the conversation that is rendered to detect formats."""
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "Where is Rome?"}
_THOUGHT: Mapping[str, Any] = {
    "role": "assistant",
    "content": "In Italy.",
    **dict.fromkeys(("reasoning_content", "reasoning"), "It is a city."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """The formats of a model.

    tools:     format of the tool calls; None: unknown, or tools are not offered.
    offers_tools: whether requests can have tools. If the format is unknown, the server parses only tool calls that the
                  request forces. It returns all other tool calls as text.
    reasoning: format of the reasoning; None: reasoning is part of the text.
    """

    tools: ToolFormat | None
    offers_tools: bool = True
    reasoning: ReasoningFormat | None = None

    @property
    def reasoning_name(self) -> str | None:
        """The name of the reasoning format; None if `reasoning` is None."""
        return next((name for name, format_ in FORMATS.items() if format_ is self.reasoning), None)


def recognised(
    tool_call_parser: str,
    reasoning_parser: str,
    *,
    template: ChatTemplate | None,
    tool_template: ChatTemplate | None,
) -> Recognised:
    """Return the formats that the server settings and the chat template determine, and log their names.

    tool_call_parser: a name in PARSERS, "none" for no tools, or "auto" to detect the format.
    reasoning_parser: a name in FORMATS, "none" for no reasoning, or "auto" to detect the format.
    template:         the chat template for requests without tools.
    tool_template:    the chat template for requests with tools.

    Raises ValueError for an unknown name.
    """
    for what, name, names in (
        ("tool-call parser", tool_call_parser, PARSERS),
        ("reasoning parser", reasoning_parser, FORMATS),
    ):
        if name not in ("auto", "none", *names):
            raise ValueError(f"there is no {what} {name!r}: use auto, none or one of {', '.join(names)}")
    tools, how = PARSERS.get(tool_call_parser), "set by --tool-call-parser"
    if tool_call_parser == "auto":
        tools, how = tool_format_of(tool_template)
    reasoning = FORMATS.get(reasoning_parser)
    if reasoning_parser == "auto":
        reasoning = reasoning_format_of(template)
    result = Recognised(tools=tools, offers_tools=tool_call_parser != "none", reasoning=reasoning)
    if tools is None and result.offers_tools:
        logger.warning("tool calls: unknown format, %s; calls are returned as text: set --tool-call-parser", how)
    else:
        logger.info("tool calls: format %s, %s", "none" if tools is None else tools.name, how)
    logger.info("reasoning: format %s", result.reasoning_name or "none")
    return result


def tool_format_of(template: ChatTemplate | None) -> tuple[ToolFormat | None, str]:
    """Return the format of the tool calls that a chat template writes or describes, and how the format was detected.

    The format is None if the template's tool calls have an unknown format.
    """
    if template is None:
        return PARSERS["hermes"], "the model has no chat template"
    source = template.source
    for format_ in PARSERS.values():
        if format_.decides and any(hint in source for hint in format_.hints):
            return format_, "described by the chat template"
    writes = False
    for text in written_calls(template, [CALL]):
        writes = True
        for format_ in PARSERS.values():
            if format_.reads(text, _TOOL, _ARGUMENTS):
                return format_, "written by the chat template"
    describes = "tools" in template.variables
    if writes and describes:
        return None, "the chat template writes calls in no known format"
    for texts_of in (lambda format_: format_.hints, lambda format_: format_.starts):
        for format_ in PARSERS.values():
            if any(text in source for text in texts_of(format_)):
                return format_, "named by the chat template"
    if not describes:
        return PARSERS["hermes"], "the chat template has no support for tools, so the server describes them"
    return None, "the chat template shows no calls"


def reasoning_format_of(template: ChatTemplate | None) -> ReasoningFormat | None:
    """Return the format whose markers a chat template contains or writes, or None if there are no known markers."""
    if template is None:
        return None
    shown = template.source
    with contextlib.suppress(ChatTemplateError):
        shown += template.render([_QUESTION, _THOUGHT, _QUESTION])
    return next((format_ for format_ in FORMATS.values() if all(marker in shown for marker in format_.markers)), None)


def opens_reasoning(template: ChatTemplate | None, format_: ReasoningFormat | None) -> bool:
    """Return whether a prompt from the chat template ends within the reasoning of the answer."""
    if template is None or format_ is None or not format_.opening:
        return False
    try:
        return template.render([_QUESTION]).rstrip().endswith(format_.opening.rstrip())
    except ChatTemplateError:
        return False


def written_calls(
    template: ChatTemplate,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    tools: Sequence[Any] = TOOLS,
    text: str = "",
) -> Iterator[str]:
    """Yield the texts that a template writes for an answer with the tool calls `calls`.

    The message has several forms, because some templates read arguments as an object, others read them as JSON, and
    some write tool calls only for messages without text. For each form that the template accepts, the function yields
    two texts: the text after the prompt of the answer, and the text after the user's message. They differ if the
    template writes the beginning of an answer in the history differently from the end of a prompt.
    """
    for arguments_of in (lambda value: value, lambda value: json.dumps(value, ensure_ascii=False)):
        for content in dict.fromkeys((text, text or None)):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {
                        "id": f"call0000{number}",
                        "type": "function",
                        "function": {"name": name, "arguments": arguments_of(arguments)},
                    }
                    for number, (name, arguments) in enumerate(calls)
                ],
            }
            try:
                whole = template.render([_QUESTION, message], tools=tools, variables={"add_generation_prompt": False})
                for begins in (True, False):
                    prompt = template.render([_QUESTION], tools=tools, variables={"add_generation_prompt": begins})
                    prefix = _common_prefix(prompt, whole)
                    if prefix != prompt and ">" not in prefix[prefix.rfind("<") :]:
                        prefix = prefix[: prefix.rfind("<")]  # the two texts share the first characters of a marker
                    if calls[0][0] in (answer := whole[len(prefix) :]):
                        yield answer
            except ChatTemplateRejectedError:
                continue
            except ChatTemplateError:
                return  # the template exceeds the limits for rendering


def _common_prefix(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    end = next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
    return first[:end]
