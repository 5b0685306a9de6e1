"""The child processes of this process that its tests start, for tests that count or kill them."""

from __future__ import annotations

import psutil


def own_children(*, recursive: bool = False) -> set[int]:
    """Return the process ids of the children.

    All tests of a process share the fork server of multiprocessing, the processes that it forks, and the resource
    tracker. These are left out.
    """
    found = set()
    for child in psutil.Process().children(recursive=recursive):
        try:
            if not any("multiprocessing" in part for part in child.cmdline()):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
