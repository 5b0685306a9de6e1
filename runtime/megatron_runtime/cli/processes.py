"""Supervises child processes: the processes of `megatron serve`, and the ranks of an engine.

A child exits when its parent exits.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from megatron_runtime.distributed.shard import FOLDER_VARIABLE, RENDEZVOUS_PORT, NodeIdentity
from megatron_runtime.process.children import END_SIGNAL, child_environment, end_signals, module_command
from megatron_runtime.process.listening import private_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RESTARTS = 3
RESTART_WINDOW_SECONDS = 60.0
_LINES_KEPT = 20
RENDEZVOUS_SECONDS = 900
OUTLIVE_SECONDS = 4.0
"""When a rank has exited, the remaining ranks are killed after this many seconds."""
_UNUSED_SIGNAL = "SIGUSR2"
"""The name of a signal that no process sends.

torch's elastic agent is configured to handle only this signal. With its default signals, the agent would kill ranks
before rank 0 has drained.
"""


_PORTS = range(20_000, 29_500)
"""The range from which free ports are chosen.

It lies below the range from which Linux assigns ports to outgoing connections. Such a connection could take a port
before the process binds it.
"""


_reservations: dict[int, socket.socket] = {}
"""UDP sockets bound to the ports that this process has reserved.

A process skips ports that another process has reserved, because the server on such a port may not listen yet.
"""


def reserve_port(port: int) -> bool:
    """Reserve a port of the loopback interface until this process exits.

    Return False if another process has reserved the port.
    """
    if port in _reservations:
        return True
    reservation = socket.socket(type=socket.SOCK_DGRAM)
    try:
        reservation.bind(("127.0.0.1", port))
    except OSError:
        reservation.close()
        return False
    _reservations[port] = reservation
    return True


def free_ports(count: int) -> list[int]:
    """Return `count` different free TCP ports of the loopback interface, and reserve them.

    Until this process exits, this function does not return these ports in any other process.

    Raises:
        OSError: too few ports are free.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        # Reserve first. Probing a port that another process has reserved could keep the server from binding it.
        if port in _reservations or not reserve_port(port):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                _reservations.pop(port).close()
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} of the ports {_PORTS.start} to {_PORTS.stop - 1} are free")


class ChildFailedError(Exception):
    """Raised if a child process has exited and is not restarted.

    The message contains the child's name, exit status and last log lines.
    """


@dataclass(slots=True)
class Child:
    """A child process to supervise.

    arguments: command-line arguments of `megatron`.
    pass_fds:  file descriptors that the process inherits.
    variables: environment variables that differ from the supervisor's environment.
    """

    name: str
    arguments: Sequence[str]
    pass_fds: Sequence[int] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS + 1))
    """Times at which the process exited."""


class Supervisor:
    """Starts child processes, and restarts them until stop() is called.

    Each child runs in a separate session. Ctrl-C therefore reaches only the supervisor, which stops the children in
    order.

    say:       prints a line. The arguments are the name of the child that wrote the line (None for the supervisor),
               and the line.
    are_ready: the caller sets this attribute to true when all children have started. After this, a child that exits is
               restarted, at most RESTARTS times within RESTART_WINDOW_SECONDS.
    failed:    future that raises ChildFailedError when a child has exited and is not restarted.
    """

    def __init__(self, *, say: Callable[[str | None, str], None]) -> None:
        self._say = say
        self._children: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self.are_ready = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, child: Child) -> None:
        """Start a child and supervise it."""
        process = await self._spawn(child)
        self._children.append(child)
        self._watchers.append(asyncio.create_task(self._watch(child, process)))

    async def stop(self, *, grace_seconds: float) -> None:
        """Stop the children in reverse order of their start.

        Each child gets END_SIGNAL. A child that is still running after `grace_seconds` gets SIGKILL.
        """
        self._stopping = True
        for child in reversed(self._children):
            process = child.process
            if process is None or process.returncode is not None:
                continue
            process.send_signal(END_SIGNAL)
            try:
                async with asyncio.timeout(grace_seconds):
                    await process.wait()
            except TimeoutError:
                self._say(None, f"{child.name} did not end within {grace_seconds:g} s: killing it")
                process.kill()
                await process.wait()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(number)

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        child.process = await asyncio.create_subprocess_exec(
            *module_command("megatron_runtime.cli", *child.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment({**child.variables, "PYTHONUNBUFFERED": "1"}, ends_with_parent=True),
            pass_fds=child.pass_fds,
            start_new_session=True,
        )
        return child.process

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> None:
        while True:
            assert process.stdout is not None
            await self._relay(child, process.stdout)
            ended = f"{child.name} ended with {_exit_status(await process.wait())}"
            if self._stopping:
                return
            now = time.monotonic()
            child.ends.append(now)
            recent = [at for at in child.ends if now - at <= RESTART_WINDOW_SECONDS]
            if not self.are_ready or len(recent) > RESTARTS:
                last_lines = "".join(f"\n  {line}" for line in child.last_lines)
                if not self.failed.done():
                    self.failed.set_exception(ChildFailedError(f"{ended}{last_lines}"))
                return
            self._say(None, f"{ended}; starting it again")
            process = await self._spawn(child)

    async def _relay(self, child: Child, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # the line exceeded the limit of the stream, so the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            child.last_lines.append(text)
            self._say(child.name, text)


def _exit_status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


class RanksFailedError(RuntimeError):
    """Raised if all ranks have exited because one rank has failed.

    The message names the failed rank. The log of this rank has the cause.
    """


def launch(node: NodeIdentity, arguments: Sequence[str]) -> None:
    """Run `megatron` with `arguments` once for each rank of this node, under torch's elastic agent without restarts.

    If there is one node, the ranks and the agent's store use files and Unix sockets in a private folder. Returns when
    all ranks have exited normally. Termination signals are forwarded to the ranks, and rank 0 then stops the engine. If
    a rank fails, the other ranks are killed. Raises RanksFailedError.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def forward(_number: int, _frame: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(END_SIGNAL)

    for number in end_signals():
        signal.signal(number, forward)
    os.environ.update(child_environment(ends_with_parent=True))
    threading.Thread(target=_kill_survivors, args=(node.ranks_per_node,), name="survivors", daemon=True).start()
    with ExitStack() as stack:
        if node.nodes == 1:
            folder = stack.enter_context(private_folder())
            os.environ[FOLDER_VARIABLE] = str(folder)
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # keep the agent from opening a TCP store
            backend, endpoint = "c10d", str(folder / "agent")
            configs: dict[str, object] = {"store_type": "file"}
        else:
            backend, endpoint = "static", f"{node.address}:{node.port or RENDEZVOUS_PORT}"
            configs = {"rank": node.node_rank, "timeout": RENDEZVOUS_SECONDS}
        config = LaunchConfig(
            min_nodes=node.nodes,
            max_nodes=node.nodes,
            nproc_per_node=node.ranks_per_node,
            run_id="engine",
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=configs,
            local_addr=node.address if node.nodes == 1 else None,
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle=_UNUSED_SIGNAL,
        )
        command = module_command("megatron_runtime.cli", *arguments)
        try:
            elastic_launch(config, command[0])("-u", *command[1:])
        except ChildFailedError as error:
            rank, first = cause(error.failures)
            message = f"rank {rank} ended with {_exit_status(first.exitcode)}, and the engine with it"
            raise RanksFailedError(message) from error


def cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that probably failed first, and its failure.

    failures: all failures that the elastic agent detected at the same time, by rank.

    A rank that was killed by a signal is taken as the cause, because ranks that exited with a status may have exited as
    a consequence.
    """
    return min(failures.items(), key=lambda failure: (failure[1].exitcode >= 0, failure[1].timestamp))


def _kill_survivors(ranks: int) -> None:
    """Kill the remaining ranks after one rank has failed. The elastic agent would wait longer for ranks that hang."""
    ended_at: float | None = None
    seen = 0
    while True:
        time.sleep(0.5)
        living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        seen = max(seen, len(living))
        if seen < ranks or len(living) == seen:
            continue
        ended_at = ended_at or time.monotonic()
        if time.monotonic() - ended_at > OUTLIVE_SECONDS:
            for child in living:
                child.kill()
