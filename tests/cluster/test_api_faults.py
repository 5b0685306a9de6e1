"""The operator behind a proxy that rejects, cuts, loses and expires its requests: every verb still acts once.

One resource alternates between Paused and Running, each time with another fault. Only the operator uses the proxy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_questions import ask_coordinator
from eventually import eventually
from soak import SOAK, size

from localcluster import LocalCluster, processes
from megatron_runtime.protocol.headers import Header

from .api_server_proxy import ApiProxy, ApiRequest, Fault

pytestmark = pytest.mark.cluster

WATCH_SECONDS = size(2, soak=40)
"""The duration of a watch. The soak run uses the operator's default."""


def work(asked: ApiRequest) -> bool:
    return not asked.leads


def write(asked: ApiRequest) -> bool:
    return asked.writes and not asked.leads


FAULTS: dict[str, Callable[[], Fault]] = {
    "409 to writes": lambda: Fault(write, answer=(409, "Conflict", {}), times=3),
    "429 with Retry-After": lambda: Fault(work, answer=(429, "TooManyRequests", {"Retry-After": "1"}), times=4),
    "a burst of 500": lambda: Fault(work, answer=(500, "InternalError", {}), times=4),
    "a burst of 503": lambda: Fault(write, answer=(503, "ServiceUnavailable", {}), times=3),
    "connections cut before the effect": lambda: Fault(work, times=4),
    "answers lost after the effect": lambda: Fault(write, times=4, after=True),
}


class Flips:
    """Switches the resource between Running and Paused."""

    def __init__(self, resource: Any, operator: Any) -> None:
        self._resource, self._operator = resource, operator
        self.signals: list[Header] = []

    async def flip(self, what: str) -> None:
        paused = len(self.signals) % 2 == 0
        await self._resource.patch(desiredState="Paused" if paused else "Running")
        self.signals.append(Header.PAUSE if paused else Header.UNPAUSE)
        try:
            await self._resource.settled("Paused" if paused else "Running")
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n{self._operator.log.read_text()[-3000:]}") from None


async def test_verbs_act_once_through_api_server_faults(
    resource: Any,
    make_operator: Any,
    proxy: ApiProxy,
    node: Any,
    control_plane: LocalCluster,
    api: Any,
    namespace: str,
    tmp_path: Path,
) -> None:
    kubeconfig = proxy.kubeconfig(tmp_path / "through-the-proxy")
    operator = make_operator("--watch-seconds", str(WATCH_SECONDS), kubeconfig=kubeconfig)
    await operator.start()
    await resource.create()
    await resource.settled("Running")

    flips = Flips(resource, operator)
    for what, make in FAULTS.items():
        fault = proxy.inject(make())
        await flips.flip(what)
        assert fault.hit, f"{what}: the fault applied to no request"
        proxy.heal()

    async def all_watch() -> bool:
        return proxy.watches > 5

    await eventually(all_watch, what="the operator has its watches open")
    proxy.expire_watches()
    await flips.flip("watches are too old")
    await eventually(all_watch, what="the operator has its watches open again")
    proxy.silence_watches()
    began = time.monotonic()
    await flips.flip("watches are silent")
    print(f"\nsilent watches of {WATCH_SECONDS} s: the verb was confirmed after {time.monotonic() - began:.1f} s")
    assert operator.running
    if SOAK:  # `make test` restarts it in test_etcd_rewind.py
        async with operator.kept_running():
            # The operator exits when it cannot renew its Lease in time.
            await restart_api_server(control_plane)
            await flips.flip("the API server was restarted")

    reply = await ask_coordinator(api, namespace, node.ports.admin)
    done = [(operation.signal, operation.phase) for operation in reply.operations]
    assert done == [(signal, "Confirmed") for signal in flips.signals]
    assert len({operation.operation_id for operation in reply.operations}) == len(flips.signals)


async def restart_api_server(cluster: LocalCluster) -> None:
    """Kill the API server with SIGKILL and start it again."""
    record = processes.running("kube-apiserver", cluster.layout)
    assert record is not None
    processes.terminate([record.pid], grace=0)
    await asyncio.to_thread(cluster.up)


async def test_operator_waits_for_an_unreachable_api_server_at_start(
    resource: Any, make_operator: Any, proxy: ApiProxy, node: Any, tmp_path: Path
) -> None:
    operator = make_operator(kubeconfig=proxy.kubeconfig(tmp_path / "through-the-proxy"))
    away = proxy.inject(Fault(lambda asked: True))
    await resource.create()
    await operator.start(phase="standing by")

    async def asked_twice() -> bool:
        return len(away.hit) > 1

    await eventually(asked_twice, what="the operator repeated its request")
    proxy.heal()
    await operator.reaches("leading")
    await resource.settled("Running")


async def test_failing_watches_are_reported_by_the_liveness_probe(
    make_operator: Any, proxy: ApiProxy, tmp_path: Path
) -> None:
    """All other requests succeed, so only the age of the watches shows the fault."""
    operator = make_operator("--watch-seconds", "1", kubeconfig=proxy.kubeconfig(tmp_path / "through-the-proxy"))
    await operator.start()
    cut = proxy.inject(Fault(lambda asked: asked.watch))
    await operator.beats(lambda beat: beat["watch_silent_seconds"] > 1)
    assert cut.hit
    proxy.heal()
    await operator.beats(lambda beat: beat["watch_silent_seconds"] == 0)


async def test_a_rejected_permission_is_reported_and_recovered_from(
    resource: Any, make_operator: Any, proxy: ApiProxy, node: Any, tmp_path: Path
) -> None:
    """The status names the request that a policy of the cluster rejects. Once it is allowed, the operator recovers."""
    operator = make_operator(kubeconfig=proxy.kubeconfig(tmp_path / "through-the-proxy"))
    rejected = proxy.inject(Fault(lambda asked: asked.writes and "/statefulsets" in asked.path, (403, "Forbidden", {})))
    await operator.start()
    await resource.create()
    status = await resource.until(lambda status: "Forbidden by the proxy" in str(status))
    assert status["state"] == "Pending"
    assert rejected.hit
    proxy.heal()
    await resource.settled("Running")
