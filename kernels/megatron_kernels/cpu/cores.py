"""The number of threads that a process can use."""

from __future__ import annotations

import os
from pathlib import Path

_SYSTEM = Path("/sys")


def default_threads(system: Path = _SYSTEM, cpus: set[int] | None = None) -> int:
    """Return the number of physical cores that this process may use, within the CPU limit of its container.

    Two threads on one core share the core's vector units, so a second thread gains nothing. A CPU limit is rounded down
    to whole CPUs, but not below 1. With more threads than the limit, Linux would suspend a thread in each period, and
    the other threads would wait for it.

    system: directory at which sysfs is mounted.
    cpus:   CPUs that the process may use; None means its affinity.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(system, cpu) for cpu in cpus}
    limit = _limit(system / "fs/cgroup")
    return len(cores) if limit is None else min(len(cores), max(1, int(limit)))


def _siblings(system: Path, cpu: int) -> str:
    """Return a text that identifies the physical core of a CPU.

    The text is the list of all CPUs of this core from sysfs, or the CPU's number if sysfs has no such list.
    """
    path = system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return path.read_text().strip() if path.is_file() else str(cpu)


def _limit(groups: Path) -> float | None:
    """Return the CPU limit of the container's control group, in CPUs. Return None if there is no limit."""
    both = groups / "cpu.max"
    quota, period = groups / "cpu/cpu.cfs_quota_us", groups / "cpu/cpu.cfs_period_us"
    if both.is_file():  # cgroup version 2
        allowed, each = both.read_text().split()
    elif quota.is_file() and period.is_file():  # cgroup version 1
        allowed, each = quota.read_text().strip(), period.read_text().strip()
    else:
        return None
    return None if allowed in ("max", "-1") else int(allowed) / int(each)
