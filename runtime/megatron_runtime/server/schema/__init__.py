"""Requests as the OpenAI API defines them, and what this server adds or does not offer.

A field that would change the answer and is not offered is refused by name; one that only annotates is accepted.
"""

from megatron_runtime.server.schema.chat import ChatMessage, ChatRequest
from megatron_runtime.server.schema.common import GenerationRequest
from megatron_runtime.server.schema.completion import CompletionRequest
from megatron_runtime.server.schema.tokens import DetokenizeRequest, TokenizeRequest
from megatron_runtime.server.schema.tools import Tool

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "TokenizeRequest",
    "Tool",
]
