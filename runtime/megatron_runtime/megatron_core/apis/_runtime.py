"""Coordinator and client of a MegatronLLM in coordinator mode."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_runtime.client.pending import failed_reply
from megatron_runtime.client.rejection import (
    DeadlineExceededError,
    QueueFullError,
    RequestRejectedError,
    UnavailableError,
)
from megatron_runtime.coordinator.spawn import CoordinatorFailedError
from megatron_runtime.engine.output_stage import error_map
from megatron_runtime.in_process.front_end import FrontEnd
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine, EngineFailedError
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError

T = TypeVar("T")

logger = logging.getLogger(__name__)

DEFAULT_PLACES = 1024
RETRY_SECONDS = 1.0
"""After a rejection without a time."""
SHUT_DOWN = "this MegatronLLM was shut down before the answer was complete"

MAX_ADDRESS_BYTES = 256


class _CoordinatorRuntime:
    """Owns the coordinator and the client of one MegatronLLM. setup() and teardown() run on the background loop.

    The primary rank starts a coordinator and a client. Worker ranks connect to the coordinator at host and port, or
    receive its address through torch.distributed.

    If the coordinator's process ends, or this engine fails and no other one serves, every open and later call raises
    the cause.

    places: prompts that answer() submits at once, in all calls together.
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
        self.front_end: FrontEnd | None = None
        """The HTTP server, after serve()."""
        self.failure: Callable[[], Exception] | None = None
        """Returns the error that ended the coordinator, or the last engine."""
        self._failed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[None] | None = None
        self._answered = self._submitted = 0
        """Prompts of answer() that were answered, and those that are submitted now."""
        self._place_count = places
        self._places = asyncio.Semaphore(places)
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
                self._watch(self.client)
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

    def _watch(self, client: InferenceClient) -> None:
        """Notice the end of the coordinator and of the engine."""
        loop, coordinator, engine = asyncio.get_running_loop(), self._engine.coordinator, self._engine.engine_loop_task

        def coordinator_ended(ended: concurrent.futures.Future[str]) -> None:
            error = partial(CoordinatorFailedError, f"{ended.result()}: construct the object again")
            with contextlib.suppress(RuntimeError):  # the loop has ended, too
                loop.call_soon_threadsafe(self._fail, client, error)

        async def engine_ended() -> None:
            try:
                await asyncio.shield(engine)
                return  # it was stopped
            except EngineFailedError as error:
                message, cause = str(error), error.__cause__
            with contextlib.suppress(CoordinatorUnreachableError):
                if (await client.status()).engines:
                    logger.warning("%s; the other engines continue", message)
                    return

            def failure() -> Exception:
                error = EngineFailedError(f"{message}: construct the object again")
                error.__cause__ = cause
                return error

            self._fail(client, failure)

        if coordinator is not None:
            coordinator.ended.add_done_callback(coordinator_ended)
        self._watching = asyncio.create_task(engine_ended())

    def _fail(self, client: InferenceClient, failure: Callable[[], Exception]) -> None:
        if self.failure is None and self.client is client:  # it is not being torn down
            logger.error("%s", failure())
            self.failure = failure
            self._failed.set()
            client.stop(failure, is_lost=True)
            if self.front_end is not None:
                self._failing = asyncio.create_task(self.front_end.fail(str(failure())))

    def raise_failure(self) -> None:
        """Raise the error that ended the coordinator or the last engine, if there is one."""
        if self.failure is not None:
            raise self.failure()

    async def confirmed(self, signal: Awaitable[T]) -> T:
        """Await the answer to a control signal. Raises the error of raise_failure() if that ended the wait."""
        try:
            return await signal
        except asyncio.CancelledError:
            self.raise_failure()
            raise

    async def wait_for_end(self) -> None:
        """Wait until the engine has stopped. Raises EngineFailedError, CoordinatorFailedError if one has failed."""
        engine, failed = self._engine.engine_loop_task, asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({engine, failed}, return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()
            await asyncio.shield(engine)
        finally:
            failed.cancel()

    async def answer(
        self, prompts: Sequence[list[int] | dict[str, Any]], params: SamplingParams
    ) -> list[dict[str, Any]]:
        """Return the reply maps of the prompts. Only as many are submitted as the engines can take soon.

        prompts: token ids, or the reply of a request that has failed already.

        Raises the RequestRejectedError of a reason that is not in the prompt itself.
        """
        replies: list[Any] = list(prompts)
        numbers = iter([number for number, prompt in enumerate(prompts) if not isinstance(prompt, dict)])

        async def work() -> None:
            for number in numbers:
                replies[number] = await self._answer_one(replies[number], params)

        workers = [asyncio.create_task(work()) for _ in range(min(len(prompts), self._place_count))]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            raise
        return replies

    async def _answer_one(self, tokens: list[int], params: SamplingParams) -> dict[str, Any]:
        while True:
            async with self._places:  # in order of arrival, so calls take turns
                self.raise_failure()
                client, answered = self.client, self._answered
                if client is None:
                    raise UnavailableError(ErrorCode.UNAVAILABLE, SHUT_DOWN)
                self._submitted += 1
                try:
                    reply: dict[str, Any] = await client.add_request(tokens, params)
                    self._answered += 1
                    return reply
                except (QueueFullError, DeadlineExceededError) as error:
                    # If others are answered, or will be, this one will be answered later.
                    if self._answered == answered and (
                        self._submitted == 1 or isinstance(error, DeadlineExceededError)
                    ):
                        raise
                    seconds = error.retry_after_seconds or RETRY_SECONDS
                except RequestRejectedError as error:
                    if error.is_transient:
                        raise
                    return failed_reply(error_map(ErrorCode(error.code), str(error)))
                finally:
                    self._submitted -= 1
            await asyncio.sleep(seconds)

    async def teardown(self) -> None:
        """Stop the client, the engine's connection and the coordinator, if they were started. Idempotent."""
        client, self.client = self.client, None
        if self._watching is not None:
            self._watching.cancel()
        try:
            if self.front_end is not None:
                await self.front_end.stop()
        finally:
            if client is not None:
                client.stop(self.failure or partial(UnavailableError, ErrorCode.UNAVAILABLE, SHUT_DOWN))
            await self._engine.stop_listening()


def _broadcast_text(text: str, ranks: dist.ProcessGroup) -> str:
    """Return the text of rank 0. Every rank of the group must call this."""
    data = text.encode().ljust(MAX_ADDRESS_BYTES, b"\0")
    if len(data) > MAX_ADDRESS_BYTES:
        raise ValueError(f"address of {len(data)} bytes: at most {MAX_ADDRESS_BYTES}")
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    dist.broadcast(tensor, src=0, group=ranks)
    return bytes(tensor.tolist()).rstrip(b"\0").decode()
