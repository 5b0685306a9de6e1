"""Models without tokenizer.json: the tokenizer is vLLM's, in servers and engines."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.formats.vllm_format import VllmChatFormat, chat_format_of
from megatron_runtime.tokenization import load_tokenizer

from .conftest import has_formats

pytestmark = pytest.mark.timeout(900)

TEXTS = ("The quick brown fox", "naïve café 🦙 東京\n\n  x = 1", " <s>[INST] Hi[/INST]", "مرحبا\tb\r\n")
CONFIG = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(directory: Path, vocabulary: str, **settings: Any) -> Path:
    """Write a model without weights. vocabulary: of mistral_common."""
    directory.mkdir()
    name = "tekken.json" if vocabulary.startswith("tekken") else "tokenizer.model"
    shutil.copyfile(str(files("mistral_common").joinpath("data", vocabulary)), directory / name)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 131072 if "tekken" in name else 32000}))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_tekken_is_encoded_and_decoded_as_by_vllm(tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    model = model_of(tmp_path / "model", "tekken_240911.json")
    ours, theirs = load_tokenizer(str(model)), get_tokenizer(str(model), tokenizer_mode="mistral")
    for text in TEXTS:
        if "[INST]" not in text:  # mistral_common takes the texts of special tokens for text
            assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.special_ids == set(theirs.all_special_ids)
    tokens = random.Random(1).sample(range(1000, 131_000), 500)
    for token in tokens:
        assert ours.token_bytes(token) == theirs.tokenizer.id_to_byte_piece(token)
    detokenizer = ours.detokenizer()
    parts = [detokenizer.feed([token]) for token in tokens]
    assert "".join([*parts, detokenizer.finish()]) == theirs.decode(tokens, skip_special_tokens=True)


def test_sentencepiece_is_encoded_and_decoded_as_by_vllm(tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    model = model_of(tmp_path / "model", "tokenizer.model.v1", tokenizer_class="LlamaTokenizer", **special)
    ours, theirs = load_tokenizer(str(model)), get_tokenizer(str(model))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        tokens = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == tokens
        assert ours.decode(tokens, skip_special=False) == theirs.decode(tokens)
    assert ours.eos_ids == (2,)


@pytest.mark.skipif(not has_formats(), reason="servers with this version of vLLM use our formats")
async def test_conversations_of_mistral_are_written_by_vllm(tmp_path: Path) -> None:
    from vllm.tokenizers import get_tokenizer

    model = model_of(tmp_path / "model", "tekken_240911.json")
    tokenizer = load_tokenizer(str(model))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why 🦙?"}]
    chat_format = await chat_format_of(
        tokenizer, backend="vllm", model=str(model), tool_call_parser="mistral", reasoning_parser="none"
    )
    try:
        assert isinstance(chat_format, VllmChatFormat)
        assert chat_format.tool_format == "vllm:mistral"
        rendered = await asyncio.to_thread(chat_format.render, ChatTemplateInput(messages, tools=[], variables={}))
    finally:
        chat_format.close()
    theirs = get_tokenizer(str(model), tokenizer_mode="mistral")
    assert rendered.tokens == theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)


def test_files_that_vllm_cannot_read_are_rejected_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no vocabulary")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"vLLM cannot read the tokenizer of .*: "):
        load_tokenizer(str(tmp_path))
