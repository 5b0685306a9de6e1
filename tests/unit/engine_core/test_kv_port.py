"""The port on which engines exchange blocks: tickets, keys, damaged and silent peers. Real sockets on loopback."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

import pytest
from eventually import LONG_SECONDS, eventually

from megatron_runtime.engine import kv_port
from megatron_runtime.engine.kv_port import CHUNK_BYTES, WINDOW_CHUNKS, BlockReceiver, BlockServer
from megatron_runtime.engine.kv_transfer import TransferEndedError
from megatron_runtime.protocol.codec import pack, unpack
from megatron_runtime.protocol.messages import Transfer
from megatron_runtime.transport.security import generate_key_files
from megatron_runtime.transport.zmtp.dealer import Dealer
from megatron_runtime.transport.zmtp.handshake import NullHandshake
from megatron_runtime.transport.zmtp.router import Router

BLOCK_BYTES = CHUNK_BYTES + 1234  # no multiple of a chunk
EXPORT, IMPORT = 5, 6


class Blocks:
    """Implements KVTransfer in memory: one export, and one import."""

    layout, block_bytes = "test", BLOCK_BYTES

    def __init__(self, contents: Iterable[bytes] = (), *, room: bool = True, cached: int = 0) -> None:
        self.contents = list(contents)
        self.room, self.cached = room, cached
        self.written: dict[int, bytes] = {}
        self.is_complete = False
        self.reads = self.writes = 0
        self.read_gate = asyncio.Event()
        self.read_gate.set()

    async def read(self, transfer: int, blocks: range) -> bytes:
        assert transfer == EXPORT
        self.reads += 1
        await self.read_gate.wait()
        if not self.contents:
            raise TransferEndedError("it was released")
        return b"".join(self.contents[block] for block in blocks)

    async def reserve(self, transfer: int, digests: Sequence[bytes], weights: str) -> int | None:
        if weights != "w":
            raise TransferEndedError("other weights")
        return self.cached if self.room else None

    async def write(self, transfer: int, first: int, data: bytes) -> None:
        self.writes += 1
        size = self.block_bytes
        for block, start in enumerate(range(0, len(data), size), first):
            self.written[block] = data[start : start + size]

    async def complete(self, transfer: int) -> None:
        self.is_complete = True


def transfer(address: str, *, blocks: int, key: str = "", ticket: bytes = bytes(32), weights: str = "w") -> Transfer:
    return Transfer(
        export_id=EXPORT,
        dispatch_id=IMPORT,
        ticket=ticket,
        digests=random.Random(1).randbytes(32 * blocks),
        weights=weights,
        key=key,
        seconds=LONG_SECONDS,
        address=address,
    )


async def until(condition: Callable[[], bool], what: str) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds, what=what, look_seconds=0.01)


def contents(count: int) -> list[bytes]:
    return [random.Random(number).randbytes(BLOCK_BYTES) for number in range(count)]


@pytest.fixture(autouse=True)
def limits_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_port, "CONNECT_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(kv_port, "SILENCE_SECONDS", LONG_SECONDS)


@pytest.fixture
async def exporter() -> AsyncIterator[tuple[BlockServer, Blocks, str]]:
    blocks = Blocks(contents(5))
    server = BlockServer(blocks, keys_dir=None)
    yield server, blocks, server.bind("127.0.0.1", 0)
    server.close()
    await until(lambda: server.num_open == 0, "no ticket and no upload is left")


async def test_blocks_arrive_as_they_were_and_those_in_the_cache_are_not_sent(
    exporter: tuple[BlockServer, Blocks, str],
) -> None:
    server, source, address = exporter
    target = Blocks(cached=2)
    message = transfer(address, blocks=5)
    server.grant(message)
    result = await BlockReceiver(target, keys_dir=None).receive(message)
    assert result.ok, result
    assert target.is_complete
    assert target.written == {number: source.contents[number] for number in (2, 3, 4)}
    assert result.received_bytes == 3 * BLOCK_BYTES
    await until(lambda: server.num_open == 0, "the ticket and the upload have ended")


async def test_many_small_blocks_are_read_and_written_together() -> None:
    """Each read and each write waits for a step."""
    source, target = (Blocks(random.Random(1).randbytes(5000) for _ in range(9000)) for _ in range(2))
    source.block_bytes = target.block_bytes = 5000
    server = BlockServer(source, keys_dir=None)
    message = transfer(server.bind("127.0.0.1", 0), blocks=9000)
    server.grant(message)
    result = await BlockReceiver(target, keys_dir=None).receive(message)
    server.close()
    assert result.ok, result
    assert target.written == dict(enumerate(source.contents))
    chunks = -(-9000 * 5000 // CHUNK_BYTES)
    assert source.reads == -(-chunks // WINDOW_CHUNKS)
    assert target.writes <= chunks


async def test_a_ticket_that_arrives_after_its_request_is_not_rejected(
    exporter: tuple[BlockServer, Blocks, str],
) -> None:
    server, _, address = exporter
    target = Blocks()
    message = transfer(address, blocks=5)
    receiving = asyncio.create_task(BlockReceiver(target, keys_dir=None).receive(message))
    await until(lambda: len(server._early) > 0, "the request waits for its ticket")
    server.grant(message)
    assert (await receiving).ok


async def test_a_ticket_opens_an_export_once(exporter: tuple[BlockServer, Blocks, str]) -> None:
    server, source, address = exporter
    message = transfer(address, blocks=5)
    server.grant(message)
    source.read_gate.clear()
    first = asyncio.create_task(BlockReceiver(Blocks(), keys_dir=None).receive(message))
    await until(lambda: source.reads > 0, "the first connection has shown the ticket")
    second = await BlockReceiver(Blocks(), keys_dir=None).receive(message)
    assert not second.ok
    assert "ticket is not valid" in (second.error or "")
    source.read_gate.set()
    assert (await first).ok


@pytest.mark.parametrize("reason", ["expired", "released", "other weights", "beyond"])
async def test_a_transfer_that_may_not_be_made_fails_with_its_reason(
    exporter: tuple[BlockServer, Blocks, str], reason: str
) -> None:
    server, source, address = exporter
    message = transfer(address, blocks=5, weights="x" if reason == "other weights" else "w")
    granted = message
    if reason == "expired":
        granted = message._replace(seconds=0.0)
    elif reason == "beyond":
        granted = message._replace(digests=message.digests[:64])
    elif reason == "released":
        source.contents.clear()
    server.grant(granted)
    target = Blocks()
    result = await BlockReceiver(target, keys_dir=None).receive(message)
    assert not result.ok
    assert not target.is_complete
    expected = {"expired": "ticket is not valid", "released": "it was released", "beyond": "beyond the export"}
    assert expected.get(reason, reason) in (result.error or "")


async def test_an_importer_without_room_asks_for_nothing(exporter: tuple[BlockServer, Blocks, str]) -> None:
    server, source, address = exporter
    message = transfer(address, blocks=5)
    server.grant(message)
    result = await BlockReceiver(Blocks(room=False), keys_dir=None).receive(message)
    assert (result.ok, result.has_room) == (False, False)
    assert source.reads == 0


async def test_a_release_in_mid_transfer_ends_the_import(exporter: tuple[BlockServer, Blocks, str]) -> None:
    server, source, address = exporter
    message = transfer(address, blocks=5)
    server.grant(message)
    source.read_gate.clear()
    receiving = asyncio.create_task(BlockReceiver(Blocks(), keys_dir=None).receive(message))
    await until(lambda: source.reads > 0, "the transfer has begun")
    server.revoke(EXPORT)
    assert not (await receiving).ok
    assert server.num_open == 0


async def test_a_silent_exporter_and_one_that_does_not_exist_end_the_import(
    exporter: tuple[BlockServer, Blocks, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, source, address = exporter
    monkeypatch.setattr(kv_port, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(kv_port, "CONNECT_SECONDS", 0.2)
    message = transfer(address, blocks=5)
    server.grant(message)
    source.read_gate.clear()
    silent = await BlockReceiver(Blocks(), keys_dir=None).receive(message)
    assert silent.error == "no bytes for 0.2 s, or the time of the ticket ended"
    absent = await BlockReceiver(Blocks(), keys_dir=None).receive(transfer("tcp://127.0.0.1:9", blocks=1))
    assert absent.error == "no connection to the other engine within 0.2 s"
    source.read_gate.set()


async def test_an_importer_that_is_cancelled_leaves_nothing_at_the_exporter(
    exporter: tuple[BlockServer, Blocks, str],
) -> None:
    server, source, address = exporter
    message = transfer(address, blocks=5)
    server.grant(message)
    source.read_gate.clear()
    receiving = asyncio.create_task(BlockReceiver(Blocks(), keys_dir=None).receive(message))
    await until(lambda: source.reads > 0, "the transfer has begun")
    receiving.cancel()
    await until(lambda: server.num_open == 0, "the exporter has ended the transfer")


async def test_frames_that_are_no_requests_end_their_connection_only(
    exporter: tuple[BlockServer, Blocks, str],
) -> None:
    server, _, address = exporter
    valid = [bytes(32), 0, 100]
    for frame in (
        *(b"", b"\xc1", random.Random(3).randbytes(4000), pack([]), pack({}), pack("text")),
        *(pack([*valid[:place], None, *valid[place + 1 :]]) for place in range(3)),
        *(pack([bytes(32), -1, 100]), pack([bytes(32), 0, 0]), pack([bytes(32), 0, CHUNK_BYTES + 1])),
    ):
        lost = asyncio.Event()
        opened = asyncio.Event()
        dealer = Dealer(
            address,
            lambda _: None,
            on_open=opened.set,
            on_lost=lambda _, lost=lost: lost.set(),
            max_message_bytes=CHUNK_BYTES,
        )
        await opened.wait()
        dealer.send([frame])
        await lost.wait()
        dealer.close()
    message = transfer(address, blocks=5)
    server.grant(message)
    assert (await BlockReceiver(Blocks(), keys_dir=None).receive(message)).ok


@pytest.mark.parametrize("damage", ["checksum", "offset", "size", "shape"])
async def test_damaged_chunks_are_not_imported(damage: str) -> None:
    """The other engine sends chunks that are not those that were asked for."""

    def answer(peer: tuple[int, bytes], frames: list[bytes]) -> None:
        _, offset, size = unpack(frames[0], kv_port._MESSAGE)
        data = bytes(size)
        heads = {
            "checksum": [pack(["", offset, zlib.crc32(data) ^ 1]), data],
            "offset": [pack(["", offset + 1, zlib.crc32(data)]), data],
            "size": [pack(["", offset, zlib.crc32(data[:-1])]), data[:-1]],
            "shape": [pack([offset]), data],
        }
        router.connections[peer].send(heads[damage])

    router = Router(
        0,
        connections={},
        handshake=NullHandshake,
        on_message=answer,
        max_message_bytes=4096,
        send_buffer_bytes=64 << 20,
        check_seconds=5.0,
    )
    target = Blocks()
    try:
        message = transfer(router.bind("127.0.0.1", 0), blocks=2)
        result = await BlockReceiver(target, keys_dir=None).receive(message)
    finally:
        router.close()
    assert not result.ok
    assert target.written == {}
    assert not target.is_complete


def key_directory(path: Path, *, own: str = "", **files: str) -> Path:
    path.mkdir()
    for name, text in {**generate_key_files(roles=("engine", "server")), **files}.items():
        (path / name).write_text(text)
    return path


async def test_with_keys_only_the_engine_that_the_ticket_names_gets_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = key_directory(tmp_path / "ours")
    other = key_directory(tmp_path / "other")
    public = (ours / "engine.pub").read_text()
    source = Blocks(contents(1))
    server = BlockServer(source, keys_dir=ours)
    address = server.bind("127.0.0.1", 0)
    try:
        message = transfer(address, blocks=1, key=public)
        server.grant(message)
        assert (await BlockReceiver(Blocks(), keys_dir=ours).receive(message)).ok
        # A key of another pool does not open the port; one that the ticket does not name opens no export.
        with monkeypatch.context() as patch:
            patch.setattr(kv_port, "CONNECT_SECONDS", 0.5)
            rejected = await BlockReceiver(Blocks(), keys_dir=other).receive(message._replace(ticket=b"1" * 32))
        assert not rejected.ok
        (ours / "engine.pub").write_text(public + "\n" + (other / "engine.pub").read_text())
        server.grant(message._replace(ticket=b"2" * 32))
        rejected = await BlockReceiver(Blocks(), keys_dir=other).receive(message._replace(ticket=b"2" * 32))
        assert "ticket is not valid" in (rejected.error or "")
    finally:
        server.close()
