"""The pods of an engine that spans several pods. Their vLLM processes start, end and fail together.

vLLM's workers in other pods do not notice the loss of the first pod, and a suspend must stop the processes of all pods.
So each pod has a TCP connection to the first pod, at the rendezvous port plus 1. Both sides send one byte every second,
usually ALIVE. The first pod sends START and END. Another pod sends LEAVE when it gets SIGTERM. A side terminates the
container of its own pod if it receives nothing for SILENCE_SECONDS, or if the connection closes. The kubelet restarts
the container, and the whole engine starts again.

The connection carries no request data and has no authentication. vLLM's own channels between pods have no
authentication either, and unpickle what they receive; see SECURITY.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from megatron_runtime.backends.vllm.process import OnLost, VllmError, VllmProcess, VllmRejectedError
from megatron_runtime.distributed.errors import RankError, RankLostError, RendezvousError
from megatron_runtime.distributed.shard import RENDEZVOUS_PORT, NodeIdentity, node_identity
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_signals
from megatron_runtime.process.health import HealthServer

logger = logging.getLogger(__name__)

START, END, LEAVE, ALIVE = b"S", b"E", b"L", b"."
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 10.0
RETRY_SECONDS = 0.5


def _port(node: NodeIdentity) -> int:
    return (node.port or RENDEZVOUS_PORT) + 1


class Followers:
    """The first pod's view of the engine's other pods.

    on_lost:  called when a pod is lost.
    on_leave: called when a pod is about to stop, so that the engine drains.
    """

    def __init__(
        self, node: NodeIdentity, *, on_lost: Callable[[RankError], None], on_leave: Callable[[], None]
    ) -> None:
        self._on_leave = on_leave
        self._node = node
        self._on_lost = on_lost
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._arrived = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, port=_port(self._node))
        self._beats = asyncio.create_task(self._beat())

    async def start(self, *, timeout_seconds: float) -> None:
        """Start vLLM in every other pod that lacks it.

        Raises RendezvousError if a pod does not connect in time.
        """
        wanted = set(range(1, self._node.nodes))
        try:
            async with asyncio.timeout(timeout_seconds), self._arrived:
                await self._arrived.wait_for(lambda: wanted <= self._writers.keys())
        except TimeoutError:
            missing = ", ".join(map(str, sorted(wanted - self._writers.keys())))
            raise RendezvousError(0, f"no connection from pod {missing} within {timeout_seconds:g} s") from None
        self._tell(START)

    def end(self) -> None:
        """Stop vLLM in every other pod."""
        self._tell(END)

    async def close(self) -> None:
        """Disconnect the other pods. They restart, and then wait for this pod."""
        if self._beats is not None:
            self._beats.cancel()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _tell(self, message: bytes) -> None:
        for writer in self._writers.values():
            writer.write(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._tell(ALIVE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Exchange messages with another pod. The first byte from the other pod is its index."""
        try:
            number = (await asyncio.wait_for(reader.readexactly(1), SILENCE_SECONDS))[0]
        except (EOFError, OSError, TimeoutError):
            writer.close()
            return
        if not 0 < number < self._node.nodes or number in self._writers:
            logger.warning("rejected a connection from pod %d of %d", number, self._node.nodes)
            writer.close()
            return
        self._writers[number] = writer
        async with self._arrived:
            self._arrived.notify_all()
        cause = ""
        try:
            async for message in _messages(reader):
                if message == LEAVE:
                    self._on_leave()
        except (EOFError, OSError, TimeoutError) as error:
            cause = _cause(error)
        writer.close()
        if self._writers.pop(number, None) is not None:
            rank = number * self._node.ranks_per_node
            self._on_lost(RankLostError(rank, f"pod {number} of the engine is lost: {cause}"))


async def follow(settings: EngineSettings) -> None:
    """Run vLLM in a pod other than the first pod, whenever the first pod requests it.

    Returns when the first pod disconnects after this pod has received SIGTERM. Raises RankError if the first pod is
    lost before that, or if vLLM fails.
    """
    node = node_identity(settings.parallel)
    rank = node.node_rank * node.ranks_per_node
    missing = [f"a connection to pod 0 at {node.address}"]
    if settings.health_port is not None:
        await HealthServer(missing=lambda: missing, port=settings.health_port).start()
    reader, writer = await _connect(node, rank, timeout_seconds=settings.rendezvous_seconds)
    writer.write(bytes([node.node_rank]))
    missing.clear()
    leaving = asyncio.Event()

    def leave() -> None:
        leaving.set()
        writer.write(LEAVE)

    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, leave)
    failures: list[VllmError] = []

    def fail(error: VllmError) -> None:
        failures.append(error)
        obeying.cancel()

    beats = asyncio.create_task(_beat(writer))
    obeying = asyncio.create_task(_obey(reader, settings, on_lost=fail))
    try:
        await obeying
    except (EOFError, OSError, TimeoutError) as error:
        if not leaving.is_set():
            raise RankLostError(0, f"the first pod of the engine is lost: {_cause(error)}") from error
    except (asyncio.CancelledError, VllmError, VllmRejectedError) as error:
        raise RankError(rank, str(failures[0] if failures else error)) from error
    finally:
        beats.cancel()
        writer.close()


async def _obey(reader: asyncio.StreamReader, settings: EngineSettings, *, on_lost: OnLost) -> None:
    """Start vLLM when the first pod sends START, and stop vLLM when the first pod sends END.

    Raises EOFError, OSError or TimeoutError if the first pod is lost.
    """
    vllm: VllmProcess | None = None
    try:
        async for message in _messages(reader):
            if message == START and vllm is None:
                vllm = await asyncio.to_thread(VllmProcess, settings)
                await vllm.connect(lambda _: None, on_lost)
                vllm.send("run_workers")
            elif message == END and vllm is not None:
                await vllm.end()
                vllm = None
    finally:
        if vllm is not None:
            vllm.kill()


async def _connect(
    node: NodeIdentity, rank: int, *, timeout_seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection(node.address, _port(node))
                await asyncio.sleep(RETRY_SECONDS)
    except TimeoutError:
        where = f"{node.address}:{_port(node)}"
        raise RendezvousError(rank, f"no connection to the first pod at {where} within {timeout_seconds:g} s") from None


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        writer.write(ALIVE)


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield each byte that the other pod sends. Raises EOFError, OSError or TimeoutError if the other pod is lost."""
    while True:
        yield await asyncio.wait_for(reader.readexactly(1), SILENCE_SECONDS)


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no heartbeat for {SILENCE_SECONDS:g} s"
    return "it closed its connection" if isinstance(error, EOFError | ConnectionError) else str(error)
