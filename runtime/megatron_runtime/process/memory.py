"""Determines how much memory this process can still allocate. No other module reads memory limits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_VERSIONS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Mount point, files of limit and usage, and counter of the droppable page cache, by controller of cgroups v2 and v1.
"""


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return how many more bytes this process can allocate within the limits of the machine and the container.

    Returns None if the system reports neither limit.

    root: folder in which proc and sys are mounted.
    """
    return min((*_of_machine(root), *_of_control_groups(root)), default=None)


def _of_machine(root: Path) -> Iterator[int]:
    meminfo = root / "proc/meminfo"
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else ():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_control_groups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes within the limit of this process's cgroup, and of each cgroup above it.

    Without a cgroup namespace, /proc shows the path of the container's cgroup on the host, but the mount point shows
    the container's cgroup itself.
    """
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & _VERSIONS.keys():
            mount, limit, use, inactive = _VERSIONS[controller]
            below = Path(path.lstrip("/"))
            for folder in (below, *below.parents):
                yield from _left(root / mount / folder, limit, use, inactive)


def _left(group: Path, limit: str, use: str, inactive: str) -> Iterator[int]:
    files = group / limit, group / use, group / "memory.stat"
    if not all(file.is_file() for file in files):
        return
    allowed, used, stat = (file.read_text() for file in files)
    if allowed.strip() != "max":
        counters = dict(line.split() for line in stat.splitlines())
        yield max(0, int(allowed) - int(used) + int(counters.get(inactive, 0)))
