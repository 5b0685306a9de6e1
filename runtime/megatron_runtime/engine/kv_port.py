"""The port on which engines exchange blocks of their prefix caches, with CURVE and the keys of engines.

The importing engine requests each chunk, and thereby limits the bytes in flight. A ticket gives one connection access
to one export. The frames are described in docs/reference/protocol.md, "Split requests".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_runtime.engine.kv_transfer import KVConnector, KVTransfer, TransferEndedError
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import Frames, MalformedMessageError, UnpackLimits, pack, unpack
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import DIGEST_BYTES, Imported, Transfer
from megatron_runtime.transport.security import PeerKeys, public_keys
from megatron_runtime.transport.zmtp.connection import PeerId
from megatron_runtime.transport.zmtp.dealer import Dealer
from megatron_runtime.transport.zmtp.handshake import Handshake, NullHandshake
from megatron_runtime.transport.zmtp.router import Router

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
MAX_IN_FLIGHT_BYTES = 64 << 20
"""Maximum number of bytes in flight of all exports of an engine together, and of all its imports together."""
WINDOW_CHUNKS = 4
"""Maximum number of chunks of one import that are in flight."""
MAX_ACTIVE = MAX_IN_FLIGHT_BYTES // (WINDOW_CHUNKS * CHUNK_BYTES)
"""Maximum number of exports that send, and of imports that receive, at the same time. Further transfers wait."""
CONNECT_SECONDS = 2.0
CONNECTOR_SECONDS = 20.0
"""Time after which a ConnectorPort gives up an import. Its backend may wait for free blocks during this time."""
SILENCE_SECONDS = 5.0
"""Time after which a transfer ends if its other side neither sends nor accepts bytes."""
MAX_EARLY = 64
"""Maximum number of requests that may wait for their ticket. The coordinator sends a ticket to both engines at the same
time.
"""
_MESSAGE = UnpackLimits(elements=8, containers=2, depth=2, frame_bytes=4096)
_CHECK_SECONDS = 5.0


@dataclass(eq=False)
class _Grant:
    """Permission to read one export.

    peer: the connection that has presented the ticket; None if no connection has presented it yet.
    """

    export: int
    key: bytes
    until: float
    num_blocks: int
    peer: PeerId | None = None


@dataclass(eq=False)
class _Upload:
    """The chunks that one connection has requested, and the task that sends them."""

    requests: asyncio.Queue[tuple[_Grant, int, int]] = field(default_factory=asyncio.Queue)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class BlockServer:
    """A server that sends the blocks of exports to engines that have a ticket.

    keys_dir: directory of engine.key and engine.pub; None means no encryption.
    """

    def __init__(self, kv: KVTransfer, *, keys_dir: Path | None) -> None:
        self._kv = kv
        self._keys_dir = keys_dir
        self._grants: dict[bytes, _Grant] = {}
        self._early: list[tuple[PeerId, bytes, int, int]] = []
        self._uploads: dict[PeerId, _Upload] = {}
        self._active = asyncio.Semaphore(MAX_ACTIVE)
        self._router = Router(
            0,
            connections={},
            handshake=self._handshakes(),
            on_message=self._received,
            on_gone=lambda peer, _by_peer: self._end(peer),
            on_room=self._has_room,
            max_message_bytes=4096,
            send_buffer_bytes=(WINDOW_CHUNKS - 1) * CHUNK_BYTES,
            check_seconds=_CHECK_SECONDS,
        )

    def bind(self, host: str, port: int) -> str:
        """Listen on a port, and return the address for other engines. Raises OSError if the server cannot listen."""
        return self._router.bind(host, port)

    def close(self) -> None:
        self._router.close()
        self._grants.clear()
        for peer in list(self._uploads):
            self._end(peer)

    @property
    def num_open(self) -> int:
        """Number of tickets with which an engine may read blocks, plus the number of uploads in progress."""
        return len(self._grants) + len(self._uploads)

    def grant(self, transfer: Transfer) -> None:
        """Accept the ticket of a transfer until the ticket expires or revoke() is called."""
        until = time.monotonic() + transfer.seconds
        num_blocks = len(transfer.digests) // DIGEST_BYTES
        self._grants[transfer.ticket] = _Grant(transfer.export_id, transfer.key.encode(), until, num_blocks)
        early, self._early = self._early, []
        for peer, ticket, offset, size in early:
            self._request(peer, ticket, offset, size)

    def revoke(self, export: int) -> None:
        """Reject tickets for this export from now on, and close the connections that read the export."""
        for ticket, grant in list(self._grants.items()):
            if grant.export == export:
                del self._grants[ticket]
                if grant.peer is not None:
                    self._router.cut(grant.peer)
                    self._end(grant.peer)

    def _handshakes(self) -> Callable[[bytes], Handshake]:
        directory = self._keys_dir
        if directory is None:
            return NullHandshake
        from megatron_runtime.transport.zmtp.curve import CurveHandshake, CurveServer

        own = PeerKeys.load(directory, Role.ENGINE).own
        server = CurveServer.from_z85(
            own.secret, lambda key: key == own.public or key in public_keys(directory, Role.ENGINE)
        )
        return lambda properties: CurveHandshake(server, properties)

    def _received(self, peer: PeerId, frames: Frames) -> None:
        try:
            items = unpack(frames[0], _MESSAGE)
        except MalformedMessageError:
            items = None
        if type(items) is list and [type(item) for item in items[:3]] == [bytes, int, int]:
            ticket, offset, size = items[:3]
            if offset >= 0 and 0 < size <= CHUNK_BYTES:
                self._request(peer, ticket, offset, size)
                return
        self._router.cut(peer)

    def _request(self, peer: PeerId, ticket: bytes, offset: int, size: int) -> None:
        grant = self._grants.get(ticket)
        connection = self._router.connections.get(peer)
        if connection is None:
            return
        if grant is None:
            self._early.append((peer, ticket, offset, size))
            if len(self._early) > MAX_EARLY:
                self._router.cut(self._early.pop(0)[0])
            return
        is_first = grant.peer is None
        if connection.key != grant.key or time.monotonic() > grant.until or grant.peer not in (None, peer):
            connection.send([pack(["the ticket is not valid for this connection", offset, 0]), b""])
            return
        if is_first:
            grant.peer = peer
        upload = self._uploads.get(peer)
        if upload is None:
            upload = self._uploads[peer] = _Upload()
            upload.task = asyncio.create_task(self._send(peer, upload))
        if upload.requests.qsize() > WINDOW_CHUNKS:
            self._router.cut(peer)
            self._end(peer)
        else:
            upload.requests.put_nowait((grant, offset, size))

    async def _send(self, peer: PeerId, upload: _Upload) -> None:
        """Send the chunks that one connection requests.

        Close the connection if the importer stops requesting or reading.
        """
        block_bytes, content, at, source = self._kv.block_bytes, b"", 0, None
        # content: bytes of `source` from `at` to the end of a block. One read is a window of chunks.
        async with self._active:
            try:
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        grant, offset, size = await upload.requests.get()
                    if offset + size > grant.num_blocks * block_bytes:
                        raise TransferEndedError(f"bytes {offset} to {offset + size} are beyond the export")
                    content = content[offset - at :] if grant is source and at <= offset else b""
                    at, source = offset, grant
                    if len(content) < size:
                        first, start = divmod(at + len(content), block_bytes)
                        end = -(-(at + WINDOW_CHUNKS * CHUNK_BYTES) // block_bytes)
                        blocks = range(first, min(end, grant.num_blocks))
                        content += (await self._kv.read(grant.export, blocks))[start:]
                    data = content[:size]
                    head = pack(["", offset, zlib.crc32(data)])
                    connection = self._router.connections.get(peer)
                    while connection is not None and not connection.send([head, data]):
                        upload.has_room.clear()
                        async with asyncio.timeout(SILENCE_SECONDS):
                            await upload.has_room.wait()
            except TimeoutError:
                self._router.cut(peer)
            except Exception as error:
                # The importer closes the connection. If this side closed it, an unread request could lose the error.
                connection = self._router.connections.get(peer)
                if connection is not None:
                    connection.send([pack([_cause(error), 0, 0]), b""])
            finally:
                if self._uploads.get(peer) is upload:
                    del self._uploads[peer]

    def _has_room(self, peer: PeerId) -> None:
        upload = self._uploads.get(peer)
        if upload is not None:
            upload.has_room.set()

    def _end(self, peer: PeerId) -> None:
        self._early = [item for item in self._early if item[0] != peer]
        for ticket, grant in list(self._grants.items()):
            if grant.peer == peer:
                del self._grants[ticket]
        upload = self._uploads.pop(peer, None)
        if upload is not None and upload.task is not None:
            upload.task.cancel()


class BlockPort:
    """A BlockServer and a BlockReceiver, which are the port of an engine whose worker moves the blocks."""

    def __init__(self, kv: KVTransfer, *, keys_dir: Path | None) -> None:
        self._server = BlockServer(kv, keys_dir=keys_dir)
        self.bind, self.grant, self.revoke = self._server.bind, self._server.grant, self._server.revoke
        self.close, self.receive = self._server.close, BlockReceiver(kv, keys_dir=keys_dir).receive


class ConnectorPort:
    """The port of an engine whose backend moves the blocks. The backend needs no ticket."""

    def __init__(self, kv: KVConnector) -> None:
        self._kv = kv
        self.bind = kv.listen

    def grant(self, transfer: Transfer) -> None: ...
    def revoke(self, export: int) -> None: ...
    def close(self) -> None: ...

    async def receive(self, transfer: Transfer) -> Imported:
        """Import the blocks of a transfer, and return the message for the coordinator.

        If the import fails or is cancelled, the caller must release it.
        """
        begun = time.monotonic()
        try:
            async with asyncio.timeout(CONNECTOR_SECONDS):
                received = await self._kv.receive(transfer.dispatch_id, transfer.weights, transfer.handle)
        except TimeoutError:
            error = f"the import has not ended within {CONNECTOR_SECONDS:g} s"
            return Imported(dispatch_id=transfer.dispatch_id, ok=False, error=error)
        except Exception as error:
            return Imported(dispatch_id=transfer.dispatch_id, ok=False, error=_cause(error))
        seconds = time.monotonic() - begun
        return Imported(dispatch_id=transfer.dispatch_id, ok=True, received_bytes=received, seconds=seconds)


class BlockReceiver:
    """A client that imports blocks from the BlockServers of other engines.

    keys_dir: directory of engine.key and engine.pub; None means no encryption.
    """

    def __init__(self, kv: KVTransfer, *, keys_dir: Path | None) -> None:
        self._kv = kv
        self._keys_dir = keys_dir
        self._active = asyncio.Semaphore(MAX_ACTIVE)

    async def receive(self, transfer: Transfer) -> Imported:
        """Import the blocks of a transfer into the prefix cache, and return the message for the coordinator.

        If the import fails or is cancelled, the caller must release the blocks that this method has reserved.
        """
        begun, size = time.monotonic(), self._kv.block_bytes
        digests = [transfer.digests[at : at + DIGEST_BYTES] for at in range(0, len(transfer.digests), DIGEST_BYTES)]
        try:
            cached = await self._kv.reserve(transfer.dispatch_id, digests, transfer.weights)
            if cached is None:
                return Imported(dispatch_id=transfer.dispatch_id, ok=False, has_room=False)
            if cached < len(digests):
                async with asyncio.timeout(transfer.seconds), self._active:
                    begun = time.monotonic()
                    await self._fetch(transfer, first=cached, count=len(digests))
            await self._kv.complete(transfer.dispatch_id)
        except Exception as error:
            return Imported(dispatch_id=transfer.dispatch_id, ok=False, error=_cause(error))
        received = (len(digests) - cached) * size
        seconds = time.monotonic() - begun
        return Imported(dispatch_id=transfer.dispatch_id, ok=True, received_bytes=received, seconds=seconds)

    async def _fetch(self, transfer: Transfer, *, first: int, count: int) -> None:
        """Receive the blocks of a transfer from index `first` on, and write each complete block to the cache.

        count: number of all blocks of the transfer, including the blocks before `first`.
        """
        inbox: asyncio.Queue[Frames | str] = asyncio.Queue()
        opened = asyncio.Event()
        keys = None
        if self._keys_dir is not None:
            own = PeerKeys.load(self._keys_dir, Role.ENGINE).own
            keys = PeerKeys(own, transfer.key.encode())
        dealer = Dealer(
            transfer.address,
            inbox.put_nowait,
            on_open=opened.set,
            on_lost=inbox.put_nowait,
            keys=keys,
            max_message_bytes=CHUNK_BYTES + limits.MAX_NAME_BYTES + 4096,
        )
        with contextlib.closing(dealer):
            try:
                await asyncio.wait_for(opened.wait(), CONNECT_SECONDS)
            except TimeoutError:
                raise TransferEndedError(f"no connection to the other engine within {CONNECT_SECONDS:g} s") from None
            size = self._kv.block_bytes
            asked = arrived = first * size
            end, content = count * size, bytearray()
            while arrived < end:
                while asked < end and asked - arrived < WINDOW_CHUNKS * CHUNK_BYTES:
                    part = min(CHUNK_BYTES, end - asked)
                    dealer.send([pack([transfer.ticket, asked, part])])
                    asked += part
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await inbox.get()
                data = _chunk_of(message, offset=arrived, size=min(CHUNK_BYTES, end - arrived))
                arrived += len(data)
                content += data
                complete = len(content) // size * size
                if complete and inbox.empty():  # each write waits for a step
                    block = (arrived - len(content)) // size
                    await self._kv.write(transfer.dispatch_id, block, bytes(content[:complete]))
                    del content[:complete]


def _chunk_of(message: Frames | str, *, offset: int, size: int) -> bytes:
    """Return the bytes of the expected chunk from a message.

    Raises TransferEndedError if the exporter has no such chunk.
    """
    if isinstance(message, str):
        raise TransferEndedError(message)
    try:
        items = unpack(message[0], _MESSAGE)
    except MalformedMessageError as error:
        raise TransferEndedError(str(error)) from error
    if type(items) is not list or [type(item) for item in items[:3]] != [str, int, int] or len(message) != 2:
        raise TransferEndedError("the other engine's answer is not [error, offset, checksum] and bytes")
    cause, at, checksum = items[:3]
    if cause:
        raise TransferEndedError(f"the other engine: {cause}")
    if at != offset or len(message[1]) != size or zlib.crc32(message[1]) != checksum:
        raise TransferEndedError(f"the chunk at byte {offset} arrived damaged or out of order")
    return message[1]


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no bytes for {SILENCE_SECONDS:g} s, or the time of the ticket ended"
    return (str(error) or type(error).__name__)[: limits.MAX_TEXT_CHARACTERS]
