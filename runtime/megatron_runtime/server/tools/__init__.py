"""Tool calls: the description of tools for the model, and its answer parsed into calls."""

from megatron_runtime.server.tools.parsers import (
    PARSERS,
    CallArguments,
    CallBegin,
    Event,
    NamedParser,
    RequiredParser,
    Text,
    ToolParser,
    parser_of,
    without_tool_roles,
)

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
    "without_tool_roles",
]
