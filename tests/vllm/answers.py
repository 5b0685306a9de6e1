"""Answers as the server reads them, and the renderer and parsers that vLLM's own server has for them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Event, Reasoning, Text
from megatron_runtime.tokenization import Tokenizer

TOOLS: Mapping[str, Any] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
}
OFFERED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]


def vllm_renderer(model: Path, *, tools: str, reasoning: str) -> Any:
    """Return vLLM's renderer, tokenizer and class of parsers, as its own server makes them."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    config = AsyncEngineArgs(model=str(model)).create_model_config()
    return OnlineRenderer(
        config,
        renderer_from_config(VllmConfig(model_config=config)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser=tools,
        reasoning_parser=reasoning,
    )


def pieces_of(tokenizer: Tokenizer, answer: str, *, shows_special: bool) -> list[tuple[str, list[int]]]:
    """Return the text and the token of each piece of a stream. shows_special: special tokens have a text."""
    tokens = tokenizer.encode(answer, add_special=False)
    detokenizer = tokenizer.detokenizer(skip_special=not shows_special)
    return [(detokenizer.feed([token]), [token]) for token in tokens]


def joined(events: Sequence[Event]) -> dict[str, Any]:
    """Return the answer that a client collects."""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    return {
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "text": "".join(event.text for event in events if isinstance(event, Text)),
        "calls": [(name, json.loads(arguments)) for name, arguments in calls],
    }


async def read(parser: Any, pieces: Sequence[tuple[str, list[int]]], *, kill_at: Sequence[int] = ()) -> list[Event]:
    """Return the events of a stream, without the random ids of calls.

    kill_at: places before which the worker of the parser is killed.
    """
    events: list[Event] = []
    for place, (text, tokens) in enumerate(pieces):
        if place in kill_at:
            os.kill(parser.worker.pid, signal.SIGKILL)
        events += await parser.feed(text, tokens, is_last=place == len(pieces) - 1)
    parser.close()
    return [CallBegin(event.name) if isinstance(event, CallBegin) else event for event in events]
