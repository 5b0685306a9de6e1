"""Starts, identifies and terminates the cluster's processes.

A pid alone does not identify a process, because the kernel reuses pids. A process belongs to the cluster if it runs one
of `PROGRAM_NAMES` with an argument below the cluster's state folder. This rule also identifies processes whose record
is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from localcluster.components import PROGRAM_NAMES, Component
from localcluster.errors import ClusterError
from localcluster.network import namespace_path
from localcluster.settings import Layout
from localcluster.shell import tail
from megatron_runtime.protocol import strict_json as json

GRACE_SECONDS = 5.0
_PROXY_VARIABLES = frozenset({"http_proxy", "https_proxy", "no_proxy", "all_proxy"})


@dataclass(frozen=True)
class Record:
    """The record of a started process: its pid and a digest of its command line and files."""

    pid: int
    digest: str


def belongs(argv: Sequence[str], state: Path) -> bool:
    """Return whether a command line belongs to a process of the cluster in `state`."""
    if not argv or Path(argv[0]).name not in PROGRAM_NAMES:
        return False
    prefix = f"{state}/"
    return any(
        value.removeprefix("unix://").startswith(prefix)
        for part in argv[1:]
        for value in (part, part.partition("=")[2])
    )


def is_same_component(argv: Sequence[str], other: Sequence[str], state: Path) -> bool:
    """Return whether two command lines run the same program with the same path below the state folder.

    The kubelets of two nodes run the same program with different paths.
    """
    common = {part for part in argv[1:] if f"{state}/" in part} & set(other[1:])
    return Path(argv[0]).name == Path(other[0]).name and bool(common)


def command_line(pid: int) -> list[str]:
    """Return the arguments of a running process. The result is empty if the process has exited."""
    try:
        return [part.decode(errors="replace") for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def owned_pids(state: Path) -> dict[int, list[str]]:
    """Return the command line of every running process of the cluster, by pid."""
    lines = {int(entry): command_line(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    return {pid: argv for pid, argv in lines.items() if belongs(argv, state)}


def digest(component: Component) -> str:
    parts = [*component.argv, *(path.read_text() for path in component.files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def running(component_name: str, layout: Layout) -> Record | None:
    """Return the record of a component if its process runs and belongs to the cluster, otherwise None."""
    try:
        record = Record(**json.loads((layout.run / f"{component_name}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return record if belongs(command_line(record.pid), layout.state) else None


def ensure(component: Component, layout: Layout) -> bool:
    """Start the component unless it runs with this configuration. Return whether it was started."""
    current = running(component.name, layout)
    wanted = digest(component)
    if current is not None and current.digest == wanted:
        return False
    owned = owned_pids(layout.state)
    terminate(pid for pid, argv in owned.items() if is_same_component(argv, component.argv, layout.state))
    _start(component, layout, wanted)
    return True


def _start(component: Component, layout: Layout, wanted: str) -> None:
    layout.run.mkdir(parents=True, exist_ok=True)
    layout.logs.mkdir(parents=True, exist_ok=True)
    log = log_path(component.name, layout)
    if log.exists():
        log.replace(log.with_suffix(".previous.log"))
    enter = ["nsenter", f"--net={namespace_path(component.namespace)}"] if component.namespace else []
    with log.open("w") as output:
        process = subprocess.Popen(
            [*enter, *component.argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=layout.state,
            env=environment(os.environ),
            start_new_session=True,
        )
    # Before exec, the kernel shows nsenter's command line. Right after exec, it shows an empty command line, as for a
    # process that has exited.
    while not belongs(command_line(process.pid), layout.state) and process.poll() is None:
        time.sleep(0.001)
    partial = layout.run / f"{component.name}.json.partial"
    partial.write_text(json.dumps({"pid": process.pid, "digest": wanted}))
    partial.replace(layout.run / f"{component.name}.json")


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return `inherited` without proxy variables, because the cluster connects only to this machine."""
    return {key: value for key, value in inherited.items() if key.lower() not in _PROXY_VARIABLES}


def log_path(component_name: str, layout: Layout) -> Path:
    return layout.logs / f"{component_name}.log"


def wait_ready(component: Component, layout: Layout, ready: Callable[[], bool], *, seconds: float) -> None:
    """Wait until `ready` returns true.

    Raises ClusterError with the end of the log if the process exits, or if `seconds` have passed.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        record = running(component.name, layout)
        if record is None or time.monotonic() > deadline:
            log = log_path(component.name, layout)
            output = tail(log.read_text(errors="replace")) if log.exists() else "    (no log)"
            what = "exited at once" if record is None else f"was not ready within {seconds:.0f} s"
            raise ClusterError(f"{component.name} {what}; the end of {log}:\n{output}")
        time.sleep(0.1)


def terminate(pids: Iterable[int], *, grace: float = GRACE_SECONDS) -> None:
    """Send SIGTERM to processes, and SIGKILL after `grace` seconds. Return when all processes have exited.

    The function opens the processes as pidfds before it sends signals, so that no signal reaches another process that
    reuses a pid. Raises ClusterError if a process does not exit after SIGKILL.
    """
    handles: dict[int, int] = {}
    for pid in pids:
        try:
            handles[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
    try:
        for wave, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            alive = {pid: handle for pid, handle in handles.items() if not _ended(handle, 0.0)}
            for handle in alive.values():
                _send(handle, wave)
            deadline = time.monotonic() + seconds
            for pid, handle in alive.items():
                if not _ended(handle, max(0.0, deadline - time.monotonic())) and wave == signal.SIGKILL:
                    raise ClusterError(f"process {pid} does not exit after SIGKILL; see `cat /proc/{pid}/stack`")
    finally:
        for pid, handle in handles.items():
            os.close(handle)
            _reap(pid)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _send(handle: int, wave: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, wave)
    except ProcessLookupError:
        return


def _ended(handle: int, timeout: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(int(timeout * 1000)))


def _reap(pid: int) -> None:
    """Reap a process that has exited if it is a child of this launcher, because it would stay a zombie otherwise."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
