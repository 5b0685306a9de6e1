"""The leader is frozen with an unsent signal and resumes when another operator leads: its signal and writes fail."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_questions import ask_coordinator
from eventually import eventually
from soak import repeated, size
from tcp_relay import TcpRelay

from megatron_runtime.protocol.headers import Header

from .api_server_proxy import ApiProxy, ApiRequest

pytestmark = pytest.mark.cluster

FROZEN_SECONDS = size(0, soak=30)
"""The minimum. The leader stays frozen until the other operator has taken over and completed its verb."""


@pytest.fixture
async def relay(node: Any) -> AsyncIterator[TcpRelay]:
    made = TcpRelay(node.ports.admin)
    await made.start()
    yield made
    await made.stop()


@repeated(soak=5)
async def test_a_frozen_leader_that_resumes_changes_nothing(
    seed: int,
    resource: Any,
    make_operator: Any,
    node: Any,
    api: Any,
    namespace: str,
    relay: TcpRelay,
    proxy: ApiProxy,
    tmp_path: Path,
) -> None:
    through = proxy.kubeconfig(tmp_path / "of-the-first")
    lease = ("--lease-seconds", "10")
    first = make_operator(*lease, pod="operator-a", kubeconfig=through, coordinator_port=relay.port)
    second = make_operator(*lease, pod="operator-b")
    await first.start()
    await resource.create()
    await resource.settled("Running")
    await second.start(phase="standing by")

    # The relay holds the signal back once the leader has recorded its intent; then the leader is frozen.
    def hold(asked: ApiRequest, body: bytes) -> None:
        if asked.path.endswith("/status") and json.loads(body)["status"]["lifecycle"]["phase"] == "Submitted":
            relay.hold()

    async def signal_held() -> bool:
        return relay.held > 0

    proxy.tell = hold
    await resource.patch(desiredState="Paused")
    sent = await first.logs("signal sent", signal="PAUSE")
    await eventually(signal_held, what="the relay holds the signal")
    first.freeze()
    frozen = time.monotonic()
    await second.reaches("leading")
    failover = time.monotonic() - frozen
    await resource.settled("Paused")
    await resource.patch(desiredState="Running")
    await resource.settled("Running")
    await asyncio.sleep(max(0.0, frozen + FROZEN_SECONDS - time.monotonic()))

    requests = len(proxy.seen)
    thawed = await ask_coordinator(api, namespace, node.ports.admin)
    first.thaw()
    relay.release()
    assert await first.ends() == 1
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")

    reply = await ask_coordinator(api, namespace, node.ports.admin)
    wanted = [Header.PAUSE, Header.UNPAUSE, Header.PAUSE]
    assert [(done.signal, done.phase) for done in reply.operations] == [(signal, "Confirmed") for signal in wanted]
    assert [done.operation_id for done in reply.operations][:2] == [done.operation_id for done in thawed.operations]
    assert reply.operations[0].operation_id == sent["operation_id"]
    assert reply.fence == 2 > sent["fence"]
    late = [asked for asked in proxy.seen[requests:] if asked.writes and not asked.leads]
    assert late == [], "the first operator wrote after the second had led"
    assert len(first.lines("signal sent")) == 1
    elapsed = time.monotonic() - frozen
    print(f"\nfailover took {failover:.1f} s, the freeze {elapsed:.0f} s; 0 stale commands were accepted")
