"""Tokenizers of hostile models: a tokenizer.json, its companions, the metadata of a GGUF file, chat templates.

No content ends the process that loads them. A file that cannot be used is named in a TokenizerLoadError.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size

from megatron_runtime.process.sacrificial_process import SacrificialProcess
from megatron_runtime.tokenization import ChatTemplateError, Tokenizer, TokenizerLoadError, load_tokenizer
from megatron_runtime.tokenization import gguf_tokenizer as gguf_module
from megatron_runtime.tokenization import loader as loader_module
from megatron_runtime.tokenization.chat_template import ChatTemplate
from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf
from megatron_runtime.tokenization.loader import TRIAL_MEMORY_BYTES, backend_from_json
from megatron_runtime.tokenization.vocabulary import load_vocabulary

BASE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, " ": 3}, "merges": [["a", "b"]]},
}
CALLS = "".join(f"(?<n{i}>\\g<n{i + 1}>\\g<n{i + 1}>)" for i in range(40)) + "(?<n40>a)"
"""Oniguruma takes years to compile it."""


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "compiles for years": ({"pre_tokenizer": split(CALLS)}, "it took longer"),
    "grows without end": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "a" * 10)] * 9}},
        "is not a usable tokenizer|characters became",
    ),
    "grows a hundredfold": ({"normalizer": replace("a", "a" * 100)}, "characters became"),
    "decodes without end": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 10)] * 9}},
        "is not a usable tokenizer|characters became",
    ),
    "panics at load": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA//8="}},
        "Cannot parse precompiled_charsmap",
    ),
    "panics on a text": (
        {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(b"\x10\0\0\0" + b"\xff" * 16 + b"abc").decode(),
            }
        },
        "fails on a common text",
    ),
    "cuts into nothing": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on a common text|variant"),
    "quadratic": (
        {
            "model": {
                "type": "WordPiece",
                "unk_token": "a",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 10**9,
                "vocab": {"a": 0, "##a": 1},
            }
        },
        "max_input_chars_per_word is 1000000000: at most 4096",
    ),
}


def directory_with(path: Path, changes: dict[str, Any]) -> str:
    (path / "tokenizer.json").write_text(json.dumps({**BASE, **changes}))
    return str(path)


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_would_end_the_process_is_rejected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, complaint = BOMBS[name]
    if "without end" in name or "for years" in name:  # else the limits take their time to be reached
        monkeypatch.setattr(loader_module, "TRIAL_SECONDS", 1.0)
        monkeypatch.setattr(loader_module, "TRIAL_MEMORY_BYTES", 512 << 20)
    with pytest.raises(TokenizerLoadError, match=rf"tokenizer\.json .*({complaint})"):
        load_tokenizer(directory_with(tmp_path, changes))


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 2_000_000_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 1}
    loaded = load_tokenizer(directory_with(tmp_path, {"padding": padding, "truncation": truncation}))
    assert loaded.encode("ab" * 1000) == [2] * 1000


def test_a_text_on_which_the_library_panics_is_an_error(tmp_path: Path) -> None:
    loaded = load_tokenizer(directory_with(tmp_path, {"pre_tokenizer": split("(b+)+$")}))
    with pytest.raises(ValueError, match=r"cannot be tokenized: .*retry-limit"):
        loaded.encode("b" * 5000 + "a")
    assert loaded.encode("ab") == [0, 1]


PARTS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "NFC"},
        {"type": "Lowercase"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
        replace(" ", "▁"),
        {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, replace("", "x")]},
    ],
    "pre_tokenizer": [
        split(r"\p{L}+|\s"),
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, {"type": "Digits", "individual_digits": True}]},
    ],
    "decoder": [
        {"type": "ByteLevel"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "ByteFallback"},
    ],
    "model": [
        {"type": "Unigram", "unk_id": 0, "vocab": [["<u>", 0.0], ["a", -1.0], ["ab", -2.0]], "byte_fallback": False},
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        {
            "type": "WordPiece",
            "vocab": {"a": 0, "##a": 1},
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        {**BASE["model"], "dropout": 0.5, "unk_token": "a", "fuse_unk": True, "byte_fallback": True},
    ],
    "added_tokens": [
        [
            {
                "id": 9,
                "content": "<x>",
                "single_word": False,
                "lstrip": True,
                "rstrip": True,
                "normalized": True,
                "special": True,
            }
        ]
    ],
    "post_processor": [
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
        }
    ],
}
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**64, 1.5, math.inf, "", "a", "(", "(a+)+", "\\g<0>", "a{99999}", "\ud800"),
    *([], {}, [[]], {"type": "Sequence"}, {"type": "NFC"}, {"Regex": "a*"}, {"String": ""}),
]
ODD = st.sampled_from(ODD_VALUES)


def mutated(tree: Any, dice: random.Random, odd: Callable[[], Any]) -> Any:
    """Return the tree with one place of it changed, removed or duplicated."""
    root = [copy.deepcopy(tree)]
    places: list[tuple[Any, Any]] = [(root, 0)]
    for holder, key in places:
        inner = holder[key]
        places += [
            (inner, k)
            for k in (inner if isinstance(inner, dict) else range(len(inner) if isinstance(inner, list) else 0))
        ]
    holder, key = dice.choice(places)
    what = dice.random()
    if what < 0.7 or holder is root:
        holder[key] = odd()
    elif what < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[f"{key}x"] = holder[key]
    return root[0]


@pytest.fixture(scope="module")
def trial_process() -> Iterator[SacrificialProcess]:
    """Return one process for all examples: a process for each would take a quarter of a second."""
    process = SacrificialProcess("megatron_runtime.tokenization.tokenizer_trial", memory_bytes=TRIAL_MEMORY_BYTES)
    yield process
    process.close()


def test_no_tokenizer_json_kills_the_process_or_takes_long(trial_process: SacrificialProcess) -> None:
    slowest = 0.0

    @settings(max_examples=size(25, soak=100_000))
    @given(st.randoms(use_true_random=False), st.data())
    def check(dice: random.Random, data: st.DataObject) -> None:
        nonlocal slowest
        tree = dict(BASE)
        for part in dice.sample(sorted(PARTS), k=dice.randint(0, 3)):
            tree[part] = dice.choice(PARTS[part])
        for _ in range(dice.randint(0, 3)):
            tree = mutated(tree, dice, lambda: data.draw(ODD))
        content = json.dumps(tree).encode()
        begun = time.perf_counter()
        verdict = trial_process.call(content, timeout_seconds=60)
        slowest = max(slowest, time.perf_counter() - begun)
        if verdict:
            return
        # What passed the trial is loaded into this process, and has to stay harmless here.
        loaded = Tokenizer(load_vocabulary(content))
        for text in ("ab ab", "Ａé🦙<x>  a" * 50):
            try:
                ids = loaded.encode(text)
            except ValueError:
                continue
            if len(set(loaded.bound.weights)) > 1:  # otherwise it is the generous one, of which nothing is proven
                assert loaded.bound.min_tokens(text) <= len(ids)
            loaded.decode(ids)

    check()
    assert slowest < 10, "a small file takes a second at most, on a machine five times slower"


def test_any_companion_file_is_loaded_or_rejected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_run_trial", lambda content, *, name: None)
    directory_with(tmp_path, {})
    values = st.sampled_from(
        [*ODD_VALUES, {"content": "a"}, {"content": 5}, [0, 1], [0, "a"], [{"name": "default", "template": "x"}], [{}]]
    )
    files = st.fixed_dictionaries(
        {},
        optional={
            "tokenizer_config.json": st.dictionaries(
                st.sampled_from(["bos_token", "eos_token", "unk_token", "add_bos_token", "chat_template"]), values
            ),
            "config.json": st.dictionaries(st.sampled_from(["eos_token_id", "max_position_embeddings"]), values),
            "generation_config.json": st.dictionaries(st.just("eos_token_id"), values) | values,
        },
    )

    @settings(max_examples=size(25, soak=20_000))
    @given(files)
    def check(contents: dict[str, Any]) -> None:
        for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
            (tmp_path / name).write_text(json.dumps(contents.get(name, {})))
        try:
            loaded = load_tokenizer(str(tmp_path), renders_chat=True)
        except TokenizerLoadError as error:
            complaint = str(error)
        else:
            assert all(type(id_) is int for id_ in loaded.eos_ids)
            assert loaded.context_length is None or loaded.context_length > 0
            return
        assert str(tmp_path) in complaint

    check()


def test_any_gguf_tokenizer_metadata_is_loaded_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence_piece = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "▁", "a", "b", "ab", "<0x41>"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 6],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }
    bpe = {
        **sentence_piece,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.merges": ["a b"],
    }

    @settings(max_examples=size(25, soak=50_000))
    @given(st.sampled_from([sentence_piece, bpe]), st.randoms(use_true_random=False), st.data())
    def check(tree: dict[str, Any], dice: random.Random, data: st.DataObject) -> None:
        for _ in range(dice.randint(1, 3)):
            tree = mutated(tree, dice, lambda: data.draw(ODD | st.just("x" * 100_000)))
        monkeypatch.setattr(gguf_module, "read_gguf_header", lambda path, vocabulary: (tree, ()))
        if not isinstance(tree, dict):
            return
        try:
            loaded = tokenizer_from_gguf(Path("model.gguf"), renders_chat=False)
        except ValueError as error:
            complaint = str(error)
        else:
            with contextlib.suppress(ValueError):
                loaded.decode(loaded.encode("ab abc"))
            return
        assert "model.gguf" in complaint

    check()


SNIPPETS = st.sampled_from(
    [
        *("{{ messages[0].content }}", "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if m %}"),
        *("{% endif %}", "{{ 'x' * 10**10 }}", "{{ 10 ** 9 ** 9 }}", "{{ range(10**9) }}", "{{ tools | tojson }}"),
        *("{% set ns = namespace(x='a') %}", "{% set ns.x = ns.x ~ ns.x %}", "{{ ns.x }}", "{% macro f(x) %}"),
        *("{{ f(f) }}", "{% endmacro %}", "{{ ''.__class__ }}", "{{ messages | join | upper }}", "text", "{{", "}}"),
        *("{% break %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ '%999999999d' % 1 }}"),
        *("{{ (" * 50, "{{ lipsum(n=10) }}", "{% include 'x' %}", "{% import 'x' as y %}", "{{ self }}"),
        *("{% filter upper %}", "{% endfilter %}", "{{ messages | map('attr', '__class__') | list }}", "\x00", "é🦙"),
    ]
)


def test_no_chat_template_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    @settings(max_examples=size(25, soak=50_000))
    @given(st.lists(SNIPPETS, max_size=12).map("".join))
    def check(source: str) -> None:
        try:
            text = ChatTemplate(source, special={"bos_token": "<s>"}).render(messages)
        except ChatTemplateError as error:
            text = str(error)
        assert isinstance(text, str)

    check()


def test_a_tokenizer_json_of_another_type_is_rejected() -> None:
    nested = '{"type":"Sequence","normalizers":[' * 20_000 + "]}" * 20_000
    for content in (b"", b"[]", b"\xff", nested.encode(), b'{"model":' * 1000):
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
            backend_from_json(content, name="tokenizer.json")
