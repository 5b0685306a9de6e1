"""ZeroMQ's sockets on the event loop, and key files."""

import asyncio
from pathlib import Path

import pytest
import zmq
from eventually import LONG_SECONDS
from zmq.utils import z85

from megatron_runtime.megatron_core._event_socket import DRAIN_BUDGET, EventSocket
from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import (
    Gatekeeper,
    KeyFileError,
    KeyPair,
    PeerKeys,
    generate_key_files,
    key_bytes,
    key_text,
)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


async def test_a_flood_arrives_complete_and_in_order_while_the_loop_runs_other_callbacks(context: zmq.Context) -> None:
    count = 20 * DRAIN_BUDGET
    received: list[int] = []
    done = asyncio.Event()

    def on_message(frames: list[bytes]) -> None:
        received.append(int(frames[1]))
        if len(received) == count:
            done.set()

    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVHWM, 0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    server = EventSocket(router, on_message)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    client = EventSocket(dealer, lambda frames: None)
    for number in range(count):
        assert client.send([b"%d" % number])
    turns = 0
    while not done.is_set():
        turns += 1
        await asyncio.sleep(0)
    assert received == list(range(count))
    assert turns >= count / DRAIN_BUDGET / 2, "other callbacks of the loop run between budgets"
    client.close()
    server.close()


async def test_a_handler_that_raises_loses_its_message_only(context: zmq.Context) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    def on_message(frames: list[bytes]) -> None:
        if frames[1] == b"bad":
            raise ValueError("bad message")
        received.put_nowait(frames[1])

    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    server = EventSocket(router, on_message)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    for text in (b"bad", b"good"):
        dealer.send(text)
    assert await asyncio.wait_for(received.get(), LONG_SECONDS) == b"good"
    assert server.handler_errors == 1
    server.close()
    server.close()


def test_a_missing_key_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"engine\.key.*Mount the keys Secret"):
        PeerKeys.load(tmp_path, Role.ENGINE)


def test_a_key_file_that_is_not_z85_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "server.key").write_text("short")
    with pytest.raises(KeyFileError, match="one Z85 key of 40 characters"):
        Gatekeeper(_with_public_keys(tmp_path))


def test_keys_are_those_of_libzmq() -> None:
    for _ in range(100):
        public, secret = zmq.curve_keypair()
        assert KeyPair.of_secret(secret).public == public
        own = KeyPair.generate()
        assert zmq.curve_public(own.secret) == own.public
        raw = z85.decode(secret)
        assert (key_bytes(secret), key_text(raw)) == (raw, secret)


@pytest.mark.parametrize("text", [b"", b"a" * 39, b"a" * 41, b"a" * 39 + b";", b"a" * 39 + b"\n"])
def test_text_that_is_no_key_is_rejected(text: bytes) -> None:
    with pytest.raises(ValueError, match="want 40 characters of Z85"):
        key_bytes(text)


def _with_public_keys(path: Path) -> Path:
    for name, text in generate_key_files().items():
        if name.endswith(".pub"):
            (path / name).write_text(text)
    return path
