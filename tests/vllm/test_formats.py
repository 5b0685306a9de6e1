"""The server's formats of vLLM engines beside vLLM's own renderer and parsers: the same prompts and answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from megatron_runtime.server.formats.chat_format import AnswerParserError, AnswerRequest
from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.formats.vllm_format import VllmChatFormat, chat_format_of
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

from .answers import OFFERED, TOOLS, joined, pieces_of, read, vllm_renderer
from .conftest import has_formats

pytestmark = [
    pytest.mark.skipif(not has_formats(), reason="servers with this version of vLLM use our formats"),
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Naïve café 🦙?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ],
)
PLAIN = "Sure: 3 < 4 <tool"
THOUGHT = "<think>Let me\nthink 🦙.</think>The answer is 42."
CALL = 'I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": -4}}\n</tool_call>'
CALLS = "<think>Twice.</think>" + "\n".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2)
)
ANSWERS = (PLAIN, THOUGHT, CALL, CALLS)


@pytest.fixture(scope="module")
def thinking_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with the tokens of <think>, as a model that reasons has them."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(model, directory)
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("<repo_name>", "<think>").replace("<reponame>", "</think>"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(thinking_model: Path) -> Tokenizer:
    return load_tokenizer(str(thinking_model))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat_format(thinking_model: Path, tokenizer: Tokenizer) -> AsyncIterator[VllmChatFormat]:
    """The format of the server, with the parsers of Hermes and DeepSeek R1."""
    chat_format = await chat_format_of(
        tokenizer,
        backend="vllm",
        model=str(thinking_model),
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
    )
    assert isinstance(chat_format, VllmChatFormat)
    yield chat_format
    chat_format.close()


@pytest.fixture(scope="module")
def vllm_server(thinking_model: Path) -> Any:
    return vllm_renderer(thinking_model, tools="hermes", reasoning="deepseek_r1")


def vllm_request(messages: Sequence[Mapping[str, Any]], *, has_tools: bool) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = {"tools": OFFERED, "tool_choice": "auto"} if has_tools else {}
    return ChatCompletionRequest.model_validate({"messages": list(messages), **tools})


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS)
async def test_prompts_equal_vllms(
    messages: Sequence[Mapping[str, Any]], has_tools: bool, chat_format: VllmChatFormat, vllm_server: Any
) -> None:
    _, (prompt,) = await vllm_server.render_chat(vllm_request(messages, has_tools=False))
    conversation = ChatTemplateInput(messages, tools=OFFERED if has_tools else [], variables={})
    rendered = await asyncio.to_thread(chat_format.render, conversation)
    if has_tools:  # the template of this model knows none, so the server describes them
        assert len(rendered.tokens or ()) > len(prompt["prompt_token_ids"])
    else:
        assert rendered.tokens == prompt["prompt_token_ids"]


@pytest.mark.parametrize("has_tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("answer", ANSWERS, ids=["text", "reasoning", "call", "reasoning and calls"])
async def test_answers_equal_vllms_parsers_streamed_and_whole(
    answer: str, has_tools: bool, chat_format: VllmChatFormat, vllm_server: Any, tokenizer: Tokenizer
) -> None:
    request = vllm_request(CONVERSATIONS[0], has_tools=has_tools)
    _, (prompt,) = await vllm_server.render_chat(request)
    prompt_tokens = prompt["prompt_token_ids"]

    def theirs_of() -> Any:
        tokenizer = vllm_server.renderer.get_tokenizer()
        return vllm_server.parser(tokenizer, request.tools, model_config=vllm_server.model_config)

    ours = chat_format.answer(AnswerRequest(prompt=prompt_tokens, tools=TOOLS if has_tools else {}))
    assert bool(ours.markers) is not request.skip_special_tokens
    pieces = pieces_of(tokenizer, answer, shows_special=bool(ours.markers))
    text, tokens = "".join(text for text, _ in pieces), [token for _, each in pieces for token in each]

    reasoning, content, calls = theirs_of().parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)
    whole = joined(await read(ours.async_parser(), [(text, tokens)]))
    assert whole == {
        "reasoning": reasoning or "",
        "text": content or "",
        "calls": [(call.name, json.loads(call.arguments)) for call in calls or ()],
    }
    parser, deltas = theirs_of(), []
    for place, (part, ids) in enumerate(pieces):
        delta = parser.parse_delta(part, ids, request, prompt_tokens, finished=place == len(pieces) - 1)
        deltas += [] if delta is None else [delta]
    streamed = joined(await read(ours.async_parser(), pieces))
    assert streamed["reasoning"] == "".join(delta.reasoning or "" for delta in deltas)
    assert streamed["text"] == "".join(delta.content or "" for delta in deltas)
    names = [call.function.name for delta in deltas for call in delta.tool_calls if call.function.name]
    assert [name for name, _ in streamed["calls"]] == names
    assert streamed["calls"] == whole["calls"]
    if has_tools and answer is CALLS:
        assert streamed["calls"] == [("add", {"a": 1}), ("add", {"a": 2})]


async def test_a_worker_killed_in_mid_stream_loses_and_repeats_nothing(
    chat_format: VllmChatFormat, tokenizer: Tokenizer
) -> None:
    answer = chat_format.answer(AnswerRequest(prompt=[1, 2, 3], tools=TOOLS))
    pieces = pieces_of(tokenizer, CALLS, shows_special=True)
    undisturbed = await read(answer.async_parser(), pieces)
    places = [[place] for place in range(0, len(pieces), 9)] + [[3, 4], [5, 20, 40]]
    for kill_at in places:
        assert await read(answer.async_parser(), pieces, kill_at=kill_at) == undisturbed
    # Several answers in one worker: all are rebuilt.
    parsers = [answer.async_parser() for _ in range(6)]
    reading = (read(parser, pieces, kill_at=[10] if number == 0 else ()) for number, parser in enumerate(parsers))
    assert await asyncio.gather(*reading) == [undisturbed] * 6


async def test_a_name_that_vllm_does_not_have_is_rejected_with_those_that_it_has(
    thinking_model: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=r"--tool-call-parser 'nosuch' .*installed vLLM: .*hermes.*qwen3_xml"):
        await chat_format_of(
            tokenizer, backend="vllm", model=str(thinking_model), tool_call_parser="nosuch", reasoning_parser="auto"
        )


async def test_a_parser_that_fails_fails_its_answer_alone(chat_format: VllmChatFormat, tokenizer: Tokenizer) -> None:
    answer = chat_format.answer(AnswerRequest(prompt=[1], tools=TOOLS))
    pieces = pieces_of(tokenizer, CALLS, shows_special=True)
    broken, other = answer.async_parser(), answer.async_parser()
    broken.opening["request"] = "[]"  # no request
    with pytest.raises(AnswerParserError):
        await broken.feed(*pieces[0], is_last=False)
    broken.close()
    assert joined(await read(other, pieces))["calls"] == [("add", {"a": 1}), ("add", {"a": 2})]
