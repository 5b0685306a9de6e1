"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationInfo, field_validator

from megatron_runtime.server.schema.bounds import (
    MAX_MESSAGES,
    MAX_TEMPLATE_VARIABLES,
    JsonValue,
    Name,
    TokenIds,
)
from megatron_runtime.server.schema.chat import ChatMessage
from megatron_runtime.server.schema.tools import MAX_TOOLS, Tool


class TokenizeRequest(BaseModel):
    """Either `prompt`, or `messages` with what belongs to them.

    add_special_tokens: put what the model expects before a prompt, such as its begin-of-sequence token.
    return_token_strs:  answer with the text of each token too.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, validate_default=True)
    ] = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    @field_validator("messages")
    @classmethod
    def _one_of_two(cls, value: Any, info: ValidationInfo) -> Any:
        if "prompt" in info.data and (value is None) == (info.data["prompt"] is None):
            raise ValueError("give either prompt or messages")
        return value


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: Name | None = None
    tokens: TokenIds
