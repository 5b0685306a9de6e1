"""Tool calls: what the model is told of the tools, and its answer read back as calls.

Each parser reads one way in which models write calls; `parser_of` finds the one that a chat template asks for.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_runtime.server.tools.forced import NamedParser, RequiredParser
from megatron_runtime.server.tools.hermes import HermesParser
from megatron_runtime.server.tools.llama3_json import Llama3JsonParser
from megatron_runtime.server.tools.mistral import MistralParser
from megatron_runtime.server.tools.parser import CallArguments, CallBegin, Event, Text, ToolParser
from megatron_runtime.server.tools.pythonic import PythonicParser

__all__ = [
    "PARSERS",
    "CallArguments",
    "CallBegin",
    "Event",
    "NamedParser",
    "RequiredParser",
    "Text",
    "ToolParser",
    "parser_of",
]

PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters":', "llama3_json"),
)
"""Text of a chat template, and the format that it teaches; the first that is there counts."""


def parser_of(template: str | None) -> type[ToolParser]:
    """Return the parser for the calls that a chat template asks for; Hermes' where it says nothing of calls."""
    name = next((name for sign, name in _SIGNS if sign in (template or "")), "hermes")
    return PARSERS[name]
