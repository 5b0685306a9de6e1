"""Parts of an answer: reasoning with a budget, the marker of a call, and the grammar after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import pytest
from eventually import LONG_SECONDS

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.sampling.answer_guide import AnswerGuide
from megatron_runtime.sampling.answer_parts import AnswerPart, AnswerParts
from megatron_runtime.sampling.batch import AnswerState
from megatron_runtime.sampling.structured_output import GrammarCompiler
from megatron_runtime.server.formats.call_grammars import written_with
from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

OPENING, CLOSING = [901, 902], [903]
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CALL = '{"name": "now", "arguments": {}}'


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m", renders_chat=False)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer(), vocab_size=tokenizer().vocab_size)
    yield compiler
    compiler.close()


def call_structure(format_: str = "hermes", *, is_single: bool = False) -> dict[str, Any]:
    structure = PARSERS[format_].grammar(TOOLS, written_with({}), is_single).structure
    assert structure is not None
    return structure


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"opening": OPENING, "closing": CLOSING, "is_open": False, **fields}


def token_bytes(token: int) -> bytes:
    return b"" if token in (*OPENING, *CLOSING) else tokenizer().token_bytes(token)


def parts_after(tokens: Sequence[int], **params: Any) -> AnswerParts:
    parts = AnswerParts(SamplingParams(**params), token_bytes=token_bytes)
    parts.feed_all(tokens)
    return parts


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def allows(state: AnswerState, token: int) -> bool:
    mask = state.allowed()
    return mask is None or (token // 32 < len(mask) and bool(int(mask[token // 32]) >> (token % 32) & 1))


class Compiling:
    """Begins a grammar; finish() completes the last one."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self.begun: list[tuple[Mapping[str, Any], list[int], Future[AnswerState]]] = []

    def __call__(self, structure: Mapping[str, Any], tokens: Sequence[int]) -> Future[AnswerState]:
        future: Future[AnswerState] = Future()
        self.begun.append((structure, list(tokens), future))
        return future

    def finish(self) -> None:
        structure, tokens, future = self.begun[-1]
        future.set_result(self.compiler.begin(structure, tokens))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", AnswerPart.BEGIN),
        (" \n\n", AnswerPart.BEGIN),
        ("\n<tool", AnswerPart.BEGIN),
        ("\n<tool_call>", AnswerPart.STRUCTURE),
        ("<tool_calls", AnswerPart.TEXT),
        ("Paris <tool_call>", AnswerPart.TEXT),
    ],
)
def test_only_an_answer_that_begins_with_the_marker_is_a_call(text: str, part: AnswerPart) -> None:
    assert parts_after(ids(text), call_structure=call_structure()).part is part


@pytest.mark.parametrize(
    ("tokens", "is_open"),
    [
        ([*OPENING, *ids("I think <tool_call>"), *CLOSING, *ids("\n\n<tool_call>")], False),
        ([*ids("I think"), *CLOSING, *ids("<tool_call>")], True),
        (ids("<tool_call>"), False),
    ],
)
def test_the_answer_itself_begins_after_the_reasoning(tokens: list[int], is_open: bool) -> None:
    params = {"call_structure": call_structure(), "reasoning": reasoning(is_open=is_open)}
    for cut in range(len(tokens)):
        assert parts_after(tokens[:cut], **params).structure is None
    parts = parts_after(tokens, **params)
    assert parts.structure is not None
    assert parts.structure["value"].startswith("start: calls\n" if parts.free == len(tokens) else 'start: ">" calls\n')


def test_a_budget_of_reasoning_forces_its_end_once() -> None:
    parts = parts_after([*OPENING, 1, 2], reasoning=reasoning(budget=3, ending=[7, 8, *CLOSING]))
    forced = []
    assert parts.forced is None
    parts.feed(7)  # the model writes the first token of the end itself
    while parts.forced is not None:
        forced.append(parts.forced)
        parts.feed(parts.forced)
    assert (forced, parts.part) == ([8, *CLOSING], AnswerPart.TEXT)
    parts.feed_all([*OPENING, 1, 2, 3, 4])
    assert parts.forced is None
    assert parts_after([], reasoning=reasoning(budget=0, is_open=True)).forced == CLOSING[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"reasoning": reasoning(is_open=True)},
        {"reasoning": reasoning(budget=1), "structured_output": {"type": "json_object"}},
        {"reasoning": reasoning(budget=1), "call_structure": call_structure(), "allowed_token_ids": [5]},
    ],
)
def test_an_answer_of_one_part_has_no_parts(params: dict[str, Any]) -> None:
    assert AnswerParts.of(SamplingParams(**params), token_bytes=token_bytes) is None


def test_a_plain_answer_compiles_nothing(compiler: GrammarCompiler) -> None:
    compiling = Compiling(compiler)
    params = SamplingParams(call_structure=call_structure())
    guide = AnswerGuide(AnswerParts(params, token_bytes=token_bytes), begin=compiling)
    for token in ids("The capital of France is Paris. <tool_call> is a marker."):
        assert guide.is_ready
        assert guide.allowed() is None
        guide.accept(token)
    assert not compiling.begun


@pytest.mark.parametrize("marker", ["<tool_call>", "\n<tool_call>"])
def test_a_call_waits_for_its_grammar_and_follows_it(compiler: GrammarCompiler, marker: str) -> None:
    compiling = Compiling(compiler)
    params = SamplingParams(call_structure=call_structure(is_single=True))
    guide = AnswerGuide(AnswerParts(params, token_bytes=token_bytes), begin=compiling)
    for token in ids(marker):
        assert guide.is_ready
        guide.accept(token)
    assert not guide.is_ready
    assert not guide.wait(0)
    compiling.finish()
    assert guide.wait(LONG_SECONDS)
    for token in ids(CALL + "</tool_call>"):
        assert guide.wait(LONG_SECONDS)
        assert allows(guide, token)
        assert not allows(guide, ids("Paris")[0])
        guide.accept(token)
    assert (guide.is_complete, guide.failure) == (True, None)


def test_the_state_after_a_failover_is_the_same_at_every_token(compiler: GrammarCompiler) -> None:
    tokens = ids(f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>")
    params = SamplingParams(call_structure=call_structure())
    compiling = Compiling(compiler)
    whole = AnswerGuide(AnswerParts(params, token_bytes=token_bytes), begin=compiling)
    for count in range(len(tokens)):
        parts = AnswerParts(params, token_bytes=token_bytes)
        parts.feed_all(tokens[:count])
        begin = Compiling(compiler)
        other = AnswerGuide(parts, rest=tokens[:count][parts.free :], begin=begin)
        assert bool(begin.begun) == bool(compiling.begun)
        if begin.begun:
            begin.finish()
            assert other.wait(LONG_SECONDS)
            assert whole.wait(LONG_SECONDS)
            assert other.failure is whole.failure is None
            assert (other.allowed() == whole.allowed()).all()
        whole.accept(tokens[count])
        if compiling.begun and not compiling.begun[0][2].done():
            compiling.finish()


def test_a_grammar_that_is_not_available_or_fails_leaves_the_answer_free(compiler: GrammarCompiler) -> None:
    params = SamplingParams(call_structure=call_structure())

    def guide_after(text: str, begin: Any) -> AnswerGuide:
        parts = AnswerParts(params, token_bytes=token_bytes)
        parts.feed_all(tokens := ids(text))
        return AnswerGuide(parts, rest=tokens[parts.free :], begin=begin)

    compiling = Compiling(compiler)
    rejected = guide_after("<tool_call>", compiling)
    compiling.begun[-1][2].set_exception(ValueError("too complex"))
    unmatched = guide_after("<tool_call>Paris", compiling)
    compiling.finish()
    for guide in (rejected, unmatched, guide_after("<tool_call>", None)):
        assert guide.wait(LONG_SECONDS)
        assert guide.is_ready
        assert (guide.allowed(), guide.failure, guide.is_complete) == (None, None, False)
        guide.accept(ids("x")[0])


@pytest.mark.parametrize(
    ("format_", "answers", "others"),
    [
        (
            "hermes",
            [f"\n{CALL}\n</tool_call>", f"{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"],
            ['{"name": "other'],
        ),
        (
            "qwen3_coder",
            [
                "\n<function=weather>\n<parameter=city>\nA < B\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
                "</function>\n</tool_call>",
                "<function=now></function></tool_call>",
            ],
            ["<function=weather></function>", "<function=weather><parameter=city>A</parameter><parameter=days>x"],
        ),
        (
            "mistral",
            [f"[{CALL}]", 'weather[ARGS]{"city": "A"}', "now{}[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{}"],
            ["other", "[]", "now[ARGS][]"],
        ),
        (
            "llama3_json",
            [
                '{"name": "now", "parameters": {}}',
                '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
            ],
            ['{"name": "other'],
        ),
    ],
)
def test_grammars_match_what_models_write(
    compiler: GrammarCompiler, format_: str, answers: list[str], others: list[str]
) -> None:
    structure = call_structure(format_)
    grammar = {"type": "grammar", "value": f"start: calls\n{structure['grammar']}"}
    for text in answers:
        state = compiler.begin(grammar, ids(text))
        assert state.failure is None
        assert state.is_complete or allows(state, tokenizer().eos_ids[0])
    for text in others:
        assert compiler.begin(grammar, ids(text)).failure is not None


def test_an_object_that_names_a_tool_is_a_call_of_llama() -> None:
    structure = call_structure("llama3_json")
    assert parts_after(ids('{"name": "weather"'), call_structure=structure).structure is not None
    assert parts_after(ids('{"name": "Ada"'), call_structure=structure).part is AnswerPart.TEXT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("call_structure", {"markers": {}, "grammar": "x"}),
        ("call_structure", {"markers": {"<t>": "Not a rule"}, "grammar": "x"}),
        ("call_structure", {"markers": {"": "calls"}, "grammar": "x"}),
        ("call_structure", {"markers": {"<t>": "calls"}}),
        ("reasoning", {"is_open": True}),
        ("reasoning", {"closing": [1], "is_open": True, "budget": -1}),
        ("reasoning", {"closing": [1], "is_open": True, "ending": [1, 2]}),
        ("reasoning", {"closing": [1], "opening": [], "is_open": True}),
    ],
)
def test_wrong_values_are_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=name):
        SamplingParams(**{name: value})
