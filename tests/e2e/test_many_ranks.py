"""One engine in several pods: it gives the answers of one rank, every rank confirms every verb, and (in `make soak`)
when a rank is killed under load all ranks restart and no request is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK

from localcluster.kubectl import PATIENCE_SECONDS, Kubectl
from localcluster.walkthrough import QUESTION, STORY
from megatron_runtime.requests.request import DynamicInferenceRequest
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization import load_tokenizer

from .conftest import Deployed, deploy

TOKENS = 24
"""Tokens of the built-in model, in three pods on one CPU."""
MANY_TOKENS = 600
"""Tokens of a small model: enough that a rank is killed before they are generated."""
long = pytest.mark.skipif(not SOAK, reason="takes minutes; `make soak` runs it")

RESOURCES = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "1"}}
ENGINE: dict[str, Any] = {
    "ranksPerPod": 1,
    "startupSeconds": 300,
    "batching": {"kvCacheMemory": "64Mi", "maxRequests": 16},
    "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": RESOURCES}]}},
}


def walk_through_verbs(kube: Kubectl, ranks: int) -> None:
    for state in ("Paused", "Suspended", "Running"):
        kube.patch_spec("demo", desiredState=state)
        status = kube.wait_state("demo", state)
        lifecycle = status["lifecycle"]
        assert (lifecycle["confirmedRanks"], lifecycle["totalRanks"]) == (ranks, ranks), lifecycle


def kill_a_rank_under_load(deployed: Deployed, pod: str, *, tokens: int) -> None:
    """Kill a rank. Every rank of the engine must restart, and every stream must give the undisturbed answer."""
    kube, chat = deployed.kube, deployed.chat
    story = chat.ask(STORY, max_tokens=tokens)
    before = lives(kube)
    opened = [chat.stream(STORY, max_tokens=tokens) for _ in range(4)]
    for stream in opened:
        assert stream.begun.wait(PATIENCE_SECONDS)
    kube("delete", "pod", pod, "--grace-period=0", "--force")
    assert not any(stream.finished.is_set() for stream in opened), "the rank was killed too late"
    assert [stream.wait() for stream in opened] == [story] * 4
    kube.wait("mi/demo", "condition=Ready")
    assert not before & lives(kube), "a rank of the engine with the killed rank has not restarted"


def lives(kube: Kubectl) -> set[tuple[str, int]]:
    """Return the engine pods and the restart counts of their containers."""
    found = kube.json("pods", "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=engine")
    return {(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in found["items"]}


@long
def test_tensor_ranks_in_three_pods(kube: Kubectl) -> None:
    model = {"source": {"builtin": "smollm2-135m"}, "dtype": "Float32", "maxSequenceLength": 1024}
    deployed = deploy(kube, model=model, parallelism={"tensor": 3}, engine=ENGINE)
    assert "Paris" in deployed.chat.ask(QUESTION)
    assert kube.json("mi", "demo")["status"]["engines"][0]["ranks"] == 3
    walk_through_verbs(kube, 3)
    kill_a_rank_under_load(deployed, "demo-engine-0-1", tokens=TOKENS)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(2, 2, marks=long)])
def test_ranks_in_pods_answer_as_one(
    kube: Kubectl, small_model: Path, claim: Callable[..., str], tensor: int, pipeline: int
) -> None:
    model = {
        "source": {"persistentVolumeClaim": {"claimName": claim(small_model), "path": "/"}},
        "dtype": "Float32",
        "maxSequenceLength": 1024,
    }
    ranks = tensor * pipeline
    spread = deploy(kube, model=model, parallelism={"tensor": tensor, "pipeline": pipeline}, engine=ENGINE)
    assert kube.json("mi", "demo")["status"]["engines"][0]["ranks"] == ranks
    assert spread.chat.ask(STORY, max_tokens=TOKENS) == answer_of_one_rank(small_model)
    walk_through_verbs(kube, ranks)
    if SOAK:  # a restart of all ranks takes a minute more
        kill_a_rank_under_load(spread, f"demo-engine-0-{ranks - 1}", tokens=MANY_TOKENS)


def answer_of_one_rank(model: Path) -> str:
    """Return the answer to STORY of an engine in this process."""
    from megatron_runtime.megatron_core.apis import MegatronLLM

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=TOKENS)
    with MegatronLLM.from_pretrained(model, dtype="float32") as llm:
        answer = llm.generate(load_tokenizer(str(model)).encode_chat(STORY), params)
    assert isinstance(answer, DynamicInferenceRequest)
    return answer.generated_text or ""
