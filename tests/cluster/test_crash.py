"""The operator is killed between signal and confirmation, or replaced by another: each verb acts once, fenced."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from coordinator_questions import ask_coordinator

from megatron_operator.cluster.kinds import LEASE, SECRET
from megatron_runtime.protocol.headers import Header

pytestmark = pytest.mark.cluster


async def test_operator_killed_before_confirmation_completes_the_verb_once(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    await resource.create(replicas=2)
    await resource.settled("Running")

    node.signal_engine("demo-engine-1", signal.SIGSTOP)
    await resource.patch(desiredState="Paused")
    sent = await operator.logs("signal sent", signal="PAUSE")
    operator.kill()
    during = await resource.status()
    node.signal_engine("demo-engine-1", signal.SIGCONT)
    await operator.start()
    status = await resource.settled("Paused")

    assert during["lifecycle"]["operationId"] == sent["operation_id"]
    assert during["lifecycle"]["phase"] in ("Pending", "Submitted")
    assert status["history"][-1]["operationId"] == sent["operation_id"]
    reply = await ask_coordinator(api, namespace, node.ports.admin)
    assert [(done.operation_id, done.signal, done.phase, done.ranks) for done in reply.operations] == [
        (sent["operation_id"], Header.PAUSE, "Confirmed", 2)
    ]
    # The killed operator may not have sent the signal that it passed to its socket: then its successor sent it.
    assert reply.fence in (sent["fence"], sent["fence"] + 1)


async def test_second_operator_stands_by_then_takes_over_with_a_higher_fence(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str
) -> None:
    first, second = make_operator(pod="operator-a"), make_operator(pod="operator-b")
    await first.start()
    await resource.create()
    await resource.settled("Running")
    await second.start(phase="standing by")

    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    assert second.lines("decision") == []

    assert first.stop() == 0
    await second.reaches("leading")
    await resource.patch(desiredState="Running")
    await resource.settled("Running")

    lease = await api.get(LEASE, namespace, "megatron-operator")
    assert lease["spec"]["holderIdentity"] == "operator-b_operator-b-uid"
    assert [line["fence"] for line in first.lines("signal sent")] == [1]
    assert [line["fence"] for line in second.lines("signal sent")] == [2]
    assert (await ask_coordinator(api, namespace, node.ports.admin)).fence == 2


async def test_a_lost_admin_key_is_recreated_and_accepted(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    """The coordinator first rejects the new key, because it reads the key file a moment later."""
    await resource.create()
    await resource.settled("Running")
    assert operator.stop() == 0
    admin = await api.get(SECRET, namespace, "megatron-operator-admin")
    await api.delete(SECRET, namespace, "megatron-operator-admin", uid=admin["metadata"]["uid"])

    await operator.start()
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    fresh = await api.get(SECRET, namespace, "megatron-operator-admin")
    assert fresh["data"]["admin.pub"] != admin["data"]["admin.pub"]
