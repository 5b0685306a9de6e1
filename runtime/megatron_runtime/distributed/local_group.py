"""Collectives on CPU tensors between the ranks of one host, over Unix sockets in a private folder.

gloo is not used here, because it listens on TCP and does not authenticate peers, so any user of the host could pose as
a rank. Only the owner of the private folder can connect to a Unix socket in the folder.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

LARGE_BYTES = 64 * 1024
"""Size above which a tensor is summed in parts. Each rank sums one part, and receives the sums of the other parts."""
_RETRY_SECONDS = 0.01


class LocalGroup:
    """The connections of one rank to the other ranks of its group. One thread calls the collectives.

    All ranks must construct this object at the same time, because the constructor waits for the other ranks.

    folder:  folder of the sockets; only the user who runs the ranks may enter it.
    name:    name of the group's dimension; it differs between groups of the same ranks.
    ranks:   the ranks of the group in ascending order, including `rank`.
    timeout_seconds: timeout of the constructor, and of each collective.

    The constructor and all methods raise RuntimeError if a rank is missing, exits, or makes no progress in time.
    """

    def __init__(self, folder: Path, name: str, ranks: Sequence[int], *, rank: int, timeout_seconds: float) -> None:
        self._ranks = list(ranks)
        self._place = self._ranks.index(rank)
        self._timeout = timeout_seconds
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="send")
        self._links: dict[int, socket.socket] = {}
        self._received = torch.empty(len(self._ranks), 0)
        """Buffer for the tensors of the other ranks. Each sum reuses it."""
        deadline = time.monotonic() + timeout_seconds
        try:
            with contextlib.ExitStack() as stack:
                # A rank listens for the ranks with higher numbers, and connects to the ranks with lower numbers.
                listeners = {}
                for other in self._ranks[self._place + 1 :]:
                    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                    listener.bind(str(folder / f"{name}-{rank}-{other}"))
                    listener.listen(1)
                    listener.settimeout(timeout_seconds)
                    listeners[other] = listener
                for other in self._ranks[: self._place]:
                    self._links[other] = _connect(folder / f"{name}-{other}-{rank}", deadline)
                for other, listener in listeners.items():
                    self._links[other], _ = listener.accept()
        except OSError as error:
            self.close()
            raise RuntimeError(f"the ranks of this host cannot connect: {error}") from error

    def close(self) -> None:
        self._sender.shutdown(wait=False)
        for link in self._links.values():
            link.close()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks.

        The tensors are added in ascending order of the ranks.
        """
        flat = tensor.view(-1)
        if flat.nbytes <= LARGE_BYTES:
            self._sum([flat] * len(self._ranks), into=flat)
            return
        parts = flat.tensor_split(len(self._ranks))
        own = parts[self._place]
        self._sum(parts, into=own)
        self._exchange([(rank, own, parts[place]) for place, rank in self._others()])

    def all_gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the `tensor` of each rank to `gathered`, in the order of the ranks. Both tensors must be contiguous."""
        parts = gathered.view(len(self._ranks), -1).unbind()
        flat = tensor.view(-1)
        parts[self._place].copy_(flat)
        self._exchange([(rank, flat, parts[place]) for place, rank in self._others()])

    def _sum(self, sent: Sequence[torch.Tensor], *, into: torch.Tensor) -> None:
        """Send one tensor of `sent` to each other rank, and add the received tensors to `into`, in the order of the
        ranks.
        """
        size = into.numel()
        if self._received.dtype != into.dtype or self._received.shape[1] < size:
            self._received = torch.empty(len(self._ranks), size, dtype=into.dtype)
        received = list(self._received[:, :size].unbind())
        self._exchange([(rank, sent[place], received[place]) for place, rank in self._others()])
        received[self._place] = into
        if len(received) == 2:
            torch.add(*received, out=into)
            return
        received[self._place] = into.clone()
        torch.add(received[0], received[1], out=into)
        for part in received[2:]:
            into += part

    def _others(self) -> list[tuple[int, int]]:
        """Return (position in the group, rank) of each other rank."""
        return [(place, rank) for place, rank in enumerate(self._ranks) if place != self._place]

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        """Start to send a contiguous tensor to `rank`. Return a function that waits until the tensor is sent."""
        return self._sender.submit(self._exchange, [(rank, tensor, None)]).result

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._exchange([(rank, None, tensor)])

    def _exchange(self, transfers: Iterable[tuple[int, torch.Tensor | None, torch.Tensor | None]]) -> None:
        """Send and receive at the same time, so that two ranks that send to each other cannot deadlock.

        transfers: for each transfer, the rank, the tensor to send to this rank, and the tensor to receive from this
            rank.
        """
        deadline = time.monotonic() + self._timeout
        left = [(rank, self._links[rank], _bytes(sent), _bytes(received)) for rank, sent, received in transfers]
        while True:
            left = [transfer for transfer in map(_advance, left) if transfer[2] or transfer[3]]
            if not left:
                return
            poller = select.poll()
            for _, link, unsent, missing in left:
                poller.register(link, (select.POLLOUT if unsent else 0) | (select.POLLIN if missing else 0))
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                ranks = ", ".join(str(rank) for rank, *_ in left)
                raise RuntimeError(f"no progress with rank {ranks} within {self._timeout:g} s")


Transfer = tuple[int, socket.socket, memoryview, memoryview]
"""A transfer in progress: rank, socket, bytes still to send, and buffer still to fill."""


def _advance(transfer: Transfer) -> Transfer:
    """Send and receive the bytes that the socket can transfer now. Return the part of the transfer that remains."""
    rank, link, unsent, missing = transfer
    try:
        if unsent:
            with contextlib.suppress(BlockingIOError):
                unsent = unsent[link.send(unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        if missing:
            with contextlib.suppress(BlockingIOError):
                count = link.recv_into(missing, flags=socket.MSG_DONTWAIT)
                if count == 0:
                    raise ConnectionResetError("its connection ended")
                missing = missing[count:]
    except OSError as error:
        raise RuntimeError(f"rank {rank}: {error}") from error
    return rank, link, unsent, missing


def _connect(path: Path, deadline: float) -> socket.socket:
    """Return a connection to a Unix socket as soon as the other rank listens on it. Raises OSError at the deadline."""
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(path))
            return link
        except (FileNotFoundError, ConnectionRefusedError) as error:
            link.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank listens at {path.name}") from error
            time.sleep(_RETRY_SECONDS)


def _bytes(tensor: torch.Tensor | None) -> memoryview:
    if tensor is None or not tensor.numel():
        return memoryview(b"")
    array = tensor.view(-1).view(torch.uint8).numpy()
    return array.data
