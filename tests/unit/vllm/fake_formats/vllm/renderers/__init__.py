"""See the README."""

from __future__ import annotations

from vllm.config import VllmConfig


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Renderer:
    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()


def renderer_from_config(config: VllmConfig) -> Renderer:
    return Renderer()
