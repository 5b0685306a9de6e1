"""Prometheus, from PATH or from Debian's package, which is unpacked into build/ and not installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "prometheus"


def prometheus() -> Path:
    """Return the program."""
    found = shutil.which("prometheus")
    if found is not None:
        return Path(found)
    if not FOLDER.exists():
        assert shutil.which("apt-get") is not None, "Prometheus is missing: put the program prometheus on PATH"
        FOLDER.parent.mkdir(exist_ok=True)
        unpacked = Path(tempfile.mkdtemp(dir=FOLDER.parent))
        download = ["apt-get", "download", "-q", "prometheus"]
        if subprocess.run(download, cwd=unpacked, check=False, capture_output=True).returncode:
            subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
            subprocess.run(download, cwd=unpacked, check=True, capture_output=True)
        (package,) = unpacked.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        package.unlink()
        try:
            unpacked.rename(FOLDER)
        except OSError:  # another process was first
            shutil.rmtree(unpacked)
    return FOLDER / "usr" / "bin" / "prometheus"
