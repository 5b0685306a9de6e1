"""Installs the Debian packages that the node needs.

A package is installed only if its program is missing. Another vendor's containerd or runc is therefore used, and never
replaced. The installation neither starts nor enables services.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.locking import locked
from localcluster.progress import Steps
from localcluster.settings import cache_root
from localcluster.shell import run

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# megatron-localcluster: no service starts while its packages are being installed\nexit 101\n"


@dataclass(frozen=True)
class Requirement:
    """A program and the package that contains it.

    If `program` contains a slash, it is a path. Otherwise, it is the name of a program on PATH.
    """

    package: str
    program: str


CONTROL_PLANE = (Requirement("etcd-server", "etcd"), Requirement("openssl", "openssl"))
NODE = (
    *CONTROL_PLANE,
    Requirement("containerd", "containerd"),
    Requirement("runc", "runc"),
    Requirement("containernetworking-plugins", "cni:bridge"),
    Requirement("iptables", "iptables-save"),
    Requirement("conntrack", "conntrack"),
    Requirement("iproute2", "ip"),
    Requirement("socat", "socat"),
    Requirement("util-linux", "nsenter"),
)
IMAGES = (Requirement("buildah", "buildah"), Requirement("debootstrap", "debootstrap"))

# The systemd units that these packages would enable for the next boot.
UNITS = ("etcd.service", "containerd.service")


def present(program: str) -> bool:
    if program.startswith("cni:"):
        return any((folder / program.removeprefix("cni:")).exists() for folder in CNI_FOLDERS)
    return shutil.which(program) is not None


def missing(requirements: Iterable[Requirement], *, has: Callable[[str], bool] = present) -> list[str]:
    """Return the packages to install, without duplicates, in the order of `requirements`."""
    return list(dict.fromkeys(r.package for r in requirements if not has(r.program)))


def cni_folder() -> Path:
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise ClusterError(f"no CNI plugins in {' or '.join(map(str, CNI_FOLDERS))}: install containernetworking-plugins")


def ensure(requirements: Iterable[Requirement], steps: Steps) -> None:
    """Install the missing packages. If this fails, raise ClusterError, which names the packages."""
    if missing(requirements):
        with locked(cache_root() / ".packages.lock", steps, reason="another installation of packages"):
            _install(missing(requirements), steps)


def _install(wanted: list[str], steps: Steps) -> None:
    if not wanted:
        return
    if os.geteuid() != 0:
        raise ClusterError(f"the embedded cluster needs root, to install {', '.join(wanted)}: run it with sudo")
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"missing: {', '.join(wanted)}. Only Debian-like systems are set up by themselves; install these by hand, "
            "or use a cluster of your own with CLUSTER=current"
        )
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    with steps.step("apt-get update"):
        run(["apt-get", "update", "-qq"], env=environment)
    with steps.step(f"apt-get install {' '.join(wanted)}"), _Quiescent():
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "--no-remove"]
        run([*install, "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120", *wanted], env=environment)


class _Quiescent:
    """A context manager that prevents newly installed packages from starting services, now and at the next boot."""

    def __init__(self) -> None:
        self._policy = False

    def __enter__(self) -> None:
        if not POLICY.exists() or POLICY.read_text() == POLICY_TEXT:
            POLICY.write_text(POLICY_TEXT)
            POLICY.chmod(0o755)
            self._policy = True
        self._enabled_before = {unit for unit in UNITS if _enabled(unit)}

    def __exit__(self, *_: object) -> None:
        if self._policy:
            POLICY.unlink(missing_ok=True)
        for unit in UNITS:
            if unit not in self._enabled_before and _enabled(unit):
                run(["systemctl", "disable", "--quiet", unit], check=False)


def _enabled(unit: str) -> bool:
    return shutil.which("systemctl") is not None and run(["systemctl", "is-enabled", unit], check=False).returncode == 0
