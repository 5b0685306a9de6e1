"""Requests with images survive kill -9 of engines and of the coordinator: their files are kept for a replay."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
from pathlib import Path

import httpx
import pytest
from echo_engine import echo_prompt
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from fleet import Fleet, until_serving

from megatron_runtime.checkpoints.builtin import builtin_file
from megatron_runtime.protocol.media import Media, MediaItem, media_digest
from megatron_runtime.protocol.messages import tokens_to_bytes
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

OPTIONS = ("--echo-takes-media", "--echo-step-seconds", "0.02", "--kv-cache-memory", "16Mi")
LENGTH = 60

pytestmark = pytest.mark.timeout(300)


async def test_answers_to_images_survive_killed_engines_and_coordinators(fleet: Fleet) -> None:
    coordinator, link = await fleet.serve(2, *OPTIONS)
    client, draw = await fleet.client(), random.Random(4)
    asked, answers, begun = [], [], asyncio.Semaphore(0)
    for _ in range(8):
        prompt, file = draw.choices(range(50_000), k=20), draw.randbytes(200_000)
        media = Media(tokens_to_bytes(prompt[:9]), (MediaItem("image", media_digest("image", file), 3, 9, file),))
        for _ in range(2):  # two choices
            params = SamplingParams(num_tokens_to_generate=LENGTH)
            asked.append(echo_answer(echo_prompt(prompt, media), LENGTH))
            answers.append(client.add_request(prompt, params, media=media, on_tokens=lambda _: begun.release()))
    for _ in range(4 * len(answers)):
        await begun.acquire()
    await fleet.engines["engine-0"].kill()
    await fleet.engine("engine-0", *OPTIONS)
    await until_serving(link, fleet.engines)
    await coordinator.kill()
    await fleet.coordinator()
    found = await asyncio.gather(*answers)
    assert [answer["generated_tokens"] for answer in found] == asked


async def test_images_of_http_requests_reach_engines_also_after_a_kill(fleet: Fleet, tmp_path: Path) -> None:
    """The server renders with a fake of vLLM's renderer, whose tokens are bytes."""
    fake, directory = Path(__file__).parents[1] / "unit/vllm/fake_formats", tmp_path / "model"
    directory.mkdir()
    write_gguf_tokenizer(builtin_file("smollm2-135m"), directory)
    (directory / "config.json").write_text('{"model_type": "fake", "takes": ["image"]}')
    path = os.pathsep.join(filter(None, (str(fake), os.environ.get("PYTHONPATH"))))
    await fleet.serve(2, *OPTIONS)
    options = ("--backend", "vllm", "--model", str(directory), "--model-name", "m")
    _, url = await fleet.server(*options, warm=False, environment={"PYTHONPATH": path})
    draw, arrived = random.Random(5), asyncio.Semaphore(0)
    expected, asked = [], []

    async def ask(http: httpx.AsyncClient, file: bytes) -> list[int]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}
        content = [{"type": "text", "text": "See "}, part]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": LENGTH, "stream": True}
        found: list[int] = []
        async with http.stream("POST", "/v1/chat/completions", json={**body, "return_token_ids": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or ()
                    arrived.release()
        return found

    async with httpx.AsyncClient(base_url=url, timeout=LONG_SECONDS, trust_env=False) as http:
        for _ in range(8):
            file = b"MEDIA" + bytes([draw.randint(1, 30)]) + draw.randbytes(50_000)
            prompt = [*b"user: See ", *[26] * file[5], *b"\nassistant: "]
            item = MediaItem("image", media_digest("image", file), 10, file[5], file)
            expected.append(echo_answer(echo_prompt(prompt, Media(b"", (item,))), LENGTH))
            asked.append(asyncio.create_task(ask(http, file)))
        for _ in range(4 * len(asked)):
            await arrived.acquire()
        await fleet.engines["engine-1"].kill()
        assert await asyncio.gather(*asked) == expected
