"""A resource with vLLM engines: it answers, its server reads calls with vLLM's parser, every verb holds in the middle
of a stream, and a bad argument changes no engine. vLLM itself runs in the pods, on the CPU of the node."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from soak import SOAK

from localcluster.kubectl import PATIENCE_SECONDS, Kubectl
from localcluster.walkthrough import FROZEN_SECONDS, QUESTION, STORY, Chat, ask_for_paris

from .conftest import Platform, deploy

pytestmark = pytest.mark.skipif(not SOAK, reason="builds an image of 6 GB and starts vLLM twice; `make soak` runs it")

RESOURCES = {"requests": {"cpu": "200m", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "8Gi"}}
ARGS = {"enforce_eager": True}  # compilation takes a minute, and a verb does not depend on it
ENGINE = {
    "backend": "VLLM",
    "vllm": {"args": ARGS},
    "startupSeconds": 1800,
    "batching": {"kvCacheMemory": "256Mi", "maxRequests": 16},
    "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": RESOURCES}]}},
}
SERVER = {
    "toolCallParser": "hermes",
    "podTemplate": {"spec": {"containers": [{"name": "server", "resources": {"requests": {"memory": "2Gi"}}}]}},
}
CALLED = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Paris", "Rome"]}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "tool_choice": "required",
    "temperature": 0,
}
RESIDENT = "import psutil; print(sum(process.memory_info().rss for process in psutil.process_iter()) >> 20)"


@pytest.fixture(scope="module", autouse=True)
def image(platform: Platform) -> None:
    platform.cluster.build_images(["runtime-vllm"])


@pytest.fixture
def model(claim: Callable[..., str]) -> Iterator[dict[str, Any]]:
    """The built-in model as files of Hugging Face, from which vLLM's own renderer and parsers work."""
    # They import torch, which the other tests here do not need.
    from megatron_runtime.checkpoints.convert import convert
    from megatron_runtime.tokenization.loader import write_gguf_tokenizer

    directory = Path(tempfile.mkdtemp(prefix="megatron-model-"))
    directory.chmod(0o755)
    files = directory / "model"
    convert("builtin:smollm2-135m", files, dtype="float32", write_gguf_tokenizer=write_gguf_tokenizer)
    source = {"persistentVolumeClaim": {"claimName": claim(directory), "path": "/model"}}
    yield {"source": source, "dtype": "Float32", "maxSequenceLength": 2048}
    shutil.rmtree(directory)


def resident_mib(kube: Kubectl) -> int:
    """Return the resident memory of all processes of the engine's pod."""
    return int(kube("exec", "demo-engine-0-0", "--container=engine", "--", "python", "-c", RESIDENT))


def engine_pod(kube: Kubectl) -> tuple[str, int]:
    """Return the engine's pod and the restarts of its container."""
    pod = kube.json("pod", "demo-engine-0-0")
    return pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]


def enter(kube: Kubectl, state: str) -> None:
    kube.patch_spec("demo", desiredState=state)
    kube.wait_state("demo", state)


def check_call(kube: Kubectl, chat: Chat) -> None:
    """Check that the server's pod reads calls as vLLM's own server does."""
    assert kube.json("mi", "demo")["status"]["formats"]["toolCalls"] == "vllm:hermes"
    (card,) = httpx.get(f"{chat.url}/v1/models", timeout=PATIENCE_SECONDS).json()["data"]
    assert card["tool_call_format"] == "vllm:hermes"
    answer = httpx.post(f"{chat.url}/v1/chat/completions", json=CALLED, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert call["id"].startswith("chatcmpl-tool-"), "the id is not of vLLM's form"


def test_calls_and_every_verb_with_a_vllm_engine(kube: Kubectl, model: dict[str, Any]) -> None:
    chat = deploy(kube, model=model, engine=ENGINE, server=SERVER).chat
    check_call(kube, chat)
    pod = engine_pod(kube)
    _, tokens = ask_for_paris(chat)
    story = chat.ask(STORY, max_tokens=tokens)

    stream = chat.stream(STORY, max_tokens=tokens)
    assert stream.begun.wait(PATIENCE_SECONDS)
    enter(kube, "Paused")
    waiting, chunks = chat.stream(QUESTION, max_tokens=16), stream.chunks
    assert not stream.finished.wait(FROZEN_SECONDS), "the stream ended while the engine was paused"
    assert stream.chunks == chunks, "tokens arrived while the engine was paused"
    assert not waiting.begun.is_set(), "a new request was answered while the engine was paused"
    enter(kube, "Running")
    assert stream.wait() == story
    assert "Paris" in waiting.wait()

    stream = chat.stream(STORY, max_tokens=tokens)
    assert stream.begun.wait(PATIENCE_SECONDS)
    before = resident_mib(kube)
    enter(kube, "Suspended")
    after = resident_mib(kube)
    assert after < before - 500, f"resident memory of the engine's pod: {before} MiB running, {after} MiB suspended"
    enter(kube, "Running")
    assert stream.wait() == story

    kube.patch_spec("demo", engine={"vllm": {"args": {"no_such_argument": 1}}})
    kube.wait("mi/demo", "condition=Degraded")
    (degraded,) = [entry for entry in kube.json("mi", "demo")["status"]["conditions"] if entry["type"] == "Degraded"]
    assert degraded["reason"] == "NotAllowed"
    assert "spec.engine.vllm.args.no_such_argument" in degraded["message"]
    ask_for_paris(chat)
    assert engine_pod(kube) == pod, "a verb or a rejected argument restarted the engine's pod"
    kube.patch_spec("demo", engine={"vllm": {"args": {"no_such_argument": None}}})

    enter(kube, "Stopped")
    assert kube.json("pods", "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=engine")["items"] == []
    assert chat.status_of(QUESTION) == 503
