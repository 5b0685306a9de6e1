"""Prefill and decode engines on a real node with real weights: long prompts are split, and no answer changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import LONG_SECONDS, eventually
from soak import SOAK, size

from localcluster.cluster import LocalCluster
from localcluster.kubectl import Kubectl
from localcluster.walkthrough import Chat, reachable

from .conftest import SECOND, Platform, own_namespace, printed_when_failed
from .disturbances import kill, pods

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "prefill-decode.yaml"
VLLM_RESOURCES = {"requests": {"cpu": "200m", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "8Gi"}}
STREAMS, TOKENS = 4, 8
NUMBERS = 70
"""Of each prompt, of three digits or more: longer than the one chunk that a decode engine computes itself."""


class Pool:
    """The sample with one engine of each role, and clients that ask long questions at the same time."""

    def __init__(self, kube: Kubectl, **engine: Any) -> None:
        self.kube = kube
        manifest = yaml.safe_load(SAMPLE.read_text())
        manifest["metadata"]["name"] = "demo"
        manifest["spec"]["replicas"] = 1
        manifest["spec"]["engine"].update(engine)
        kube.apply(manifest)
        self.until(ready="2/2")
        self.chat = Chat(reachable(f"http://{kube.cluster_ip('demo')}"), kube.json("mi", "demo")["status"]["model"])
        self.answers: dict[int, str] = {}
        """By question."""

    def until(self, *, ready: str, missing: str = "AllWell") -> None:
        """Wait until the resource has these engines, and its condition RoleMissing this reason."""
        generation = self.kube.json("mi", "demo")["metadata"]["generation"]
        reason = '{.status.conditions[?(@.type=="RoleMissing")].reason}'
        for path, value in (
            ("{.status.observedGeneration}", generation),
            ("{.status.ready}", ready),
            (reason, missing),
        ):
            self.kube.wait("mi/demo", f"jsonpath={path}={value}", seconds=LONG_SECONDS)
        self.kube.wait("mi/demo", "condition=Progressing=False", seconds=LONG_SECONDS)

    def ask(self, questions: Sequence[int]) -> None:
        """Ask at the same time. A question that was asked before has the same answer."""

        def answer(number: int) -> str:
            words = " ".join(str(number + place) for place in range(NUMBERS))
            messages = [{"role": "user", "content": f"What comes next? {words}"}]
            return self.chat.ask(messages, max_tokens=TOKENS, timeout=LONG_SECONDS)

        with ThreadPoolExecutor(len(questions)) as clients:
            for number, text in zip(questions, clients.map(answer, questions), strict=True):
                assert self.answers.setdefault(number, text) == text

    @property
    def imports(self) -> float:
        (pod,) = [pod["metadata"]["name"] for pod in pods(self.kube, "coordinator")]
        path = f"/api/v1/namespaces/{self.kube.namespace}/pods/{pod}:8080/proxy/metrics"
        found = re.search(r"^megatron_coordinator_kv_imports_total (\S+)", self.kube("get", "--raw", path), re.M)
        return float(found[1]) if found else 0.0

    def ask_until_split(self, numbers: Iterator[int]) -> None:
        """Ask new questions until a decode engine has imported a prompt: an idle one computes it itself."""
        before = self.imports
        for _ in range(10):
            self.ask([next(numbers) for _ in range(STREAMS)])
            if self.imports > before:
                return
        raise AssertionError("no prompt was split")

    def lose(self, engine: str) -> None:
        """Delete the pod of an engine by force under questions, and wait until it is replaced."""
        before = self.kube.json("pod", f"{engine}-0")["metadata"]["uid"]
        with ThreadPoolExecutor(1) as clients:
            open_questions = clients.submit(self.ask, [10 * NUMBERS + number for number in range(STREAMS)])
            kill(self.kube, f"{engine}-0")
            open_questions.result(LONG_SECONDS)
        name = f"{engine}-0"
        self.kube("wait", f"pod/{name}", "--for=create", f"--timeout={LONG_SECONDS:g}s")
        self.kube.wait(f"pod/{name}", "condition=Ready", seconds=LONG_SECONDS)
        assert self.kube.json("pod", name)["metadata"]["uid"] != before
        self.until(ready="2/2")


async def test_long_prompts_are_split_and_no_answer_changes(kube: Kubectl) -> None:
    numbers = iter(range(100, 100 * NUMBERS, 7))
    pool = Pool(kube)
    pool.ask_until_split(numbers)
    for state in ("Paused", "Suspended", "Running"):
        kube.patch_spec("demo", desiredState=state)
        kube.wait_state("demo", state)
    pool.until(ready="2/2")
    pool.ask_until_split(numbers)
    for engine in size(("demo-engine-0",), soak=("demo-prefill-0", "demo-engine-0")):
        pool.lose(engine)
    if SOAK:
        pool.ask_until_split(numbers)
        kube.patch_spec("demo", engine={"roles": {"prefill": {"perDecode": None, "replicas": 1}}})
        kube("scale", "mi/demo", "--replicas=0")
        pool.until(ready="1/1", missing="NoDecodeEngine")
        pool.ask([*pool.answers][:STREAMS])
        kube("scale", "mi/demo", "--replicas=1")
        pool.until(ready="2/2")

    # The new decode engine has computed none of the earlier prompts, and imported none.
    kube.patch_spec("demo", engine={"roles": {"prefill": {"perDecode": None, "replicas": 0}}})
    pool.until(ready="1/1", missing="NoPrefillEngine")
    pool.ask([*pool.answers][: size(STREAMS, soak=None)])

    def engine_pods() -> list[str]:
        return [pod["metadata"]["name"] for pod in pods(kube, "engine")]

    async def one_is_left() -> bool:
        return engine_pods() == ["demo-engine-0-0"]

    await eventually(one_is_left, what="the prefill engine is removed", look_seconds=1)


@pytest.mark.skipif(not SOAK, reason="builds an image of 6 GB; `make soak` runs it")
async def test_vllm_engines_split_long_prompts(platform: Platform, kube: Kubectl) -> None:
    platform.cluster.build_images(["runtime-vllm"])
    numbers = iter(range(0, 100 * NUMBERS, 7))
    pool = Pool(
        kube,
        backend="VLLM",
        vllm={"args": {"enforce_eager": True}, "allowNixlBetweenPods": True},
        startupSeconds=1800,
        batching={"kvCacheMemory": "512Mi"},
        roles={"prefill": {"perDecode": 0.5}, "decode": {}},
        podTemplate={"spec": {"containers": [{"name": "engine", "resources": VLLM_RESOURCES}]}},
    )
    pool.ask_until_split(numbers)
    for engine in ("demo-prefill-0", "demo-engine-0"):
        pool.lose(engine)
    pool.ask_until_split(numbers)


@pytest.mark.skipif(not SOAK, reason="takes some minutes; `make soak` runs it")
async def test_a_node_with_the_prefill_engine_is_lost(
    platform: Platform, cluster: LocalCluster, request: pytest.FixtureRequest
) -> None:
    numbers = iter(range(100, 100 * NUMBERS, 7))
    first, second = (node.name for node in cluster.settings.nodes)

    def on(node: str) -> dict[str, Any]:
        return {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}

    with own_namespace(platform) as kube, printed_when_failed(platform, kube, request):
        kube("cordon", second)
        pool = Pool(kube)
        kube("uncordon", second)
        kube.patch_spec("demo", engine={"roles": {"prefill": {"podTemplate": on(second)}}})
        pool.until(ready="2/2")
        assert {pod["spec"]["nodeName"] for pod in pods(kube, "engine")} == {first, second}
        pool.ask_until_split(numbers)
        cluster.cut_network(SECOND)
        cluster.freeze_node(SECOND)
        try:
            pool.ask([next(numbers) for _ in range(STREAMS)])
            reason = '{.status.conditions[?(@.type=="RoleMissing")].reason}'
            kube.wait("mi/demo", f"jsonpath={reason}=NoPrefillEngine", seconds=LONG_SECONDS)
            pool.ask([next(numbers) for _ in range(STREAMS)])
        finally:
            cluster.restore_network(SECOND)
            cluster.thaw_node(SECOND)
        kube("wait", f"node/{second}", "--for=condition=Ready", "--timeout=120s")
        pool.until(ready="2/2")
        pool.ask_until_split(numbers)
