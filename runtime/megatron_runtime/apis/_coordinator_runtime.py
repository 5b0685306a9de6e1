"""The coordinator and the client of one MegatronLLM, from set-up to teardown."""

from __future__ import annotations

import asyncio
import logging

from megatron_runtime.apis import _ranks
from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine

logger = logging.getLogger(__name__)


class _CoordinatorRuntime:
    """Owns the coordinator's and the client's life. setup() and teardown() run on the background loop.

    On the primary rank it starts a coordinator, and has a client to send it requests and control messages. Worker
    ranks find it at host and port, or are told its address through torch.distributed.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        is_primary: bool,
        coordinator_host: str | None,
        coordinator_port: int | None,
    ) -> None:
        self._engine = engine
        self._is_primary = is_primary
        self._host = coordinator_host
        self._port = coordinator_port
        self._client: InferenceClient | None = None
        self._coord_addr: str | None = None

    @property
    def client(self) -> InferenceClient | None:
        """On the primary rank; None on workers."""
        return self._client

    @property
    def coord_addr(self) -> str | None:
        """ "tcp://host:port", once set up."""
        return self._coord_addr

    async def setup(self, *, loop: asyncio.AbstractEventLoop) -> None:
        """Bring coordinator and client up. If anything fails, nothing of it is left running."""
        try:
            if self._is_primary:
                self._coord_addr = await self._listen(loop, launch=True)
                await self._share()
                self._client = InferenceClient(self._coord_addr, deserialize=False)
                await self._client.start()
            else:
                await self._share()
                self._coord_addr = await self._listen(loop, launch=False)
        except BaseException:
            await self.teardown()
            raise

    async def _listen(self, loop: asyncio.AbstractEventLoop, *, launch: bool) -> str:
        """Only what the caller gave is passed on: with neither host nor port the engine binds a free port."""
        where: dict[str, str] = {} if self._host is None else {"hostname": self._host}
        return await self._engine.start_listening_to_data_parallel_coordinator(
            self._port, launch, loop=loop, name=f"engine-{_ranks.global_rank()}", **where
        )

    async def _share(self) -> None:
        """Every rank learns the address of the primary's coordinator, where several ranks run and no port was given."""
        if _ranks.world_size() == 1 or self._port is not None:
            return
        address = await asyncio.to_thread(_ranks.broadcast_text, self._coord_addr or "")
        if not self._is_primary:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            self._host, self._port = host, int(port)

    async def teardown(self) -> None:
        """End the client, the engine's part and the coordinator, as far as they were set up. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.stop()
        await self._engine.stop_listening()
