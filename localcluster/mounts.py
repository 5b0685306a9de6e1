"""Unmounts the mounts below a folder before the folder is removed."""

from __future__ import annotations

from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.shell import run


def mounts_below(mountinfo: str, folder: Path) -> list[str]:
    """Return the mount points at or below `folder`, latest mount first. mountinfo: the text of /proc/self/mountinfo."""
    points = [_unescape(line.split()[4]) for line in mountinfo.splitlines()]
    return [point for point in reversed(points) if point == str(folder) or point.startswith(f"{folder}/")]


def _unescape(field: str) -> str:
    return field.encode().decode("unicode_escape") if "\\" in field else field


def unmount_below(folder: Path) -> int:
    """Unmount everything below `folder`, and return the number of mounts.

    Raises ClusterError if a mount remains, because removing the folder would delete the mount's content.
    """
    mountinfo = Path("/proc/self/mountinfo")
    points = mounts_below(mountinfo.read_text(), folder)
    for point in points:
        if run(["umount", point], check=False).returncode != 0:
            run(["umount", "--lazy", point], check=False)
    left = mounts_below(mountinfo.read_text(), folder)
    if left:
        raise ClusterError(f"still mounted: {', '.join(left)}; unmount by hand, then `down` again")
    return len(points)
