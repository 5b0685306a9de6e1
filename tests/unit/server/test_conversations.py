"""Prompts of conversations: lists of chat templates, templates without tools, messages that the answer continues."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size
from vocabularies import sentencepiece_like

from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.tokenization import ChatTemplate, ChatTemplateError, Tokenizer, load_tokenizer
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

USER = {"role": "user", "content": "Weather?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
ALTERNATING = (
    "{% set state = namespace(turn=0) %}{% for m in messages %}{% if m.role != 'system' %}"
    "{% if (m.role == 'user') != (state.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set state.turn = state.turn + 1 %}<{{ m.role }}>{% if loop.index0 == 1 and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}" + END
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + END,
    "alternating": ALTERNATING,
    "without system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + ALTERNATING,
    "without system anywhere": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}" + END
    ),
    "drops system": (
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + END
    ),
    "with tools": (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}</s>{% endfor %}" + END
    ),
    "with tools, as objects": (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments.items() | list }}{% endfor %}"
        "</s>{% endfor %}" + END
    ),
}


def tokenizer_with(template: str, tool_template: str | None = None) -> Tokenizer:
    return Tokenizer(
        sentencepiece_like("keeps spaces"),
        chat_template=ChatTemplate(template, special={}),
        tool_template=None if tool_template is None else ChatTemplate(tool_template, special={}),
    )


def rendered(template: str, messages: list[dict[str, Any]], *, tools: Any = (), **options: Any) -> str:
    return ChatTemplateInput(messages, tools=tools, variables={}, **options).render(tokenizer_with(template))


# --- tools for templates without tools ------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation of OpenAI's API: each call has its result, and the last message is not an answer."""
    numbers = iter(range(999))

    def text() -> str:
        return f"text-{next(numbers)};"

    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages += [{"role": "system", "content": text()}] * draw(st.integers(1, 2))
    messages.append({"role": "user", "content": text()})
    for kind in draw(
        st.lists(st.sampled_from(["text", "calls", "calls and text", "system", "two questions"]), max_size=4)
    ):
        if kind == "two questions":
            messages += [{"role": "user", "content": text()}]
        elif kind == "system":
            messages += [{"role": "assistant", "content": text()}, {"role": "system", "content": text()}]
        elif kind == "text":
            messages += [{"role": "assistant", "content": text()}]
        else:
            count = draw(st.integers(1, 3))
            arguments = draw(st.sampled_from([{"a": 1}, '{"a": ']))
            calls = [
                {"id": f"call_{at}", "type": "function", "function": {"name": text(), "arguments": arguments}}
                for at in range(count)
            ]
            said = text() if kind == "calls and text" else ""
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": text()} for call in reversed(calls)]
        if draw(st.booleans()) or kind == "system":
            messages.append({"role": "user", "content": text()})
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_tools_is_rendered_by_every_template(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])

    @settings(max_examples=size(25, soak=60))
    @given(messages=conversations(), has_tools=st.booleans())
    def check(messages: list[dict[str, Any]], has_tools: bool) -> None:
        if not has_tools and not any("tool_calls" in message for message in messages):
            return  # the template's own rules hold
        conversation = ChatTemplateInput(messages, tools=[TOOL] if has_tools else [], variables={})
        text = conversation.render(tokenizer)
        assert not has_tools or "weather" in text
        named = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        said = [message["content"] for message in messages]
        shown = [each for each in (*said, *(named if name != "with tools, as objects" else ())) if each]
        assert [each for each in shown if each not in text] == []
        places = [text.rindex(each) for each in said if each and "system" not in name]
        if "system" not in [message["role"] for message in messages[1:]]:
            assert places == sorted(places)

    check()


def test_the_fallback_joins_neighbours_and_moves_the_system_text() -> None:
    calls = [
        {"id": str(at), "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for at, city in enumerate(("Oslo", "Rome"))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": str(at), "content": f"{at} degrees"} for at in range(2)),
        {"role": "user", "content": "And now?"},
    ]
    text = rendered(TEMPLATES["without system"], messages, tools=[TOOL])
    assert text.startswith("<user>Be brief.\n\nYou can call these functions")
    assert text.count("<user>") == 2
    assert "</tool_call>\n\nWeather?</s><assistant><tool_call>" in text
    assert text.endswith(
        "<tool_response>\n0 degrees\n</tool_response>\n\n<tool_response>\n1 degrees\n</tool_response>\n\nAnd now?</s>"
        "<assistant>"
    )
    # Where the template takes a system message, the text stays there.
    assert rendered(TEMPLATES["chatml"], messages, tools=[TOOL]).startswith("<system>Be brief.\n\nYou can call")


@pytest.mark.parametrize("name", ["alternating", "without system"])
async def test_without_tools_a_rejection_of_the_template_is_a_400(start_with_template: Any, name: str) -> None:
    running = await start_with_template(TEMPLATES[name])
    for messages, reason in (
        ([USER, USER], "roles must alternate"),
        ([{"role": "system", "content": "x"}, USER], "no system" if name == "without system" else None),
    ):
        body = {"model": "smollm2", "messages": messages, "max_tokens": 1}
        reply = await running.post("/v1/chat/completions", body)
        assert reply.status_code == (200 if reason is None else 400)
        assert reason is None or reason in reply.json()["error"]["message"]
        assert (await running.post("/v1/chat/completions", {**body, "tools": [TOOL]})).status_code == 200


def test_a_template_that_exceeds_a_limit_is_not_run_again() -> None:
    runs = []

    def render_chat(*_: Any, **__: Any) -> str:
        runs.append(1)
        raise ChatTemplateError("its process is limited to 5 s")

    tokenizer = SimpleNamespace(template_for=lambda _: SimpleNamespace(variables=()), render_chat=render_chat)
    with pytest.raises(ChatTemplateError, match="limited"):
        ChatTemplateInput([USER], tools=[TOOL], variables={}).render(tokenizer)  # type: ignore[arg-type]
    assert len(runs) == 1


# --- lists of chat templates ----------------------------------------------------------------------------------------

LISTED = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["with tools"], "rag": "{{ documents }}"}


def written(directory: Path, *, files: bool) -> Path:
    sentencepiece_like("keeps spaces").save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    listed = [{"name": name, "template": source} for name, source in LISTED.items()]
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": listed}))
    if files:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(LISTED["default"])
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(LISTED["tool_use"])
    return directory


@pytest.mark.parametrize("files", [False, True])
def test_tools_take_the_template_that_transformers_takes(tmp_path: Path, files: bool) -> None:
    import transformers

    directory = written(tmp_path, files=files)
    tokenizer, reference = load_tokenizer(str(directory)), transformers.AutoTokenizer.from_pretrained(directory)
    for tools in (None, [TOOL]):
        expected = reference.apply_chat_template([USER], tools=tools, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat([USER], tools=tools) == expected
    from megatron_runtime.tokenization import tokenizer_of

    assert tokenizer_of(reference).render_chat([USER], tools=[TOOL]) == expected


def test_a_gguf_file_may_have_a_template_for_tools(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    pieces = ["<unk>", "<s>", "</s>", "a"]
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL])
    writer.add_chat_template([{"name": name, "template": source} for name, source in LISTED.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = tmp_path / "written"
    directory.mkdir()
    write_gguf_tokenizer(path, directory)
    for model in (path, directory):
        tokenizer = load_tokenizer(str(model))
        assert tokenizer.render_chat([USER]) == "<user>Weather?</s><assistant>"
        assert "weather" in tokenizer.render_chat([USER], tools=[TOOL])


@pytest.mark.parametrize("listed", [[{"name": "default"}], [{"name": ["x"], "template": ""}], ["x"], {"a": 1}, 5])
def test_a_malformed_list_of_templates_is_rejected(tmp_path: Path, listed: Any) -> None:
    written(tmp_path, files=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(ValueError, match="want a string, or a list of"):
        load_tokenizer(str(tmp_path))


async def test_the_calls_of_an_answer_are_parsed_as_the_template_for_tools_says(start: Any) -> None:
    calls = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    of_tools = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + calls + "</s>{% endfor %}"
    running = await start(tokenizer_with(TEMPLATES["chatml"], of_tools))
    assert running.service.chat_format.tool_format == "hermes"


# --- messages that the answer continues -----------------------------------------------------------------------------

PARTIAL = "The capital of France is"
THINKING = "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>{% endfor %}"  # noqa: E501


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("partial", [PARTIAL, PARTIAL + " ", "  x", "\n", ""])
def test_the_prompt_ends_within_the_last_message_as_in_transformers(tmp_path: Path, name: str, partial: str) -> None:
    import transformers

    written(tmp_path, files=False)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [USER, {"role": "assistant", "content": partial}]
    prompt = rendered(TEMPLATES[name], messages, continues=True)
    if partial.strip():  # transformers continues no empty message
        assert prompt == reference.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
        )
    assert prompt.endswith(f"<assistant>{partial.strip() if 'anywhere' in name else partial}")


def test_a_message_that_cannot_be_continued_is_rejected() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(ChatTemplateError, match="has tool_calls"):
        rendered(
            TEMPLATES["chatml"], [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], continues=True
        )
    with pytest.raises(ChatTemplateError, match="leaves the text of the last message out"):
        rendered("{{ messages[0].content }}", [USER, {"role": "assistant", "content": "x"}], continues=True)


async def test_each_interface_continues_the_last_message(start_with_template: Any) -> None:
    running = await start_with_template(TEMPLATES["chatml"])
    running.backend.answer = " Paris."
    partial = {"role": "assistant", "content": PARTIAL}
    item = {"type": "message", **partial, "content": [{"type": "output_text", "text": PARTIAL}]}
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = f"<user>Weather?</s><assistant>{PARTIAL}"
    for path, body in (
        ("chat/completions", {"messages": [USER, partial], **flags}),
        ("chat/completions", {"messages": [USER, partial], "continue_final_message": True, "tools": []}),
        ("messages", {"messages": [USER, partial], "max_tokens": 99}),
        ("responses", {"input": [USER, {**item, "status": "incomplete"}]}),
        ("responses", {"input": [USER, {**item, "status": "in_progress"}]}),
    ):
        reply = await running.post(f"/v1/{path}", {"model": "smollm2", "temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        assert running.tokenizer.decode(running.backend.requests[-1][0], skip_special=False) == prompt
        assert '" Paris."' in reply.text
    counted = (await running.post("/v1/messages/count_tokens", {"messages": [USER, partial]})).json()
    tokens = (await running.post("/v1/tokenize", {"messages": [USER, partial], **flags})).json()
    assert counted["input_tokens"] == tokens["count"] == len(running.tokenizer.encode(prompt))
    for path, body in (
        ("responses", {"input": [USER, {**item, "status": "completed"}]}),
        ("chat/completions", {"messages": [USER, partial]}),
    ):
        await running.post(f"/v1/{path}", {"model": "smollm2", "temperature": 0, **body})
        assert running.tokenizer.decode(running.backend.requests[-1][0]) == f"{prompt}</s><assistant>"
    bare = {"model": "smollm2", "messages": [USER], "add_generation_prompt": False, "max_tokens": 1}
    assert (await running.post("/v1/chat/completions", bare)).status_code == 200
    assert running.tokenizer.decode(running.backend.requests[-1][0]) == "<user>Weather?</s>"


async def test_an_answer_that_was_cut_in_its_reasoning_is_continued_there(start_with_template: Any) -> None:
    running = await start_with_template(THINKING + END, special=["<think>", "</think>"])
    running.backend.answer = "m.</think>Yes."
    for history, prompt, expected in (
        ({"content": "", "reasoning_content": "H"}, "<assistant><think>H", ("m.", "Yes.")),
        ({"content": None, "reasoning": "H"}, "<assistant><think>H", ("m.", "Yes.")),
        ({"content": "x", "reasoning": "H"}, "<assistant><think>H</think>x", (None, "m.</think>Yes.")),
    ):
        messages = [USER, {"role": "assistant", **history}]
        body = {"model": "smollm2", "messages": messages, "continue_final_message": True, "temperature": 0}
        message = (await running.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        text = running.tokenizer.decode(running.backend.requests[-1][0], skip_special=False)
        assert text == f"<user>Weather?</s>{prompt}"
        assert (message.get("reasoning"), message["content"]) == expected


@pytest.mark.parametrize(("history", "expected"), [("reasoning", ("m.", "Yes.")), ("content", (None, "m."))])
async def test_a_message_of_gpt_oss_is_continued(start_with_template: Any, history: str, expected: Any) -> None:
    markers = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
    template = (
        "{% for m in messages %}{% if m.reasoning %}<|channel|>analysis<|message|>{{ m.reasoning }}<|end|>{% endif %}"
        "{% if m.content or not m.reasoning %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    running = await start_with_template(template, special=markers, reasoning_parser="gpt_oss")
    running.backend.answer = "m.<|end|>"
    if history == "reasoning":
        running.backend.answer += "<|start|>assistant<|channel|>final<|message|>Yes."
    messages = [USER, {"role": "assistant", history: "H"}]
    body = {"model": "smollm2", "messages": messages, "continue_final_message": True, "temperature": 0}
    reply = (await running.post("/v1/chat/completions", body)).json()
    message = reply["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == expected
    assert (reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) == (history == "reasoning")
