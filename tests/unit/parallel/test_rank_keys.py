"""Any process can write to the rendezvous store: a rank's key is accepted only if it is mounted."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import zmq
from machine import scaled

from megatron_runtime.distributed.errors import RendezvousError
from megatron_runtime.distributed.rendezvous import Meeting
from megatron_runtime.distributed.shard import RankIdentity
from megatron_runtime.transport.security import KeyPair

SECONDS = scaled(60)
FOREIGN = KeyPair.generate()


def write_keys(folder: Path, own: KeyPair, *admitted: KeyPair) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "engine.key").write_text(own.secret.decode())
    (folder / "engine.pub").write_text("\n".join(pair.public.decode() for pair in admitted or (own,)))
    (folder / "server.pub").write_text(own.public.decode())
    return folder


@pytest.fixture
def meet() -> Iterator[Callable[..., Meeting]]:
    """meet(rank, store, keys, address): return the rendezvous of one rank of two, with rank 0 at `address`."""
    meetings: list[Meeting] = []

    def make(rank: int, store: dist.Store, keys_dir: Path | None, address: str = "127.0.0.1") -> Meeting:
        identity = RankIdentity(rank=rank, local_rank=0, world=2, local_world=1, address=address, port=1)
        meetings.append(Meeting(identity, store, keys_dir=keys_dir))
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting.pull.close(linger=0)
        meeting.close()


def until(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) in (0, errno.ECONNREFUSED)


def send(sender: Meeting, receiver: Meeting, *, to: int) -> bytes:
    push = sender.connect(to)
    push.send(b"an order")
    assert receiver.pull.poll(SECONDS * 1000)
    push.close(linger=0)
    return receiver.pull.recv()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_ranks_with_the_mounted_keys_connect(meet, tmp_path: Path, with_keys: bool, address: str) -> None:
    if address == "::1" and not has_ipv6():
        pytest.skip("this system has no IPv6")
    keys = write_keys(tmp_path / "keys", KeyPair.generate()) if with_keys else None
    store = dist.HashStore()
    leader, follower = meet(0, store, keys, address), meet(1, store, keys, address)
    for one in (leader, follower):
        one.wait_for_all(until=until())
    assert send(leader, follower, to=1) == send(follower, leader, to=0) == b"an order"


@pytest.mark.parametrize(
    "written",
    [
        f"tcp://127.0.0.1:9 {FOREIGN.public.decode()}",
        "tcp://127.0.0.1:9",
        "ipc:///tmp/of-another",
        "\x00",
        f"tcp://127.0.0.1:9 {FOREIGN.public.decode()} {FOREIGN.public.decode()}",
    ],
    ids=["another key", "no key", "another transport", "no text", "two keys"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_foreign_address_in_the_store_is_rejected(meet, tmp_path: Path, rank: int, written: str) -> None:
    keys = write_keys(tmp_path / "keys", KeyPair.generate())
    store = dist.HashStore()
    other = meet(1 - rank, store, keys)
    store.set(f"address/{rank}", written)
    with pytest.raises(RendezvousError) as rejected:
        other.wait_for_all(until=until(0.1))
    assert rejected.value.rank == rank


def test_writes_to_the_store_after_the_rendezvous_have_no_effect(meet, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", KeyPair.generate())
    store = dist.HashStore()
    leader, follower = meet(0, store, keys), meet(1, store, keys)
    leader.wait_for_all(until=until())
    store.set("address/1", f"tcp://127.0.0.1:9 {FOREIGN.public.decode()}")
    assert send(leader, follower, to=1) == b"an order"


def test_a_rank_without_the_secret_key_gets_no_order(meet, tmp_path: Path) -> None:
    """It announces the mounted public key, and listens with another."""
    own = KeyPair.generate()
    keys = write_keys(tmp_path / "keys", own)
    store = dist.HashStore()
    leader, context = meet(0, store, keys), zmq.Context()
    listener = context.socket(zmq.PULL)
    listener.curve_server = True
    listener.curve_publickey, listener.curve_secretkey = FOREIGN.public, FOREIGN.secret
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    monitor = listener.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    store.set("address/1", f"tcp://127.0.0.1:{port} {own.public.decode()}")
    leader.wait_for_all(until=until())
    push = leader.connect(1)
    push.send(b"an order", zmq.NOBLOCK)
    assert monitor.poll(SECONDS * 1000), "its handshake failed"
    assert not listener.poll(0)
    push.close(linger=0)
    listener.disable_monitor()
    context.destroy(linger=0)


def test_rendezvous_waits_for_a_rotated_key(meet, tmp_path: Path) -> None:
    """The kubelet brings a changed Secret to one pod earlier than to another."""
    old, new = KeyPair.generate(), KeyPair.generate()
    late, early = write_keys(tmp_path / "late", old), write_keys(tmp_path / "early", new, old, new)
    store = dist.HashStore()
    leader, follower = meet(0, store, late), meet(1, store, early)
    threading.Timer(0.3, lambda: write_keys(tmp_path / "late", old, old, new)).start()
    leader.wait_for_all(until=until())
    follower.wait_for_all(until=until())
    assert send(leader, follower, to=1) == send(follower, leader, to=0) == b"an order"
