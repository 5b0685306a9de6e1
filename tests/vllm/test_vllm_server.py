"""`megatron serve --backend vllm` beside vLLM's own OpenAI server: the same answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_runtime.tokenization import load_tokenizer

from .conftest import has_formats
from .servers import EAGER, openai_client, started, until_ready

pytestmark = pytest.mark.timeout(1800)

PROMPTS = [
    f"{opening} {subject}"
    for opening in ("The history of", "A recipe for", "Once upon a time,", "In physics,")
    for subject in ("bread", "the moon", "a small town", "music", "water")
]


@contextmanager
def both(model: Path, *, vllm: Sequence[str] = (), megatron: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Start both servers. Yield their URLs. vllm, megatron: further arguments."""
    theirs = ("--max-model-len", "1024", "--max-num-seqs", "64", "--enable-auto-tool-choice")
    with started(
        model,
        vllm=(*theirs, "--tool-call-parser", "hermes", *vllm),
        megatron=("--max-sequence-length", "1024", *EAGER, *megatron),
    ) as urls:
        yield urls


async def complete(client: openai.AsyncOpenAI, prompt: str, **options: Any) -> Any:
    return await client.completions.create(model="m", prompt=prompt, max_tokens=32, temperature=0, **options)


async def chat(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(
        model="m", messages=messages, max_tokens=32, temperature=0, seed=1, **options
    )


def without_cut_character(text: str) -> str:
    """Return `text` without a character that the limit of tokens has cut: vLLM drops it, we write U+FFFD."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


async def chats_are_equal(clients: dict[str, openai.AsyncOpenAI]) -> None:
    """Compare whole and streamed answers of both servers to conversations."""
    for prompt in PROMPTS[::4]:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{prompt} 🦙?"}]
        theirs, ours = await asyncio.gather(*(chat(clients[name], messages) for name in ("vllm", "megatron")))
        assert without_cut_character(ours.choices[0].message.content) == theirs.choices[0].message.content
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        stream = await chat(clients["megatron"], messages, stream=True)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(parts) == ours.choices[0].message.content
    (card,) = (await clients["megatron"].models.list()).data
    assert card.tool_call_format == "vllm:hermes"  # type: ignore[attr-defined]


async def test_greedy_answers_streams_and_log_probabilities_equal_vllms_server(model: Path) -> None:
    with both(model) as urls:
        await until_ready(urls)
        await answers_are_equal({name: openai_client(url) for name, url in urls.items()})


async def answers_are_equal(clients: dict[str, openai.AsyncOpenAI]) -> None:
    for prompt in PROMPTS:
        theirs, ours = await asyncio.gather(
            *(complete(clients[name], prompt, logprobs=3) for name in ("vllm", "megatron"))
        )
        assert ours.choices[0].text == theirs.choices[0].text
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        assert ours.choices[0].logprobs.token_logprobs == pytest.approx(
            theirs.choices[0].logprobs.token_logprobs, abs=1e-3
        )
        stream = await complete(clients["megatron"], prompt, stream=True)
        parts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
        assert "".join(parts) == theirs.choices[0].text
        assert len(parts) > 5
        first, second, *_ = theirs.choices[0].text.split()
        words = {"bad_words": [first, f"{first} {second}", second[:2]]}
        theirs, ours = await asyncio.gather(
            *(complete(clients[name], prompt, logprobs=3, extra_body=words) for name in ("vllm", "megatron"))
        )
        assert ours.choices[0].text == theirs.choices[0].text
        expected = theirs.choices[0].logprobs.token_logprobs
        if theirs.choices[0].finish_reason == "stop":
            expected.pop()  # of the end-of-sequence token, which has no text
        assert ours.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
    if has_formats():
        await chats_are_equal(clients)


TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]


def call_of(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


MEMORISED = {
    "What is 6 times 7?": "<think>6 times 7 🦙\nis 42.</think>The answer is 42.",
    "Is 3 less than 4?": "<think></think>Sure: 3 < 4 <tool",
    "Add 3 and -4.": f"<think>I need add.</think>I will add.\n{call_of(3, -4)}",
    "Add 1 and 2, then 5 and 6.": f"<think>\nTwice.\n</think>\n{call_of(1, 2)}\n{call_of(5, 6)}",
}
"""What the model answers, by the question, with and without tools."""
CALLS = {"Add 3 and -4.": [(3, -4)], "Add 1 and 2, then 5 and 6.": [(1, 2), (5, 6)]}


@pytest.fixture
def thinking_model(model: Path, tmp_path: Path) -> Path:
    """A model with SmolLM2's vocabulary and the tokens of <think>, which answers as MEMORISED says."""
    from .memorising_model import write_memorising_model

    directory = tmp_path / "thinking"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model / name, directory / name)
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("<repo_name>", "<think>").replace("<reponame>", "</think>"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(str(directory))
    answers = [
        (
            tokenizer.encode_chat(
                [{"role": "user", "content": question}], tools=tools, variables={"add_generation_prompt": True}
            ),
            tokenizer.encode(f"{answer}<|im_end|>", add_special=False),
        )
        for question, answer in MEMORISED.items()
        for tools in (None, TOOLS)
    ]
    write_memorising_model(directory, answers, vocab_size=tokenizer.vocab_size)
    return directory


def message_of(answer: Any) -> dict[str, Any]:
    """Return what a client reads from a whole answer. `ids`: their shape."""
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "reasoning": choice.message.model_extra.get("reasoning") or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "ids": [re.sub("[0-9a-f]{16}", "#", call.id) for call in calls],
        "finish_reason": choice.finish_reason,
        "usage": (answer.usage.prompt_tokens, answer.usage.completion_tokens),
    }


async def collected(stream: Any) -> dict[str, Any]:
    """Return the same from a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": []}
    async for chunk in stream:
        if chunk.usage is not None:
            found["usage"] = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += choice.delta.model_extra.get("reasoning") or ""
            for call in choice.delta.tool_calls or []:
                if call.id:
                    found["ids"].append(re.sub("[0-9a-f]{16}", "#", call.id))
                    found["calls"].append((call.function.name, ""))
                name, arguments = found["calls"][call.index]
                found["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
            if choice.finish_reason is not None:
                found["finish_reason"] = choice.finish_reason
    return found


@pytest.mark.skipif(not has_formats(), reason="servers with this version of vLLM use our formats")
async def test_reasoning_and_calls_equal_vllms_server_streamed_and_whole(thinking_model: Path) -> None:
    megatron = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with both(thinking_model, vllm=("--reasoning-parser", "qwen3"), megatron=megatron) as urls:
        await until_ready(urls)
        clients = {name: openai_client(url) for name, url in urls.items()}
        for question in MEMORISED:
            for tools in ({}, {"tools": TOOLS}):
                options: Any = {"model": "m", "messages": [{"role": "user", "content": question}], "temperature": 0}
                options |= {"max_tokens": 200, **tools}
                theirs, ours = [
                    message_of(await clients[name].chat.completions.create(**options)) for name in ("vllm", "megatron")
                ]
                assert ours == theirs
                assert ours["finish_reason"] == ("tool_calls" if tools and question in CALLS else "stop")
                assert ours["reasoning"] or question == "Is 3 less than 4?"
                calls = [(name, json.loads(arguments)) for name, arguments in ours["calls"]]
                assert calls == ([("add", {"a": a, "b": b}) for a, b in CALLS.get(question, ())] if tools else [])
                options |= {"stream": True, "stream_options": {"include_usage": True}}
                streams = [
                    await collected(await clients[name].chat.completions.create(**options))
                    for name in ("vllm", "megatron")
                ]
                assert streams[1] == streams[0]
                assert streams[1]["ids"] == ours["ids"] == ["chatcmpl-tool-#"] * len(calls)
