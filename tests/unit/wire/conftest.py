"""Ports for the tests of ZMTP."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from .zmtp_port import Port, key_files


def pytest_asyncio_loop_factories(config, item):
    """The coordinator runs on uvloop; an embedding program may run another event loop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return key_files(tmp_path / "keys")


@pytest.fixture
async def make_port():
    ports: list[Port] = []

    def make(**options) -> Port:
        ports.append(Port(**options))
        return ports[-1]

    yield make
    for port in ports:
        await port.close()


@pytest.fixture
async def port(make_port) -> Port:
    return make_port()


@pytest.fixture(params=["without keys", "with keys"])
async def either(request, make_port, keys) -> Port:
    return make_port(keys=keys if request.param == "with keys" else None)
