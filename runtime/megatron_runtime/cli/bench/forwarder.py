"""A coordinator that does nothing: what ZeroMQ and its Python binding take for a request, in a process of its own.

`python -m megatron_runtime.cli.bench.forwarder` prints the ports of its two sockets and forwards until its standard
input ends. A message from a client goes to the next engine with the client's routing id in front, and an engine's
answer goes to the client whose id it carries.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Self

import zmq


class Forwarder:
    """A running forwarder, for one load: what it sends to an engine that has just left is lost.

    Clients connect to `client_address`, engines to `engine_address`.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        client_port, engine_port = self._process.stdout.readline().split()
        self.client_address = f"tcp://127.0.0.1:{int(client_port)}"
        self.engine_address = f"tcp://127.0.0.1:{int(engine_port)}"
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Asked to end it might not: with the engines gone, it waits for one to give a client's last words to.
        self._process.terminate()
        self._process.communicate()


def main() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients, engines = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (clients, engines):
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (clients, engines)]
    print(*ports, flush=True)
    poller = zmq.Poller()
    for readable in (clients, engines, sys.stdin.fileno()):
        poller.register(readable, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            context.destroy()
            return
        for source, target in ((clients, engines), (engines, clients)):
            if source in ready:
                _forward(source, target)


def _forward(source: zmq.Socket[bytes], target: zmq.Socket[bytes]) -> None:
    while True:
        try:
            frames = source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        target.send_multipart(frames)


if __name__ == "__main__":
    main()
