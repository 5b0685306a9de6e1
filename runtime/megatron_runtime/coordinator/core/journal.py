"""Every open request, so that it can be given to another engine: prompt, parameters, tokens so far. Bounded."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_runtime.coordinator.core.records import Entry


class Journal:
    """Open requests by uid. `bytes` is always the sum of what its entries cost."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.bytes = 0
        self._limit = limit_bytes
        self._entries: dict[bytes, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def get(self, uid: bytes) -> Entry | None:
        return self._entries.get(uid)

    def add(self, entry: Entry) -> bool:
        """False when the budget has no room. Tokens that come later are never refused, only counted."""
        cost = entry.cost()
        if self.bytes + cost > self._limit:
            return False
        entry.admitted_bytes = cost
        self._entries[entry.uid] = entry
        self.bytes += cost
        return True

    def append(self, entry: Entry, tokens: bytes, *, details: bytes = b"", details_cost: int = 0) -> None:
        """New tokens. `details` are shared by all entries of a message, of which this one bears `details_cost`."""
        if details:
            entry.details.append((entry.tokens_so_far, details))
            entry.details_bytes += details_cost
        entry.generated += tokens
        self.bytes += len(tokens) + (details_cost if details else 0)

    def remove(self, entry: Entry) -> None:
        if self._entries.pop(entry.uid, None) is not None:
            self.bytes -= entry.cost()

    def check_integrity(self) -> None:
        """What must hold whenever the loop is idle."""
        assert self.bytes == sum(entry.cost() for entry in self._entries.values()), "journal bytes are miscounted"
        for entry in self._entries.values():
            assert entry.client.open.get(entry.uid) is entry, "an open request is unknown to its client"
            if entry.engine is not None:
                assert entry.engine.in_flight.get(entry.dispatch_id) is entry, "a dispatch is unknown to its engine"
