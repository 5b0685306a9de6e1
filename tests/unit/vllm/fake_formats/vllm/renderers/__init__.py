"""See the README."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig

PLACEHOLDER = 26
"""Token of an item before and after it is expanded."""


class _Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class BaseRenderer:
    def __init__(self, config: VllmConfig) -> None:
        takes = config.model_config.hf_config.takes
        limits = dict.fromkeys(takes, 4)
        self.mm_processor = SimpleNamespace(info=SimpleNamespace(allowed_mm_limits=limits)) if takes else None

    def get_tokenizer(self) -> _Tokenizer:
        return _Tokenizer()

    async def process_for_engine_async(self, prompt: dict[str, Any], arrival_time: float) -> dict[str, Any]:
        tokens: list[int] = []
        found: dict[str, list[SimpleNamespace]] = {}
        items = iter(prompt["items"])
        for token in prompt["prompt_token_ids"]:
            if token != PLACEHOLDER:
                tokens.append(token)
                continue
            modality, url = next(items)
            length = _length(base64.b64decode(url.partition(",")[2]))
            found.setdefault(modality, []).append(SimpleNamespace(offset=len(tokens), length=length))
            tokens += [PLACEHOLDER] * length
        return {"prompt": prompt["prompt"], "prompt_token_ids": tokens, "mm_placeholders": found}


def _length(data: bytes) -> int:
    """Return the number of tokens of a file."""
    if b"BOMB" in data:
        bytearray(1 << 40)
    if not data.startswith(b"MEDIA"):
        raise ValueError("cannot identify the file")
    return data[5]


def renderer_from_config(config: VllmConfig) -> BaseRenderer:
    return BaseRenderer(config)
