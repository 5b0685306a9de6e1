"""Reasoning is separated from answers, whole and streamed, and structured answers follow it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.sampling.structured_output import GrammarCompiler
from megatron_runtime.server.formats.harmony import HarmonyParser
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, Reasoning, Text, ToolParser
from megatron_runtime.server.formats.reasoning import FORMATS, ReasoningFormat, ReasoningUse
from megatron_runtime.server.formats.recognition import reasoning_format_of, recognised
from megatron_runtime.server.formats.table import PARSERS
from megatron_runtime.tokenization import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
THINKING = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.content }};{% endfor %}<think>\n"
"""Opens the reasoning itself, as templates of models that always reason do. Names both markers: </think>."""
SWITCHED = (
    "{% for m in messages %}{{ m.content }};{% endfor %}{{ reasoning_effort }}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
SPECIAL = ["<think>", "</think>"]


def read(format_: ReasoningFormat, answer: list[str], *, is_open: bool, calls: ToolParser | None = None) -> Any:
    """Reasoning, text and calls."""
    parser = ReasoningUse(format_, (), (), is_open).parser(calls)
    events = [event for piece in answer for event in parser.feed(piece)] + parser.finish()
    parts = {kind: "".join(e.text for e in events if isinstance(e, kind)) for kind in (Reasoning, Text, CallArguments)}
    return parts[Reasoning], parts[Text], [e.name for e in events if isinstance(e, CallBegin)], parts[CallArguments]


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


CASES: list[tuple[str, bool, str, str, str]] = [
    (
        "think",
        True,
        "\nFirst, a < b.\n\nThen.\n</think>\n\nAnswer </think>.\n",
        "First, a < b.\n\nThen.",
        "Answer </think>.\n",
    ),
    ("think", False, "\n<think>Hm</think>Yes", "Hm", "Yes"),
    ("think", False, "  Plain <think>text</think>", "", "  Plain <think>text</think>"),
    ("think", False, "<thin", "", "<thin"),
    ("think", True, "cut short </thi", "cut short </thi", ""),
    ("think", True, "\n\n</think>\n\nYes", "", "Yes"),
    ("gemma4", False, "<|channel>thought\nHm<channel|>Yes", "Hm", "Yes"),
    ("gemma4", False, "Yes", "", "Yes"),
    (
        "gpt_oss",
        True,
        "<|channel|>analysis<|message|>Hm <|end|><|start|>assistant<|channel|>final<|message|>Yes",
        "Hm ",
        "Yes",
    ),
    ("gpt_oss", True, "<|channel|>commentary<|message|>I look.<|end|><|start|>assist", "", "I look."),
    ("gpt_oss", True, "No marker", "", "No marker"),
    ("seed_oss", False, "<seed:think>Hm</seed:think>Yes", "Hm", "Yes"),
    ("command_a", False, "<|START_THINKING|>Hm<|END_THINKING|>Yes", "Hm", "Yes"),
    ("mistral", False, "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
    ("minimax_m3", False, "<mm:think>Hm</mm:think>Yes", "Hm", "Yes"),
    ("kimi_k3", True, "Hm<|close|>think<|sep|>Yes", "Hm", "Yes"),
    ("hunyuan_v3", False, "<think:opensource>Hm</think:opensource>Yes", "Hm", "Yes"),
    ("solar", False, "<|think|>Hm<|end|>Yes", "Hm", "Yes"),
    ("apertus", False, "<|inner_prefix|>Hm<|inner_suffix|>Yes", "Hm", "Yes"),
    ("apriel", True, "Hm\n[BEGIN FINAL RESPONSE]\nYes", "Hm", "Yes"),
    ("muse", False, " to=self<|message|>Hm<|eom|>Yes", "Hm", "Yes"),
]


@pytest.mark.parametrize(("name", "is_open", "answer", "reasoning", "text"), CASES)
def test_reasoning_is_separated(name: str, is_open: bool, answer: str, reasoning: str, text: str) -> None:
    draw = random.Random(1)
    for pieces in ([answer], list(answer), *(pieces_of(answer, draw) for _ in range(20))):
        assert read(FORMATS[name], pieces, is_open=is_open) == (reasoning, text, [], "")


@pytest.mark.parametrize(
    ("name", "calls", "answer"),
    [
        ("think", "hermes", 'Hm<tool_call></think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("think", "qwen3_coder", "Hm<tool_call></think><tool_call><function=f><parameter=a>1</parameter></tool_call>"),
        (
            "gpt_oss",
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm<tool_call><|end|><|start|>assistant to=functions.f<|channel|>commentary"
            ' json<|message|>{"a": 1}',
        ),
    ],
)
def test_a_call_after_reasoning_is_parsed_and_one_inside_it_is_not(name: str, calls: str, answer: str) -> None:
    for pieces in ([answer], list(answer)):
        found = read(FORMATS[name], pieces, is_open=True, calls=PARSERS[calls]({"f": {}}))
        assert found == ("Hm<tool_call>", "", ["f"], '{"a": 1}')


@given(
    text=st.text(alphabet="<|>/think channel\nfinalmessage", max_size=60),
    name=st.sampled_from(sorted(FORMATS)),
    is_open=st.booleans(),
    seed=st.integers(),
)
def test_the_division_of_the_text_does_not_matter(text: str, name: str, is_open: bool, seed: int) -> None:
    pieces = pieces_of(text, random.Random(seed))
    assert read(FORMATS[name], pieces, is_open=is_open) == read(FORMATS[name], [text], is_open=is_open)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if x %}<think>\n\n</think>{% endif %}", "think"),
        ("{% for m in messages %}{{ '<th' + 'ink>' + (m.reasoning or '') + '</th' + 'ink>' }}{% endfor %}", "think"),
        ("<|start|><|channel|><|message|><|end|>", "gpt_oss"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_how_reasoning_is_marked(template: str, name: str | None) -> None:
    assert reasoning_format_of(ChatTemplate(template, special={})) is (None if name is None else FORMATS[name])


def test_the_format_of_reasoning_may_be_set() -> None:
    template = ChatTemplate("<think></think>", special={})
    assert recognised("none", "none", template=template, tool_template=template).reasoning is None
    assert recognised("none", "gemma4", template=template, tool_template=template).reasoning is FORMATS["gemma4"]
    with pytest.raises(ValueError, match="no reasoning parser 'thinks': use auto, none or one of think"):
        recognised("none", "thinks", template=template, tool_template=template)


async def test_reasoning_is_returned_streamed_and_counted(start_with_template: Any) -> None:
    running = await start_with_template(THINKING, special=SPECIAL, reasoning_parser="think")
    running.backend.answer = "Let me see.\n</think>\n\nYes."
    whole = await running.openai.chat.completions.create(model="smollm2", temperature=0, messages=MESSAGES)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("Let me see.\n") + 1
    reasoning = content = ""
    stream = await running.openai.chat.completions.create(
        model="smollm2", temperature=0, messages=MESSAGES, stream=True
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        assert not content or not getattr(delta, "reasoning_content", None)
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == ("Let me see.", "Yes.")


async def test_an_answer_may_carry_its_reasoning_back(start_with_template: Any) -> None:
    running = await start_with_template(THINKING, special=SPECIAL)
    history = [*MESSAGES, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm"}, *MESSAGES]
    reply = await running.post("/v1/chat/completions", {"model": "smollm2", "messages": history, "max_tokens": 1})
    assert reply.status_code == 200
    assert "assistant:Hm|Yes.;" in running.tokenizer.decode(running.backend.requests[0][0])
    history = [{"role": "user", "content": "Hi", "reasoning_content": "Hm"}]
    reply = await running.post("/v1/chat/completions", {"model": "smollm2", "messages": history, "max_tokens": 1})
    assert reply.status_code == 200
    assert "Hm" not in running.tokenizer.decode(running.backend.requests[-1][0])


async def test_structured_output_begins_after_the_reasoning(start_with_template: Any) -> None:
    running = await start_with_template(THINKING, special=SPECIAL, reasoning_parser="think")
    running.backend.answer = 'Hm</think>{"a": 1}'
    reply = await running.openai.chat.completions.create(
        model="smollm2", temperature=0, messages=MESSAGES, response_format={"type": "json_object"}
    )
    assert reply.choices[0].message.content == '{"a": 1}'
    closing = running.tokenizer.token_id("</think>")
    expected = {"type": "json_object", "value": None, "after": [closing]}
    assert running.backend.requests[0][1].structured_output == expected
    tool = {"type": "function", "function": {"name": "f"}}
    running.backend.answer = "Hm</think>{}"
    reply = await running.openai.chat.completions.create(
        model="smollm2",
        temperature=0,
        messages=MESSAGES,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
    )
    message = reply.choices[0].message
    assert (message.reasoning_content, message.tool_calls[0].function.arguments) == ("Hm", "{}")
    assert running.backend.requests[1][1].structured_output["after"] == [closing]
    for answer in ('{"a": 1}', '<tool_call>{"name": "f", "arguments": {}}</tool_call>'):
        running.backend.answer = f"Hm</think>{answer}"
        reply = await running.openai.chat.completions.create(
            model="smollm2",
            temperature=0,
            messages=MESSAGES,
            tools=[tool],
            response_format={"type": "json_object"},
        )
        message = reply.choices[0].message
        assert message.reasoning_content == "Hm"
        assert (message.content == answer) == (message.tool_calls is None)
        structure = running.backend.requests[-1][1].structured_output
        assert (structure["type"], structure["after"]) == ("grammar", [closing])


async def test_calls_or_json_of_gpt_oss_are_messages_after_its_reasoning(start_with_template: Any) -> None:
    """The grammar describes the whole answer, because a call is a message without the end of the reasoning."""
    special = [*HarmonyParser.MARKERS, "<|call|>"]
    running = await start_with_template("<|start|><|channel|><|message|><|end|>", special=special)
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    for answer, content in (
        (f'{thought}<|channel|>final<|message|>{{"a": 1}}', '{"a": 1}'),
        (f"{thought}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>", None),
    ):
        running.backend.answer = answer
        reply = await running.openai.chat.completions.create(
            model="smollm2",
            temperature=0,
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f"}}],
            response_format={"type": "json_object"},
        )
        message = reply.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm", content)
        assert [call.function.name for call in message.tool_calls or ()] == ([] if content else ["f"])
        structure = running.backend.requests[-1][1].structured_output
        assert "after" not in structure
        compiler = GrammarCompiler(running.tokenizer, vocab_size=running.tokenizer.vocab_size)
        try:
            state = compiler.begin(structure, running.tokenizer.encode(answer, add_special=False))
            assert state.failure is None
            end, mask = running.tokenizer.eos_ids[0], state.allowed()
            assert state.is_complete or (mask is not None and mask[end // 32] >> (end % 32) & 1)
        finally:
            compiler.close()


async def test_the_effort_reaches_a_template_that_reads_it_and_others_ignore_it(
    start_with_template: Any, start: Any
) -> None:
    running = await start_with_template(SWITCHED, special=SPECIAL)
    for effort, prompt in (("high", "Hi;high"), ("max", "Hi;high"), ("none", "Hi;low<think>\n\n</think>\n\n")):
        body = {"model": "smollm2", "messages": MESSAGES, "reasoning_effort": effort, "max_tokens": 1}
        assert (await running.post("/v1/chat/completions", body)).status_code == 200
        assert running.tokenizer.decode(running.backend.requests[-1][0], skip_special=False) == prompt
    plain = await start()
    for effort in ("high", "none"):
        assert (await plain.chat(reasoning_effort=effort)).status_code == 200
    assert plain.backend.requests[0][0] == plain.backend.requests[1][0]


async def test_a_budget_of_reasoning_is_sent_where_the_format_has_an_end(start_with_template: Any, start: Any) -> None:
    running = await start_with_template(THINKING, special=SPECIAL, reasoning_parser="think")
    opening, closing = (running.tokenizer.token_id(marker) for marker in SPECIAL)
    markers = {"opening": [opening], "closing": [closing], "ending": [closing], "is_open": True}

    async def sent(server: Any, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        reply = await server.post(path, {"model": "smollm2", "messages": MESSAGES, "max_tokens": 9, **fields})
        assert reply.status_code == 200, reply.text
        return server.backend.requests[-1][1].reasoning

    for fields, budget in (
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0}, 0),
        ({"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
    ):
        assert await sent(running, **fields) == {**markers, "budget": budget}
    for fields in ({}, {"thinking_token_budget": -1}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}):
        assert await sent(running, **fields) is None
    assert (await sent(running, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 6}))["budget"] == 6
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert await sent(running, tools=tools) == {**markers, "budget": None}

    plain = await start()
    assert await sent(plain, thinking_token_budget=5, reasoning_effort="low") is None


def test_the_end_of_gpt_oss_begins_its_final_message_unless_a_call_may_follow() -> None:
    use = ReasoningUse(FORMATS["gpt_oss"], (), (5, 6), is_open=True, ending=(1, 5, 6), message=((7, 8), (1,)))
    expected = {"closing": [5, 6], "ending": [1, 5, 6], "is_open": True, "budget": 3}
    assert use.parameter(3, has_tools=False) == expected
    assert use.parameter(3, has_tools=True) == {"opening": [7, 8], "closing": [1], "is_open": False, "budget": 3}
    answer = ReasoningUse(FORMATS["think"], (4,), (5,), is_open=False, ending=(5,), continues=True)
    assert answer.parameter(3, has_tools=False) is None
