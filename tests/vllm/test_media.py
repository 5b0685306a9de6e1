"""A tiny vision model with random weights: the same answers as vLLM's own server, also across kill -9 of an engine."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import Fleet, until_serving

from megatron_runtime.cli.processes import free_ports

from .conftest import START_SECONDS, has_formats
from .test_vllm_server import until_ready

pytestmark = [
    pytest.mark.skipif(not has_formats(), reason="this version of vLLM has no renderer for servers"),
    pytest.mark.timeout(1800),
]

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = {"<repo_name>": START, "<reponame>": END, "<file_sep>": IMAGE, "<filename>": VIDEO}
"""Tokens of SmolLM2 that become those of images."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% elif c.type == 'video' %}"
    f"{START}{VIDEO}{END}"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 40


def write_vision_model(model: Path, directory: Path) -> None:
    """Write a Qwen2-VL with two layers and random weights, and the tokenizer of SmolLM2. model: SmolLM2."""
    import torch
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    directory.mkdir()
    text = (model / "tokenizer.json").read_text()
    for before, after in SPECIAL.items():
        text = text.replace(before, after)
    (directory / "tokenizer.json").write_text(text)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    for name in ("added_tokens_decoder", "additional_special_tokens"):
        settings.pop(name, None)
    settings["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL.values()}
    torch.manual_seed(3)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 2,
            "hidden_size": 128,
            "mlp_ratio": 2,
            "initializer_range": 0.2,
        },
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        tie_word_embeddings=True,
        architectures=["Qwen2VLForConditionalGeneration"],
    )
    Qwen2VLForConditionalGeneration(config).float().save_pretrained(directory)
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 36}
    shared = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    shared |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen2VLProcessor"}
    image = {**shared, "image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {**shared, "video_processor_type": "Qwen2VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


@pytest.fixture(scope="module")
def vision_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    write_vision_model(model, directory)
    return directory


@pytest.fixture
def vllm_server(vision_model: Path) -> Iterator[str]:
    """The base URL of vLLM's own server."""
    (port,) = free_ports(1)
    command = (
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(vision_model), "--served-model-name", "m"),
        *("--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--generation-config", "vllm", "--port", str(port)),
    )
    with subprocess.Popen([sys.executable, *command]) as process:
        yield f"http://127.0.0.1:{port}/v1"
        process.terminate()


def image(seed: int, *, width: int = 120, height: int = 80, mode: str = "RGB", form: str = "PNG") -> Mapping[str, Any]:
    """Return the part of a message with a random image."""
    from PIL import Image

    content = io.BytesIO()
    pixels = random.Random(seed).randbytes(len(mode) * 8 * 6)
    Image.frombytes(mode, (8, 6), pixels).resize((width, height)).save(content, form)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def video(*seeds: int) -> Mapping[str, Any]:
    """Return the part of a message with a video of one image for each seed."""
    frames = [image(seed, width=56, height=56, form="JPEG")["image_url"]["url"].partition(",")[2] for seed in seeds]
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(frames)}"}}


def text(content: str) -> Mapping[str, Any]:
    return {"type": "text", "text": content}


def user(*content: Any) -> Mapping[str, Any]:
    return {"role": "user", "content": list(content)}


CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    [user(image(1), text("What is this?"))],
    [user(image(2), text("What is this?"))],
    [user(text("Compare"), image(1, mode="RGBA"), text("and"), image(3, width=60, height=150, form="JPEG"))],
    [user(image(1)), {"role": "assistant", "content": "A cat."}, user(image(2), text("And this?"))],
    [user(image(1)), {"role": "assistant", "content": "It is"}],
    [user(video(4, 5, 6, 7), text("What happens?"))],
)


async def ask(client: openai.AsyncOpenAI, messages: Any, **options: Any) -> Any:
    extra: dict[str, Any] = {"ignore_eos": True}
    if messages[-1]["role"] == "assistant":
        extra |= {"continue_final_message": True, "add_generation_prompt": False}
    return await client.chat.completions.create(
        model="m", messages=messages, max_tokens=LENGTH, temperature=0, extra_body=extra, **options
    )


async def streamed(client: openai.AsyncOpenAI, messages: Any, arrived: asyncio.Semaphore | None = None) -> str:
    parts = []
    async for chunk in await ask(client, messages, stream=True):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        if arrived is not None:
            arrived.release()
    return "".join(parts)


async def test_answers_equal_those_of_vllms_server_and_survive_a_killed_engine(
    fleet: Fleet, vision_model: Path, vllm_server: str
) -> None:
    options = ("--backend", "vllm", "--model", str(vision_model), "--max-sequence-length", "1024")
    of_engine = ("--dtype", "float32", "--kv-cache-memory", "256Mi", "--threads", "1")
    eager = ("--vllm-arguments", '{"enforce_eager": true}')
    await fleet.coordinator("--routing-policy", "LongestPrefix")
    link = await fleet.admin()
    for name in ("a", "b"):
        await fleet.engine(name, *options, *of_engine, *eager, warm=False)
    await until_serving(link, ("a", "b"), seconds=START_SECONDS)
    _, url = await fleet.server(*options, "--model-name", "m", warm=False)
    ours, theirs = (
        openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) for base in (f"{url}/v1", vllm_server)
    )
    await until_ready(theirs)
    await until_ready(ours)

    answers = []
    for messages in CONVERSATIONS:
        expected, found = [await ask(client, messages, logprobs=True) for client in (theirs, ours)]
        answers.append(expected.choices[0].message.content)
        assert found.choices[0].message.content == answers[-1]
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
        log_probs = [[token.logprob for token in each.choices[0].logprobs.content] for each in (expected, found)]
        assert log_probs[1] == pytest.approx(log_probs[0], abs=1e-3)
        assert await streamed(ours, messages) == answers[-1]
    assert answers[0] != answers[1], "the model does not see its images"
    several = await ask(ours, CONVERSATIONS[0], n=3)
    assert [choice.message.content for choice in several.choices] == [answers[0]] * 3

    arrived = asyncio.Semaphore(0)
    streams = [asyncio.create_task(streamed(ours, messages, arrived)) for messages in CONVERSATIONS * 2]
    for _ in range(2 * len(streams)):
        await arrived.acquire()
    await fleet.engines["a"].kill()
    assert await asyncio.gather(*streams) == answers * 2
