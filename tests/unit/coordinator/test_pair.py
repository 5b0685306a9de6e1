"""A pair of coordinators on real sockets: who is redirected where, and which keys may report a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from echo_executor import echo_answer

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Frames, PairState
from megatron_runtime.transport.security import KeyPair, PeerKeys, generate_key_files
from megatron_runtime.transport.zmtp.dealer import Dealer

HOSTS = ("127.0.0.1", "127.0.0.2")
TIMING = Timing(heartbeat=0.05, dead=60.0, client_dead=60.0, recovery=0.0, takeover=0.5)


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    for name, text in generate_key_files().items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
async def pair(stage: Any, keys_dir: Path) -> list[Coordinator]:
    """Two coordinators with keys; stage.address() is of the second."""
    client, engine, admin = free_ports(3)
    ports = {"client_port": client, "engine_port": engine, "admin_port": admin}
    return [
        stage.coordinator(listen=own, other_host=other, keys_dir=keys_dir, timing=TIMING, **ports)
        for own, other in (HOSTS, HOSTS[::-1])
    ]


async def settled(stage: Any, pair: list[Coordinator]) -> None:
    """Wait until both know that neither is active."""
    await stage.until(lambda: all(each._pair._election._hears(each._time()) is not None for each in pair))


async def test_peers_of_the_standby_are_sent_to_the_active_one(
    stage: Any, pair: list[Coordinator], keys_dir: Path, params: Any, collect: Any
) -> None:
    await settled(stage, pair)
    engine = await stage.engine(keys=PeerKeys.load(keys_dir, Role.ENGINE))
    assert [each.core.context.active for each in pair] == [False, True], "the one that was asked"
    await stage.until(lambda: pair[0]._pair._election._other.active)

    stage.coordinators.reverse()  # the client connects to the standby
    client = await stage.client(keys=PeerKeys.load(keys_dir, Role.CLIENT))
    assert client.native._link.address.startswith(f"tcp://{HOSTS[1]}:")
    tokens, final = await collect(client.add_request_streaming([1, 2, 3], params(8)))
    assert (final["generated_tokens"], len(tokens) < 9) == (echo_answer([1, 2, 3], 8), True)
    assert engine.name in {each.name for each in pair[1].core.engines}
    assert not list(pair[0].core.clients)


async def test_the_standby_has_the_peers_as_soon_as_the_active_one_hands_over(
    stage: Any, pair: list[Coordinator], keys_dir: Path
) -> None:
    await settled(stage, pair)
    client = await stage.client(keys=PeerKeys.load(keys_dir, Role.CLIENT))
    await stage.until(lambda: pair[0]._pair._election._other.active)
    assert await pair[1].hand_over()
    await stage.until(lambda: list(pair[0].core.clients))
    assert client.native._link.address.startswith(f"tcp://{HOSTS[0]}:")
    assert [each.core.context.term for each in pair] == [2, 0]


async def test_only_a_coordinators_key_reports_a_state(stage: Any, pair: list[Coordinator], keys_dir: Path) -> None:
    """Another administrator's would make the active coordinator stand by."""
    await settled(stage, pair)
    await stage.client(keys=PeerKeys.load(keys_dir, Role.CLIENT))
    usurper = PairState(incarnation=1, term=99, active=True)

    async def report(keys: PeerKeys) -> None:
        opened: list[bool] = []
        dealer = Dealer(
            stage.address(Role.ADMIN),
            lambda _: None,
            on_open=lambda: opened.append(True),
            keys=keys,
            max_message_bytes=1 << 20,
        )
        stage.closers.append(dealer.close)
        await stage.until(lambda: opened)
        rejected = pair[1].core.counters.rejected.total()
        frames: Frames = usurper.to_frames()
        dealer.send(frames)
        dealer.send([b"\x91\x69"])  # STATUS: it has been answered when the state has been handled
        await stage.until(lambda: pair[1].core.counters.rejected.total() > rejected or not pair[1].core.context.active)

    await report(PeerKeys.load(keys_dir, Role.ADMIN))
    assert pair[1].core.context.active
    server = PeerKeys.load(keys_dir, Role.ADMIN).server_public
    secret = (keys_dir / "server.key").read_text().split()[0].encode()
    await report(PeerKeys(KeyPair(server, secret), server))
    assert not pair[1].core.context.active


async def test_a_peer_does_not_return_to_an_earlier_term(stage: Any) -> None:
    coordinator = stage.coordinator(timing=TIMING)
    coordinator.core.context.term = 3
    client = await stage.client()
    coordinator.core.context.term = 2
    client.native._link.say_hello()
    await stage.until(lambda: not client.connected)
    coordinator.core.context.term = 4
    await stage.until(lambda: client.connected)


@pytest.mark.parametrize("ports", [{"single_port": True}, {"admin_port": 0}], ids=["one port", "any port"])
def test_a_pair_needs_three_known_ports(ports: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"other_host 'b': want three ports"):
        CoordinatorSettings(other_host="b", **ports)
