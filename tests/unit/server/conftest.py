"""The true tokenizer, loaded once: everything the server tests say about text holds for a real vocabulary."""

from __future__ import annotations

import pytest

from megatron_runtime.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m")
