"""`KVTransfer`, the interface of a backend whose prefix cache other engines read and write. No torch."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TransferEndedError(RuntimeError):
    """The export or import was released, or the cache was cleared, for example by a weight update."""


@dataclass(frozen=True, slots=True)
class ExportedBlocks:
    """What a backend keeps of a prompt. An EngineRequest with `prefill_only` or `keeps_blocks` has it in
    its last output.

    digests: digests of the blocks, in the order of the prompt.
    weights: names epoch and weights that computed them.
    """

    digests: Sequence[bytes]
    weights: str


class KVTransfer(Protocol):
    """Exports and imports of blocks, by the id that the coordinator gave to this stage of a request.

    A backend that has it declares Capability.KV_TRANSFER. abort() of the backend ends an export or import, and so does
    everything that clears its prefix cache. Methods may run while steps run, and while the engine is paused.

    A call may take effect only between two steps. So a transfer reads and writes many blocks in each.

    layout:      text that is equal on engines that can exchange blocks: number formats and sizes.
    block_bytes: bytes of the keys and values of one block.
    """

    layout: str
    block_bytes: int

    def read(self, transfer: int, blocks: range) -> Awaitable[bytes]:
        """Return the keys and values of blocks of an export, block by block. Raises TransferEndedError."""

    def reserve(self, transfer: int, digests: Sequence[bytes], weights: str) -> Awaitable[int | None]:
        """Take memory for an import. Return how many blocks, from the first on, are in the cache already; None if too
        few blocks are free. Raises TransferEndedError if the engine has other weights.
        """

    def write(self, transfer: int, first: int, data: bytes) -> Awaitable[None]:
        """Set the keys and values of blocks of an import, from block `first` on. Raises TransferEndedError."""

    def complete(self, transfer: int) -> Awaitable[None]:
        """Add the blocks to the prefix cache. They stay until a request that begins with them was admitted, or abort().
        Raises TransferEndedError.
        """
