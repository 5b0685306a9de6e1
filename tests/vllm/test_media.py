"""Tiny models with random weights that take images, video or audio: the same answers as vLLM's own server, also across
kill -9 of an engine. Files that expand to gigabytes are rejected.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import Fleet, until_serving

from .conftest import START_SECONDS, has_formats
from .servers import EAGER, openai_client, started, until_ready

pytestmark = [
    pytest.mark.skipif(not has_formats(), reason="this version of vLLM has no renderer for servers"),
    pytest.mark.timeout(1800),
]

START, END, IMAGE, VIDEO, AUDIO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|AUDIO|>"
SPECIAL = {
    "<repo_name>": START,
    "<reponame>": END,
    "<file_sep>": IMAGE,
    "<filename>": VIDEO,
    "<gh_stars>": AUDIO,
    "<issue_start>": "<|audio_bos|>",
    "<issue_comment>": "<|audio_eos|>",
}
"""Tokens of SmolLM2 that the test uses as placeholders of media."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% elif c.type == 'video' %}"
    f"{START}{VIDEO}{END}"
    "{% elif c.type == 'audio' %}"
    f"<|audio_bos|>{AUDIO}<|audio_eos|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 40


def write_tokenizer(model: Path, directory: Path) -> Any:
    """Write the tokenizer of SmolLM2 with tokens of media. Return it. model: SmolLM2."""
    from transformers import AutoTokenizer

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
    return AutoTokenizer.from_pretrained(directory)


def text_config(tokenizer: Any) -> dict[str, Any]:
    """Return the settings of the two layers that read tokens."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def write_audio_model(model: Path, directory: Path) -> None:
    """Write a Qwen2-Audio with two layers and random weights. model: SmolLM2."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    tokenizer = write_tokenizer(model, directory)
    torch.manual_seed(3)
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text_config(tokenizer)},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "initializer_range": 0.2,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO),
        architectures=["Qwen2AudioForConditionalGeneration"],
    )
    Qwen2AudioForConditionalGeneration(config).float().save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    published = {name.replace(".model.model.", ".model."): value for name, value in weights.items()}
    save_file(published, directory / "model.safetensors")  # transformers 5.19 writes ".model" twice
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor"}
    extractor |= {"feature_size": 128, "sampling_rate": 16000, "return_attention_mask": True}
    (directory / "preprocessor_config.json").write_text(json.dumps(extractor))


def write_vision_model(model: Path, directory: Path) -> None:
    """Write a Qwen2-VL with two layers and random weights. model: SmolLM2."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = write_tokenizer(model, directory)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL.values()}
    torch.manual_seed(3)
    config = Qwen2VLConfig(
        text_config={
            **text_config(tokenizer),
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
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


def container(*seeds: int) -> Mapping[str, Any]:
    """Return the part of a message with a video in a container, of one image for each seed, at 4 images per second."""
    import cv2
    import numpy as np

    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        writer = cv2.VideoWriter(file.name, cv2.VideoWriter_fourcc(*"mp4v"), 4, (56, 56))  # type: ignore[attr-defined]
        for seed in seeds:
            pixels = np.frombuffer(random.Random(seed).randbytes(3 * 7 * 7), np.uint8).reshape(7, 7, 3)
            writer.write(cv2.resize(pixels, (56, 56)))
        writer.release()
        content = Path(file.name).read_bytes()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(content).decode()}"}}


def sound(seed: int, *, seconds: float = 0.7, rate: int = 16000, form: str = "WAV") -> str:
    """Return a file with noise in base64."""
    import numpy as np
    import soundfile

    content = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.2, int(seconds * rate)).astype(np.float32)
    soundfile.write(content, samples, rate, format=form)
    return base64.b64encode(content.getvalue()).decode()


def audio(seed: int, **options: Any) -> Mapping[str, Any]:
    url = f"data:audio/{options.get('form', 'WAV').lower()};base64,{sound(seed, **options)}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def input_audio(seed: int) -> Mapping[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": sound(seed), "format": "wav"}}


def text(content: str) -> Mapping[str, Any]:
    return {"type": "text", "text": content}


def user(*content: Any) -> Mapping[str, Any]:
    return {"role": "user", "content": list(content)}


Conversations = Sequence[Sequence[Mapping[str, Any]]]


def conversations_of_vision() -> Conversations:
    return (
        [user(image(1), text("What is this?"))],
        [user(image(2), text("What is this?"))],
        [user(text("Compare"), image(1, mode="RGBA"), text("and"), image(3, width=60, height=150, form="JPEG"))],
        [user(image(1)), {"role": "assistant", "content": "A cat."}, user(image(2), text("And this?"))],
        [user(image(1)), {"role": "assistant", "content": "It is"}],
        [user(video(4, 5, 6, 7), text("What happens?"))],
        [user(container(4, 5, 6, 7), text("What happens?"))],
    )


def conversations_of_audio() -> Conversations:
    return (
        [user(audio(1), text("What is said?"))],
        [user(audio(2), text("What is said?"))],
        [user(text("Compare"), audio(1, rate=44100, form="FLAC"), text("and"), audio(3, seconds=3.5, form="OGG"))],
        [user(input_audio(1)), {"role": "assistant", "content": "Hello."}, user(input_audio(2), text("And this?"))],
    )


def zeros(size: int, *, times: int) -> bytes:
    """Return zero bytes, compressed."""
    compressor, part = zlib.compressobj(), bytes(size)
    return b"".join(compressor.compress(part) for _ in range(times)) + compressor.flush()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> Mapping[str, Any]:
    """Return the part of a message with a black image of one bit per pixel. chunks: further ones, name and content."""
    content = zeros(1 + (width + 7) // 8, times=height)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in ((b"IHDR", header), *chunks, (b"IDAT", content), (b"IEND", b""))
    )
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def bombs_of_vision() -> Sequence[Mapping[str, Any]]:
    return png(30_000, 30_000), png(16, 16, (b"zTXt", b"a\0\0" + zeros(1 << 20, times=1 << 10)))


def bombs_of_audio() -> Sequence[Mapping[str, Any]]:
    import numpy as np
    import soundfile

    content = io.BytesIO()
    with soundfile.SoundFile(content, "w", 8000, 1, format="FLAC") as file:
        for _ in range(30):
            file.write(np.zeros(8000 * 600, np.int16))
    assert len(content.getvalue()) < 1 << 20
    url = f"data:audio/flac;base64,{base64.b64encode(content.getvalue()).decode()}"
    return ({"type": "audio_url", "audio_url": {"url": url}},)


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


@pytest.mark.parametrize(
    ("write", "conversations_of", "bombs_of"),
    [
        pytest.param(write_vision_model, conversations_of_vision, bombs_of_vision, id="vision"),
        pytest.param(write_audio_model, conversations_of_audio, bombs_of_audio, id="audio"),
    ],
)
async def test_answers_equal_those_of_vllms_server_and_survive_bombs_and_a_killed_engine(
    fleet: Fleet,
    model: Path,
    tmp_path: Path,
    write: Callable[[Path, Path], None],
    conversations_of: Callable[[], Conversations],
    bombs_of: Callable[[], Sequence[Mapping[str, Any]]],
) -> None:
    directory, conversations = tmp_path / "model", conversations_of()
    write(model, directory)
    options = ("--backend", "vllm", "--model", str(directory), "--max-sequence-length", "1024")
    of_engine = ("--dtype", "float32", "--kv-cache-memory", "256Mi", "--threads", "1", *EAGER)
    await fleet.coordinator("--routing-policy", "LongestPrefix")
    link = await fleet.admin()
    for name in ("a", "b"):
        await fleet.engine(name, *options, *of_engine, warm=False)
    await until_serving(link, ("a", "b"), seconds=START_SECONDS)
    _, url = await fleet.server(*options, "--model-name", "m", warm=False)
    with started(directory, vllm=("--max-model-len", "1024", "--max-num-seqs", "64")) as vllm:
        urls = {**vllm, "megatron": url}
        await until_ready(urls)
        theirs, ours = (openai_client(each) for each in urls.values())
        answers = await equal_answers(theirs, ours, conversations)
    several = await ask(ours, conversations[0], n=3)
    assert [choice.message.content for choice in several.choices] == [answers[0]] * 3

    processes = [fleet.engines[name].pid for name in ("a", "b")]
    for bomb in bombs_of():
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(ours, [user(bomb, text("What is this?"))])
        assert caught.value.param == "messages"
    assert await asyncio.gather(*(streamed(ours, messages) for messages in conversations)) == answers
    assert [fleet.engines[name].pid for name in ("a", "b")] == processes

    arrived = asyncio.Semaphore(0)
    streams = [asyncio.create_task(streamed(ours, messages, arrived)) for messages in conversations * 2]
    for _ in range(2 * len(streams)):
        await arrived.acquire()
    await fleet.engines["a"].kill()
    assert await asyncio.gather(*streams) == answers * 2


async def equal_answers(
    theirs: openai.AsyncOpenAI, ours: openai.AsyncOpenAI, conversations: Conversations
) -> list[str]:
    """Compare whole and streamed answers. Return them."""
    answers = []
    for messages in conversations:
        expected, found = [await ask(client, messages, logprobs=True) for client in (theirs, ours)]
        answers.append(expected.choices[0].message.content)
        assert found.choices[0].message.content == answers[-1]
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens
        log_probs = [[token.logprob for token in each.choices[0].logprobs.content] for each in (expected, found)]
        assert log_probs[1] == pytest.approx(log_probs[0], abs=1e-3)
        assert await streamed(ours, messages) == answers[-1]
    assert answers[0] != answers[1], "the model does not see its media"
    return answers
