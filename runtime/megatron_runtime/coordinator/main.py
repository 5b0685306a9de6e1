"""`megatron coordinator`: one process, from start to the end of what is open."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from megatron_runtime.coordinator.core.coordinator import Coordinator, Tokenizer
from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.short_slices import ask_for_short_slices
from megatron_runtime.protocol.headers import Role

if TYPE_CHECKING:
    from megatron_runtime.process.health import HealthServer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0
"""After SIGTERM, the time for open requests to end. What is left is submitted again by its clients."""

OnBound = Callable[[dict[Role, str]], None]


def run(settings: CoordinatorSettings, *, tokenizer: Tokenizer | None = None, on_bound: OnBound | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises BindError when a port is taken, KeyFileError when a key is missing.
    """
    ask_for_short_slices()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, tokenizer=tokenizer, on_bound=on_bound))


async def serve(
    settings: CoordinatorSettings, *, tokenizer: Tokenizer | None = None, on_bound: OnBound | None = None
) -> None:
    coordinator = Coordinator(settings, tokenizer=tokenizer, on_bound=on_bound)
    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    coordinator.start()
    # What has been imported stays, and requests leave no cycles: a collector that walks it all finds nothing.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    for role, address in coordinator.transport.addresses.items():
        logger.info("%s port: %s", role.name.lower(), address)
    health: HealthServer | None = None
    try:
        # Peers have their addresses; what follows would only have kept them waiting.
        health = _health_server(settings, coordinator)
        if health is not None:
            await health.start()
        await asyncio.to_thread(importlib.import_module, "megatron_runtime.requests.hashing")
        await _first(leave, coordinator.ended)
        if leave.is_set():
            await coordinator.drain(seconds=DRAIN_SECONDS)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        coordinator.stop()
        await coordinator.transport.closed()
        if health is not None:
            await health.stop()


def _health_server(settings: CoordinatorSettings, coordinator: Coordinator) -> HealthServer | None:
    if settings.health_port is None:
        return None
    from prometheus_client import CollectorRegistry

    from megatron_runtime.coordinator.metrics import CoordinatorMetrics
    from megatron_runtime.process.health import HealthServer

    registry = CollectorRegistry()
    registry.register(CoordinatorMetrics(coordinator))
    return HealthServer(
        missing=lambda: [] if coordinator.transport.addresses else ["bound sockets"],
        registry=registry,
        port=settings.health_port,
    )


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
