"""See the README."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers


def get_tokenizer(tokenizer_name: str) -> Any:
    backend = tokenizers.Tokenizer.from_file(str(Path(tokenizer_name) / "vocab.json"))
    return SimpleNamespace(backend_tokenizer=backend, eos_token="<|im_end|>", chat_template="{{ messages[0].content }}")
