"""The interfaces through which engines exchange blocks of their prefix caches. Imports no torch.

A backend implements `KVTransfer` if the worker moves the bytes, or `KVConnector` if the backend itself moves them.
"""

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
    handle:  data with which the KVConnector of another engine imports the blocks; empty with a KVTransfer.
    """

    digests: Sequence[bytes]
    weights: str
    handle: bytes = b""


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


class KVConnector(Protocol):
    """Imports of KV blocks by a backend that has its own connections between engines, such as vLLM with NIXL.

    A backend that implements this interface declares Capability.KV_TRANSFER. abort() of the backend ends an import. The
    backend decides how long it keeps an export that no engine has read.

    layout:      as in KVTransfer; empty until the weights are loaded.
    block_bytes: as in KVTransfer; 0 until the weights are loaded.
    """

    layout: str
    block_bytes: int

    def listen(self, host: str, port: int) -> str:
        """Choose the address for connections of importing engines, before the first load(). Return the address.

        port: 0 picks a free port.

        Raises OSError if the port is in use.
        """

    def receive(self, transfer: int, weights: str, handle: bytes) -> Awaitable[int]:
        """Import the blocks of an export into the prefix cache. Return the number of received bytes.

        Raises TransferEndedError if the blocks cannot be imported, or if the import has ended.
        """
