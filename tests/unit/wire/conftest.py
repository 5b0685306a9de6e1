"""Ports for the tests of ZMTP."""

from pathlib import Path

import pytest
from zmtp_port import Port, key_files


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
