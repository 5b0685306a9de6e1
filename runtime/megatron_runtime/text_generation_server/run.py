"""`megatron server`: one HTTP process, from start to drained end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Generator

import uvicorn

from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.text_generation_server.app import create_app
from megatron_runtime.text_generation_server.listener import listen
from megatron_runtime.text_generation_server.service import Service
from megatron_runtime.text_generation_server.settings import ServerSettings
from megatron_runtime.text_generation_server.tls import Certificate
from megatron_runtime.tokenization import Tokenizer, load_tokenizer
from megatron_runtime.wire.headers import Role
from megatron_runtime.wire.security import PeerKeys

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2
"""After the drain: time for the last bytes to leave."""


def run(settings: ServerSettings, *, listener: socket.socket | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; a second signal cuts the drain short.

    listener: an already bound socket; None binds host and port.
    Raises OSError when the address is taken and TokenizerLoadError when the model has no readable tokenizer.
    """
    listener = listener or listen(host=settings.host, port=settings.port)
    with listener:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: no thread for each CPU
        tokenizer = load_tokenizer(settings.model)
        tokenizer.bound.fewest_tokens("")  # computed now, not while requests wait for it
        gc.freeze()  # modules and vocabulary stay as long as the process: no collection, and no stream, waits for them
        loop_factory = uvicorn.Config(app="", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(settings, listener=listener, tokenizer=tokenizer))


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to the caller, who drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(app: object, *, access_log: bool = False) -> HttpServer:
    """Return the configured HTTP server of an application."""
    return HttpServer(
        uvicorn.Config(
            app,  # type: ignore[arg-type]  # any ASGI callable
            log_level="info" if access_log else "warning",
            access_log=access_log,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
    )


async def drain(service: Service, http: HttpServer) -> None:
    """Stop being ready, let open requests end while the drain time lasts, answer the rest with an error, close."""
    service.draining = True
    settings = service.settings
    logger.info("draining %d open requests for up to %g s", service.in_flight, settings.drain_seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.drain_seconds):
            await _first(service.expired.wait(), _lingered(service))
    service.expired.set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_SECONDS):
            await service.wait_idle()
    service.text_work.close()
    http.should_exit = True


async def _lingered(service: Service) -> None:
    await asyncio.sleep(service.settings.linger_seconds)
    await service.wait_idle()


async def _first(*waits: object) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _serve(settings: ServerSettings, *, listener: socket.socket, tokenizer: Tokenizer) -> None:
    keys = PeerKeys.load(settings.keys_dir, Role.CLIENT) if settings.keys_dir is not None else None
    client = InferenceClient(settings.coordinator, deserialize=False, keys=keys, model=settings.model_hash)
    app = create_app(settings, backend=client, tokenizer=tokenizer)
    service: Service = app.state.service
    http = http_server(app)
    certificate = _certificate(settings)
    if certificate is not None:
        http.config.load()
        http.config.ssl = certificate.context
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            service.expired.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await client.start(connect_timeout_seconds=0)  # readiness says when it is connected
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    renewing = asyncio.create_task(certificate.watch()) if certificate is not None else None
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await drain(service, http)
        await serving
    finally:
        stopping.cancel()
        if renewing is not None:
            renewing.cancel()
        client.stop()


def _certificate(settings: ServerSettings) -> Certificate | None:
    if settings.tls_certificate_file is None or settings.tls_key_file is None:
        return None
    return Certificate(settings.tls_certificate_file, settings.tls_key_file)
