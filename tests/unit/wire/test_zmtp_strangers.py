"""The coordinator's ROUTER with peers that violate the protocol or hold no key."""

import itertools
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp import router as router_module
from megatron_runtime.transport.zmtp.connection import MAX_FRAMES
from megatron_runtime.transport.zmtp.frames import COMMAND, MORE

from .curve_client import CurveClient
from .zmtp_port import CURVE_GREETING, LIMIT, NULL_BEGIN, READY, Port, Raw, key_files, until

# --- protocol violations ----------------------------------------------------------------------------------------------

NONSENSE = {
    "not ZMTP": b"GET / HTTP/1.1\r\nHost: coordinator\r\nAccept: */*\r\nUser-Agent: browser\r\n\r\n",
    "ZMTP 2": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + bytes(60),
    "an old version": NULL_BEGIN[:10] + b"\x02" + NULL_BEGIN[11:],
    "READY, but not as a command": NULL_BEGIN.replace(READY, frames.frame(0, READY[2:])),
    "another mechanism": frames.greeting(b"PLAIN", as_server=False),
    "a message first": frames.greeting(b"NULL", as_server=False) + frames.frame(0, b"hello"),
    "another command first": frames.greeting(b"NULL", as_server=False) + frames.frame(COMMAND, b"\x05HELLO"),
    "a property cut short": frames.greeting(b"NULL", as_server=False) + frames.frame(COMMAND, b"\x05READY\x04Na"),
    "a property too long": frames.greeting(b"NULL", as_server=False)
    + frames.frame(COMMAND, b"\x05READY\x04Name\xff\xff\xff\xff"),
    "a long handshake": frames.greeting(b"NULL", as_server=False) + frames.frame(COMMAND, bytes(5000)),
    "too long a frame": NULL_BEGIN + b"\x02" + (1 << 62).to_bytes(8, "big"),
    "too many frames": NULL_BEGIN + frames.frame(MORE, b"") * (MAX_FRAMES + 1),
    "too many bytes in frames": NULL_BEGIN + frames.frame(MORE, bytes(LIMIT // 2 + 1)) * 3,
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
async def test_invalid_bytes_end_their_connection_and_no_other(port: Port, nonsense: bytes) -> None:
    dealer = port.dealer()
    raw = await port.raw(nonsense)
    await raw.end()
    await dealer.send(b"hello")
    assert (await port.next())[1] == [b"hello"]
    assert len(port.connections) == 1
    assert port.router.handler_errors == 0


async def test_a_stalled_handshake_is_ended_for_a_new_one(make_port, monkeypatch) -> None:
    monkeypatch.setattr(router_module, "HANDSHAKE_SECONDS", 0.2)
    port = make_port()
    await (await port.raw(b"\xff")).end()
    monkeypatch.setattr(router_module, "HANDSHAKE_SECONDS", 60.0)
    monkeypatch.setattr(router_module, "MAX_HANDSHAKES", 3)
    idlers = [await port.raw(b"\xff") for _ in range(4)]
    await idlers[0].end()
    dealer = port.dealer()
    await dealer.send(b"hello")
    assert (await port.next())[1] == [b"hello"]
    for idler in idlers:
        idler.close()


# --- keys -------------------------------------------------------------------------------------------------------------


async def curve(port: Port, client: CurveClient) -> Raw:
    """A connection whose handshake is over."""
    raw = await port.raw(CURVE_GREETING)
    assert (await raw.greeting())[32] == 1, "the greeting has the flag of the server"
    raw.write(frames.frame(COMMAND, client.hello()))
    raw.write(frames.frame(COMMAND, client.initiate((await raw.frame())[1])))
    assert client.ready((await raw.frame())[1])[b"socket-type"] == b"ROUTER"
    return raw


@pytest.mark.parametrize(("held", "port_role"), list(itertools.product(Role, Role)))
async def test_a_port_admits_the_keys_of_its_role_only(make_port, keys: Path, held: Role, port_role: Role) -> None:
    port = make_port(keys=keys, role=port_role)
    dealer = port.dealer(PeerKeys.load(keys, held))
    await dealer.send(b"hello")
    if held is port_role:
        peer, message = await port.next()
        assert message == [b"hello"]
        assert port.connections[peer].key == PeerKeys.load(keys, held).own.public
        assert port.router.rejected == 0
    else:
        await until(lambda: port.router.rejected)
        assert port.received.empty()
        assert port.connections == {}


async def test_strangers_without_a_key_and_with_a_key_of_their_own_are_kept_out(make_port, keys, tmp_path) -> None:
    port = make_port(keys=keys)
    stranger = PeerKeys(PeerKeys.load(key_files(tmp_path / "other"), Role.CLIENT).own, port.gatekeeper.own.public)
    rejected = port.dealer(stranger)
    await rejected.send(b"own key")
    await until(lambda: port.router.rejected == 1)
    await (await port.raw()).end()
    wrong_server = port.dealer(PeerKeys(PeerKeys.load(keys, Role.CLIENT).own, stranger.own.public))
    await wrong_server.send(b"for another server")
    await until(lambda: port.router.rejected == 2)
    owner = port.dealer()
    await owner.send(b"client")
    assert (await port.next())[1] == [b"client"]
    assert port.received.empty()


async def test_a_rejected_peer_gets_an_error(make_port, keys: Path) -> None:
    port = make_port(keys=keys, role=Role.ADMIN)
    client = CurveClient(PeerKeys.load(keys, Role.CLIENT))
    raw = await port.raw(CURVE_GREETING)
    await raw.greeting()
    raw.write(frames.frame(COMMAND, client.hello()))
    raw.write(frames.frame(COMMAND, client.initiate((await raw.frame())[1])))
    assert await raw.frame() == (COMMAND, b"\x05ERROR\x03400")
    await raw.end()


async def test_encrypted_messages_are_taken_once_and_in_order(make_port, keys: Path) -> None:
    port = make_port(keys=keys)
    client = CurveClient(PeerKeys.load(keys, Role.CLIENT))
    raw = await curve(port, client)
    first = client.message(b"first")
    raw.write(first)
    raw.write(client.message(b"two", more=True) + client.message(b"frames"))
    assert [(await port.next())[1] for _ in range(2)] == [[b"first"], [b"two", b"frames"]]
    assert client.message(b"secret").find(b"secret") < 0
    raw.write(first)
    await raw.end()
    assert port.received.empty()


@pytest.mark.parametrize("kind", ["changed", "not encrypted", "cut short", "made with other keys"])
async def test_a_frame_encrypted_with_other_keys_ends_the_connection(make_port, keys: Path, kind: str) -> None:
    port = make_port(keys=keys)
    client = CurveClient(PeerKeys.load(keys, Role.CLIENT))
    raw = await curve(port, client)
    message = bytearray(client.message(b"hello"))
    if kind == "changed":
        message[-1] ^= 1
    elif kind == "not encrypted":
        message = bytearray(frames.frame(0, b"hello"))
    elif kind == "cut short":
        message = bytearray(frames.frame(0, bytes(message[2:20])))
    else:
        client._shared = secrets.token_bytes(32)
        message = bytearray(client.message(b"hello"))
    raw.write(bytes(message))
    await raw.end()
    assert port.received.empty()
    assert port.router.handler_errors == 0


async def test_an_initiate_without_proof_is_rejected(make_port, keys: Path) -> None:
    port = make_port(keys=keys)
    own = PeerKeys.load(keys, Role.CLIENT)

    async def initiate(client: CurveClient, change: Callable[[bytes], bytes] = lambda command: command) -> None:
        raw = await port.raw(CURVE_GREETING)
        await raw.greeting()
        raw.write(frames.frame(COMMAND, client.hello()))
        raw.write(frames.frame(COMMAND, change(client.initiate((await raw.frame())[1]))))
        await raw.end()

    cookie = len(b"\x08INITIATE")
    await initiate(CurveClient(own), lambda command: command[:cookie] + bytes(96) + command[cookie + 96 :])
    assert port.router.rejected == 0, "a broken peer, not one with another key"
    await initiate(CurveClient(own, vouch_for=os.urandom(32)))
    # The public key of a client, without the secret one.
    thief = PeerKeys(PeerKeys.load(keys, Role.ENGINE).own, own.server_public)
    pretender = CurveClient(PeerKeys(type(own.own)(own.own.public, thief.own.secret), own.server_public))
    await initiate(pretender)
    await initiate(CurveClient(own), lambda command: command[:-1] + bytes((command[-1] ^ 1,)))
    assert port.router.rejected == 3
    assert port.connections == {}


@pytest.mark.parametrize(
    "hello", [b"", bytes(200), b"\x05HELLO\x01\x00" + bytes(192), b"\x05HELLO\x02\x00" + bytes(192)]
)
async def test_a_malformed_curve_hello_is_rejected(make_port, keys: Path, hello: bytes) -> None:
    port = make_port(keys=keys)
    raw = await port.raw(CURVE_GREETING + frames.frame(COMMAND, hello))
    await raw.end()
    assert port.connections == {}


async def test_no_two_frames_are_encrypted_alike(make_port, keys: Path) -> None:
    port = make_port(keys=keys)
    client = CurveClient(PeerKeys.load(keys, Role.CLIENT))
    raw = await curve(port, client)
    raw.write(client.message(b"hello"))
    peer, _ = await port.next()
    for _ in range(50):
        assert port.send(peer, b"the same")
    sent = [(await raw.frame())[1] for _ in range(50)]
    assert {client.open(body) for body in sent} == {(0, b"the same")}
    numbers = [int.from_bytes(body[8:16], "big") for body in sent]
    assert numbers == sorted(set(numbers))
    assert len({body[16:] for body in sent}) == 50
    raw.close()
