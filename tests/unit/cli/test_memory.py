"""The memory that is available: of the machine, and within the limits of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_runtime.process.memory import available_bytes


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _group(path: str, limit: object, used: int, *, version: int = 2) -> dict[str, str]:
    if version == 2:
        names, base = ("memory.max", "memory.current", "inactive_file"), "sys/fs/cgroup"
    else:
        names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), "sys/fs/cgroup/memory"
    folder = f"{base}/{path}".rstrip("/")
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{used}\n",
        f"{folder}/memory.stat": f"anon 100\n{names[2]} 40000\n",
    }


V2, V1 = "0::/a/b\n", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"
CASES = {
    "no limit": (V2, _group("a/b", "max", 250_000), 512_000),
    "own group": (V2, _group("a/b", 300_000, 250_000), 90_000),
    "a group above": (V2, {**_group("a/b", "max", 10), **_group("a", 300_000, 250_000)}, 90_000),
    "namespace of the container": ("0::/\n", _group("", 300_000, 250_000), 90_000),
    "path of the host": ("0::/kubepods/x\n", _group("", 300_000, 250_000), 90_000),
    "more used than allowed": (V2, _group("a/b", 300_000, 900_000), 0),
    "version 1": (V1, _group("a/b", 300_000, 250_000, version=1), 90_000),
    "version 1 without a limit": (V1, _group("a/b", 2**63 - 4096, 250_000, version=1), 512_000),
    "version 1, a group above": (V1, _group("a", 300_000, 250_000, version=1), 90_000),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_machine_and_container_leave(tmp_path: Path, case: str) -> None:
    listing, groups, expected = CASES[case]
    _write(
        tmp_path, {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n", "proc/self/cgroup": listing, **groups}
    )
    assert available_bytes(tmp_path) == expected


def test_memory_is_unknown_if_the_system_reports_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
