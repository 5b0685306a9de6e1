"""How the ranks of an engine find each other: a store at rank 0's address, to which each rank writes its own address.

The store authenticates nothing. With keys, a rank's key from the store is accepted only if the mounted `engine.pub` has
it; the rank's connection then proves that it holds the secret key.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import zmq
from zmq.auth.thread import ThreadAuthenticator

from megatron_runtime.distributed.errors import RendezvousError
from megatron_runtime.distributed.shard import RankIdentity
from megatron_runtime.distributed.watch import BEAT_SECONDS
from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp.dealer import AddressError, parse_address

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
KEY_LOOK_SECONDS = 1.0
"""Between two looks at engine.pub while a rank's key is not in it: pods receive a rotated key at different times."""
SILENCE_SECONDS = 3.0
"""ZeroMQ closes a connection without traffic for so long. Its I/O thread sends the heartbeats, whatever Python does."""


def open_store(identity: RankIdentity, *, timeout_seconds: float) -> dist.Store:
    """The store of this engine's ranks. Raises RendezvousError if rank 0 does not open it in time."""
    # Under torchrun the agent of the first node has opened the port already.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            identity.address,
            identity.port,
            world_size=None,
            is_master=identity.rank == 0 and not is_agents,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RendezvousError(
            identity.rank,
            f"no rendezvous at {identity.address}:{identity.port} within {timeout_seconds:g} s: {error}",
        ) from error
    return dist.PrefixStore("megatron", store)


class Meeting:
    """The sockets of one rank, and the addresses of the others.

    keys_dir: engine.key and engine.pub; both ends of a connection must hold a key of engine.pub. None: no encryption;
              the socket listens on loopback only, unless the engine spans several machines.
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
        self.pull = _socket(self.context, zmq.PULL)
        if self._keys is not None:
            self.pull.curve_server = True
            self.pull.curve_publickey = self._keys.own.public
            self.pull.curve_secretkey = self._keys.own.secret
        port = self.pull.bind_to_random_port(f"tcp://{LOOPBACK if own == LOOPBACK else '*'}")
        public = self._keys.own.public.decode() if self._keys is not None else ""
        store.set(_key(identity.rank), f"tcp://{own}:{port} {public}")

    def wait_for_all(self, *, until: float) -> None:
        """Return when every rank of the engine has written its address, with a key that is accepted.

        until: of time.monotonic(). Raises RendezvousError naming the rank that has not.
        """
        everyone = range(self._identity.world)
        try:
            self._store.wait([_key(rank) for rank in everyone], timedelta(seconds=max(0.1, until - time.monotonic())))
        except RuntimeError as error:
            missing = [rank for rank in everyone if not self._store.check([_key(rank)])]
            raise RendezvousError(
                missing[0] if missing else self._identity.rank,
                f"it has not come to the rendezvous at {self._identity.address}:{self._identity.port} in time; "
                f"missing are ranks {missing} of {self._identity.world}",
            ) from error
        for rank in everyone:
            self._peers[rank] = self._read(rank)
            self._check_key(rank, until=until)

    def _read(self, rank: int) -> tuple[str, str]:
        """Address and public key of a rank from the store, which any process can write to."""
        try:
            address, _, public = self._store.get(_key(rank)).decode("ascii").partition(" ")
            if isinstance(parse_address(address), Path):
                raise AddressError(f"address {address!r}: want tcp://HOST:PORT")
        except ValueError as error:
            raise RendezvousError(rank, f"the rendezvous store has no address of it: {error}") from error
        return address, public

    def _check_key(self, rank: int, *, until: float) -> None:
        _, public = self._peers[rank]
        if self._accepted_keys is None:
            if public:
                raise RendezvousError(rank, "it has keys, this rank has not: give --keys-dir to all ranks or to none")
            return
        if not public:
            raise RendezvousError(rank, "it has no keys, this rank has: give --keys-dir to all ranks or to none")
        while not _is_accepted(public.encode(), self._accepted_keys):
            if time.monotonic() >= until:
                raise RendezvousError(
                    rank,
                    f"the rendezvous store says that its key is {public:.60}, which {self._accepted_keys} does not "
                    "have: another process wrote to the store, or this pod has not got the rotated keys yet",
                )
            time.sleep(min(KEY_LOOK_SECONDS, max(0.0, until - time.monotonic())))

    def connect(self, rank: int) -> zmq.Socket[bytes]:
        """A PUSH socket to `rank`, after wait_for_all(). It never blocks."""
        address, public = self._peers[rank]
        push = _socket(self.context, zmq.PUSH)
        if self._keys is not None:
            push.curve_publickey = self._keys.own.public
            push.curve_secretkey = self._keys.own.secret
            push.curve_serverkey = public.encode()
        push.connect(address)
        return push

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a peer with this public key, in Z85, may connect. engine.pub may have two keys during a rotation."""
        return self._accepted_keys is not None and _is_accepted(key, self._accepted_keys)

    def close(self) -> None:
        """Call it after the channel has closed its sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=0)


def _is_accepted(key: bytes, file: Path) -> bool:
    """Whether `file` has this key. No key is accepted while the file cannot be read."""
    try:
        return key in file.read_bytes().split()
    except OSError as error:
        logger.warning("key file %s: %s", file, error.strerror)
        return False


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket without a limit on queued messages, which closes silent connections."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM if kind == zmq.PUSH else zmq.RCVHWM, 0),
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, int(SILENCE_SECONDS * 1000)),
    ):
        socket.setsockopt(option, value)
    return socket


def _own_address(identity: RankIdentity) -> str:
    """The address of the interface that leads to rank 0."""
    if identity.address in (LOOPBACK, "localhost"):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((identity.address, identity.port))
        return str(probe.getsockname()[0])


def _key(rank: int) -> str:
    return f"address/{rank}"
