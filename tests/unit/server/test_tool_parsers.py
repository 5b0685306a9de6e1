"""Parsers of tool calls: the formats, and results that do not depend on how the text is divided."""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.server.formats.parser import (
    CallArguments,
    CallBegin,
    Event,
    MalformedError,
    NamedParser,
    Reasoning,
    RequiredParser,
    Text,
    ToolParser,
)
from megatron_runtime.server.formats.recognition import recognised
from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.tokenization import ChatTemplate

NAMES: dict[str, Any] = {"f": {"properties": {"s": {"type": "string"}}}, "get_weather": {}}
Read = tuple[str, list[tuple[str, str]]]


def read(parser: ToolParser, pieces: Iterable[str]) -> Read:
    """The text and the calls, put together."""
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    text, calls = "", []
    for event in events:
        match event:
            case Text(part) | Reasoning(part):
                text += part
            case CallBegin(name):
                calls.append((name, ""))
            case CallArguments(part):
                calls[-1] = (calls[-1][0], calls[-1][1] + part)
    return text, calls


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "qwen3_coder",
        "See.\n<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=code>\na = '<b>'\n  c\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=get_weather></function></tool_call>",
        "See.",
        [("f", '{"s": "12", "n": 12, "code": "a = \'<b>\'\\n  c"}'), ("get_weather", "{}")],
    ),
    ("qwen3_coder", "<tool_call>no function</tool_call>", "<tool_call>no function</tool_call>", []),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>Done.',
        "Hm.Done.",
        [("f", '{"a": 1}')],
    ),
    ("gpt_oss", "<|channel|>final<|message|>Cut.<|end|><|start|>assist", "Cut.", []),
    ("hermes", "Plain <b>text</b> { } ", "Plain <b>text</b> { } ", []),
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x</tool_call>"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
        "Sure.",
        [("f", '{"a": "x</tool_call>"}'), ("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"k\\": 1}"}</tool_call>', "", [("f", '{"k": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> more', " more", [("f", "{}")]),
    ("hermes", "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1x}}</tool_call> ok', " ok", [("f", '{"a": 1x}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}{"name"', '{"name"', [("f", "{}")]),
    ("hermes", "almost <tool_", "almost <tool_", []),
    ("hermes", '<tool_call><tool_call>{"name": "f"}', "<tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": null}, "id": 7, "name": "f"}', "", [("f", '{"a": null}')]),
    (
        "llama3_json",
        '\n{"name": "f", "parameters": {"a": [1, 2.5e3, true]}}; {"parameters": {}, "name": "get_weather"}',
        "",
        [("f", '{"a": [1, 2.5e3, true]}'), ("get_weather", "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": 1}}',
        "",
        [("f", '{"q": 1}')],
    ),
    ("llama3_json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3_json", '{"answer": 42} is it', '{"answer": 42} is it', []),
    ("llama3_json", 'Call {"name": "f"}', 'Call {"name": "f"}', []),
    ("llama3_json", "<|python_", "<|python_", []),
    (
        "mistral",
        'Let me see. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "Let me see.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": {"b": []}}[TOOL_CALLS]g[CALL_ID]1a[ARGS]{}',
        "",
        [("f", '{"a": {"b": []}}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, junk', ", junk", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
    ("mistral", "a [TOOL] list", "a [TOOL] list", []),
    ("mistral", '[TOOL_CALLS]! [TOOL_CALLS]f{"a": 1}', "[TOOL_CALLS]!", [("f", '{"a": 1}')]),
    (
        "glm45",
        "See.\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n"
        '<arg_value>{"k": [1]}</arg_value>\n</tool_call><tool_call>get_weather</tool_call> Done.',
        "See. Done.",
        [("f", '{"s": "12", "n": {"k": [1]}}'), ("get_weather", "{}")],
    ),
    ("glm45", "<tool_call>f<arg_key>s</arg_key> x</tool_call> y", "<arg_key>s</arg_key> x y", [("f", "{}")]),
    ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>cut", "<arg_key>s</arg_key><arg_value>cut", [("f", "")]),
    (
        "seed_oss",
        "See.<seed:tool_call>\n<function=f>\n<parameter=s>\n a\n</parameter>\n<parameter=n>{'k': [1, None, True]}"
        "</parameter>\n</function>\n</seed:tool_call>",
        "See.",
        [("f", '{"s": "\\n a\\n", "n": {"k": [1, null, true]}}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">1</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>',
        "",
        [("f", '{"s": "1"}'), ("get_weather", "{}")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f">odd</invoke></minimax:tool_call>!',
        "odd</invoke>!",
        [("f", "{}")],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        [("f", '{"a": "1", "b": 1}')],
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [("f", "{}")],
    ),
    (
        "hunyuan_v3",
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>s"
        "</arg_key:opensource>\n<arg_value:opensource>1</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "",
        [("f", '{"s": "1"}')],
    ),
    (
        "kimi_k3",
        '<|open|>response<|sep|>See.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"'
        '<|sep|><|open|>argument key="a" type="string"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "See.",
        [("f", '{"a": "1"}')],
    ),
    (
        "muse",
        ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="s">1</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Done.",
        "Done.",
        [("f", '{"s": "1"}')],
    ),
    (
        "minicpm5",
        'See.\n<function name="f"><param name="s"><![CDATA[<1>]]></param></function><function name="get_weather">'
        "</function>",
        "See.",
        [("f", '{"s": "<1>"}'), ("get_weather", "{}")],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        'See.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "See.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no JSON",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>no JSON",
        [],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        '<|tool_call_begin|>g:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    (
        "solar",
        "<|content|>See.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>f"
        '<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>',
        "See.",
        [("f", '{"a": 1}')],
    ),
    (
        "minimax",
        '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}\n</tool_calls>',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    ("minimax", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', "", [("f", "{}")]),
    ("minimax", "<tool_calls></tool_calls>", "<tool_calls></tool_calls>", []),
    ("nemotron", 'See.<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>', "See.", [("f", '{"a": 1}')]),
    (
        "command_a",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "command_r_plus",
        'See.\nAction:\n```json\n[\n{"tool_name": "f",\n"parameters": {}}\n]```',
        "See.",
        [("f", "{}")],
    ),
    (
        "apertus",
        '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        "gigachat3",
        'See.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
        "See.",
        [("f", '{"a": 1}')],
    ),
    ("gigachat3", '<|function_call|>{"name": "f", "arguments": {}}<|message_sep|>', "", [("f", "{}")]),
    ("functools", ' functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("functools", "Use functools, it helps.", "Use functools, it helps.", []),
    (
        "functionary_v31",
        'See.<function=f>{"a": 1}</function><function=g>{}</function> Done.',
        "See. Done.",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "functionary_v32",
        'all\nSee.>>>f\n{"a": 1}>>>get_weather\n{}',
        "See.",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ("functionary_v32", "python\nprint(1)>>>x", "python\nprint(1)>>>x", []),
    (
        "gemma4",
        'See.<|tool_call>call:f{s:<|"|>a "{x}", <|"|>,n:[1,{k:null}],<|"|>o p<|"|>:true}<tool_call|>'
        "<|tool_call>call:get_weather{}<tool_call|>",
        "See.",
        [("f", '{"s": "a \\"{x}\\", ", "n": [1, {"k": null}], "o p": true}'), ("get_weather", "{}")],
    ),
    ("gemma4", "<|tool_call>call:f{a}<tool_call|>", "<|tool_call>call:f{a}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{a:1", "<|tool_call>call:f{a:1", []),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<s>1]<]minimax[>[</s>]<]minimax[>[<n>'
        "]<]minimax[>[<k>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</k>]<]minimax[>[</n>]<]minimax[>["
        "</invoke>\n]<]minimax[>[</tool_call>",
        "",
        [("f", '{"s": "1", "n": {"k": [1]}}')],
    ),
    (
        "lfm2",
        "See.<|tool_call_start|>[f(a='x\ny', b={\"k\": [null, true]}), g()]<|tool_call_end|> Done.",
        "See. Done.",
        [("f", '{"a": "x\\ny", "b": {"k": [null, true]}}'), ("g", "{}")],
    ),
    (
        "pythonic",
        "[f(a='x, [y)', b=[1, {'k': None}], c=-1.5, d=True), get_weather()]",
        "",
        [("f", '{"a": "x, [y)", "b": [1, {"k": null}], "c": -1.5, "d": true}'), ("get_weather", "{}")],
    ),
    ("pythonic", "[1, 2] and [f(a=1)]", "[1, 2] and [f(a=1)]", []),
    ("pythonic", "[f(open('x'))]", "[f(open('x'))]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1), unknown()]", " unknown()]", [("f", '{"a": 1}')]),
    ("pythonic", "[f(a=1", "[f(a=1", []),
]


@pytest.mark.parametrize(("parser", "answer", "text", "calls"), CASES)
def test_calls_are_parsed_whatever_the_partition_of_the_answer(
    parser: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    draw = random.Random(answer)
    assert read(PARSERS[parser](NAMES), [answer]) == (text, calls)
    assert read(PARSERS[parser](NAMES), answer) == (text, calls)
    for _ in range(20):
        assert read(PARSERS[parser](NAMES), pieces_of(answer, draw)) == (text, calls)


def test_deeply_nested_arguments_in_a_string_are_text() -> None:
    answer = '<tool_call>{"name": "f", "arguments": "%s"}</tool_call>' % ("[" * 100_000)
    assert read(PARSERS["hermes"](NAMES), [answer]) == (answer, [])


def test_arguments_come_while_they_are_written() -> None:
    parser = PARSERS["hermes"](NAMES)
    assert parser.feed('<tool_call>{"name": "f", "arg') == []
    assert parser.feed('uments": {"city": "Par') == [CallBegin("f"), CallArguments('{"city": "Par')]
    assert parser.feed('is"}}') == [CallArguments('is"}')]
    assert parser.feed("</tool_call>") == []


def test_forced_answers_are_calls_from_the_first_character() -> None:
    answer = '[{"name": "f", "arguments": {"x": 1}}, {"name": "get_weather", "arguments": {}}]'
    assert read(RequiredParser(NAMES), answer) == ("", [("f", '{"x": 1}'), ("get_weather", "{}")])
    named = NamedParser("f")
    assert named.feed(' {"x"') == [CallBegin("f"), CallArguments('{"x"')]
    assert named.feed(": 2}") == [CallArguments(": 2}")]
    assert named.finish() == []


arguments = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(calls=st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3), data=st.data())
def test_well_formed_calls_are_parsed_completely(calls: list[tuple[str, dict[str, Any]]], data: st.DataObject) -> None:
    draw = random.Random(data.draw(st.integers()))
    indent = data.draw(st.sampled_from([None, 2]))
    ascii_only = data.draw(st.booleans())

    def dumped(value: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    objects = [{"name": name, "arguments": given} for name, given in calls]
    written = {
        "hermes": "Text\n" + "\n".join(f"<tool_call>\n{dumped(one)}\n</tool_call>" for one in objects),
        "llama3_json": ";".join(dumped({"name": one["name"], "parameters": one["arguments"]}) for one in objects),
        "mistral": f"[TOOL_CALLS]{dumped(objects)}",
    }
    for name, answer in written.items():
        _, found = read(PARSERS[name](NAMES), pieces_of(answer, draw))
        assert [(called, json.loads(given)) for called, given in found] == calls


JSON_LIKE = st.text(alphabet='{}[]",:\\/tfn0123456789.eE+-u \n<>_a', max_size=40)


@given(text=JSON_LIKE | st.text(max_size=30), parser=st.sampled_from(sorted(PARSERS)), data=st.data())
def test_any_text_becomes_text_or_calls_and_never_an_error(text: str, parser: str, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(["", "<tool_call>", "[TOOL_CALLS]", '{"name": "f", "parameters": ', "[f("]))
    draw = random.Random(data.draw(st.integers()))
    whole = read(PARSERS[parser](NAMES), [start + text])
    assert read(PARSERS[parser](NAMES), pieces_of(start + text, draw)) == whole
    if not whole[1]:
        assert whole[0] == start + text


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "</tool_c",
        "<function=f>",
        "<function=",
        "<parameter=a>",
        "<parameter=</tool_call>",
    ),
    *("</parameter>", "</para", "<parameter=", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|channel|>"),
    *(
        "analysis",
        "final",
        " to=functions.f",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        '{"name": "f", "arguments": {"a": 1}}',
    ),
    *(
        '{"arguments": {"z": [1, "x"]}, "name": "f"}',
        '{"name": "f", "parameters": ',
        "[f(a='x'), ",
        "f(",
        ")",
        "]",
        "}",
    ),
    *("a", "f", "1", "\n", " ", "\t" * 70, ";", ",", '"', "'", "\\", "=", ">"),
]


@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    name=st.sampled_from([*sorted(PARSERS), "required", "named"]),
    seed=st.integers(),
)
def test_however_markers_are_divided_the_calls_are_the_same(parts: list[str], name: str, seed: int) -> None:
    forced = {"required": lambda: RequiredParser(NAMES), "named": lambda: NamedParser("f")}
    make = forced.get(name) or (lambda: PARSERS[name](NAMES))
    answer = "".join(parts)
    whole = read(make(), [answer])
    assert read(make(), list(answer)) == whole
    assert read(make(), pieces_of(answer, random.Random(seed))) == whole


class ValueReader(ToolParser):
    """Reads one JSON value. end: where it ends; None for text without a complete value."""

    end: int | None = None

    def _read(self) -> Generator[None, None, None]:
        try:
            yield from self._value((yield from self._token()))
            self.end = self._at
        except MalformedError:
            pass
        yield from self._read_text()


def end_of_value(text: str) -> int | None:
    """Where the JSON value at the start of `text` ends; None for text without a complete value."""
    reader = ValueReader({})
    reader.feed(text + "\n")
    return reader.end


@given(text=JSON_LIKE | arguments.map(json.dumps) | st.integers().map(str) | st.text().map(json.dumps))
def test_the_scanner_agrees_with_the_json_library(text: str) -> None:
    end = end_of_value(text)
    try:
        _, expected = json.JSONDecoder().raw_decode(text.lstrip(" \t\n\r"))
        expected += len(text) - len(text.lstrip(" \t\n\r"))
    except json.JSONDecodeError:
        expected = None
    if end is not None:
        assert expected == end
    elif expected is not None:
        # A value that the library ends early, such as the 0 of 01, is malformed here: no continuation is JSON.
        assert text[expected : expected + 1] not in ("", " ", "\n", ",", "]", "}")


CALLS_AS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CALLS_AS.replace("CALL", "<tool_call>{{ c.function | tojson }}</tool_call>"), "hermes"),
        (CALLS_AS.replace("CALL", "{{ tools }}[TOOL_CALLS][{{ c.function | tojson }}]"), "mistral"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\n<function=name>", "qwen3_coder"),
        ("<|channel|>", "gpt_oss"),
        ('respond with {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]{% endif %}", "pythonic"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
        (CALLS_AS.replace("CALL", "{{ tools }}<call {{ c.function | tojson }}>"), None),
        ("{{ tools }}{{ messages }}", None),
        ("{% if %}", "hermes"),
    ],
)
def test_the_template_shows_how_calls_are_written(template: str | None, name: str | None) -> None:
    chosen = None if template is None else ChatTemplate(template, special={})
    formats = recognised("auto", "none", template=chosen, tool_template=chosen)
    assert (formats.tools, formats.offers_tools) == (None if name is None else PARSERS[name], True)


def test_the_format_may_be_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    formats = recognised("mistral", "none", template=None, tool_template=None)
    assert formats.tools is PARSERS["mistral"]
    assert "tool calls: format mistral, set by --tool-call-parser" in caplog.text
    assert not recognised("none", "none", template=None, tool_template=None).offers_tools
    with pytest.raises(ValueError, match="no tool-call parser 'hermess': use auto, none or one of hermes"):
        recognised("hermess", "none", template=None, tool_template=None)


def test_no_marker_of_a_format_hides_another() -> None:
    """However an answer is divided, the first marker in it is found: none begins with another, or has it within."""
    for format_ in PARSERS.values():
        markers = (*format_.starts, *format_.dropped)
        for marker in markers:
            for other in markers:
                assert marker is other or other not in marker or marker.endswith(other), (format_.name, marker, other)


def test_a_call_that_is_held_until_it_is_complete_is_text_beyond_a_limit() -> None:
    for size, calls in (((1 << 20) - 100, 1), (1 << 20, 0)):
        answer = '<|tool_call>call:f{s:<|"|>' + "x" * size + '<|"|>}<tool_call|>'
        whole = read(PARSERS["gemma4"](NAMES), [answer])
        assert (len(whole[1]), whole[0] or answer) == (calls, answer)
        assert read(PARSERS["gemma4"](NAMES), [answer[i : i + 99_991] for i in range(0, len(answer), 99_991)]) == whole
