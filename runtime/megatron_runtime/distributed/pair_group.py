"""Transfers tensors between processes of two programs over gloo, independently of torch's default group.

gloo does not authenticate peers. The caller compares the received data with a digest from an authenticated connection.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

MEETING_SECONDS = 60.0
"""Timeout of the constructor, in seconds. The other side may have to import torch first."""
EXCHANGE_SECONDS = 30.0
"""Timeout of a transfer, in seconds.

The exit of a peer is detected at once; a stopped or unreachable peer after this time.
"""
SENDER, RECEIVER = 0, 1
_READY, _LOOK_SECONDS = "ready", 0.02


class PairLostError(RuntimeError):
    """The other process exited, did not answer in time, or never connected."""


def local_address(host: str, port: int) -> str:
    """Return the address that this machine uses to reach `host`, without sending anything. Raises OSError."""
    family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def listen_store(host: str) -> dist.TCPStore:
    """Return a rendezvous store that listens on a free port of `host` only. Raises OSError."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to a rendezvous store. Raises PairLostError."""
    try:
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEETING_SECONDS)
        )
    except RuntimeError as error:
        raise PairLostError(f"no rendezvous store at {host}:{port}: {_first_line(error)}") from error


def wait_for_receiver(store: dist.Store, *, closing: threading.Event) -> None:
    """Wait until the receiver is about to connect. Raises PairLostError after a timeout, or if `closing` is set.

    Unlike a wait in gloo, this wait can be cancelled. If a thread waits in gloo when the interpreter exits, the process
    aborts.
    """
    deadline = time.monotonic() + MEETING_SECONDS
    while not store.check([_READY]):
        if closing.wait(_LOOK_SECONDS) or time.monotonic() > deadline:
            raise PairLostError("it did not connect")


class PairGroup:
    """A group of two processes, for one thread. The constructor waits for the other process.

    store: the rendezvous store, with a prefix that only this pair uses.
    rank:  SENDER or RECEIVER; both may send and receive.
    host:  address of this machine, to which the other process connects.

    All methods raise PairLostError. The group cannot be used afterwards.
    """

    def __init__(self, store: dist.Store, *, rank: int, host: str) -> None:
        self._other = 1 - rank
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=MEETING_SECONDS)
        options._threads = 1
        try:
            if rank == RECEIVER:
                store.set(_READY, "")
            self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, 2, options)
        except RuntimeError as error:
            raise PairLostError(f"the other side did not connect: {_first_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._group = None

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor on the CPU."""
        self._exchange("send", tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Receive into a contiguous CPU tensor of the same size as the sent tensor."""
        self._exchange("recv", tensor)

    def _exchange(self, operation: str, tensor: torch.Tensor) -> None:
        if self._group is None:
            raise PairLostError("the connection is closed")
        try:
            getattr(self._group, operation)([tensor], self._other, 0).wait(timedelta(seconds=EXCHANGE_SECONDS))
        except RuntimeError as error:
            self._group = None
            raise PairLostError(_first_line(error)) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:300]
