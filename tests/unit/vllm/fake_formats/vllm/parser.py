"""See the README."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PARTS = re.compile(r"think\[([^]]*)\]|call\[([^]]*)\]|([^tc]+|.)", re.DOTALL)


def hurt(text: str) -> None:
    """Kill this process if the text contains the words of the README."""
    once = re.search(r"ONCE\(([^)]*)\)", text)
    if once is not None and not Path(once[1]).exists():
        Path(once[1]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "CRASH" in text:
        os.kill(os.getpid(), signal.SIGKILL)


class Parser:
    def __init__(
        self, tokenizer: Any, tools: Any = None, *, chat_template_kwargs: Any = None, model_config: Any = None
    ) -> None:
        self._buffer = ""
        self._text = ""

    def adjust_request(self, request: Any) -> Any:
        return request

    def set_prompt_token_ids(self, prompt_token_ids: list[int]) -> None:
        assert prompt_token_ids

    def parse(
        self, model_output: str, request: Any, enable_auto_tools: bool, model_output_token_ids: list[int]
    ) -> tuple[str | None, str | None, list[Any]]:
        delta = self.parse_delta(model_output, model_output_token_ids, request, [], finished=True)
        return delta.reasoning, delta.content, [call.function for call in delta.tool_calls]

    def parse_delta(
        self, delta_text: str, delta_token_ids: list[int], request: Any, prompt_token_ids: list[int], *, finished: bool
    ) -> Any:
        self._text += delta_text
        hurt(self._text)
        if "BROKEN" in self._text:
            raise LookupError("no such construct")
        self._buffer += delta_text
        end = len(self._buffer)
        if not finished:
            opened = [at for at in (self._buffer.rfind("think"), self._buffer.rfind("call")) if at >= 0]
            partial = re.search(r"(t|th|thi|thin|c|ca|cal)$", self._buffer)
            opened += [partial.start()] if partial else []
            end = min([at for at in opened if "]" not in self._buffer[at:]], default=end)
        ready, self._buffer = self._buffer[:end], self._buffer[end:]
        found = SimpleNamespace(reasoning=None, content=None, tool_calls=[])
        for thought, name, text in _PARTS.findall(ready):
            found.reasoning = (found.reasoning or "") + thought if thought else found.reasoning
            found.content = (found.content or "") + text if text else found.content
            if name:
                id_ = f"id-of-{name}" if name != "sub" else None
                function = SimpleNamespace(id=id_, name=name, arguments='{"a": 1}')
                found.tool_calls.append(SimpleNamespace(id=id_, function=function))
        return found


class ParserManager:
    @classmethod
    def get_parser(
        cls,
        *,
        tool_parser_name: str | None = None,
        reasoning_parser_name: str | None = None,
        enable_auto_tools: bool = False,
        is_harmony: bool = False,
        tokenizer: Any = None,
    ) -> type[Parser] | None:
        return Parser if tool_parser_name or reasoning_parser_name else None
