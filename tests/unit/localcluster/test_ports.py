"""Allocated ports are ports that the servers can bind."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from localcluster import ports
from localcluster.settings import Options


@pytest.fixture
def lingering_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The API server's preferred port, with a connection of a previous server in TIME_WAIT."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.recv(1)
        client.close()
    monkeypatch.setitem(ports.PREFERRED_PORTS, "apiserver", port)
    return port


def test_a_port_with_connections_in_time_wait_is_allocated(lingering_port: int) -> None:
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", lingering_port))
    assert ports.allocate(Options())["apiserver"] == lingering_port


def test_a_used_port_is_skipped_and_none_is_allocated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        monkeypatch.setitem(ports.PREFERRED_PORTS, "apiserver", taken)
        given = ports.allocate(Options())
    assert given["apiserver"] != taken
    assert len(set(given.values())) == len(given)


def test_two_clusters_that_start_at_the_same_time_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of the first one do not listen yet when the second one allocates its ports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    allocate = f"""
from localcluster import ports
from localcluster.settings import Options
ports.PREFERRED_PORTS["apiserver"] = {port}
print(ports.allocate(Options())["apiserver"])
"""
    monkeypatch.setitem(ports.PREFERRED_PORTS, "apiserver", port)
    assert ports.allocate(Options())["apiserver"] == port
    other = subprocess.run([sys.executable, "-c", allocate], capture_output=True, text=True, check=True)
    assert int(other.stdout) != port


def test_no_outgoing_connection_takes_a_port_before_its_server_listens() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in ports.allocate(Options()).values() if first <= port <= last]


def test_a_cluster_keeps_its_ports_when_the_process_that_chose_them_starts_it_again() -> None:
    assert all(map(ports.take, ports.allocate(Options()).values()))
