"""Translates vLLM's KV cache events to digests of our blocks. vLLM publishes the events on a ZeroMQ socket.

vLLM identifies a block by its own hash. The coordinator routes by the digests of requests.hashing, which cover the
tokens of a block and all blocks before it. The event `BlockStored` contains the tokens and vLLM's hash of the previous
block, so this module can compute the digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.requests.hashing import digests_after, root_digest

logger = logging.getLogger(__name__)


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint at which a data-parallel rank publishes events. vLLM derives the endpoint in the same way.

    `endpoint` must contain `inproc`. Otherwise, vLLM derives no endpoints for ranks other than rank 0.
    """
    return f"{endpoint}_dp{rank}" if rank else endpoint


class MergedCaches:
    """The union of the prefix caches of an engine's data-parallel ranks."""

    def __init__(self, ranks: int) -> None:
        self._blocks: list[set[bytes]] = [set() for _ in range(ranks)]

    def merge(self, rank: int, events: CacheEvents) -> CacheEvents:
        """Apply the changes of one rank's prefix cache to the union. Return the resulting changes of the union."""
        own = self._blocks[rank]
        others = [blocks for number, blocks in enumerate(self._blocks) if number != rank]

        def is_elsewhere(digest: bytes) -> bool:
            return any(digest in blocks for blocks in others)

        removed = list(own) if events.cleared else [digest for digest in events.evicted if digest in own]
        added = [digest for digest in events.stored if digest not in own]
        own.difference_update(removed)
        own.update(events.stored)
        return CacheEvents(
            [digest for digest in added if not is_elsewhere(digest)],
            [digest for digest in removed if digest not in own and not is_elsewhere(digest)],
        )


class CacheEventTranslator:
    """A translator of vLLM's block hashes to our digests, for the blocks in vLLM's prefix cache.

    block_size: number of tokens of a translated block. Blocks of other sizes are ignored; layers other than attention
                can have such blocks.
    media:      digests of images, audio and video, by vLLM's identifiers for them.
    """

    def __init__(self, block_size: int, media: Mapping[str, bytes] | None = None) -> None:
        self._block_size = block_size
        self._media = {} if media is None else media
        self._digests: dict[Any, bytes] = {}
        self._next_number: int | None = None

    def translate(self, number: int, batch: KVEventBatch) -> CacheEvents:
        """Return the changes of the prefix cache that one batch of events describes.

        number: number of the batch. A gap in the numbers means that batches were lost; all blocks then count as
                evicted.
        """
        stored: dict[bytes, None] = {}
        evicted: dict[bytes, None] = {}
        cleared = self._next_number is not None and number != self._next_number
        if cleared:
            logger.warning("KV cache events %s to %d are lost: the prefix table is cleared", self._next_number, number)
            self._digests.clear()
        self._next_number = number + 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                for digest in self._store(event):
                    stored[digest] = None
                    evicted.pop(digest, None)
            elif isinstance(event, BlockRemoved):
                for digest in [self._digests.pop(name) for name in event.block_hashes if name in self._digests]:
                    evicted[digest] = None
                    stored.pop(digest, None)
            elif isinstance(event, AllBlocksCleared):
                self._digests.clear()
                stored, evicted, cleared = {}, {}, True
        return CacheEvents(list(stored), list(evicted), cleared=cleared)

    def _store(self, event: BlockStored) -> list[bytes]:
        if event.block_size != self._block_size:
            return []
        if event.parent_block_hash is None:
            # The first key is the name of the LoRA adapter, if the event has one. The salt follows.
            keys = [key for key in (event.extra_keys or [None])[0] or () if isinstance(key, str)]
            adapter = keys.pop(0) if event.lora_name else ""
            before = root_digest(keys[0].encode() if keys else b"", adapter)
        elif (known := self._digests.get(event.parent_block_hash)) is not None:
            before = known
        else:
            return []  # the previous block was stored in a batch that is lost
        digests = digests_after(before, event.token_ids, event.block_size, media=self._media_of(event))
        self._digests.update(zip(event.block_hashes, digests, strict=True))
        return digests

    def _media_of(self, event: BlockStored) -> dict[int, bytes]:
        """Return the digests of the media in each block that has media, by the block's index in the event."""
        found = {}
        for block, keys in enumerate(event.extra_keys or ()):
            names = [key[0] for key in keys or () if isinstance(key, list | tuple) and key]
            if names:
                found[block] = b"".join(self._media.get(name, b"") for name in names)
        return found


async def follow_cache_events(
    endpoint: str,
    block_size: int,
    deliver: Callable[[CacheEvents], None],
    *,
    media: Mapping[str, bytes] | None = None,
) -> None:
    """Call `deliver` with each change of the prefix cache that vLLM publishes at `endpoint`, until cancelled.

    block_size, media: as for CacheEventTranslator.
    """
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    translator = CacheEventTranslator(block_size, media)
    context = zmq.asyncio.Context.instance()
    with context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            _, number, payload = await socket.recv_multipart()
            if events := translator.translate(int.from_bytes(number, "big"), decoder.decode(payload)):
                deliver(events)
