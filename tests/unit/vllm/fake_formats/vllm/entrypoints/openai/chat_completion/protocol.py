"""See the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ChatCompletionRequest:
    def __init__(self, **fields: Any) -> None:
        self.messages: list[Mapping[str, Any]] = fields.pop("messages")
        self.tools: list[Any] | None = fields.pop("tools", None)
        self.tool_choice: str = fields.pop("tool_choice", "none")
        self.chat_template_kwargs: Mapping[str, Any] | None = fields.pop("chat_template_kwargs")
        self.add_generation_prompt: bool = fields.pop("add_generation_prompt", True)
        self.continue_final_message: bool = fields.pop("continue_final_message", False)
        assert not (self.add_generation_prompt and self.continue_final_message)
        self.skip_special_tokens = True
        assert not fields, fields

    @classmethod
    def model_validate(cls, values: Mapping[str, Any]) -> ChatCompletionRequest:
        return cls(**values)
