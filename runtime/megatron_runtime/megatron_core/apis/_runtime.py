"""Coordinator and client of a MegatronLLM in coordinator mode."""

from __future__ import annotations

import asyncio

from megatron_runtime.in_process.lifecycle import ProgramLifecycle
from megatron_runtime.in_process.ranks import ProgramRanks
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.inference_client import InferenceClient

DEFAULT_PLACES = 1024


class _CoordinatorRuntime:
    """Owns the coordinator and the client of one MegatronLLM. setup() and teardown() run on the background loop.

    The primary rank starts a coordinator and a client. Worker ranks connect to the coordinator at host and port, or
    receive its address through torch.distributed.

    places: prompts of lists that are submitted at once, in all calls together.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        is_primary: bool,
        coordinator_host: str | None,
        coordinator_port: int | None,
        name: str = "engine-0",
        places: int = DEFAULT_PLACES,
    ) -> None:
        self.client: InferenceClient | None = None
        """On the primary rank; None on workers."""
        self.coord_addr: str | None = None
        """ "tcp://host:port", once set up."""
        self.ranks = ProgramRanks(None)
        self.lifecycle: ProgramLifecycle | None = None
        """Once set up."""
        self._engine = engine
        self._name = name
        self._is_primary = is_primary
        self._host = coordinator_host
        self._port = coordinator_port
        self._places = places

    async def setup(self, *, loop: asyncio.AbstractEventLoop) -> None:
        """Start coordinator and client. After a failure neither is left running."""
        try:
            if self._is_primary:
                self.coord_addr = await self._listen(loop, launch=True)
                await self._share()
                self.client = InferenceClient(self.coord_addr, deserialize=False, records=True)
                await self.client.start()
            else:
                await self._share()
                self.coord_addr = await self._listen(loop, launch=False)
            self.lifecycle = ProgramLifecycle(
                self._engine.core,
                self._engine.service,
                client=self.client.native if self.client is not None else None,
                ranks=self.ranks,
                places=self._places,
            )
        except BaseException:
            await self.teardown()
            raise

    async def _listen(self, loop: asyncio.AbstractEventLoop, *, launch: bool) -> str:
        """Connect the engine. Without a host and a port it binds a free port."""
        where: dict[str, str] = {} if self._host is None else {"hostname": self._host}
        return await self._engine.start_listening_to_data_parallel_coordinator(
            self._port, launch, loop=loop, name=self._name, **where
        )

    async def _share(self) -> None:
        """Send the coordinator's address from the primary to every rank, if no port is set."""
        self.ranks = await ProgramRanks.join()
        if self._port is None and self.ranks.group is not None:
            address = await self.ranks.text_of_first(self.coord_addr or "")
            if not self._is_primary:
                host, _, port = address.removeprefix("tcp://").rpartition(":")
                self._host, self._port = host, int(port)

    async def teardown(self) -> None:
        """Stop the client, the engine's connection and the coordinator, if they were started. Idempotent."""
        client, self.client = self.client, None
        try:
            if self.lifecycle is not None:
                await self.lifecycle.close()
        finally:
            if client is not None:
                client.stop()
            await self._engine.stop_listening()
