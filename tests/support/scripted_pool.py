"""Fixtures of tests of clients: a coordinator with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.sampling_params import SamplingParams


class Pool:
    """A coordinator on one port with a scripted engine behind it."""

    def __init__(self) -> None:
        patient = Timing(heartbeat=0.05, suspect=30.0, dead=60.0, client_dead=60.0, recovery=0.0)
        settings = CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True, timing=patient)
        self.coordinator = Coordinator(settings)
        self.coordinator.start()
        self.address = self.coordinator.transport.addresses[Role.CLIENT]
        self.engine = ScriptedEngine(self.address)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool()
    await pool.engine.start()
    yield pool
    pool.engine.close()
    assert pool.coordinator.transport.handler_errors == 0
    pool.coordinator.stop()


@pytest.fixture
def params() -> Callable[..., SamplingParams]:
    return lambda tokens=8, **values: SamplingParams(num_tokens_to_generate=tokens, **values)


async def read(stream: Any) -> tuple[list[int], dict[str, Any]]:
    """Read a stream to its end: its tokens and its final reply."""
    tokens: list[int] = []
    async for item in stream:
        if "final" in item:
            return tokens, item["final"]
        tokens += item["partial"]["new_tokens"]
    raise AssertionError("the stream ended without a final reply")


@pytest.fixture
def collect() -> Callable[[Any], Any]:
    return read


@pytest.fixture
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
