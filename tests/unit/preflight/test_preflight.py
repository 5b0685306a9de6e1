"""Eight pods of one engine on loopback addresses: errors name the pods that cannot reach each other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

import pytest
from eventually import LONG_SECONDS
from torch.distributed import TCPStore

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.distributed.preflight import Outcome, PreflightError, PreflightSettings, preflight

NODES = 8


def names(nodes: int = NODES) -> tuple[str, ...]:
    return tuple(f"127.0.77.{number + 1}" for number in range(nodes))


def settings(node: int, port: int, *, nodes: int = NODES, seconds: float = 5.0) -> PreflightSettings:
    return PreflightSettings(
        node=node, names=names(nodes), port=port, timeout_seconds=seconds, listen=names(nodes)[node]
    )


@pytest.fixture
def silent_host() -> Iterator[tuple[str, int]]:
    """Its queue of calls is full, so what is sent to it is dropped, as by a firewall."""
    host = names()[3]
    with socket.socket() as listener, contextlib.ExitStack() as calls:
        listener.bind((host, 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        for _ in range(4):
            call = calls.enter_context(socket.socket())
            call.setblocking(False)
            call.connect_ex(address)
        yield address


async def test_all_pairs_of_eight_exchange_data() -> None:
    port = free_ports(1)[0]
    async with asyncio.timeout(LONG_SECONDS):
        found = await asyncio.gather(*(preflight(settings(node, port, seconds=40.0)) for node in range(NODES)))
    for outcomes in found:
        assert len(outcomes) == NODES - 1
        assert set(outcomes.values()) == {Outcome.ANSWERED}


async def test_preflight_waits_for_a_later_pod() -> None:
    port = free_ports(1)[0]
    first = asyncio.create_task(preflight(settings(0, port, nodes=2, seconds=40.0)))
    await asyncio.sleep(0)
    assert await preflight(settings(1, port, nodes=2, seconds=40.0)) == {names(2)[0]: Outcome.ANSWERED}
    assert await first == {names(2)[1]: Outcome.ANSWERED}


async def test_a_silent_pod_is_named_with_the_pod_that_called_it(silent_host: tuple[str, int]) -> None:
    host, port = silent_host
    others = [0, 1, 2, 4]
    plans = [settings(node, port, nodes=5, seconds=6.0) for node in others]
    found = await asyncio.gather(*(preflight(each) for each in plans), return_exceptions=True)
    for node, error in zip(others, found, strict=True):
        assert isinstance(error, PreflightError)
        assert error.rank == node
        assert f"{names()[node]} cannot reach {host} on port {port}: no answer within 6 s" in str(error)


async def test_pod_with_running_ranks_passes() -> None:
    """Another protocol on the rendezvous port, and a closed port, both show that the network works."""
    port = free_ports(1)[0]

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\0" * 64)
        writer.close()

    server = await asyncio.start_server(hang_up, names(3)[1], port)
    async with server:
        found = await preflight(settings(0, port, nodes=3, seconds=4.0))
    assert found == {names(3)[1]: Outcome.REACHABLE, names(3)[2]: Outcome.REACHABLE}


async def test_store_of_running_ranks_passes() -> None:
    """A pod comes back alone while the others' ranks wait for it: rank 0's store takes calls, and waits for more."""
    port = free_ports(1)[0]
    # It listens on every address: its calls come through another port, as from another pod.
    store = TCPStore("127.0.0.1", free_ports(1)[0], is_master=True, wait_for_workers=False)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", store.port)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(relay, names(2)[1], port)
    async with server:
        found = await preflight(settings(0, port, nodes=2, seconds=10.0))
    assert found == {names(2)[1]: Outcome.REACHABLE}


async def test_unresolvable_own_name_is_an_error() -> None:
    broken = PreflightSettings(
        node=0, names=("pod-0.invalid", "pod-1.invalid"), port=free_ports(1)[0], timeout_seconds=1.0, listen="127.0.0.1"
    )
    with pytest.raises(PreflightError, match=r"pod-0\.invalid cannot resolve its own name within 1 s .*DNS"):
        await preflight(broken)


async def test_pod_without_an_address_passes() -> None:
    waits = PreflightSettings(
        node=0, names=("127.0.77.1", "pod-1.invalid"), port=free_ports(1)[0], timeout_seconds=4.0, listen="127.0.77.1"
    )
    assert await preflight(waits) == {"pod-1.invalid": Outcome.ABSENT}


async def test_command_names_the_pair_in_its_error(silent_host: tuple[str, int]) -> None:
    _, port = silent_host
    command = [sys.executable, "-m", "megatron_runtime.cli", "preflight", "--name", "127.0.77.{node}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--node", "2", "--nodes", "5", "--port", str(port), "--timeout-seconds", "8"),
        *("--listen", "127.0.77.2"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), LONG_SECONDS)
    assert process.returncode == 1, (out, err)
    assert "127.0.77.2 cannot reach 127.0.77.4 on port" in err.decode()
