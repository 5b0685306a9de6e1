"""The port on which a trainer, or a rank of an engine, sends weights to the ranks of engines. Only the receiving ranks
connect.

A connection that begins as ZMTP is a DEALER with CURVE. Its peer requests a session, and gets the manifest and a token.
A connection that begins with a token is plain TCP. Its peer requests blocks by their numbers and gets their bytes. The
plain connection is not authenticated, so the receiver compares each block with its digest in the manifest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.process.threads import off_loop
from megatron_runtime.protocol.codec import Frames, MalformedMessageError
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.published_weights import (
    TOKEN_BYTES,
    OpenSession,
    PublishedTensor,
    SessionOpened,
    WeightsManifest,
)
from megatron_runtime.transport.security import PeerKeys, public_keys
from megatron_runtime.transport.zmtp.connection import Connection, PeerId
from megatron_runtime.transport.zmtp.dealer import parse_address
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from megatron_runtime.transport.zmtp.router import Router

logger = logging.getLogger(__name__)

EXCHANGE_SECONDS = 30.0
"""Time for which each side waits for the other. The exit of a peer is detected immediately."""
BLOCK_REQUEST = struct.Struct("<qq")
"""Format of a request for a block: index of the tensor, and index of the block in the tensor."""
_MAX_UNSENT_BYTES = 64 << 20
_CHECK_SECONDS = 5.0
_ZMTP = 0xFF
"""First byte of each ZMTP connection."""
_HASHING_THREADS = 4


def block_digest(block: torch.Tensor) -> bytes:
    """Return the SHA-256 of the bytes of a contiguous tensor on the CPU."""
    return hashlib.sha256(block_bytes(block)).digest()


def block_bytes(block: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the CPU."""
    return block.reshape(-1).view(torch.uint8).numpy().data


def local_address(host: str, port: int) -> str:
    """Return the IP address that this machine uses for connections to `host`. Sends nothing. Raises OSError."""
    family, kind, *_, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def address_towards(coordinator: str) -> str:
    """Return the IP address at which other machines reach this machine, from its route to a coordinator.

    Raises OSError.
    """
    target = parse_address(coordinator)
    return "127.0.0.1" if isinstance(target, Path) else local_address(*target)


class OfferedTensors:
    """Tensors that are divided into blocks. The digests of all blocks are computed when they are first needed.

    tensors:  contiguous tensors by name, on any device. They are not copied.
    reading:  returns a context manager. Inside its `with` block, any thread may copy the tensors from the device.
    manifest: the manifest of these tensors, in the same order; None: it is computed.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.Tensor]],
        *,
        epoch: int,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
        manifest: bytes | None = None,
    ) -> None:
        self._tensors = list(tensors)
        self._reading = reading
        self._lock = threading.Lock()
        self.epoch = epoch
        if manifest is not None:
            self._manifest = manifest
            self.entries = WeightsManifest.from_bytes(manifest).tensors

    @cached_property
    def entries(self) -> tuple[PublishedTensor, ...]:
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            return tuple(pool.map(self._entry, self._tensors))

    @property
    def manifest(self) -> bytes:
        with self._lock:  # two engines may be the first to ask
            return self._manifest

    @cached_property
    def _manifest(self) -> bytes:
        return WeightsManifest(self.epoch, self.entries).to_bytes()

    def block(self, tensor: int, block: int) -> torch.Tensor:
        """Return one block of a tensor on the CPU. The block is a view if the tensor is on the CPU, otherwise a copy.

        tensor, block: index of the tensor in the manifest, and index of the block in the tensor.

        Raises IndexError if the manifest has no such block.
        """
        if not 0 <= tensor < len(self.entries) or not 0 <= block < self.entries[tensor].num_blocks:
            raise IndexError(f"there is no block {block} of tensor {tensor}")
        return self._read(self._tensors[tensor][1], self.entries[tensor].rows(block))

    def _read(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        with self._reading():
            return tensor[rows].cpu()

    def _entry(self, item: tuple[str, torch.Tensor]) -> PublishedTensor:
        entry, tensor = entry_of(*item), item[1]
        digests = (block_digest(self._read(tensor, entry.rows(block))) for block in range(entry.num_blocks))
        return PublishedTensor(entry.name, entry.shape, entry.dtype, b"".join(digests))


def entry_of(name: str, tensor: torch.Tensor) -> PublishedTensor:
    """Return the manifest entry of a tensor, without digests."""
    return PublishedTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Weights that the port sends.

    session: id of the published weights, which a receiving rank names in OpenSession.session.
    part:    text that a receiving rank must send as OpenSession.part; empty for whole tensors.
    digest:  digest of the sending engine's weights; empty if there is none.
    """

    session: str
    tensors: OfferedTensors
    part: str = ""
    digest: str = ""


class WeightPort:
    """A server of weights. It listens on one port, on a thread of its own.

    All methods may be called on any other thread.

    host: address to listen on.
    port: 0 chooses a free port. After construction, the attribute has the port on which the server listens.
    keys_dir: directory of the key pair of `role`, and of engine.pub; None means no encryption.
    role: file name of this side's keys, "engine" or TRAINER.

    The constructor raises KeyFileError, and OSError if it cannot listen.
    """

    def __init__(self, host: str, port: int, *, keys_dir: Path | None, role: str) -> None:
        self.host = host
        self._keys_dir = keys_dir
        self._offers: dict[str, Offer] = {}
        self._tokens: dict[bytes, Offer] = {}
        self._streams: set[_Stream] = set()
        self._opening: set[asyncio.Task[None]] = set()
        started: Future[int] = Future()
        handshakes = _handshakes(keys_dir, role)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(port, handshakes, started)), name="weight port", daemon=True
        )
        self._thread.start()
        self.port = started.result()

    @property
    def address(self) -> str:
        """The address of the port, `tcp://HOST:PORT`."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def offer(self, *offers: Offer) -> None:
        """Send `offers` from now on, instead of the earlier weights.

        Wait until no block of the earlier weights is being sent, so that the caller may overwrite the earlier weights.
        """
        self._call(lambda: self._replace(offers))

    def close(self) -> None:
        """Stop listening, and wait for the engines that are receiving weights. This method is idempotent.

        The wait for an engine ends when it has all weights, or has been silent for EXCHANGE_SECONDS.
        """
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join()
        self._offers.clear()

    def _call(self, function: Callable[[], object]) -> None:
        done: Future[None] = Future()

        def call() -> None:
            function()
            done.set_result(None)

        self._loop.call_soon_threadsafe(call)
        done.result()

    # --- on the thread ----------------------------------------------------------------------------------------------

    async def _run(self, port: int, handshakes: Callable[[bytes], Handshake], started: Future[int]) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        router = self._router = Router(
            0,
            connections={},
            handshake=handshakes,
            on_message=self._received,
            max_message_bytes=1 << 16,
            send_buffer_bytes=_MAX_UNSENT_BYTES,
            check_seconds=_CHECK_SECONDS,
            first=lambda connect: _First(self, connect),
        )
        try:
            address = router.bind(self.host, port)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(int(address.rpartition(":")[2]))
        await self._closing.wait()
        router.close()
        while self._streams:
            await asyncio.wait([stream.ended for stream in self._streams])
        await router.closed()

    def _replace(self, offers: Sequence[Offer]) -> None:
        self._offers = {offer.session: offer for offer in offers}
        self._tokens = {token: offer for token, offer in self._tokens.items() if self._holds(offer)}
        for stream in list(self._streams):
            if not self._holds(stream.offer):
                stream.abort()

    def _holds(self, offer: Offer | None) -> bool:
        return offer is not None and offer in self._offers.values()

    def _received(self, peer: PeerId, frames: Frames) -> None:
        task = self._loop.create_task(self._open(peer, frames))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, peer: PeerId, frames: Frames) -> None:
        """Answer a peer's request for a session."""
        try:
            opening = OpenSession.from_bytes(frames[0])
        except MalformedMessageError as error:
            answer = SessionOpened(error=str(error))
        else:
            answer = await self._opened(opening)
        connection = self._router.connections.get(peer)
        if connection is not None:
            connection.send([answer.to_bytes()])

    async def _opened(self, opening: OpenSession) -> SessionOpened:
        if opening.is_question and not opening.session:
            newest = max(self._offers.values(), key=lambda offer: offer.tensors.epoch, default=None)
            if newest is None:
                return SessionOpened(error="it has published nothing yet")
            return SessionOpened(digest=newest.session)
        offer = self._offers.get(opening.session)
        if offer is None:
            epochs = ", ".join(session.partition("-")[0] for session in self._offers) or "none"
            cause = f"it does not hold session {opening.session[:24]}; epochs that it holds: {epochs}. Publish again"
            return SessionOpened(error=cause)
        if offer.part != opening.part:
            return SessionOpened(error=f"it holds {offer.part or 'whole tensors'!r}, not {opening.part!r}")
        if opening.is_question:
            return SessionOpened()
        manifest = await off_loop(lambda: offer.tensors.manifest)  # takes about a second for each gigabyte
        if not self._holds(offer):
            return SessionOpened(error="its weights were updated meanwhile")
        token = secrets.token_hex(TOKEN_BYTES // 2)
        self._tokens[token.encode()] = offer
        self._loop.call_later(EXCHANGE_SECONDS, self._tokens.pop, token.encode(), None)
        return SessionOpened(manifest=manifest, token=token, digest=offer.digest)

    def take(self, token: bytes) -> Offer | None:
        """Return the offer for which a token was issued, or None if the token is invalid or was used before."""
        return self._tokens.pop(token, None)

    def stream(self, stream: _Stream, *, is_open: bool) -> None:
        (self._streams.add if is_open else self._streams.discard)(stream)


class _First(asyncio.Protocol):
    """A connection whose first bytes have not arrived, so that its protocol is still unknown."""

    def __init__(self, port: WeightPort, connect: Callable[[], Connection]) -> None:
        self._port = port
        self._connect = connect

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(EXCHANGE_SECONDS, transport.abort)

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        self._deadline.cancel()
        protocol: asyncio.Protocol = self._connect() if data[0] == _ZMTP else _Stream(self._port)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)


class _Stream(asyncio.Protocol):
    """A plain TCP connection, on which a token and then requests for blocks arrive.

    ended: future that is done when the connection is closed.
    """

    def __init__(self, port: WeightPort) -> None:
        self._port = port
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self.offer: Offer | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # resume_writing() means that everything is sent
        self._deadline = self._loop.call_later(EXCHANGE_SECONDS, self._expire)
        self._port.stream(self, is_open=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._port.stream(self, is_open=False)
        self.ended.set_result(None)

    def resume_writing(self) -> None:
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if self.offer is None:
            if len(self._rest) < TOKEN_BYTES:
                return
            self.offer = self._port.take(self._rest[:TOKEN_BYTES])
            self._rest = self._rest[TOKEN_BYTES:]
        offer = self.offer
        if offer is None:
            self.abort()
            return
        while len(self._rest) >= BLOCK_REQUEST.size and not self._transport.is_closing():
            tensor, block = BLOCK_REQUEST.unpack_from(self._rest)
            self._rest = self._rest[BLOCK_REQUEST.size :]
            if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                self.abort()  # the peer sends requests but does not read
                return
            try:
                self._transport.write(block_bytes(offer.tensors.block(tensor, block)))
            except IndexError as error:
                logger.warning("an engine asked for weights of epoch %d: %s", offer.tensors.epoch, error)
                self.abort()
        self._wait()

    def abort(self) -> None:
        self._transport.abort()

    def _wait(self) -> None:
        """Restart the timeout within which the engine must send a request or read the bytes that were sent."""
        self._deadline.cancel()
        self._deadline = self._loop.call_later(EXCHANGE_SECONDS, self._expire)

    def _expire(self) -> None:
        logger.warning("an engine stopped receiving weights: it was silent for %g s", EXCHANGE_SECONDS)
        self.abort()


def _handshakes(keys_dir: Path | None, role: str) -> Callable[[bytes], Handshake]:
    if keys_dir is None:
        return NullHandshake
    from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer

    current = PeerKeys.load(keys_dir, role)

    def handshake(properties: bytes) -> Handshake:
        nonlocal current
        current = current.refreshed()  # they may have been rotated
        server = CurveServer.from_z85(current.own.secret, lambda key: key in public_keys(keys_dir, Role.ENGINE))
        return CurveHandshake(server, properties)

    return handshake
