"""Builds the Go programs of the node and caches them by the module's content and the compiler's version.

A program is built on first use. All checkouts of a user share the cache. A file lock allows one builder at a time, and
programs are created by rename, so that an existing one is complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.locking import locked
from localcluster.progress import Steps
from localcluster.settings import cache_root
from localcluster.shell import run, tail

MODULE = Path(__file__).resolve().parent / "go"
MINIMUM_GO = (1, 24)
KUBERNETES_VERSION = "v1.34.2"
ATTEMPTS = 4

PACKAGES = {
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "coredns": "./coredns",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "pause": "./pause",
}
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kubectl")
NODE = (*CONTROL_PLANE, "kube-scheduler", "kubelet", "kube-proxy", "coredns", "pause")

_NETWORK_TROUBLE = re.compile(
    r"dial tcp|i/o timeout|TLS handshake|connection re(set|fused)|unexpected EOF|no such host|reading https?://"
    r"|502 Bad|503 Service|504 Gateway|429 Too Many|context deadline",
    re.IGNORECASE,
)


def ldflags() -> str:
    major, minor, _ = KUBERNETES_VERSION.lstrip("v").split(".")
    variables = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    return "-s -w " + " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in variables.items())


def go_version() -> str:
    """The compiler's version, such as `go1.24.5`; an error with the remedy when there is none or it is too old."""
    if shutil.which("go") is None:
        raise ClusterError("Go is not installed: put Go 1.24 or newer on PATH (https://go.dev/dl/)")
    version = run(["go", "env", "GOVERSION"], cwd=MODULE).stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_GO:
        raise ClusterError(f"Go is {version or 'unknown'}; Kubernetes 1.34 needs Go 1.24 or newer (https://go.dev/dl/)")
    return version


def cache_key(go: str, module: Path = MODULE) -> str:
    """A digest of everything the programs depend on."""
    digest = hashlib.sha256(f"{go}\0{ldflags()}\0".encode())
    for path in sorted(p for p in module.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(path.relative_to(module).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_network_trouble(output: str) -> bool:
    """Return whether a build failed because of the network and should be retried."""
    return _NETWORK_TROUBLE.search(output) is not None


def ensure(names: Iterable[str], steps: Steps) -> Path:
    """Builds what is missing among `names` and returns the folder that holds them all."""
    names = list(names)
    folder = cache_root() / "bin" / cache_key(go_version())
    if all((folder / name).exists() for name in names):
        return folder
    with locked(folder / ".lock", steps, reason="another build of the same programs"):
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            with steps.step(f"build {', '.join(missing)}", expect="the first time: up to 10 minutes on 2 cores"):
                _build(missing, folder)
    _drop_old(folder)
    return folder


def _build(names: Sequence[str], folder: Path) -> None:
    """Build all in one call, so that linking one program, which uses one CPU, overlaps with compiling another."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ["-mod=readonly", "-trimpath", "-ldflags", ldflags(), "-o", f"{scratch}/"]
        command = ["go", "build", *options, *(PACKAGES[name] for name in names)]
        for attempt in range(1, ATTEMPTS + 1):
            result = run(command, cwd=MODULE, env={"CGO_ENABLED": "0"}, check=False)
            if result.returncode == 0:
                for name in names:
                    (Path(scratch) / name).replace(folder / name)
                return
            if attempt == ATTEMPTS or not is_network_trouble(result.stderr):
                raise ClusterError(
                    f"building {', '.join(names)} failed (attempt {attempt} of {ATTEMPTS}):\n{tail(result.stderr)}"
                )
            time.sleep(2**attempt)


def _drop_old(current: Path, *, keep: int = 2) -> None:
    """Keep the newest `keep` sets of programs, about 600 MB each: switching between branches does not rebuild."""
    os.utime(current)
    folders = sorted((p for p in current.parent.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in folders[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
