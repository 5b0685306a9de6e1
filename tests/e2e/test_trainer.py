"""A trainer in a pod publishes weights to the engines of a resource. Lost engines get them from another engine.

The trainer has its own keys of the resource's Secret, and connects as `spec.weights.trainer` permits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from eventually import LONG_SECONDS, eventually
from soak import SOAK

from localcluster.cluster import LocalCluster
from localcluster.images import TARGETS
from localcluster.kubectl import Kubectl
from localcluster.walkthrough import reachable

from .conftest import SECOND, apply_sample
from .disturbances import kill, pods

PEERS = [{"podSelector": {"matchLabels": {"app": "trainer"}}}]
KEYS = ("trainer.key", "trainer.pub", "server.pub", "engine.pub")
PROGRAM = """
import signal
from pathlib import Path
from safetensors.torch import load_file
from megatron_runtime.trainer import WeightServer

weights = load_file("/model/model.safetensors")
weights["model.norm.weight"].neg_()  # reverses the order of the logits
with WeightServer(weights, coordinator="demo-coordinator:5557", keys=Path("/keys"), port=7000) as server:
    print(server.publish(1), flush=True)
    signal.pause()
"""
QUESTIONS = [[number, number + 1, number + 2] for number in range(100, 104)]
TOKENS = 8
HOSTNAME = "kubernetes.io/hostname"
LOST_SECONDS = 5
"""How long the pods of a lost node may run on, so that the test is short."""


class Trained:
    """A resource with two engines and a trainer, and the answers of its weights."""

    def __init__(self, kube: Kubectl, claim: str, **spec: Any) -> None:
        self.kube = kube
        self._claim = claim
        model = {
            "source": {"persistentVolumeClaim": {"claimName": claim, "path": "/"}},
            "dtype": "Float32",
            "maxSequenceLength": 1024,
        }
        apply_sample(kube, replicas=2, model=model, weights={"trainer": {"from": PEERS}}, **spec)
        self.until(ready="2/2")
        self._url = reachable(f"http://{kube.cluster_ip('demo')}")
        self.before = self.answers(epoch=0)

    def until(self, *, ready: str) -> None:
        self.kube.wait("mi/demo", f"jsonpath={{.status.ready}}={ready}", seconds=LONG_SECONDS)
        self.kube.wait("mi/demo", "condition=Progressing=False", seconds=LONG_SECONDS)

    def answers(self, *, epoch: int) -> list[str]:
        """Return the answers to all questions, each from the weights of this epoch."""
        body = {"model": self.status["model"], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        texts = []
        for question in QUESTIONS:
            answer = httpx.post(f"{self._url}/v1/completions", json={**body, "prompt": question}, timeout=LONG_SECONDS)
            assert answer.status_code == 200, answer.text
            assert answer.json()["system_fingerprint"] == f"weights-{epoch}"
            texts.append(answer.json()["choices"][0]["text"])
        return texts

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.kube.json("mi", "demo")["status"]
        return status

    def start_trainer(self) -> None:
        """Start the trainer, which publishes epoch 1."""
        volumes = {
            "keys": {"secret": {"secretName": "demo-keys", "items": [{"key": name, "path": name} for name in KEYS]}},
            "model": {"persistentVolumeClaim": {"claimName": self._claim, "readOnly": True}},
        }
        container = {
            "name": "trainer",
            "image": TARGETS["runtime"],
            "command": ["python", "-c", PROGRAM],
            "volumeMounts": [{"name": name, "mountPath": f"/{name}"} for name in volumes],
        }
        self.kube.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "trainer", "labels": PEERS[0]["podSelector"]["matchLabels"]},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
                    "automountServiceAccountToken": False,
                },
            }
        )

    async def published(self) -> str:
        """Wait until the trainer has published, and return the reference."""
        log = ""

        async def has_returned() -> bool:
            nonlocal log
            pod = self.kube.json("pod", "trainer")
            assert pod["status"]["phase"] in ("Pending", "Running"), self.kube("logs", "trainer")
            if pod["status"]["phase"] == "Running":
                log = self.kube("logs", "trainer")
            return "trainer://" in log

        await eventually(has_returned, what="publish() returns", look_seconds=0.5)
        return log.strip().splitlines()[-1]

    async def serves(self, source: str) -> None:
        """Wait until both engines serve these weights according to the status, and compare the answers."""

        async def is_reported() -> bool:
            status = self.status
            weights, engines = status.get("weights") or {}, status.get("engines") or []
            conditions = {each["type"]: each["status"] for each in status["conditions"]}
            return (
                (weights.get("source"), weights.get("epoch"), status["ready"]) == (source, 1, "2/2")
                and [(each["epoch"], each.get("digest")) for each in engines] == [(1, weights["digest"])] * 2
                and conditions["Degraded"] == "False"
            )

        await eventually(is_reported, what="the status has the weights of the trainer on both engines")
        after = self.answers(epoch=1)
        assert all(one != other for one, other in zip(self.before, after, strict=True))
        if hasattr(self, "after"):
            assert after == self.after
        self.after = after

    async def lose(self, *engines: str) -> None:
        """Remove the pods of engines at once, as after the loss of their nodes, and wait for others in their place."""
        before = {pod["metadata"]["uid"] for pod in pods(self.kube, "engine")}
        for engine in engines:
            kill(self.kube, f"{engine}-0")

        async def are_replaced() -> bool:
            return len({pod["metadata"]["uid"] for pod in pods(self.kube, "engine")} - before) == len(engines)

        await eventually(are_replaced, what=f"new pods of {engines}")

    @property
    def sends(self) -> int:
        """Updates that the operator sent."""
        return int(self.status.get("lifecycle", {}).get("epoch") or 0)


@pytest.mark.skipif(not SOAK, reason="tests/cluster shows it with processes: run by make soak")
async def test_an_engine_that_is_lost_gets_the_weights_of_the_trainer_from_another(
    kube: Kubectl, small_model: Path, claim: Callable[..., str]
) -> None:
    trained = Trained(kube, claim(small_model))
    trained.start_trainer()
    source = await trained.published()
    await trained.serves(source)
    kill(kube, "trainer")
    for engine in ("demo-engine-1", "demo-engine-0"):  # then both have a copy
        await trained.lose(engine)
        await trained.serves(source)
    assert trained.sends == 0


@contextmanager
def lost(cluster: LocalCluster) -> Iterator[None]:
    cluster.cut_network(SECOND)
    cluster.freeze_node(SECOND)
    try:
        yield
    finally:
        cluster.restore_network(SECOND)
        cluster.thaw_node(SECOND)


@pytest.mark.skipif(not SOAK, reason="takes some minutes; `make soak` runs it")
async def test_a_node_the_trainer_and_every_engine_are_lost(
    cluster: LocalCluster, kube: Kubectl, small_model: Path, claim: Callable[..., str]
) -> None:
    first, second = (node.name for node in cluster.settings.nodes)
    kube("cordon", second)
    toleration = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECONDS}
    tolerations = [{**toleration, "key": f"node.kubernetes.io/{key}"} for key in ("not-ready", "unreachable")]
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "engine"}
    spread = {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    engine = {
        "startupSeconds": 300,
        "batching": {"kvCacheMemory": "64Mi", "maxRequests": 16},
        "podTemplate": {"spec": {"tolerations": tolerations, "topologySpreadConstraints": [spread]}},
    }
    trained = Trained(
        kube,
        claim(small_model),
        engine=engine,
        lifecycle={"drainSeconds": LOST_SECONDS, "lostNodeSeconds": LOST_SECONDS},
    )
    trained.start_trainer()
    source = await trained.published()
    kube("uncordon", second)
    await trained.lose("demo-engine-1")
    await trained.serves(source)
    assert {pod["spec"]["nodeName"] for pod in pods(kube, "engine")} == {first, second}

    with lost(cluster):

        async def is_moved() -> bool:
            return {pod["spec"].get("nodeName") for pod in pods(kube, "engine")} == {first}

        await eventually(is_moved, seconds=300, what="the engine of the lost node is replaced on the first node")
        await trained.serves(source)
    kube("wait", f"node/{second}", "--for=condition=Ready", "--timeout=120s")

    kill(kube, "trainer")
    await trained.lose("demo-engine-0", "demo-engine-1")
    reason = '{.status.conditions[?(@.type=="Degraded")].reason}'
    kube.wait("mi/demo", f"jsonpath={reason}=WeightsUnavailable", seconds=LONG_SECONDS)
    assert trained.status["weights"]["epoch"] == 1
    trained.start_trainer()
    await trained.serves(await trained.published())
    assert trained.sends == 0
