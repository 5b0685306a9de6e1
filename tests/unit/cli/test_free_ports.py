"""Ports that `megatron serve` and tests choose for processes that start later."""

from __future__ import annotations

import socket
import subprocess
import sys

from megatron_runtime.cli import processes

CHOOSE = """
import socket, sys
from megatron_runtime.cli import processes

class Recorded(socket.socket):
    def bind(self, address):
        print(self.type.name)
        super().bind(address)

socket.socket = Recorded
processes._PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
print(processes.free_ports(1))
"""


def test_no_other_process_chooses_a_port_before_its_server_listens() -> None:
    (port,) = processes.free_ports(1)
    done = subprocess.run([sys.executable, "-c", CHOOSE, str(port)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "SOCK_DGRAM\n"), "it binds a port that is reserved"
    assert f"fewer than 1 of the ports {port} to {port} are free" in done.stderr
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
