"""Pooling models: every route answers as vLLM's own server, and requests outlive a killed engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fleet import Fleet, until_serving

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.request import unpack_value
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import START_SECONDS, has_formats
from .servers import openai_client, started, until_ready

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


def write_model(directory: Path, kind: str, labels: Sequence[str] = ("RELEVANT",)) -> Path:
    """Write a random model of two layers. kind: name of its class in transformers. labels: of a classifier."""
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
        config = transformers.BertConfig(**shared, num_labels=len(labels), id2label=dict(enumerate(labels)))
    getattr(transformers, kind)(config).to(torch.float32).save_pretrained(directory)
    return directory


@contextmanager
def servers(model: Path, arguments: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Run both servers. Yield their URLs, by "vllm" and "megatron". arguments: of both engines."""
    options = [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in arguments.items()
    ]
    of_engine = json.dumps({"enforce_eager": True, **arguments})
    with started(model, vllm=options, megatron=("--vllm-arguments", of_engine)) as urls:
        yield urls


class Both:
    """Sends requests to both servers."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.http = {name: httpx.AsyncClient(base_url=url, timeout=START_SECONDS) for name, url in urls.items()}
        self.openai = {name: openai_client(url) for name, url in urls.items()}

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
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
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


async def compare_classes(both: Both) -> None:
    texts = [QUERY, *DOCUMENTS]
    found = await both.equal("/classify", input=texts)
    assert {item["label"] for item in found["data"]} <= {*LABELS, "RELEVANT"}
    for options in ({"use_activation": False}, {"add_special_tokens": False}, {"truncate_prompt_tokens": 3}):
        await both.equal("/classify", input=texts, **options)
    await both.equal("/classify", input=[5, 6, 7])
    error = await both.rejected("/classify", input=["fine", LONG])
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")


async def compare_pooling(both: Both, task: str) -> None:
    """Compare arrays, which both servers send in each encoding."""
    texts = [QUERY, *DOCUMENTS]
    for options in ({}, {"task": task}, {"use_activation": False}, {"truncate_prompt_tokens": 4}):
        await both.equal("/pooling", input=texts, **options)
    await both.equal("/pooling", input=[[5, 6, 7], [8, 9]])
    replies = await both.post("/pooling", {"model": "m", "input": texts, "encoding_format": "base64"})
    theirs, ours = [
        [np.frombuffer(base64.b64decode(item["data"]), "<f4") for item in reply.json()["data"]] for reply in replies
    ]
    for one, other in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(other, one, atol=2e-5)
    for encoding in ("bytes", "bytes_only"):
        theirs, ours = await both.post("/pooling", {"model": "m", "input": texts, "encoding_format": encoding})
        values = [np.frombuffer(reply.content, "<f4") for reply in (theirs, ours)]
        np.testing.assert_allclose(values[1], values[0], atol=2e-5)
        assert ours.headers["content-type"] == theirs.headers["content-type"]
        if encoding == "bytes":
            metadata = [json.loads(reply.headers["metadata"]) for reply in (theirs, ours)]
            assert metadata[1]["data"] == metadata[0]["data"]
        else:
            assert "metadata" not in ours.headers
    other = "embed" if task != "embed" else "classify"
    for fields, param in (({"dimensions": 16}, "dimensions"), ({"task": other}, "task")):
        assert (await both.rejected("/pooling", input=QUERY, **fields))["param"] == param


LABELS = ("NEGATIVE", "NEUTRAL", "POSITIVE")


@pytest.mark.parametrize(
    ("kind", "arguments", "task"),
    [
        ("BertModel", {}, "embed"),
        ("Qwen3ForCausalLM", {"runner": "pooling", "hf_overrides": {"is_matryoshka": True}}, "embed"),
        ("BertForSequenceClassification", {}, "classify"),
        ("BertModel", {"pooler_config": {"task": "token_embed"}}, "token_embed"),
        ("BertForTokenClassification", {}, "token_classify"),
    ],
)
async def test_answers_equal_those_of_vllms_server(
    tmp_path: Path, kind: str, arguments: dict[str, Any], task: str
) -> None:
    labels = LABELS if "Token" in kind else ("RELEVANT",)
    with servers(write_model(tmp_path, kind, labels), arguments) as urls:
        both = Both(urls)
        await until_ready(urls, "/pooling", {"model": "m", "input": "a"})
        if task == "embed":
            await compare_embeddings(both, [16, 64] if "hf_overrides" in arguments else [])
        if task != "token_classify":
            await compare_scores(both)
        if task == "classify":
            await both.equal("/v1/score", queries=QUERY, documents=DOCUMENTS, use_activation=False)
            await compare_classes(both)
        await compare_pooling(both, task)
        (card,) = (await both.openai["megatron"].models.list()).data
        assert card.tasks == [task]  # type: ignore[attr-defined]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            *([] if task == "embed" else [("/v1/embeddings", {"input": "a"})]),
            *([] if task == "classify" else [("/classify", {"input": "a"})]),
            *([] if task != "token_classify" else [("/score", {"queries": "a", "documents": "b"})]),
        ):
            _, ours = await both.post(path, {"model": "m", **body})
            assert (ours.status_code, ours.json()["error"]["code"]) == (404, "not_offered"), path


async def test_a_classifier_of_several_labels_classifies_texts_and_scores_no_pairs(tmp_path: Path) -> None:
    with servers(write_model(tmp_path, "BertForSequenceClassification", LABELS), {}) as urls:
        both = Both(urls)
        await until_ready(urls, "/classify", {"model": "m", "input": "a"})
        await compare_classes(both)
        await compare_pooling(both, "classify")
        for path in ("/score", "/rerank"):
            body = {"queries": "a", "documents": ["b"]} if path == "/score" else {"query": "a", "documents": ["b"]}
            replies = await both.post(path, {"model": "m", **body})
            assert [reply.status_code for reply in replies] == [404, 404]


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
