"""Coordinators, engines and clients on real sockets. At the end the tables of each coordinator are checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from control_link import ControlLink
from coordinator_tables import check_tables
from eventually import LONG_SECONDS
from scripted_engine import ScriptedEngine
from scripted_pool import collect as collect
from scripted_pool import params as params

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Role

PATIENT = Timing(
    heartbeat=0.05,
    suspect=30.0,
    dead=60.0,
    client_dead=60.0,
    recovery=0.0,
    slow_client=60.0,
    plain_reconnect=60.0,
)
"""No peer is removed for silence, because ZeroMQ's thread may be late by seconds. Tests of silence set other times."""


@dataclass
class Stage:
    """Starts components that connect to the last coordinator."""

    coordinators: list[Coordinator] = field(default_factory=list)
    closers: list[Callable[[], Any]] = field(default_factory=list)

    def coordinator(self, *, tokenizer: Any = None, **settings: Any) -> Coordinator:
        defaults = {"listen": "127.0.0.1", "client_port": 0, "engine_port": 0, "admin_port": 0, "timing": PATIENT}
        coordinator = Coordinator(CoordinatorSettings(**{**defaults, **settings}), tokenizer=tokenizer)
        coordinator.start()
        self.coordinators.append(coordinator)
        return coordinator

    def address(self, role: Role) -> str:
        return self.coordinators[-1].transport.addresses[role]

    async def engine(self, name: str = "engine-0", **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine(self.address(Role.ENGINE), name=name, **options)
        self.closers.append(engine.close)
        return await engine.start()

    async def client(self, **options: Any) -> InferenceClient:
        client = InferenceClient(self.address(Role.CLIENT), **{"deserialize": False, **options})
        self.closers.append(client.stop)
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        return client

    async def all(self, name: str = "engine-0", **options: Any) -> tuple[Coordinator, ScriptedEngine, InferenceClient]:
        """Return a new coordinator, an engine with these options and a client."""
        return self.coordinator(), await self.engine(name, **options), await self.client()

    async def native_client(self) -> CoordinatorClient:
        client = CoordinatorClient(self.address(Role.CLIENT))
        self.closers.append(client.stop)
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        return client

    async def admin(self, **options: Any) -> ControlLink:
        link = ControlLink(self.address(Role.ADMIN), **options)
        self.closers.append(link.close)
        await link.start()
        return link

    def pump(self) -> None:
        """Dispatch, as each heartbeat does."""
        self.coordinators[-1].core.dispatcher.pump()
        self.coordinators[-1]._perform()

    async def until(self, condition: Callable[[], Any], *, seconds: float = LONG_SECONDS) -> None:
        """Wait for something inside the coordinator that has no event of its own."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    yield stage
    try:
        for coordinator in stage.coordinators:
            check_tables(coordinator.core)
            assert coordinator.transport.handler_errors == 0, "a handler raised an exception"
    finally:  # a socket that stays open keeps pytest from ending
        for close in reversed(stage.closers):
            close()
        for coordinator in stage.coordinators:
            coordinator.stop()
