"""The stages of `NAME-keys` on real sockets: a request that is in flight through all of them is answered right."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from echo_engine import EchoBackend
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from scripted_engine import ScriptedEngine

from megatron_operator.render.keys import next_files
from megatron_operator.resource.states import KeyStage
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import KeyReport
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import PeerKeys, generate_key_files

TIMING = Timing(heartbeat=0.05, suspect=30.0, dead=60.0, client_dead=60.0, recovery=0.5, key_check=0.05)


class Mounted:
    """A Secret as the kubelet mounts it: its files change all at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, str] = generate_key_files()
        self._writes = 0
        self._write()
        for name in self.files:
            (path / name).symlink_to(Path("..data") / name)

    def go_on(self, stage: KeyStage) -> None:
        self.files = next_files(self.files, stage, fresh=generate_key_files())
        self._write()

    def _write(self) -> None:
        self._writes += 1
        content = self.path / f"..{self._writes}"
        content.mkdir()
        for name, text in self.files.items():
            (content / name).write_text(text)
        (self.path / "..new").symlink_to(content.name)
        os.replace(self.path / "..new", self.path / "..data")


class Site:
    """One coordinator at one address, one engine and one client."""

    def __init__(self, secret: Mounted) -> None:
        self.secret = secret
        self._ports: dict[Role, int] = {}
        self.start_coordinator()
        self.engine: ScriptedEngine
        self.client = InferenceClient(self.address(Role.CLIENT), deserialize=False, keys=self.keys(Role.CLIENT))

    def start_coordinator(self) -> None:
        ports = {f"{role.name.lower()}_port": self._ports.get(role, 0) for role in Role}
        self.coordinator = Coordinator(
            CoordinatorSettings(listen="127.0.0.1", keys_dir=self.secret.path, timing=TIMING, **ports)
        )
        self.coordinator.start()
        self._ports = {role: int(self.address(role).rpartition(":")[2]) for role in Role}

    async def start_engine(self) -> None:
        keys = self.keys(Role.ENGINE)
        self.engine = await ScriptedEngine(self.address(Role.ENGINE), step_seconds=None, keys=keys).start()

    def address(self, role: Role) -> str:
        return self.coordinator.transport.addresses[role]

    def keys(self, role: Role) -> PeerKeys:
        return PeerKeys.load(self.secret.path, role)

    @property
    def report(self) -> KeyReport:
        found = self.coordinator.core.status().keys
        assert found is not None
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LONG_SECONDS):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(Mounted(tmp_path))
    await site.start_engine()
    await site.client.start(connect_timeout_seconds=LONG_SECONDS)
    yield site
    site.client.stop()
    site.engine.close()
    site.coordinator.stop()


@pytest.mark.slow
async def test_a_request_survives_a_whole_rotation(site: Site) -> None:
    secret = site.secret
    stream = site.client.add_request_streaming([1, 2], SamplingParams(num_tokens_to_generate=8))
    await site.engine.until(lambda: site.engine.jobs)
    site.engine.step()
    old = {name: text.strip() for name, text in secret.files.items()}

    secret.go_on(KeyStage.ADMITTING)
    both = {key for role in ("client", "engine") for key in secret.files[f"{role}.pub"].split()}
    await site.until(lambda: both <= set(site.report.admitted) and old["client.pub"] in site.report.connected)

    secret.go_on(KeyStage.SWITCHING)
    await site.until(lambda: old["client.pub"] not in site.report.connected and len(site.coordinator.core.clients) == 1)
    site.engine.close()
    await site.start_engine()
    await site.until(lambda: old["engine.pub"] not in site.report.connected and any(site.coordinator.core.engines))
    assert site.report.server == old["server.pub"]

    secret.go_on(KeyStage.RESTARTING)
    site.coordinator.stop()
    site.start_coordinator()
    assert site.report.server != old["server.pub"]
    site.engine.close()
    await site.start_engine()
    await site.until(lambda: len(site.coordinator.core.clients) == 1)

    secret.go_on(KeyStage.SETTLED)
    await site.until(lambda: not set(old.values()) & set(site.report.admitted) - {old["admin.pub"]})
    await site.engine.until(lambda: site.engine.jobs)
    site.engine.step_seconds = 0.0
    for _ in range(8):
        site.engine.step()
    tokens: list[int] = []
    async with asyncio.timeout(LONG_SECONDS):
        async for item in stream:
            if "final" in item:
                break
            tokens += item["partial"]["new_tokens"]
    assert tokens == echo_answer([1, 2], 8)
    assert site.coordinator.transport.gatekeeper is not None
    assert len(site.coordinator.core.clients) == 1


@pytest.mark.slow
async def test_a_real_engine_loads_its_new_key_while_it_serves(tmp_path: Path) -> None:
    site = Site(Mounted(tmp_path))
    settings = EngineSettings(
        coordinator=site.address(Role.ENGINE),
        name="engine-0",
        max_requests=8,
        kv_cache_memory=1 << 20,
        keys_dir=tmp_path,
    )
    worker = EngineWorker(settings, EchoBackend(settings, step_seconds=0.01))
    serving = asyncio.create_task(worker.run())
    await site.client.start(connect_timeout_seconds=LONG_SECONDS)
    asked: list[asyncio.Task[list[int]]] = []
    done = asyncio.Event()

    async def keep_asking() -> None:
        while not done.is_set():
            asked.append(asyncio.create_task(answer(site.client, len(asked))))
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(keep_asking())
    try:
        await site.until(lambda: asked and asked[0].done())
        old = {name: text.strip() for name, text in site.secret.files.items()}
        site.secret.go_on(KeyStage.ADMITTING)
        await site.until(lambda: len(site.report.admitted) == len(Role) + 2)
        site.secret.go_on(KeyStage.SWITCHING)
        await site.until(lambda: {old["engine.pub"], old["client.pub"]}.isdisjoint(site.report.connected))
        await site.until(lambda: len(site.report.connected) == 2)
        site.secret.go_on(KeyStage.RESTARTING)
        site.coordinator.stop()
        site.start_coordinator()
        await site.until(lambda: len(site.report.connected) == 2)
        site.secret.go_on(KeyStage.SETTLED)
        await site.until(lambda: len(site.report.admitted) == len(Role))
        last = len(asked)
        await site.until(lambda: len(asked) > last)
    finally:
        done.set()
        await asking
        answers = await asyncio.wait_for(asyncio.gather(*asked), LONG_SECONDS)
        site.client.stop()
        worker.ended.set()
        await serving
        site.coordinator.stop()
    assert answers == [echo_answer([1, number + 1], 8) for number in range(len(answers))]


async def answer(client: InferenceClient, number: int) -> list[int]:
    reply = await client.add_request([1, number + 1], SamplingParams(num_tokens_to_generate=8))
    tokens: list[int] = reply["generated_tokens"]
    return tokens
