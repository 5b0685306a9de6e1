"""A description of tools for chat templates without support for them, in the format of Hermes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.server.tools import HermesParser

_INSTRUCTIONS = (
    "You can call these functions, given as JSON between <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and its arguments as one JSON object between {HermesParser.OPEN}{HermesParser.CLOSE}:"
    f'\n{HermesParser.OPEN}\n{{{{"name": "function-name", "arguments": {{{{"argument": "value"}}}}}}}}\n'
    f"{HermesParser.CLOSE}"
)


def without_tool_roles(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return a conversation for a chat template without support for tools: the Hermes format, written as text.

    The system message describes the tools; calls and results become text. Only the roles system, user and assistant
    remain.
    """
    plain = [_plain_message(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{HermesParser.OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HermesParser.CLOSE}"
        for call in message.get("tool_calls", ())
    ]
    return {**kept, "content": "\n".join([kept["content"], *calls] if kept["content"] else calls or [""])}
