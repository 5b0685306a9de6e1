"""Tools for models whose chat template knows none: described in the system message, calls and results written as text.

The format is Hermes', so that `HermesParser` reads what the model answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_runtime.server.tools.hermes import CLOSE, OPEN

_INSTRUCTIONS = (
    "You can call these functions, given as JSON between <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    f"To call one, write its name and its arguments as one JSON object between {OPEN}{CLOSE}:\n"
    f'{OPEN}\n{{{{"name": "function-name", "arguments": {{{{"argument": "value"}}}}}}}}\n{CLOSE}'
)


def as_plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return new messages of the roles system, user and assistant alone, all of them text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [
        f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in message.get("tool_calls", ())
    ]
    return {**kept, "content": "\n".join([kept["content"], *calls] if kept["content"] else calls or [""])}
