"""How much memory this process may still allocate. No torch."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


class MemoryShortError(RuntimeError):
    """Memory is too short for a load. The message names both amounts and the remedy."""


def require_memory(needed: int, *, what: str, available: int | None = None) -> None:
    """Raise MemoryShortError unless `needed` bytes are available; `available` defaults to what the system reports."""
    if available is None:
        available = available_bytes()
    if available is not None and needed > available:
        raise MemoryShortError(
            f"{what} needs {_mebibytes(needed)}, {_mebibytes(available)} are available: free memory on the node or "
            "raise the memory limit of the container"
        )


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes that the machine and the container's limit leave; None if the system does not report it."""
    left = [amount for amount in (_of_machine(meminfo), _of_container(cgroup)) if amount is not None]
    return min(left, default=None)


def _of_machine(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroup: Path) -> int | None:
    """Limit less use, if control groups v2 set a limit. Page cache that can be dropped does not count as use."""
    limit, current, stat = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    if not (limit.is_file() and current.is_file() and stat.is_file()) or limit.read_text().strip() == "max":
        return None
    counters = dict(line.split() for line in stat.read_text().splitlines())
    used = int(current.read_text()) - int(counters.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - used)


def _mebibytes(amount: int) -> str:
    return f"{amount / (1 << 20):.0f} MiB"
