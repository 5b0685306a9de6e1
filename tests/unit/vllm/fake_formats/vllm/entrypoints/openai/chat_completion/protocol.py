"""See the README."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class ChatCompletionRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    tool_choice: str = "none"
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> ChatCompletionRequest:
        assert not (self.add_generation_prompt and self.continue_final_message)
        return self
