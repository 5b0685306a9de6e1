"""Pooling models: embeddings, scores and rerank equal those of vLLM's own server, and outlive a killed engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from eventually import eventually
from fleet import Fleet, until_serving

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.request import unpack_value
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import START_SECONDS, has_formats

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_formats(), reason="vLLM before 0.32 has other classes, and pooling models are rejected"),
]

LIMIT = 64
"""Positions of the models."""
QUERY = "what is the capital of france"
DOCUMENTS = ["paris is the capital", "the llama is an animal", "france", "what what what", "a city: paris, france!"]
LONG = "paris " * 100


def write_tokenizer(directory: Path) -> int:
    """Write a WordPiece tokenizer of letters and a few words. Return the size of its vocabulary."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    words = ["paris", "france", "capital", "the", "is", "llama", "what", "of"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *words, *".,:!?"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": LIMIT,
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(pieces)


def write_model(directory: Path, kind: str) -> Path:
    """Write a random model of two layers. kind: name of its class in transformers."""
    import torch
    import transformers

    torch.manual_seed(7)
    shared = {
        "vocab_size": write_tokenizer(directory),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LIMIT,
        "initializer_range": 0.3,
    }
    if kind.startswith("Qwen3"):
        config = transformers.Qwen3Config(**shared, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True)
    else:
        config = transformers.BertConfig(**shared, num_labels=1)
    getattr(transformers, kind)(config).to(torch.float32).save_pretrained(directory)
    return directory


@contextmanager
def servers(model: Path, arguments: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Run both servers. Yield their URLs, by "megatron" and "vllm"."""
    vllm_port, megatron_port = free_ports(2)
    options = [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in arguments.items()
    ]
    commands = {
        "vllm": (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"),
            *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--port", str(vllm_port), *options),
        ),
        "megatron": (
            *("-m", "megatron_runtime.cli", "serve", "--backend", "vllm", "--model", str(model), "--model-name", "m"),
            *("--dtype", "float32", "--kv-cache-memory", "64Mi", "--port", str(megatron_port)),
            *("--vllm-arguments", json.dumps({"enforce_eager": True, **arguments})),
        ),
    }
    with ExitStack() as stack:
        for command in commands.values():
            process = stack.enter_context(subprocess.Popen([sys.executable, *command]))
            stack.callback(process.terminate)
        yield {"vllm": f"http://127.0.0.1:{vllm_port}", "megatron": f"http://127.0.0.1:{megatron_port}"}


class Both:
    """Sends requests to both servers."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.http = {name: httpx.AsyncClient(base_url=url, timeout=START_SECONDS) for name, url in urls.items()}
        self.openai = {name: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for name, url in urls.items()}

    async def until_ready(self, path: str, body: dict[str, Any]) -> None:
        for name, client in self.http.items():

            async def answers(client: httpx.AsyncClient = client) -> bool:
                try:
                    return (await client.post(path, json=body)).status_code == 200
                except httpx.HTTPError:
                    return False

            await eventually(answers, what=f"{name} serves", seconds=START_SECONDS, look_seconds=1)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        """Return vLLM's answer and ours."""
        theirs, ours = await asyncio.gather(*(self.http[n].post(path, json=body) for n in ("vllm", "megatron")))
        return theirs, ours

    async def equal(self, path: str, **body: Any) -> dict[str, Any]:
        """Compare all but the ids and the time. Return ours."""
        theirs, ours = await self.post(path, {"model": "m", **body})
        assert (theirs.status_code, ours.status_code) == (200, 200), (path, theirs.text, ours.text)
        expected, found = theirs.json(), ours.json()
        for answer in (expected, found):
            for name in ("id", "created"):
                answer.pop(name, None)
            answer["usage"] = {name: answer["usage"][name] for name in ("prompt_tokens", "total_tokens")}
        assert_close(found, expected)
        return found

    async def rejected(self, path: str, **body: Any) -> dict[str, Any]:
        theirs, ours = await self.post(path, {"model": "m", **body})
        assert (theirs.status_code, ours.status_code) == (400, 400), (theirs.text, ours.text)
        error: dict[str, Any] = ours.json()["error"]
        return error


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, list | float):
        assert found == pytest.approx(expected, abs=2e-5)
    else:
        assert found == expected


async def compare_embeddings(both: Both, sizes: list[int]) -> None:
    texts = [QUERY, *DOCUMENTS]
    for options in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        theirs, ours = [
            await both.openai[name].embeddings.create(model="m", input=texts, **options)
            for name in ("vllm", "megatron")
        ]
        for one, other in zip(theirs.data, ours.data, strict=True):
            assert other.embedding == pytest.approx(one.embedding, abs=2e-5)
            assert np.linalg.norm(other.embedding) == pytest.approx(1, abs=1e-4)
        assert ours.usage.prompt_tokens == ours.usage.total_tokens == theirs.usage.prompt_tokens
    for given in (QUERY, [5, 6, 7], [[5, 6, 7], [8, 9]]):
        await both.equal("/v1/embeddings", input=given)
    for options in (
        {"use_activation": False},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5},
        {"truncate_prompt_tokens": 5, "truncation_side": "left"},
    ):
        await both.equal("/v1/embeddings", input=QUERY, **options)
    await both.equal("/v1/embeddings", input=LONG, truncate_prompt_tokens=-1)
    error = await both.rejected("/v1/embeddings", input=["fine", LONG])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert f"{LIMIT} tokens" in error["message"]
    for size in sizes:
        found = await both.equal("/v1/embeddings", input=QUERY, dimensions=size)
        assert len(found["data"][0]["embedding"]) == size
    error = await both.rejected("/v1/embeddings", input=QUERY, dimensions=1000)
    assert error["param"] == "dimensions"


async def compare_scores(both: Both) -> None:
    await both.equal("/v1/score", queries=QUERY, documents=DOCUMENTS)
    await both.equal("/score", text_1=DOCUMENTS, text_2=DOCUMENTS[::-1])
    await both.equal("/v1/score", data_1=QUERY, data_2=QUERY)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = await both.equal(path, query=QUERY, documents=DOCUMENTS)
        assert len({item["relevance_score"] for item in found["results"]}) == len(DOCUMENTS)
    assert len((await both.equal("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2))["results"]) == 2
    await both.equal("/v1/score", queries=QUERY, documents=DOCUMENTS, max_tokens_per_query=3, max_tokens_per_doc=2)
    await both.equal("/v1/score", queries=QUERY, documents=LONG, truncate_prompt_tokens=-1)
    error = await both.rejected("/v1/rerank", query=QUERY, documents=["a", LONG])
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")


@pytest.mark.parametrize(
    ("kind", "arguments", "task"),
    [
        ("BertModel", {}, "embed"),
        ("Qwen3ForCausalLM", {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}}, "embed"),
        ("BertForSequenceClassification", {}, "classify"),
        ("BertModel", {"pooler_config": {"task": "token_embed"}}, "token_embed"),
    ],
)
async def test_answers_equal_those_of_vllms_server(
    tmp_path: Path, kind: str, arguments: dict[str, Any], task: str
) -> None:
    with servers(write_model(tmp_path, kind), arguments) as urls:
        both = Both(urls)
        await both.until_ready("/v1/score", {"model": "m", "queries": "a", "documents": "b"})
        if task == "embed":
            await compare_embeddings(both, [16, 64] if "hf_overrides" in arguments else [])
        await compare_scores(both)
        if task == "classify":
            await both.equal("/v1/score", queries=QUERY, documents=DOCUMENTS, use_activation=False)
        (card,) = (await both.openai["megatron"].models.list()).data
        assert card.tasks == [task]  # type: ignore[attr-defined]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            *([] if task == "embed" else [("/v1/embeddings", {"input": "a"})]),
        ):
            _, ours = await both.post(path, {"model": "m", **body})
            assert (ours.status_code, ours.json()["error"]["code"]) == (404, "not_offered")


async def test_requests_outlive_kill_9_of_a_vllm_engine(fleet: Fleet, tmp_path: Path) -> None:
    model = write_model(tmp_path, "BertModel")
    options = ("--backend", "vllm", "--model", str(model), "--dtype", "float32", "--kv-cache-memory", "64Mi")
    options = (*options, "--threads", "1", "--vllm-arguments", '{"enforce_eager": true}')
    await fleet.coordinator()
    for name in ("first", "second"):
        await fleet.engine(name, *options, warm=False)
    await until_serving(await fleet.admin(), ["first", "second"], seconds=START_SECONDS)
    client = CoordinatorClient(fleet.client_port, keys=fleet.keys(Role.CLIENT))
    await client.start()
    assert client.tasks == ("embed",)
    params = SamplingParams(pooling={"task": "embed"}, num_tokens_to_generate=0)
    expected = [unpack_value((await client.add_request(text, params))["pooled"]) for text in DOCUMENTS]
    answers = [client.add_request(DOCUMENTS[number % len(DOCUMENTS)], params) for number in range(2000)]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    await fleet.engines["first"].kill()
    assert not all(answer.done() for answer in answers)
    for number, reply in enumerate(await asyncio.gather(*answers)):
        assert reply["status"] == "COMPLETED"
        np.testing.assert_allclose(unpack_value(reply["pooled"]), expected[number % len(DOCUMENTS)], atol=2e-5)
    client.stop()
