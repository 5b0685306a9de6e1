"""`KVTransfer`, the interface through which other engines read and write a backend's prefix cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TransferEndedError(RuntimeError):
    """The export or import was released, or the cache was cleared, for example by a weight update."""


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """KV blocks of a prompt that a backend keeps after the request.

    The last output of an EngineRequest with `prefill_only` or `keeps_blocks` has this object.

    digests: digests of the blocks, in the order of the prompt.
    weights: text that identifies the epoch and the weights with which the blocks were computed.
    """

    digests: Sequence[bytes]
    weights: str


class KVTransfer(Protocol):
    """Exports and imports of KV blocks, as a backend provides them.

    The coordinator assigns a dispatch id to each export and import, which the methods take as `transfer`.

    A backend that implements this interface declares Capability.KV_TRANSFER. An export or import ends when abort() of
    the backend is called, or when the prefix cache is cleared. Methods may be called during steps and while the engine
    is paused.

    A call may take effect only between two steps. Callers therefore read and write many blocks with each call.

    layout:      text that describes number formats and sizes. Engines can exchange blocks if their texts are equal.
    block_bytes: bytes of the keys and values of one block.
    """

    layout: str
    block_bytes: int

    def read(self, transfer: int, blocks: range) -> Awaitable[bytes]:
        """Return the keys and values of blocks of an export, `block_bytes` bytes for each block.

        blocks: indices of the blocks in the export.
        Raises TransferEndedError if the export has ended.
        """

    def reserve(self, transfer: int, digests: Sequence[bytes], weights: str) -> Awaitable[int | None]:
        """Allocate memory for an import. Return how many of the first blocks the cache already holds.

        Return None if too few blocks are free. Raises TransferEndedError if this engine does not have the weights
        `weights`.
        """

    def write(self, transfer: int, first: int, data: bytes) -> Awaitable[None]:
        """Write keys and values of consecutive blocks of an import. first: index of the first of these blocks.

        Raises TransferEndedError if the import has ended.
        """

    def complete(self, transfer: int) -> Awaitable[None]:
        """Add the imported blocks to the prefix cache.

        The blocks stay pinned until the scheduler admits a request that begins with them, or until abort(). Raises
        TransferEndedError if the import has ended.
        """
