"""With keys the port is the role, and a key opens the port of its role only. Keys change while the coordinator runs."""

import asyncio
import dataclasses
import os
import random
import threading
from pathlib import Path

import pytest
import zmq
from control_link import ControlLink
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from libzmq_keys import set_keys
from vectors import VECTORS

from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.metrics import CoordinatorMetrics
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import Hello
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError
from megatron_runtime.transport.security import PeerKeys, generate_key_files


@pytest.fixture
def keys_dir(tmp_path):
    for name, text in generate_key_files().items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def test_every_role_works_with_its_own_key(stage, params, keys_dir) -> None:
    stage.coordinator(keys_dir=keys_dir)
    await stage.engine(keys=PeerKeys.load(keys_dir, Role.ENGINE))
    client = await stage.client(keys=PeerKeys.load(keys_dir, Role.CLIENT))
    link = await stage.admin(keys=PeerKeys.load(keys_dir, Role.ADMIN))
    assert await client.add_request([1], params(1))
    assert (await link.control(Header.PAUSE, operation_id="p", fence=1, expected_engines=1)).ranks == 1


@pytest.mark.parametrize("key", [Role.CLIENT, Role.ENGINE, None], ids=str)
async def test_another_roles_key_or_none_does_not_open_the_admin_port(stage, keys_dir, key) -> None:
    coordinator = stage.coordinator(keys_dir=keys_dir)
    keys = PeerKeys.load(keys_dir, key) if key is not None else None
    with pytest.raises(CoordinatorUnreachableError, match="keys"):
        await ControlLink(stage.address(Role.ADMIN), keys=keys).start(connect_timeout_seconds=0.5)
    assert len(coordinator.core.clients) == 0
    rejected = coordinator.transport.rejected()
    assert rejected >= (key is not None)
    assert coordinator.core.status().rejected_frames == rejected
    metrics = CoordinatorMetrics(lambda: coordinator.core).collect()
    counts = {sample.labels.get("reason"): sample.value for metric in metrics for sample in metric.samples}
    assert counts["key_not_admitted"] == rejected


async def test_a_client_without_a_key_stays_out(stage, keys_dir) -> None:
    stage.coordinator(keys_dir=keys_dir)
    with pytest.raises(CoordinatorUnreachableError):
        await InferenceClient(stage.address(Role.CLIENT)).start(connect_timeout_seconds=0.5)


async def test_a_bounded_number_of_clients(stage) -> None:
    coordinator = stage.coordinator(max_clients=2)
    first, _ = await stage.client(), await stage.client()
    with pytest.raises(CoordinatorUnreachableError):
        await InferenceClient(stage.address(Role.CLIENT)).start(connect_timeout_seconds=0.3)
    first.stop()
    await stage.until(lambda: len(coordinator.core.clients) == 1)
    await stage.client()


# --- keys that change -------------------------------------------------------------------------------------------------

ROTATING = Timing(
    heartbeat=0.05, suspect=5.0, dead=60.0, client_dead=60.0, recovery=0.0, key_check=0.05, connection_check=0.2
)


class MountedSecret:
    """A key directory as the kubelet mounts it: files are links through `..data`, which is swapped as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = generate_key_files()
        self._generation = 0
        self.write()
        for name in self.files:
            (path / name).symlink_to(Path("..data") / name)

    def write(self) -> None:
        self._generation += 1
        content = self.path / f"..{self._generation}"
        content.mkdir()
        for name, text in self.files.items():
            (content / name).write_text(text)
        (self.path / "..new").symlink_to(content.name)
        os.replace(self.path / "..new", self.path / "..data")

    def renew(self, role: str, *, keep_old: bool) -> None:
        """A new pair for `role`; with `keep_old` both generations are admitted."""
        old = self.files[f"{role}.pub"]
        fresh = generate_key_files(roles=(role,))
        self.files.update(fresh)
        if keep_old:
            self.files[f"{role}.pub"] = fresh[f"{role}.pub"] + "\n" + old
        self.write()


@pytest.fixture
def secret(tmp_path):
    return MountedSecret(tmp_path)


async def test_two_generations_of_keys_are_accepted_and_no_connection_ends(stage, params, secret) -> None:
    coordinator = stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    await stage.engine(keys=PeerKeys.load(secret.path, Role.ENGINE))
    before = await stage.client(keys=PeerKeys.load(secret.path, Role.CLIENT))
    future = before.add_request([1], params(1))
    secret.renew("client", keep_old=True)
    await stage.until(lambda: len(coordinator.transport.gatekeeper.allowed[Role.CLIENT]) == 2)
    after = await stage.client(keys=PeerKeys.load(secret.path, Role.CLIENT))
    assert await future
    assert await after.add_request([2], params(1))
    assert await before.add_request([3], params(1))
    assert coordinator.core.counters.rejected.total() == 0


async def test_a_revoked_client_is_cut_and_its_requests_end(stage, params, secret) -> None:
    coordinator = stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    engine = await stage.engine(keys=PeerKeys.load(secret.path, Role.ENGINE), step_seconds=None)
    stolen = dataclasses.replace(PeerKeys.load(secret.path, Role.CLIENT), source=None)
    thief = await stage.client(keys=stolen)
    thief.add_request([1], params(4))
    await engine.until(lambda: engine.jobs)
    secret.renew("client", keep_old=False)
    await engine.until(lambda: engine.aborted)
    assert coordinator.core.clients.named(Role.CLIENT, thief.native.name) is None
    rejected = coordinator.transport.rejected()
    thief.native._link._socket.send(Hello(role=Role.CLIENT, name="thief", incarnation=1).to_frames())
    thief.native._link._socket.send(VECTORS["SUBMIT"].to_frames())
    await stage.until(lambda: coordinator.transport.rejected() > rejected, seconds=30)
    assert len(coordinator.core.clients) == len(coordinator.core.dispatcher.journal) == 0
    owner = await stage.client(keys=PeerKeys.load(secret.path, Role.CLIENT))
    engine.step_seconds = 0.0
    assert await owner.add_request([2], params(1))
    assert (await (await stage.admin(keys=PeerKeys.load(secret.path, Role.ADMIN))).status()).rejected_frames > rejected


async def test_a_revoked_engine_loses_its_requests_to_another(stage, params, collect, secret) -> None:
    coordinator = stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    old = PeerKeys.load(secret.path, Role.ENGINE)
    revoked = await stage.engine("revoked", keys=old, step_seconds=None)
    client = await stage.client(keys=PeerKeys.load(secret.path, Role.CLIENT))
    stream = client.add_request_streaming([1], params(4))
    await revoked.until(lambda: revoked.jobs)
    secret.renew("engine", keep_old=False)
    await stage.until(lambda: coordinator.core.engines.named("revoked") is None)
    for _ in range(4):
        revoked.step()
    await stage.engine("fresh", keys=PeerKeys.load(secret.path, Role.ENGINE))
    tokens, _ = await collect(stream)
    assert tokens == echo_answer([1], 4)
    assert coordinator.core.counters.replays == 1


async def test_a_connection_made_before_its_key_was_revoked_cannot_register_after(stage, secret) -> None:
    coordinator = stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    set_keys(dealer, PeerKeys.load(secret.path, Role.CLIENT))
    dealer.connect(stage.address(Role.CLIENT))
    dealer.send_multipart(VECTORS["STATUS"].to_frames())
    await stage.until(lambda: coordinator.core.counters.rejected["unknown_peer"] == 1)
    admitted = coordinator.transport.gatekeeper.allowed
    secret.renew("client", keep_old=False)
    await stage.until(lambda: coordinator.transport.gatekeeper.allowed != admitted)
    dealer.send_multipart(Hello(role=Role.CLIENT, name="late", incarnation=1).to_frames())
    await stage.until(lambda: coordinator.core.counters.rejected["wrong_role"] == 1)
    assert len(coordinator.core.clients) == 0
    dealer.close(linger=0)
    context.term()


async def test_incomplete_key_files_change_nothing_until_they_are_complete(stage, secret, caplog) -> None:
    coordinator = stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    admitted = coordinator.transport.gatekeeper.allowed
    whole = secret.files["client.pub"]
    secret.files["client.pub"] = whole[:17]
    secret.write()
    await stage.until(lambda: "keeping the keys in use" in caplog.text)
    assert coordinator.transport.gatekeeper.allowed == admitted
    secret.files["client.pub"] = whole
    secret.renew("client", keep_old=True)
    await stage.until(lambda: len(coordinator.transport.gatekeeper.allowed[Role.CLIENT]) == 2)


async def test_a_client_takes_its_new_key_from_the_files_when_the_old_one_is_revoked(stage, params, secret) -> None:
    stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    await stage.engine(keys=PeerKeys.load(secret.path, Role.ENGINE))
    client = await stage.client(keys=PeerKeys.load(secret.path, Role.CLIENT))
    assert await client.add_request([1], params(1))
    secret.renew("client", keep_old=False)
    await stage.until(lambda: len(stage.coordinators[-1].core.clients) == 0)
    assert (await asyncio.wait_for(client.add_request([2], params(1)), LONG_SECONDS))["generated_tokens"]


@pytest.mark.slow
async def test_of_two_keys_of_the_server_a_peer_finds_the_right_one(stage, secret) -> None:
    other = generate_key_files(roles=("server",))["server.pub"]
    secret.files["server.pub"] = other + "\n" + secret.files["server.pub"]
    secret.write()
    stage.coordinator(keys_dir=secret.path, timing=ROTATING)
    link = ControlLink(stage.address(Role.ADMIN), keys=PeerKeys.load(secret.path, Role.ADMIN))
    stage.closers.append(link.close)
    await link.start(connect_timeout_seconds=LONG_SECONDS)
    assert (await link.status()).state == "RUNNING"


async def test_a_coordinator_ends_in_the_middle_of_handshakes(secret) -> None:
    """A handshake that waits for a gatekeeper that has ended would keep the context from ending."""
    settings = CoordinatorSettings(
        listen="127.0.0.1", client_port=0, engine_port=0, admin_port=0, keys_dir=secret.path, timing=ROTATING
    )
    rng = random.Random(1)
    keys = PeerKeys.load(secret.path, Role.CLIENT)
    context = zmq.Context()
    for _ in range(15):
        coordinator = Coordinator(settings)
        coordinator.start()
        dealers = []
        for _ in range(8):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            set_keys(dealer, keys)
            dealer.connect(coordinator.transport.addresses[Role.CLIENT])
            dealers.append(dealer)
        # The loop is blocked: handshakes wait for the gatekeeper.
        threading.Event().wait(rng.random() * 0.05)
        coordinator.stop()
        for dealer in dealers:
            dealer.close()
    context.term()
