"""The cost of an answer is linear in its length: whatever a model writes, its last token costs what its first did.

Operations are counted, not timed. Each parser of tool calls and of reasoning meets each hostile text, new parsers too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from soak import size

from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.protocol.messages import Dispatch, RequestMeta
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.server.formats.reasoning import FORMATS
from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.server.openai.answer import Piece

from .counted_operations import CountedModules
from .test_reasoning import CASES as REASONING_CASES
from .test_tool_parsers import CASES as TOOL_CASES

SHORT, LONG = 1_000, 32_000
"""Tokens of the answers that are compared."""
SAMPLE = 50
"""Tokens that are fed one by one, at the beginning and at the end of the long answer."""
SLACK = 2.0
"""A quadratic cost exceeds it by an order of magnitude."""
CALLS = size(20_000, soak=30_000_000)
"""Counted calls for each parser, which take about 10 us each: as many hostile texts as fit, the worst ones first."""
TOOLS = {"f": {"properties": {"a": {"type": "string"}}}, "get_weather": {}}

UNITS = [
    *(
        "word ",
        " ",
        "[",
        '{"a":',
        "<",
        "a",
        "\n",
        "</",
        " \n\t ",
        '"',
        "\\",
        "\\\\",
        "'",
        "0",
        ",",
        ";",
        "=",
        "{",
        "(",
        "}",
        "a=1,",
    ),
    *('"a": 1, ', "[1, ", "f(a=1), ", "<parameter=a>", "<parameter=a>1</parameter>", "\u00e9"),
]
"""What is repeated without end, besides the markers of a parser, whole and cut."""
STATES = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "', '<tool_call>{"arguments": {"a": "'],
    "qwen3_coder": [
        "<tool_call><function=f><parameter=a>",
        "<tool_call><function=f>",
        "<tool_call><function=f><parameter=a>1</parameter>",
        "<tool_call>",
    ],
    "gpt_oss": ["<|channel|>analysis", "<|channel|>analysis<|message|>", "<|channel|>final to=functions.f<|message|>"],
    "llama3_json": ['{"parameters": {"a": "', '{"name": "f", "parameters": {}};'],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"arguments": {"a": "', "[TOOL_CALLS]f[ARGS]{"],
    "pythonic": ['[f(a="', "[f(", "["],
    "required": ['[{"name": "f", "arguments": {"a": [', '[{"arguments": ['],
    "named": ['{"a": ["'],
}
"""Beginnings of answers after which the rest of a text matters most. Others are cut from the examples of a parser."""


FORMAT_MODULES = (
    *("parser", "pythonic", "tagged_calls", "whole_calls", "json_calls", "harmony", "reasoning"),
    "table",
)
"""The modules of formats, each before those that import it."""


@pytest.fixture(scope="module")
def counted() -> CountedModules:
    return CountedModules(
        *(f"megatron_runtime.server.formats.{name}" for name in FORMAT_MODULES),
        "megatron_runtime.tokenization.tokenizer",
        "megatron_runtime.sampling.bad_words",
        "megatron_runtime.engine.output_stage",
        "megatron_runtime.server.openai.answer",
        "megatron_runtime.server.openai.chat",
        "megatron_runtime.server.openai.messages",
        "megatron_runtime.server.openai.responses",
    )


def check_linear(counted: CountedModules, feed: Callable[[Any], Any], unit: Any, what: str) -> None:
    """Feed LONG tokens, each a `unit`, and compare the cost of the last ones with the cost of the first ones."""

    def cost_of(pieces: Iterator[Any]) -> int:
        return counted.cost_of(lambda: [feed(piece) for piece in pieces])

    first = cost_of(itertools.repeat(unit, SAMPLE))
    short = cost_of(itertools.repeat(unit * 100, (SHORT - SAMPLE) // 100))
    rest = cost_of(iter([*[unit * SHORT] * (LONG // SHORT - 1), unit]))
    last = cost_of(itertools.repeat(unit, SAMPLE))
    allowed = SLACK * (first + SAMPLE * (20 + len(unit)))
    assert last <= allowed, f"{what}: {SAMPLE} tokens cost {first} at the beginning, and {last} after {LONG}"
    allowed = SLACK * (LONG // SHORT) * (first + short + SHORT * (20 + len(unit)))
    assert first + short + rest <= allowed, f"{what}: {SHORT} tokens cost {first + short}, {LONG} cost {rest}"


def states_of(name: str, answers: list[str]) -> list[str]:
    """Return beginnings of answers that bring a parser into different states."""
    found = dict.fromkeys([*STATES.get(name, ()), ""])
    for answer in answers:
        found.update(dict.fromkeys(answer[: part.end()] for part in re.finditer(r"[<>\[\](){}\"':=]+\s*|\w+", answer)))
    return list(found)


def check_hostile_texts(
    counted: CountedModules, make: Callable[[], Any], states: list[str], markers: tuple[str, ...], what: str
) -> None:
    """Feed each parser of `make()` one of the texts without end, in each of its states."""
    cuts = [text for marker in markers for text in (marker, marker[:-1], marker[: len(marker) // 2])]
    units = [*UNITS[:4], *cuts, *UNITS[4:]]
    pairs = sorted(itertools.product(range(len(states)), range(len(units))), key=lambda pair: (sum(pair), pair))
    limit = counted.operations.calls + CALLS
    for state, unit in pairs:
        parser = make()
        parser.feed(states[state])
        check_linear(counted, parser.feed, units[unit], f"{what} after {states[state]!r}, repeated {units[unit]!r}")
        if counted.operations.calls > limit:
            break


@pytest.mark.parametrize("name", [*PARSERS, "required", "named"])
def test_no_text_makes_a_parser_of_tool_calls_quadratic(counted: CountedModules, name: str) -> None:
    tools = counted.modules["megatron_runtime.server.formats.parser"]
    parsers = counted.modules["megatron_runtime.server.formats.table"].PARSERS
    forced = {"required": lambda: tools.RequiredParser(TOOLS), "named": lambda: tools.NamedParser("f")}
    make = forced.get(name) or (lambda: parsers[name](TOOLS))
    answers = [answer for parser, answer, *_ in TOOL_CASES if parser == name]
    assert answers or name in forced, f"CASES has no example of an answer that the parser {name} reads"
    markers = () if name in forced else parsers[name].markers
    check_hostile_texts(counted, make, states_of(name, answers), markers, name)


@pytest.mark.parametrize("calls", [None, "hermes"])
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_no_text_makes_a_parser_of_reasoning_quadratic(
    counted: CountedModules, name: str, is_open: bool, calls: str | None
) -> None:
    parsers = counted.modules["megatron_runtime.server.formats.table"].PARSERS
    reasoning = counted.modules["megatron_runtime.server.formats.reasoning"]
    format_ = reasoning.FORMATS[name]
    answers = [answer for parser, opens, answer, *_ in REASONING_CASES if (parser, opens) == (name, is_open)]
    states = ["Hm" if is_open else f"{format_.opening}Hm", "", format_.opening, f"Hm{format_.closing}", " \n"]
    markers = (format_.opening, format_.closing, *format_.markers)

    def make() -> Any:
        use = reasoning.ReasoningUse(format_, (), (), is_open)
        return use.parser(None if calls is None else parsers[calls](TOOLS))

    check_hostile_texts(counted, make, [*dict.fromkeys(states), *states_of(name, answers)], markers, name)


# --- what follows the parsers, and what precedes them ---------------------------------------------------------------

WORD, MARKER, HIDDEN, LEAD, STOP = range(5)
TOKEN_BYTES = {WORD: b"word ", MARKER: b"<tool_call>", HIDDEN: b"<|hidden|>", LEAD: b"\xf0\x9f", STOP: b"sto"}
TOKENS = {"words": WORD, "markers": MARKER, "hidden": HIDDEN, "incomplete characters": LEAD, "begun stop texts": STOP}


class FakeTokenizer:
    """Each token is a string of bytes; special tokens are hidden unless they are visible."""

    special_ids = frozenset({MARKER, HIDDEN})

    def __init__(self, counted: CountedModules, *, by_window: bool = False) -> None:
        self._counted = counted
        self._by_window = by_window

    def token_bytes(self, token: int) -> bytes:
        return TOKEN_BYTES[token]

    def special_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        return {}

    def detokenizer(self, *, after: Sequence[int] = (), visible: Collection[int] = ()) -> Any:
        hidden, tokenizer = (
            self.special_ids.difference(visible),
            self._counted.modules["megatron_runtime.tokenization.tokenizer"],
        )

        def decode(tokens: Sequence[int]) -> str:
            self._counted.operations.cost += len(tokens)
            return b"".join(self.token_bytes(token) for token in tokens if token not in hidden).decode(errors="replace")

        if self._by_window:
            return tokenizer.WindowDetokenizer(decode)
        return tokenizer.BytesDetokenizer(lambda token: b"" if token in hidden else self.token_bytes(token))


@pytest.mark.parametrize(
    ("kind", "by_window"), [("hidden", False), ("begun stop texts", False), ("incomplete characters", True)]
)
def test_an_engine_searches_stop_texts_in_linear_time(counted: CountedModules, kind: str, by_window: bool) -> None:
    output_stage = counted.modules["megatron_runtime.engine.output_stage"]
    sent: list[Any] = []
    stage = output_stage.OutputStage(
        send=sent.append,
        finish_early=lambda _: None,
        tokenizer=lambda: FakeTokenizer(counted, by_window=by_window),
    )
    params = SamplingParams(num_tokens_to_generate=10 * LONG, stop_words=["stop here", "word stop"])
    stage.add(Dispatch(1, bytes(16), 0, RequestMeta(streaming=True), b"", b"", b""), params, [])

    def feed(tokens: Sequence[int]) -> None:
        stage.step([RequestOutput(request_id=1, new_tokens=list(tokens), prompt_length=1)])

    feed([WORD])
    check_linear(counted, feed, [TOKENS[kind]], f"stop texts, {kind}")
    assert 1 in stage.open, "a stop text was found"


@pytest.mark.parametrize(
    ("kind", "by_window", "has_log_probs"),
    [("words", False, True), ("markers", False, False), ("hidden", True, False)],
)
def test_a_choice_becomes_text_in_linear_time(
    counted: CountedModules, kind: str, by_window: bool, has_log_probs: bool
) -> None:
    """As a stream, whole, and whole with a stop text."""
    answer = counted.modules["megatron_runtime.server.openai.answer"]
    unit = [TOKENS[kind]]
    params = SamplingParams(return_log_probs=has_log_probs, skip_prompt_log_probs=True)
    prompt = SimpleNamespace(echoed=None, tokens=[1])
    visible = frozenset({MARKER})
    job = SimpleNamespace(
        index=0,
        params=params,
        prompt=prompt,
        visible=visible,
        end_ids=frozenset(),
        is_prompt_only=False,
        options=SimpleNamespace(log_probs=None, echoes_log_probs=False, prompt_log_probs=None),
    )

    def choice() -> Any:
        return answer.Choice(job, FakeTokenizer(counted, by_window=by_window))

    def frame(tokens: Sequence[int]) -> dict[str, Any]:
        return {"new_tokens": list(tokens), "new_log_probs": [-1.0] * len(tokens) if has_log_probs else None}

    streamed = choice()
    check_linear(counted, lambda tokens: streamed.feed(frame(tokens)), unit, f"a choice of {kind}")
    costs = []
    for number, stops in itertools.product((SHORT, LONG), (False, True)):
        tokens = unit * number
        reply = {"generated_tokens": tokens, "generated_log_probs": [-1.0] * len(tokens), "finish_reason": "stop"}
        if stops:
            detokenizer = FakeTokenizer(counted, by_window=by_window).detokenizer()
            reply["generated_text"] = detokenizer.feed(tokens)
        costs.append(counted.cost_of(partial(choice().finish, reply)))
    assert costs[2] <= SLACK * LONG / SHORT * costs[0]
    assert costs[3] <= SLACK * LONG / SHORT * costs[1]


@pytest.mark.parametrize("calls", [None, "hermes"])
@pytest.mark.parametrize("route", ["chat", "messages", "responses"])
def test_the_events_of_a_stream_cost_what_they_say(counted: CountedModules, route: str, calls: str | None) -> None:
    module = counted.modules[f"megatron_runtime.server.openai.{route}"]
    chat, tools = (counted.modules[f"megatron_runtime.server.{name}"] for name in ("openai.chat", "formats.table"))
    usage = SimpleNamespace(cached=0, completion=0)
    reader = chat.AnswerReader(None if calls is None else tools.PARSERS[calls](TOOLS), parallel_calls=True)
    if route == "chat":
        body = SimpleNamespace(logprobs=None, return_token_ids=None)
        conversation = SimpleNamespace(tools=None, prompt=SimpleNamespace(tokens=[]), reader=lambda: reader)
        take = chat._ChatChoice(body, conversation, None).chunks
    elif route == "messages":
        take = module._Answer(reader, usage, model="m", prompt_tokens=1).take
    else:
        take = module._Answer(
            module.ResponsesRequest(model="m", input="Hi"), reader, usage, model="m", defaults={}
        ).take

    def feed(text: str) -> None:
        for _ in take(Piece(0, text=text)):
            pass

    if calls is not None:
        feed('<tool_call>{"name": "f", "arguments": {"a": "')
    check_linear(counted, feed, "word ", route)


def test_bad_words_look_at_the_end_of_an_answer_only(counted: CountedModules) -> None:
    bad_words = counted.modules["megatron_runtime.sampling.bad_words"].BadWords([[1, 2, 3], [1, 1, 1, 1, 9]])
    answer: list[int] = []

    def feed(tokens: Sequence[int]) -> None:
        for token in tokens:
            answer.append(token)
            bad_words.after(answer)

    check_linear(counted, feed, [1], "bad words")
