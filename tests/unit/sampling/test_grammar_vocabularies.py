"""Structured output with vocabularies that begin every text with a space, as those of Llama 2 and Mistral do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from vocabularies import DECODERS, sentencepiece_like

from megatron_runtime.sampling.structured_output import GrammarCompiler
from megatron_runtime.tokenization import Tokenizer

CHOICES = ["the capital", "Paris is", "東京."]
SCHEMA = {"type": "object", "properties": {"cat": {"enum": CHOICES}}, "required": ["cat"]}


STRUCTURES: list[dict[str, Any]] = [{"type": "choice", "value": CHOICES}, {"type": "json_schema", "value": SCHEMA}]
CASES = [(decoder, structure) for decoder in DECODERS for structure in STRUCTURES]
CASES.remove(("by window", STRUCTURES[1]))  # this vocabulary has no braces


@pytest.mark.parametrize(("decoder", "structure"), CASES)
def test_every_path_of_allowed_tokens_is_an_answer(decoder: str, structure: dict[str, Any]) -> None:
    """The compiler forces text that has one continuation. Its tokens must be exactly this text, without the space."""
    tokenizer = Tokenizer(sentencepiece_like(decoder), eos_ids=[2])
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)
    before, random = tokenizer.encode("of", add_special=False), np.random.default_rng(0)
    for _ in range(12):
        state, ids = compiler.begin(structure), list[int]()
        while not state.is_complete:
            mask = state.allowed()
            assert mask is not None
            bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            ids.append(int(random.choice(bits)))
            state.accept(ids[-1])
        assert state.failure is None
        text = tokenizer.decode([id_ for id_ in ids if id_ != 2], after=before)
        assert (json.loads(text)["cat"] if structure["type"] == "json_schema" else text) in CHOICES
    compiler.close()
