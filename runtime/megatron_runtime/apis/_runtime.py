"""Background event loop, coordinator and client of a MegatronLLM in coordinator mode."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine

T = TypeVar("T")

MAX_ADDRESS_BYTES = 256


class _EventLoopManager:
    """A daemon thread with an event loop, on which synchronous and asynchronous callers run coroutines.

    The thread uses the CUDA device that is current in the thread that calls start().
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread and wait until its loop runs. Idempotent."""
        with self._lock:
            if self._thread is not None:
                return
            ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(
                target=_run_loop, args=(device, ready), name="megatron-llm-loop", daemon=True
            )
            self._thread.start()
            try:
                self._loop = ready.result()
            except BaseException:
                self._thread.join()
                self._thread = None
                raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The background loop. Raises RuntimeError before start() and after stop()."""
        if self._loop is None:
            raise RuntimeError("the background loop is not running: call start() first")
        return self._loop

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule `coro` on the background loop. Wait with `.result()`, or asyncio.wrap_future() on another loop."""
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coro, self.loop)
        except RuntimeError:
            coro.close()
            raise

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Schedule `coro` and block until its result. The caller's own event loop is blocked, too.

        Raises RuntimeError on the background loop itself, which would be a deadlock.
        """
        if self._is_own_thread():
            coro.close()
            raise RuntimeError("run_sync() on the background loop would deadlock: await the coroutine instead")
        future = self.submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coro: Coroutine[Any, Any, T]) -> T:
        """Schedule `coro` and await it, from any loop. Cancelling the caller cancels `coro`."""
        if self._is_own_thread():
            return await coro
        return await asyncio.wrap_future(self.submit(coro))

    def stop(self) -> None:
        """Cancel open coroutines, stop the loop and join the thread. Idempotent."""
        if self._is_own_thread():
            raise RuntimeError("stop() on the background loop would deadlock: call it from another thread")
        with self._lock:
            thread, self._thread = self._thread, None
            loop, self._loop = self._loop, None
            if thread is None or loop is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _is_own_thread(self) -> bool:
        return self._thread is not None and threading.current_thread() is self._thread


def _run_loop(device: int | None, ready: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    """Run an event loop in this thread until it is stopped. ready: gets the loop."""
    # At the end, the runner cancels open tasks and closes async generators and the default executor.
    with asyncio.Runner() as runner:
        try:
            if device is not None:
                torch.cuda.set_device(device)
        except BaseException as error:
            ready.set_exception(error)
            return
        loop = runner.get_loop()
        loop.call_soon(ready.set_result, loop)
        loop.run_forever()


class _CoordinatorRuntime:
    """Owns the coordinator and the client of one MegatronLLM. setup() and teardown() run on the background loop.

    The primary rank starts a coordinator and a client. Worker ranks connect to the coordinator at host and port, or
    receive its address through torch.distributed.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        is_primary: bool,
        coordinator_host: str | None,
        coordinator_port: int | None,
        name: str = "engine-0",
    ) -> None:
        self.client: InferenceClient | None = None
        """On the primary rank; None on workers."""
        self.coord_addr: str | None = None
        """ "tcp://host:port", once set up."""
        self._engine = engine
        self._name = name
        self._is_primary = is_primary
        self._host = coordinator_host
        self._port = coordinator_port
        self._all_ranks: dist.ProcessGroup | None = None
        """All ranks of the program, if there are several."""

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
        """Send the coordinator's address from the primary to every rank, if several ranks run and no port is set."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # On the host, because the GPUs of other ranks may be in a step.
            group = await asyncio.to_thread(dist.new_group, backend="gloo")
            assert isinstance(group, dist.ProcessGroup), "it has every rank"
            self._all_ranks = group
        if self._all_ranks is None or self._port is not None:
            return
        address = await asyncio.to_thread(_broadcast_text, self.coord_addr or "", self._all_ranks)
        if not self._is_primary:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            self._host, self._port = host, int(port)

    async def wait_for_all(self) -> None:
        """Wait until every rank of torch.distributed has set up its engine, so that no rank misses a signal."""
        if self._all_ranks is not None:
            await asyncio.to_thread(dist.barrier, group=self._all_ranks)

    async def share_failure(self, failure: Exception | None) -> str | None:
        """Return the failure of rank 0 as text, on every rank of the program; None if there was none.

        Every rank must call this. It returns when all ranks have called it.
        """
        if self._all_ranks is None:
            return None
        await self.wait_for_all()
        text = "" if failure is None else str(failure) or type(failure).__name__
        text = text.encode()[:MAX_ADDRESS_BYTES].decode(errors="ignore")
        return await asyncio.to_thread(_broadcast_text, text, self._all_ranks) or None

    async def teardown(self) -> None:
        """Stop the client, the engine's connection and the coordinator, if they were started. Idempotent."""
        client, self.client = self.client, None
        if client is not None:
            client.stop()
        await self._engine.stop_listening()


def _broadcast_text(text: str, ranks: dist.ProcessGroup) -> str:
    """Return the text of rank 0. Every rank of the group must call this."""
    data = text.encode().ljust(MAX_ADDRESS_BYTES, b"\0")
    if len(data) > MAX_ADDRESS_BYTES:
        raise ValueError(f"address of {len(data)} bytes: at most {MAX_ADDRESS_BYTES}")
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    dist.broadcast(tensor, src=0, group=ranks)
    return bytes(tensor.tolist()).rstrip(b"\0").decode()
