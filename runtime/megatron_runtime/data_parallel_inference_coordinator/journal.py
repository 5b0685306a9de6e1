"""Every open request, so that it can be given to another engine: prompt, parameters, tokens so far. Bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_runtime.wire.messages import RequestMeta

if TYPE_CHECKING:
    from megatron_runtime.data_parallel_inference_coordinator.clients import Client
    from megatron_runtime.data_parallel_inference_coordinator.engines import Engine

ENTRY_OVERHEAD_BYTES = 1024
"""Estimate of what an entry costs beside its bodies."""
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Entry:
    """One open request.

    generated:  tokens so far, little-endian int32. What the client was sent is fixed for ever.
    forwarded:  how many of them the client was sent.
    held:       how many of them the client is known to have, by its own word.
    dispatched_bytes: length of `generated` when it was last dispatched.
    dispatch_id, engine: the current dispatch; 0 and None while it waits.
    plain_id:   the request's number at a plain client.
    """

    uid: bytes
    client: Client
    meta: RequestMeta
    prompt: bytes
    params: bytes
    generated: bytearray
    arrived: float
    deadline: float | None = None
    forwarded: int = 0
    held: int = 0
    dispatched_bytes: int = 0
    dispatch_id: int = 0
    engine: Engine | None = None
    plain_id: int | None = None
    hashes: list[int] | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def tokens_so_far(self) -> int:
        return len(self.generated) // TOKEN_BYTES

    def cost(self) -> int:
        return len(self.prompt) + len(self.params) + len(self.generated) + ENTRY_OVERHEAD_BYTES


class Journal:
    """Open requests by uid. `bytes` is always the sum of what its entries cost."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.bytes = 0
        self._limit = limit_bytes
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, uid: bytes) -> Entry | None:
        return self._entries.get(uid)

    def add(self, entry: Entry) -> bool:
        """False when the budget has no room. Tokens that come later are never refused, only counted."""
        cost = entry.cost()
        if self.bytes + cost > self._limit:
            return False
        self._entries[entry.uid] = entry
        self.bytes += cost
        return True

    def append(self, entry: Entry, tokens: bytes) -> None:
        entry.generated += tokens
        self.bytes += len(tokens)

    def remove(self, entry: Entry) -> None:
        if self._entries.pop(entry.uid, None) is not None:
            self.bytes -= entry.cost()
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        assert self.bytes == sum(entry.cost() for entry in self._entries.values()), "journal bytes are miscounted"
        for entry in self._entries.values():
            assert entry.client.open.get(entry.uid) is entry, "an open request is unknown to its client"
            if entry.engine is not None:
                assert entry.engine.in_flight.get(entry.dispatch_id) is entry, "a dispatch is unknown to its engine"
