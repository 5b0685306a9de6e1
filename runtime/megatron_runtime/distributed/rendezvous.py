"""The rendezvous of an engine's ranks. Each rank writes its address to a store that rank 0 serves.

The ranks of one host use a private folder, which has the store and their sockets. Between hosts, the store is not
authenticated. With keys, a rank therefore accepts another rank's public key from the store only if the mounted
`engine.pub` contains this key. The connection then proves that the other rank holds the secret key.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
import zmq
from torch.distributed import distributed_c10d
from zmq.auth.thread import ThreadAuthenticator

from megatron_runtime.distributed.errors import RankError, RendezvousError
from megatron_runtime.distributed.shard import RankIdentity
from megatron_runtime.distributed.watch import BEAT_SECONDS
from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp.dealer import AddressError, parse_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
KEY_LOOK_SECONDS = 1.0
"""Interval at which engine.pub is read while it lacks a rank's key, because pods receive a rotated key at different
times.
"""
REPORT_SECONDS = 1.0
"""Interval of the reports of a rank that is preparing."""
PREPARED_LOOK_SECONDS = 0.2
_AT_WORK, _PREPARED, _FAILED = "preparing", "prepared", "preparation failed"
"""Keys of the store: the reports of all ranks, the ranks that have prepared, and the first failure."""
SILENCE_SECONDS = 3.0
"""Seconds without traffic after which ZeroMQ closes a connection.

Its I/O thread sends heartbeats even if Python is blocked.
"""


def open_store(identity: RankIdentity, *, timeout_seconds: float) -> dist.Store:
    """Return the store of this engine's ranks. Raises RendezvousError if rank 0 does not open the store in time."""
    prefix = f"megatron/{identity.build_index}/{identity.engine}"
    if dist.is_initialized():  # a program that uses torch.distributed already has a store
        return dist.PrefixStore(prefix, distributed_c10d._get_default_store())
    if identity.folder is not None:
        return dist.PrefixStore(prefix, dist.FileStore(str(identity.folder / "store"), identity.world))
    # Under torchrun, the agent of the first node has opened the store already.
    is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            identity.address,
            identity.port,
            world_size=None,
            is_master=identity.rank == 0 and not is_open,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RendezvousError(
            identity.rank,
            f"no rendezvous at {identity.address}:{identity.port} within {timeout_seconds:g} s: {error}",
        ) from error
    return dist.PrefixStore(prefix, store)


def prepare_together(
    store: dist.Store, identity: RankIdentity, prepare: Callable[[], T], *, timeout_seconds: float
) -> T:
    """Run `prepare`, wait until every rank has run `prepare`, and return the result of this rank.

    `prepare` can take long, for example because it downloads the model. While a rank runs `prepare`, it reports this to
    the store. The other ranks wait as long as these reports arrive, and fail `timeout_seconds` after the last report.

    Raises:
        RankError: another rank failed; the message has the cause.
        RendezvousError: a rank is missing; the message names it.
        Exception: an error of `prepare`.
    """
    done = threading.Event()

    def report() -> None:
        while not done.wait(REPORT_SECONDS):
            store.add(_AT_WORK, 1)

    reporter = threading.Thread(target=report, name="preparing", daemon=True)
    reporter.start()
    try:
        result = prepare()
    except (OSError, ValueError) as error:
        store.set(_FAILED, f"{identity.rank} {error}")
        raise
    finally:
        done.set()
        reporter.join()
    store.set(f"{_PREPARED}/{identity.rank}", "")
    store.add(_PREPARED, 1)
    _wait_until_prepared(store, identity, timeout_seconds=timeout_seconds)
    return result


def _wait_until_prepared(store: dist.Store, identity: RankIdentity, *, timeout_seconds: float) -> None:
    seen, since = (-1, -1), time.monotonic()
    while True:
        now = (store.add(_PREPARED, 0), store.add(_AT_WORK, 0))
        if now[0] >= identity.world:
            return
        if store.check([_FAILED]):
            rank, _, cause = store.get(_FAILED).decode(errors="replace").partition(" ")
            raise RankError(int(rank), f"it cannot open the model: {cause}")
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_seconds:
            missing = [rank for rank in range(identity.world) if not store.check([f"{_PREPARED}/{rank}"])]
            raise RendezvousError(
                missing[0] if missing else identity.rank,
                f"it did not report that it has opened the model within {timeout_seconds:g} s; "
                f"missing ranks: {missing} of {identity.world}",
            )
        time.sleep(PREPARED_LOOK_SECONDS)


class Meeting:
    """The sockets of one rank, and the addresses of the other ranks.

    If the ranks have a private folder, the rank's socket is in this folder. Otherwise the socket listens on loopback,
    or on all interfaces if the engine spans several hosts.

    keys_dir: folder of engine.key and engine.pub. Both ends of a connection must have a key that engine.pub contains.
              None means no encryption.
    """

    def __init__(self, identity: RankIdentity, store: dist.Store, *, keys_dir: Path | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._identity = identity
        self._store = store
        self._peers: dict[int, tuple[str, str]] = {}
        self._accepted_keys = keys_dir / "engine.pub" if keys_dir is not None else None
        self._keys = PeerKeys.load(keys_dir, Role.ENGINE) if keys_dir is not None else None
        self._authenticator = ThreadAuthenticator(self.context) if keys_dir is not None else None
        if self._authenticator is not None:
            self._authenticator.start()
            self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        own = _own_address(identity)
        self._ipv6 = identity.folder is None and ":" in own
        self.pull = _socket(self.context, zmq.PULL, ipv6=self._ipv6)
        if self._keys is not None:
            self.pull.curve_server = True
            self.pull.curve_publickey = self._keys.own.public
            self.pull.curve_secretkey = self._keys.own.secret
        if identity.folder is not None:
            address = f"ipc://{identity.folder}/rank-{identity.rank}"
            self.pull.bind(address)
        else:
            port = self.pull.bind_to_random_port(f"tcp://{LOOPBACK if own == LOOPBACK else '*'}")
            address = f"tcp://{own}:{port}"
        public = self._keys.own.public.decode() if self._keys is not None else ""
        store.set(_key(identity.rank), f"{address} {public}")

    def wait_for_all(self, *, until: float) -> None:
        """Wait until every rank of the engine has written its address and an accepted public key to the store.

        until: deadline on the clock of time.monotonic().

        Raises RendezvousError with the number of a rank whose address or key is missing.
        """
        everyone = range(self._identity.world)
        try:
            self._store.wait([_key(rank) for rank in everyone], timedelta(seconds=max(0.1, until - time.monotonic())))
        except RuntimeError as error:
            missing = [rank for rank in everyone if not self._store.check([_key(rank)])]
            raise RendezvousError(
                missing[0] if missing else self._identity.rank,
                f"it did not reach the rendezvous at {self._identity.address}:{self._identity.port} in time; "
                f"missing ranks: {missing} of {self._identity.world}",
            ) from error
        for rank in everyone:
            self._peers[rank] = self._read(rank)
            self._check_key(rank, until=until)

    def _read(self, rank: int) -> tuple[str, str]:
        """Return the address and public key of a rank from the store.

        Raises RendezvousError for an invalid address, because any process can write to the store.
        """
        try:
            address, _, public = self._store.get(_key(rank)).decode("ascii").partition(" ")
            if isinstance(parse_address(address), Path) is (self._identity.folder is None):
                raise AddressError(f"address {address!r}: want the address of a socket of the ranks")
        except ValueError as error:
            raise RendezvousError(rank, f"the rendezvous store has no address of it: {error}") from error
        return address, public

    def _check_key(self, rank: int, *, until: float) -> None:
        _, public = self._peers[rank]
        if self._accepted_keys is None:
            if public:
                raise RendezvousError(rank, "it has keys, this rank has none: give --keys-dir to all ranks or to none")
            return
        if not public:
            raise RendezvousError(rank, "it has no keys, this rank has: give --keys-dir to all ranks or to none")
        while not _is_accepted(public.encode(), self._accepted_keys):
            if time.monotonic() >= until:
                raise RendezvousError(
                    rank,
                    f"its key in the rendezvous store is {public:.60}, which {self._accepted_keys} lacks: another "
                    "process wrote to the store, or this pod has not received the rotated keys yet",
                )
            time.sleep(min(KEY_LOOK_SECONDS, max(0.0, until - time.monotonic())))

    def connect(self, rank: int) -> zmq.Socket[bytes]:
        """Return a PUSH socket that connects to `rank`.

        Sending on it never blocks. Call this method after wait_for_all().
        """
        address, public = self._peers[rank]
        push = _socket(self.context, zmq.PUSH, ipv6=self._ipv6)
        if self._keys is not None:
            push.curve_publickey = self._keys.own.public
            push.curve_secretkey = self._keys.own.secret
            push.curve_serverkey = public.encode()
        push.connect(address)
        return push

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key (Z85) may connect. During a rotation, engine.pub has two keys."""
        return self._accepted_keys is not None and _is_accepted(key, self._accepted_keys)

    def close(self) -> None:
        """Close the sockets of this object. Call this method after the sockets from connect() have been closed."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=0)


def _is_accepted(key: bytes, file: Path) -> bool:
    """Return whether `file` contains this key. Returns False if the file cannot be read."""
    try:
        return key in file.read_bytes().split()
    except OSError as error:
        logger.warning("key file %s: %s", file, error.strerror)
        return False


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
    """Return a socket that queues any number of messages. It closes a connection if heartbeats are not answered."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0),
        (zmq.LINGER, 0),
        (zmq.IPV6, int(ipv6)),
        (zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000)),
    ):
        socket.setsockopt(option, value)
    return socket


def _own_address(identity: RankIdentity) -> str:
    """Return the IP address from which this host reaches rank 0. An IPv6 address is in brackets."""
    if identity.address in (LOOPBACK, "localhost"):
        return LOOPBACK
    family, *_, address = socket.getaddrinfo(identity.address, identity.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


def _key(rank: int) -> str:
    return f"address/{rank}"
