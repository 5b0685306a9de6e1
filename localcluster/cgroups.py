"""The two cgroups of a node, for both cgroup versions: one for all pods, and one for the node's own processes.

From the cgroup for pods, `down` can list every process of every pod, even if the pod's shim has exited. The cgroup for
the node's processes gives them a CPU weight as on an ordinary node. In the machine's root cgroup, each process of the
control plane would have the same weight as all pods together.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from localcluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
KUBELET_CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "hugetlb", "io")


def of_node(pods: str) -> str:
    """Return the name of the cgroup for a node's processes. pods: name of the cgroup for the node's pods."""
    return f"{pods}-node"


def is_v2() -> bool:
    """Return whether the controllers are in the unified hierarchy.

    If not, the controllers are in version 1 hierarchies, which is also the case on hybrid machines.
    """
    return (ROOT / "cgroup.controllers").exists()


def mount_points(mounts: str) -> list[Path]:
    """Return the mount points of the cgroup hierarchies. mounts: the text of /proc/mounts."""
    fields = (line.split() for line in mounts.splitlines())
    return [Path(field[1]) for field in fields if len(field) > 2 and field[2] in {"cgroup", "cgroup2"}]


def folders(cgroup: str) -> list[Path]:
    return [point / cgroup.lstrip("/") for point in mount_points(Path("/proc/mounts").read_text())]


def create(cgroup: str) -> None:
    """Create a cgroup in every hierarchy. The kubelet needs an existing cgroup, so call this before it starts."""
    if is_v2():
        _delegate()
    for folder in folders(cgroup):
        folder.mkdir(exist_ok=True)


def weigh(cgroup: str, cpus: int) -> None:
    """Set the CPU weight of a cgroup to `cpus` times the default weight."""
    for folder in folders(cgroup):
        for name, one in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (folder / name).exists():
                (folder / name).write_text(str(one * cpus))


def gather(cgroup: str, pids: Iterable[int]) -> None:
    """Move processes to a cgroup in the CPU hierarchy."""
    for folder in folders(cgroup):
        if (folder / "cpu.shares").exists() or (folder / "cpu.weight").exists():
            for pid in pids:
                _move(str(pid), folder)


def freeze(cgroup: str, *, frozen: bool) -> None:
    """Stop all processes in a cgroup and the cgroups below it if `frozen` is true, otherwise let them continue.

    Do nothing if the cgroup does not exist.
    """
    for folder in folders(cgroup):
        for name, values in (("cgroup.freeze", ("0", "1")), ("freezer.state", ("THAWED", "FROZEN"))):
            if (folder / name).exists():
                (folder / name).write_text(values[frozen])


def _delegate() -> None:
    """Delegate the controllers of the unified hierarchy's root cgroup to its child cgroups.

    In a container, the visible root cgroup contains processes, but the kernel delegates only from a cgroup without
    processes. This function therefore moves the processes to a leaf cgroup first.
    """
    available = (ROOT / "cgroup.controllers").read_text().split()
    wanted = " ".join(f"+{name}" for name in KUBELET_CONTROLLERS if name in available)
    control = ROOT / "cgroup.subtree_control"
    try:
        control.write_text(wanted)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise ClusterError(f"cannot write {wanted!r} to {control}: {error}; the cgroup must be writable") from error
        leaf = ROOT / "init"
        leaf.mkdir(exist_ok=True)
        for pid in (ROOT / "cgroup.procs").read_text().split():
            _move(pid, leaf)
        control.write_text(wanted)


def _move(pid: str, leaf: Path) -> None:
    try:
        (leaf / "cgroup.procs").write_text(pid)
    except OSError as error:
        if error.errno not in {errno.ESRCH, errno.EINVAL}:  # the process has exited meanwhile, or is a kernel thread
            raise


def remove(cgroup: str, *, seconds: float = 15.0) -> int:
    """Kill all processes in a cgroup and below it, remove the cgroup, and return the number of killed processes.

    Raises ClusterError if a process has not terminated after `seconds`.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    existing = [folder for folder in folders(cgroup) if folder.is_dir()]
    while alive := set().union(*(_pids(folder) for folder in existing)):
        for pid in alive:
            _kill(pid)
        killed |= alive
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {sorted(alive)} in cgroup {cgroup} do not terminate; see /proc/PID/stack")
        time.sleep(0.05)
    for folder in existing:
        for path in _deepest_first(folder):
            with contextlib.suppress(FileNotFoundError):  # the cgroup may have been removed meanwhile
                path.rmdir()
    return len(killed)


def _pids(folder: Path) -> set[int]:
    return {pid for path in _deepest_first(folder) for pid in _pids_of(path)}


def _pids_of(group: Path) -> set[int]:
    """Return the pids in a cgroup.

    The result is empty if the cgroup no longer exists, for example because its pod has ended since the cgroup was
    listed.
    """
    try:
        return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENODEV}:
            raise
        return set()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _deepest_first(folder: Path) -> Iterator[Path]:
    for path, _, _ in os.walk(folder, topdown=False):
        yield Path(path)
