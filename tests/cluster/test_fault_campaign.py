"""A campaign of faults on two nodes: no request fails while a server is left, and no status is wrong for long.

Clients of two servers compare each answer with the answer of an undisturbed engine. A status is wrong if it reports
more serving engines than processes that can answer, or that none serves although answers arrive. It may be wrong for
STATUS_SECONDS; the time counts while an operator leads and the API server answers.

`make test` leaves out faults that another test shows or of which another fault is a part. `make soak` holds each fault
for longer, and runs all of them several times in an order of the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import frozen_dns
import pytest
from eventually import eventually
from machine import scaled
from soak import repeated, size

from localcluster import LocalCluster, processes
from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER

from .client_load import PACE, HttpLoad, client_load, every_status
from .conftest import Resource, condition
from .fake_node import Ports
from .operator_process import OperatorProcess
from .two_nodes import TwoNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

HOLD_SECONDS = size(3, soak=25)
"""Duration of each freeze."""
ROUNDS = size(1, soak=3)
OMITTED = size(
    {
        "engine killed",  # part of "operator killed"
        "coordinator killed",  # part of "DNS frozen, coordinator killed"
        "engine stopped",  # tests/survival/test_lost_processes.py, test_status_truth.py
        "server killed",  # part of "node lost"
        "operator stopped",  # test_leaders.py
        "etcd frozen, engine killed",  # the API server does not answer either
    },
    soak=set[str](),
)
STATUS_SECONDS = size(60.0, soak=5.0)
"""`make test` also runs on machines where others compute: there the limit only shows that a status is corrected."""
LOOK_SECONDS = 0.1


@pytest.fixture
async def nodes(
    api: Any, namespace: str, ports: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TwoNodes]:
    monkeypatch.setenv(frozen_dns.VARIABLE, str(tmp_path / "dns-frozen"))
    monkeypatch.setattr(socket, "getaddrinfo", frozen_dns.getaddrinfo)
    made = TwoNodes(api, namespace=namespace, folder=tmp_path, ports=ports)
    made.coordinator_host = frozen_dns.HOST
    made.engine_program = (frozen_dns.PROGRAM, *made.engine_program)
    made.engine_arguments = PACE
    made.server_program = (frozen_dns.PROGRAM, "-m", "megatron_runtime.cli")
    await made.create()
    made.start()
    yield made
    await made.stop()


class Campaign:
    """The faults, and what is true meanwhile."""

    def __init__(
        self, *, nodes: TwoNodes, operator: OperatorProcess, cluster: LocalCluster, resource: Resource, load: HttpLoad
    ) -> None:
        self.nodes, self.operator, self.cluster = nodes, operator, cluster
        self.resource, self.load = resource, load
        self.unled = False
        """True while no operator leads or the API server does not answer."""
        self.fault = ""
        self.wrong: list[tuple[float, str, str]] = []
        """Duration, fault and description of each wrong status."""

    @property
    def faults(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "engine killed": self.kill_engine,
            "coordinator killed": self.kill_coordinator,
            "server killed": self.kill_server,
            "operator killed": self.kill_operator,
            "engine stopped": lambda: self.stop(ENGINE),
            "coordinator stopped": lambda: self.stop(COORDINATOR),
            "server stopped": lambda: self.stop(SERVER),
            "operator stopped": self.stop_operator,
            "DNS frozen, coordinator killed": self.freeze_dns,
            "API server frozen, engine killed": lambda: self.freeze_server("kube-apiserver"),
            "etcd frozen, engine killed": lambda: self.freeze_server("etcd"),
            "node lost": self.lose_node,
        }

    async def run(self, name: str) -> None:
        self.fault = name
        await self.faults[name]()
        await self.load.answered()
        await eventually(self._is_whole, what=f"{name}: every process serves again")
        await self.resource.settled("Running")

    async def _is_whole(self) -> bool:
        """Return whether as many processes serve as the spec has. The status may be older than the fault."""
        ready = (entry for entry in self.nodes.containers.values() if entry.ready and self.nodes.serves(entry))
        counts = Counter(entry.component for entry in ready)
        return (counts[COORDINATOR], counts[ENGINE], counts[SERVER]) == (1, 2, 2)

    async def kill_engine(self) -> None:
        self._kill(ENGINE)

    async def kill_coordinator(self) -> None:
        self._kill(COORDINATOR)

    async def kill_server(self) -> None:
        self._kill(SERVER)

    def _kill(self, component: str) -> None:
        process = self.nodes.one(component).process
        assert process is not None
        process.kill()

    async def kill_operator(self) -> None:
        async with self._unled():
            self.operator.kill()
            self._kill(ENGINE)
            await asyncio.sleep(1)
            await self.operator.reaches("leading")

    async def stop(self, component: str) -> None:
        container = self.nodes.one(component)
        self.nodes.freeze(container)
        await asyncio.sleep(HOLD_SECONDS)
        self.nodes.thaw(container)

    async def stop_operator(self) -> None:
        async with self._unled():
            self.operator.freeze()
            self._kill(ENGINE)
            await asyncio.sleep(HOLD_SECONDS)
            self.operator.thaw()

    async def freeze_dns(self) -> None:
        with frozen_dns.frozen():
            self._kill(COORDINATOR)
            await asyncio.sleep(HOLD_SECONDS)
            await self.load.answered()

    async def freeze_server(self, name: str) -> None:
        record = processes.running(name, self.cluster.layout)
        assert record is not None
        async with self._unled():
            os.kill(record.pid, signal.SIGSTOP)
            try:
                self._kill(ENGINE)
                await asyncio.sleep(HOLD_SECONDS)
                await self.load.answered()
            finally:
                os.kill(record.pid, signal.SIGCONT)

    async def lose_node(self) -> None:
        name = self.nodes.nodes[0]
        await self.nodes.lose(name)
        await self.load.answered()
        await eventually(self._is_whole, what="the pods of the lost node are replaced")
        await self.nodes.restore(name)

    @asynccontextmanager
    async def _unled(self) -> AsyncIterator[None]:
        """During a fault of the operator or of the API server, the status is not compared, until an operator leads."""
        self.unled = True
        try:
            yield
            await self.operator.reaches("leading")
        finally:
            self.unled = False

    async def compare(self, statuses: list[tuple[float, dict[str, Any]]]) -> None:
        """Compare the last status with the processes for ever, and record how long each wrong one lasts."""
        since: float | None = None
        answers: list[tuple[float, int]] = []
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            answers = [entry for entry in answers if entry[0] > now - 1] + [(now, self.load.answers)]
            what = "" if self.unled or not statuses else self._mistake(statuses[-1][1], answers)
            if not what:
                since = None
            elif since is None:
                since = now
                self.wrong.append((0.0, self.fault, what))
            else:
                self.wrong[-1] = (now - since, *self.wrong[-1][1:])

    def _mistake(self, status: dict[str, Any], answers: list[tuple[float, int]]) -> str:
        """Return what is wrong with a status; nothing if it is right."""
        engines = len(self.nodes.serving(ENGINE)) if self.nodes.serving(COORDINATOR) else 0
        ready, serving = condition(status, "Ready")["status"], int(status.get("ready", "0/0").split("/")[0])
        if ready == "True" and not engines:
            return "Ready=True and no process can answer"
        if serving > engines and ready == "True":
            return f"{serving} engines are ready and {engines} can answer"
        if ready != "True" and answers[-1][1] > answers[0][1]:
            return f"Ready={ready} and answers arrive"
        return ""


@repeated(soak=5)
async def test_no_request_fails_and_no_status_stays_wrong(
    seed: int,
    resource: Resource,
    make_operator: Callable[..., OperatorProcess],
    nodes: TwoNodes,
    control_plane: LocalCluster,
    api: Any,
    ports: Ports,
) -> None:
    operator = make_operator(
        *("--coordinator-address", f"{frozen_dns.HOST}:{ports.admin}", "--lease-seconds", "10"),
        program=(frozen_dns.PROGRAM, "-m", "megatron_operator.cli"),
    )
    await operator.start()
    await resource.create(replicas=2, server={"replicas": 2}, lifecycle={"lostNodeSeconds": 2})
    await resource.settled("Running")
    order = random.Random(seed)
    async with (
        operator.kept_running(),
        every_status(api, resource.namespace, resource.name) as statuses,
        client_load(HttpLoad(nodes, resource.name)) as load,
    ):
        campaign = Campaign(nodes=nodes, operator=operator, cluster=control_plane, resource=resource, load=load)
        comparison = asyncio.create_task(campaign.compare(statuses))
        try:
            for _ in range(ROUNDS):
                names = [name for name in campaign.faults if name not in OMITTED]
                if ROUNDS > 1:
                    order.shuffle(names)
                for name in names:
                    await campaign.run(name)
            assert not comparison.done(), comparison
        finally:
            comparison.cancel()
            await asyncio.gather(comparison, return_exceptions=True)
    longest = max(campaign.wrong, default=(0.0, "", ""))
    print(
        f"\n{ROUNDS * (len(campaign.faults) - len(OMITTED))} faults, {load.answers} answers compared, 0 failed; "
        f"{load.again} requests sent again, slowest answer {load.longest:.1f} s; "
        f"longest wrong status {longest[0]:.1f} s ({longest[1]}: {longest[2]})"
    )
    late = [entry for entry in campaign.wrong if entry[0] > scaled(STATUS_SECONDS)]
    assert late == [], "a status was wrong for too long"
