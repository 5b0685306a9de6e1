"""`megatron server`: one HTTP process, from the listening socket and the certificate to the drained end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Generator
from pathlib import Path
from typing import Any

import uvicorn

from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.process.health import HealthServer
from megatron_runtime.protocol.headers import Role
from megatron_runtime.server.app import create_app
from megatron_runtime.server.connections import MAX_HEADER_BYTES, Connection
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.settings import BACKLOG, ConnectionLimits, ServerSettings, listen
from megatron_runtime.server.streaming import cancel
from megatron_runtime.tokenization import Tokenizer, load_tokenizer
from megatron_runtime.transport.security import PeerKeys

logger = logging.getLogger(__name__)

CERTIFICATE_CHECK_SECONDS = 10.0
_CLOSE_SECONDS = 2
"""After the drain: time for the last bytes to leave."""
_OTHER_FILES = 512
"""Beside connections: libraries, the coordinator, probes."""
_DEFAULT_LIMITS = ConnectionLimits()
_TICKS_OF_SWEEP = 5
"""Of uvicorn's main loop, a tenth of a second each."""


def run(settings: ServerSettings, *, listener: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; a second signal ends the drain.

    listener: an already bound socket; None binds host and port.
    Raises OSError if the address is in use and TokenizerLoadError if the model has no readable tokenizer.
    """
    _raise_file_limit(settings.connections.max_connections)
    listener = listener or listen(host=settings.host, port=settings.port)
    with listener:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: no thread for each CPU
        tokenizer = load_tokenizer(settings.model)
        tokenizer.bound.fewest_tokens("")  # computed now, not while requests wait for it
        gc.freeze()  # modules and vocabulary stay as long as the process: no collection, and no stream, waits for them
        loop_factory = uvicorn.Config(app="", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(settings, listener=listener, tokenizer=tokenizer))


def _raise_file_limit(connections: int) -> None:
    """Allow the process so many connections: each is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        logger.warning("the limit of %d open files is below --max-connections %d: raise the limit", hard, connections)
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class CertificateError(ValueError):
    """A certificate or its key cannot be read or do not belong together. Names the files and the remedy."""


class Certificate:
    """A certificate chain and its key, in PEM, and the context of new connections.

    The files are read again when they change: a renewed certificate needs no restart.
    """

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self._files = (certificate_file, key_file)
        self._version = self._files_version()
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._read_into(context)
        return context

    def _read_into(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one
            raise CertificateError(
                f"certificate {certificate} with key {key}: {error}; give a PEM chain and the key that belongs to it"
            ) from error

    def check(self) -> bool:
        """Use changed files; return whether they are in use now. Files that cannot be used change nothing."""
        version = self._files_version()
        if version == self._version:
            return False
        self._version = version
        try:
            # A context that failed half-way would have a certificate and no key: try another one first.
            self._load()
            self._read_into(self.context)
        except CertificateError as error:
            logger.warning("the certificate in use stays: %s", error)
            return False
        logger.info("another certificate is in use for new connections")
        return True

    async def watch(self, *, every: float = CERTIFICATE_CHECK_SECONDS) -> None:
        """Check for changed files until cancelled."""
        while True:
            await asyncio.sleep(every)
            self.check()

    def _files_version(self) -> tuple[tuple[int, int], ...]:
        found = []
        for path in self._files:
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_ino, status.st_mtime_ns))
        return tuple(found)


class HttpServer(uvicorn.Server):
    """uvicorn with limits on its connections, and signals left to the caller, who drains first."""

    def __init__(self, config: uvicorn.Config, *, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            options = {"server_state": self.server_state, "app_state": self.lifespan.state, "_loop": loop}
            return Connection(limits=self._limits, config=self.config, **options)

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
                connection.sweep(now)  # type: ignore[union-attr]  # they are all made above
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(
    app: object,
    *,
    limits: ConnectionLimits = _DEFAULT_LIMITS,
    certificate: Certificate | None = None,
    access_log: bool = False,
) -> HttpServer:
    """Return the configured HTTP server of an application. certificate: None serves plain HTTP."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI callable
        log_level="info" if access_log else "warning",
        access_log=access_log,
        lifespan="off",
        http="h11",
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=limits.keep_alive_seconds,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    if certificate is not None:
        config.load()
        config.ssl = certificate.context
    return HttpServer(config, limits=limits)


async def drain(service: Service, http: HttpServer) -> None:
    """Stop being ready, let open requests end during the drain time, answer the rest with an error, close."""
    service.draining = True
    settings = service.settings
    logger.info("draining %d open requests for up to %g s", service.in_flight, settings.drain_seconds)

    async def lingered() -> bool:
        await asyncio.sleep(settings.linger_seconds)
        await service.wait_idle()
        return True

    ends = [asyncio.create_task(service.expired.wait()), asyncio.create_task(lingered())]
    await asyncio.wait(ends, timeout=settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    await cancel(*ends)
    service.expired.set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await service.wait_idle()
    service.prompts.close()
    http.should_exit = True


async def _serve(settings: ServerSettings, *, listener: socket.socket, tokenizer: Tokenizer) -> None:
    keys = PeerKeys.load(settings.keys_dir, Role.CLIENT) if settings.keys_dir is not None else None
    client = InferenceClient(settings.coordinator, deserialize=False, keys=keys, model=settings.model_hash)
    app = create_app(settings, backend=client, tokenizer=tokenizer)
    service: Service = app.state.service
    certificate = None
    if settings.tls_certificate_file is not None and settings.tls_key_file is not None:
        certificate = Certificate(settings.tls_certificate_file, settings.tls_key_file)
    http = http_server(app, limits=settings.connections, certificate=certificate)
    health = None
    if settings.health_port is not None:
        registry = service.metrics.registry
        health = HealthServer(missing=service.missing, registry=registry, host=settings.host, port=settings.health_port)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            service.expired.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if health is not None:
        await health.start()
    await client.start(connect_timeout_seconds=0)  # readiness says when it is connected
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    helpers: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
    if certificate is not None:
        helpers.append(asyncio.create_task(certificate.watch()))
    try:
        await asyncio.wait({serving, helpers[0]}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await drain(service, http)
        await serving
    finally:
        for helper in helpers:
            helper.cancel()
        if health is not None:
            await health.stop()
        client.stop()
