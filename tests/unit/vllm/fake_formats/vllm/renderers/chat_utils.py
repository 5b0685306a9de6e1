"""See the README."""

from __future__ import annotations

from vllm.config import ModelConfig


def get_tool_call_id_type(config: ModelConfig) -> str:
    return "random"
