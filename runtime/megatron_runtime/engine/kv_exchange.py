"""Computes prompts for other engines, and imports KV blocks from other engines, as parts of split requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.engine.kv_port import BlockPort, ConnectorPort
from megatron_runtime.engine.kv_transfer import KVConnector, KVTransfer
from megatron_runtime.protocol.codec import Frames
from megatron_runtime.protocol.messages import Exported, Imported, KVPort, Transfer
from megatron_runtime.requests.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 60.0
"""Time for which blocks are kept for another engine if the coordinator does not end the export earlier."""
IMPORT_SECONDS = 30.0
"""Time for which imported blocks wait for their request."""


class KVExchange:
    """The prefills, exports and imports of one engine.

    The object computes prompts for other engines, serves the resulting KV blocks, and imports blocks from other
    engines.

    send:    sends a message to the coordinator.
    release: makes the backend end the prefill, the export or the import with this dispatch id.
    on_prefilled: called with the dispatch id when a prefill has ended, unless forget() ended it.
    """

    def __init__(
        self,
        backend: EngineBackend,
        *,
        keys_dir: Path | None,
        send: Callable[[Frames], object],
        release: Callable[[int], object],
        on_prefilled: Callable[[int], object],
    ) -> None:
        self._kv: KVTransfer | KVConnector
        self._port: BlockPort | ConnectorPort
        if backend.kv_connector is not None:
            self._kv, self._port = backend.kv_connector, ConnectorPort(backend.kv_connector)
        else:
            assert backend.kv is not None
            self._kv, self._port = backend.kv, BlockPort(backend.kv, keys_dir=keys_dir)
        self._send = send
        self._release = release
        self._on_prefilled = on_prefilled
        self._address = ""
        self._prefills: set[int] = set()
        self._imports: dict[int, asyncio.Task[None]] = {}
        self._kept: dict[int, asyncio.TimerHandle] = {}
        """The timer for the deadline of each export and each complete import, by id."""

    def listen(self, host: str, port: int) -> None:
        """Listen for connections of importing engines. The first call has effect.

        Raises OSError if the server cannot listen on the port.
        """
        self._address = self._address or self._port.bind(host, port)

    @property
    def port(self) -> KVPort | None:
        """The description of the port, or None if the engine does not listen or has not loaded its KV cache."""
        if not self._address or not self._kv.block_bytes:
            return None
        return KVPort(address=self._address, layout=self._kv.layout, block_bytes=self._kv.block_bytes)

    def close(self) -> None:
        for timer in self._kept.values():
            timer.cancel()
        for task in self._imports.values():
            task.cancel()
        self._port.close()

    @property
    def num_running(self) -> int:
        """Number of prefills and imports in progress."""
        return len(self._prefills) + len(self._imports)

    @property
    def ids(self) -> list[int]:
        """Return the dispatch ids of the current prefills, exports and imports."""
        return [*self._prefills, *self._imports, *self._kept]

    # --- prefills -------------------------------------------------------------------------------------------------

    def begin(self, dispatch_id: int) -> None:
        """Record the dispatch id of a request with `prefill_only`. Call this before the backend gets the request."""
        self._prefills.add(dispatch_id)

    def fail(self, dispatch_id: int, error: Exception | str) -> None:
        """Report to the coordinator that this engine has no block of a prompt.

        The engine that decodes the request then computes the prompt.
        """
        logger.info("a prompt is left to the engine that answers the request: %s", error)
        self._end_prefill(dispatch_id)
        self._send(Exported(dispatch_id=dispatch_id).to_frames())

    def take(self, outputs: Iterable[RequestOutput]) -> Iterable[RequestOutput]:
        """Report to the coordinator which KV blocks the backend keeps according to `outputs`.

        Return the outputs that do not belong to prefills.
        """
        answered = []
        for output in outputs:
            number, exported = output.request_id, output.exported
            is_prefill = number in self._prefills
            if not is_prefill:
                answered.append(output)
            elif exported is None:
                self.fail(number, output.error or "it has ended")
            if exported is not None and (exported.digests or is_prefill):
                self._end_prefill(number)
                if exported.digests:
                    self._keep(number, EXPORT_SECONDS)
                message = Exported(number, b"".join(exported.digests), exported.weights, exported.handle)
                self._send(message.to_frames())
        return answered

    def _end_prefill(self, dispatch_id: int) -> None:
        if dispatch_id in self._prefills:
            self._prefills.remove(dispatch_id)
            self._on_prefilled(dispatch_id)

    # --- transfers ------------------------------------------------------------------------------------------------

    def transfer(self, message: Transfer) -> None:
        """Handle TRANSFER.

        A TRANSFER with an address starts an import from this address. A TRANSFER without an address lets another engine
        read an export of this engine.
        """
        if not message.address:
            self._port.grant(message)
        else:
            self._imports[message.dispatch_id] = asyncio.create_task(self._import(message))

    async def _import(self, transfer: Transfer) -> None:
        result: Imported = await self._port.receive(transfer)
        del self._imports[transfer.dispatch_id]
        if result.ok:
            self._keep(transfer.dispatch_id, IMPORT_SECONDS)
        else:
            self._release(transfer.dispatch_id)
        self._send(result.to_frames())

    def _keep(self, dispatch_id: int, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._kept[dispatch_id] = loop.call_later(seconds, self._expire, dispatch_id)

    def _expire(self, dispatch_id: int) -> None:
        self.forget(dispatch_id)
        self._release(dispatch_id)

    def forget(self, dispatch_id: int) -> None:
        """Forget a dispatch id and stop its transfer. Call this when the backend is about to release the blocks."""
        self._prefills.discard(dispatch_id)
        self._port.revoke(dispatch_id)
        timer = self._kept.pop(dispatch_id, None)
        if timer is not None:
            timer.cancel()
        task = self._imports.pop(dispatch_id, None)
        if task is not None:
            task.cancel()


def params_of_prompt(params: SamplingParams) -> SamplingParams:
    """Return the part of `params` that a prefill needs: parameters that affect the KV or the order of requests."""
    return SamplingParams(
        cache_salt=params.cache_salt,
        priority=params.priority,
        num_tokens_to_generate=params.num_tokens_to_generate,
        num_tokens_total=params.num_tokens_total,
    )
