"""The process of `megatron server`, from opening the listening socket to the end of the drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import time
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.process.children import end_signals
from megatron_runtime.process.health import HealthServer
from megatron_runtime.process.tracing import tracer_from_environment
from megatron_runtime.protocol.headers import Role
from megatron_runtime.server.app import create_app
from megatron_runtime.server.auth import Certificate
from megatron_runtime.server.connections import HttpConnection, ParseQueue
from megatron_runtime.server.formats.vllm_format import chat_format_of
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.settings import BACKLOG, ConnectionLimits, ServerSettings, listen
from megatron_runtime.server.streaming import cancel
from megatron_runtime.tokenization import Tokenizer, load_tokenizer
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2
"""Seconds in which connections can send their last bytes after the drain."""
_OTHER_FILES = 512
"""Number of open files in addition to the connections, for libraries, the coordinator's connection and probes."""
_TICKS_OF_SWEEP = 5
"""Number of iterations of uvicorn's main loop between two sweeps of the connections. An iteration takes 0.1 s."""


def run(settings: ServerSettings, *, listener: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends the drain.

    listener: a bound socket; None: bind the host and port in `settings`.

    Raises OSError if the address is in use, and TokenizerLoadError if the model has no readable tokenizer.
    """
    _raise_file_limit(settings.connections.max_connections)
    listener = listener or listen(host=settings.host, port=settings.port)
    with listener:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a call with one text needs no thread pool
        tokenizer = load_tokenizer(settings.model)
        tokenizer.bound.min_tokens("")  # compute the limit now, because the first computation is slow
        gc.freeze()  # exclude modules and vocabulary from garbage collection, which stalls streams
        loop_factory = uvicorn.Config(app="", loop="auto", log_config=None).get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(settings, listener=listener, tokenizer=tokenizer))


def _raise_file_limit(connections: int) -> None:
    """Raise the process's limit of open files for this number of connections, because the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning("the limit of %d open files is below --max-connections %d: raise the limit", hard, connections)
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(uvicorn.Server):
    """A uvicorn server with connection limits. It handles no signals, because the caller drains and stops it.

    certificate: TLS certificate; None: serve plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: ConnectionLimits | None = None,
        certificate: Certificate | None = None,
        access_log: bool = False,
    ) -> None:
        self._limits = limits or ConnectionLimits()
        config = uvicorn.Config(
            app,
            log_config=None,  # its records go to the root logger, in the same format as all other records
            log_level="info" if access_log else "warning",
            access_log=access_log,
            lifespan="off",
            http="h11",
            ws="none",
            timeout_keep_alive=self._limits.keep_alive_seconds,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        if certificate is not None:
            config.load()
            config.ssl = certificate.context
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop, parse_queue = asyncio.get_running_loop(), ParseQueue()

        def connection() -> HttpConnection:
            options = {"server_state": self.server_state, "app_state": self.lifespan.state, "_loop": loop}
            return HttpConnection(limits=self._limits, parse_queue=parse_queue, config=self.config, **options)

        await self.lifespan.startup()
        tls = self.config.ssl
        seconds = None if tls is None else self._limits.handshake_seconds
        self.servers = [
            await loop.create_server(connection, sock=sock, ssl=tls, ssl_handshake_timeout=seconds, backlog=BACKLOG)
            for sock in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_OF_SWEEP == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.sweep(now)  # type: ignore[union-attr]  # startup() makes all connections
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def drain(service: Service, http: HttpServer) -> None:
    """Report that the server is not ready, serve until no request arrives and no request is open, and close the server.

    Load balancers notice with a delay that the server is not ready. On a loaded node, the delay can be many seconds.
    Each request that a load balancer still sends extends the drain by `linger_seconds`. When `drain_seconds` have
    passed, the remaining requests get an error.
    """
    service.draining = True
    settings = service.settings
    logger.info("draining %d open requests for up to %g s", service.in_flight, settings.drain_seconds)
    quiet = asyncio.create_task(_quiet(service))
    ends: list[asyncio.Task[Any]] = [asyncio.create_task(service.expired.wait()), quiet]
    await asyncio.wait(ends, timeout=settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    if not quiet.done():
        service.expired.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await service.wait_idle()
    await cancel(*ends)
    http.should_exit = True


async def _quiet(service: Service) -> None:
    """Wait until no request has begun for `linger_seconds` and no request is open."""
    began = time.monotonic()
    while True:
        await service.wait_idle()
        left = max(began, service.last_request) + service.settings.linger_seconds - time.monotonic()
        if left <= 0:
            return
        await asyncio.sleep(left)


async def _serve(settings: ServerSettings, *, listener: socket.socket, tokenizer: Tokenizer) -> None:
    keys = PeerKeys.load(settings.keys_dir, Role.CLIENT) if settings.keys_dir is not None else None
    client = CoordinatorClient(settings.coordinator, keys=keys, model=settings.model_hash)
    tracer = tracer_from_environment("megatron-server")
    chat_format = await chat_format_of(
        tokenizer,
        backend=settings.backend,
        model=settings.model,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    app = create_app(settings, backend=client, tokenizer=tokenizer, chat_format=chat_format, tracer=tracer)
    service: Service = app.state.service
    certificate = None
    if settings.tls_certificate_file is not None and settings.tls_key_file is not None:
        certificate = Certificate(settings.tls_certificate_file, settings.tls_key_file)
    http = HttpServer(app, limits=settings.connections, certificate=certificate, access_log=settings.access_log)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            service.expired.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in end_signals():
        loop.add_signal_handler(number, on_signal)
    async with contextlib.AsyncExitStack() as stack:
        if tracer is not None:
            stack.callback(tracer.close)
        stack.callback(chat_format.close)
        stack.callback(client.stop)
        stack.callback(service.prompts.close)
        if (port := settings.health_port) is not None:
            registry = service.metrics.registry
            health = HealthServer(missing=service.missing, registry=registry, host=settings.host, port=port)
            await health.start()
            stack.push_async_callback(health.stop)
        await client.start(connect_timeout_seconds=0)  # do not wait, because the server is not ready until then
        if certificate is not None:
            stack.callback(asyncio.create_task(certificate.watch()).cancel)
        stopping = asyncio.create_task(stop.wait())
        stack.callback(stopping.cancel)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await drain(service, http)
        await serving
