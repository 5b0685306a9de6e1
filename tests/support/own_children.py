"""The child processes of this process that its tests start, for tests that count or kill them."""

from __future__ import annotations

import psutil


def own_children(*, recursive: bool = False) -> set[int]:
    """Return the process ids of the children.

    The fork server and the resource tracker of multiprocessing, and what the fork server forks, are left out: all tests
    of this process share them.
    """
    found = set()
    for child in psutil.Process().children(recursive=recursive):
        try:
            if not any("multiprocessing" in part for part in child.cmdline()):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found
