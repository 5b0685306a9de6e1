"""A resource with a trainer, on a real API server with real engines: updates, and engines that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from random_checkpoint import LLAMA, random_tensors, write_model
from trainer_process import TrainerProcess

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import CHILD_KINDS, POD

from .conftest import condition
from .fake_node import FakeNode, Ports

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PEERS = [{"podSelector": {"matchLabels": {"app": "trainer"}}}]


@pytest.fixture
async def trainer(node: FakeNode, ports: Ports, tmp_path: Path) -> AsyncIterator[TrainerProcess]:
    """Not started. The engines of the node have its model."""
    config = replace(LLAMA, num_layers=2, num_heads=4)
    model = str(write_model(tmp_path / "model", config, random_tensors(config)))
    node.engine_program = ("-m", "megatron_runtime.cli", "engine")
    limits = ("--max-sequence-length", str(config.max_position_embeddings), "--block-size-tokens", "16")
    node.engine_arguments = ("--model", model, "--dtype", "float32", *limits)
    made = TrainerProcess(f"127.0.0.1:{ports.admin}", node.keys_folder("demo"), model)
    yield made
    await made.kill()


def _serves(status: dict[str, Any], answer: dict[str, Any], epoch: int) -> bool:
    """Whether both engines serve what the trainer published, and the status has it."""
    weights, engines = status.get("weights") or {}, status.get("engines") or []
    return (
        (weights.get("source"), weights.get("epoch")) == (answer["source"], epoch)
        and [(each["state"], each["epoch"], each.get("digest")) for each in engines]
        == [("RUNNING", epoch, weights["digest"])] * 2
        and condition(status, "Degraded")["status"] == "False"
        and status["ready"] == "2/2"
    )


async def _lose(api: KubeApi, node: FakeNode, namespace: str, engine: str) -> None:
    """Delete the pod of an engine at once, as after the loss of its node, and wait for another process."""
    container = node.engine(engine)
    path = POD.path(namespace, container.pod["metadata"]["name"])
    await api.request("DELETE", path, body={"gracePeriodSeconds": 0})

    async def is_replaced() -> bool:
        return any(each.engine == engine and each is not container for each in node.containers.values())

    await eventually(is_replaced, seconds=120, what=f"another pod of {engine} starts")


async def test_engines_serve_what_a_trainer_publishes(
    api: KubeApi, resource: Any, operator: Any, node: FakeNode, trainer: TrainerProcess, namespace: str
) -> None:
    await resource.create(replicas=2, weights={"trainer": {"from": PEERS}})
    await resource.settled("Running")
    policies = next(kind for kind in CHILD_KINDS if kind.kind == "NetworkPolicy")
    policy = await api.get(policies, namespace, "demo-engines")
    assert policy is not None
    assert any(rule.get("to") == PEERS for rule in policy["spec"]["egress"])
    assert await trainer.start() == 0
    for epoch in (1, 2):
        answer = await trainer.publish(epoch)
        await resource.until(lambda status, epoch=epoch, answer=answer: _serves(status, answer, epoch))

    await _lose(api, node, namespace, "demo-engine-1")
    await resource.until(lambda status: _serves(status, answer, 2))

    await trainer.kill()
    await _lose(api, node, namespace, "demo-engine-1")
    await resource.until(lambda status: _serves(status, answer, 2))  # from demo-engine-0

    await asyncio.gather(*(_lose(api, node, namespace, name) for name in ("demo-engine-0", "demo-engine-1")))
    status = await resource.until(lambda status: condition(status, "Degraded").get("reason") == "WeightsUnavailable")
    assert "trainer" in condition(status, "Degraded")["message"]
    assert status["weights"]["epoch"] == 2
    assert await trainer.start() == 2
    answer = await trainer.publish(2)
    await resource.until(lambda status: _serves(status, answer, 2))
    assert not (await resource.status()).get("lifecycle", {}).get("epoch"), "the operator sent no update"
