"""Special and added tokens, templates and limits of model directories, against transformers."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_runtime.server.openai.jobs import model_defaults
from megatron_runtime.tokenization import TokenizerLoadError, load_tokenizer

PIECES = sorted(pre_tokenizers.ByteLevel.alphabet())
START, END, NEW = "<|start|>", "<|end|>", "<|new|>"
SIZE = len(PIECES) + 2
TEXT = f"a {START} b{END}c{NEW}"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DIRECTORIES: dict[str, dict[str, dict[str, Any]]] = {
    "special_tokens_map.json": {
        "special_tokens_map.json": {"bos_token": START, "eos_token": {**PLAIN, "content": END}},
    },
    "named in tokenizer_config.json": {"tokenizer_config.json": {"eos_token": END, "pad_token": START}},
    "for images": {
        "tokenizer_config.json": {"eos_token": END, "extra_special_tokens": {"image_token": START}},
    },
    "another attribute": {
        "tokenizer_config.json": {
            "eos_token": END,
            "added_tokens_decoder": {str(SIZE - 2): {**PLAIN, "content": START, "lstrip": True, "rstrip": True}},
        },
    },
    "a new token": {
        "tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {str(SIZE): {**PLAIN, "content": NEW}}},
    },
    "added_tokens.json": {
        "tokenizer_config.json": {"eos_token": END},
        "added_tokens.json": {NEW: SIZE},
    },
}


def written(directory: Path, files: dict[str, dict[str, Any]]) -> Path:
    """Write a tokenizer.json with START as an added token that is not special, and END as a plain piece."""
    backend = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate([*PIECES, START, END])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(START, special=False, normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("case", DIRECTORIES)
def test_declared_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    import transformers

    directory = written(tmp_path, DIRECTORIES[case])
    expected, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory), load_tokenizer(str(tmp_path))
    ids = tokenizer.encode(TEXT)
    assert ids == expected(TEXT)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == expected.decode(ids, skip_special_tokens=skip)
    assert (tokenizer.bos_id, tokenizer.eod) == (expected.bos_token_id, SIZE - 1)


def test_a_token_that_the_model_cannot_have_is_left_out(tmp_path: Path) -> None:
    """Its id does not follow from the vocabulary, or is not one of the model's."""
    for id_, logits in ((SIZE + 7, SIZE + 64), (SIZE, SIZE)):
        decoder = {str(id_): {**PLAIN, "content": NEW}, "0": {**PLAIN, "content": START}}
        files = {"tokenizer_config.json": {"added_tokens_decoder": decoder}, "config.json": {"vocab_size": logits}}
        tokenizer = load_tokenizer(str(written(tmp_path, files)))
        assert tokenizer.vocab_size == SIZE
        assert not tokenizer.special_ids


@pytest.mark.parametrize("decoder", [{"x": PLAIN}, {"1": "a"}, {"1": {"content": 5}}])
def test_a_malformed_token_is_named(decoder: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": decoder}})
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json: added_tokens_decoder has"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": {"default": "{{ image_token }}", "tool_use": "tools"}}},
        {"chat_template.json": {"chat_template": "{{ image_token }}"}},
    ],
)
def test_templates_of_earlier_releases_are_rendered_with_every_special_token(
    files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"image_token": START, **files.get("tokenizer_config.json", {})}
    tokenizer = load_tokenizer(str(written(tmp_path, {**files, "tokenizer_config.json": settings})))
    assert tokenizer.render_chat([{"role": "user", "content": "a"}]) == START


@pytest.mark.parametrize("is_nested", [False, True])
def test_the_context_length_is_that_of_the_engine(is_nested: bool, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    values = {"max_position_embeddings": 32, "rope_scaling": yarn, "vocab_size": SIZE + 3, "eos_token_id": [2, 3]}
    config = {"text_config": values} if is_nested else values
    tokenizer = load_tokenizer(str(written(tmp_path, {"config.json": config})))
    assert (tokenizer.context_length, tokenizer.id_limit, tokenizer.eos_ids) == (128, SIZE + 3, (2, 3))


def test_a_gguf_file_has_sampling_defaults_and_the_context_length_of_the_engine(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    writer.add_token_scores([0.0] * 4)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL])
    writer.add_context_length(32)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "m.gguf"))
    assert tokenizer.context_length == 128
    assert model_defaults(tokenizer.generation_config) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
