"""Builds the Go programs of the cluster, and caches them by the content of the Go module and the compiler's version.

A program is built on first use. All checkouts of a user share the cache. A file lock allows one builder at a time. A
program that exists in the cache is complete, because it is created by rename.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from localcluster.errors import ClusterError
from localcluster.locking import locked
from localcluster.progress import Step, Steps
from localcluster.settings import cache_root
from localcluster.shell import follow, run, tail

MODULE = Path(__file__).resolve().parent / "go"
LINK_PACKAGES = 30
"""Number of packages whose compilation takes about as long as linking one program. It is used to estimate durations."""
_PACKAGE = re.compile(r"[\w.~+/-]+", re.ASCII)
"""Matches a line of `go build -v` that is the path of a package."""
MINIMUM_GO = (1, 24)
KUBERNETES_VERSION = "v1.34.2"
TRIES = 4

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
    """Return the compiler's version, such as `go1.24.5`. Raises ClusterError if Go is missing or too old."""
    if shutil.which("go") is None:
        raise ClusterError("Go is not installed: put Go 1.24 or newer on PATH (https://go.dev/dl/)")
    version = run(["go", "env", "GOVERSION"], cwd=MODULE).stdout.strip()
    match = re.match(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_GO:
        raise ClusterError(f"Go is {version or 'unknown'}; Kubernetes 1.34 needs Go 1.24 or newer (https://go.dev/dl/)")
    return version


def cache_key(go: str, module: Path = MODULE) -> str:
    """Return a digest of everything on which the programs depend. go: version of the compiler."""
    digest = hashlib.sha256(f"{go}\0{ldflags()}\0".encode())
    for path in sorted(p for p in module.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(path.relative_to(module).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_network_trouble(output: str) -> bool:
    """Return whether a build with this output has failed because of the network, so that the caller should retry."""
    return _NETWORK_TROUBLE.search(output) is not None


def ensure(names: Iterable[str], steps: Steps) -> Path:
    """Build the programs in `names` that the cache lacks. Return the folder that contains all programs in `names`."""
    names = list(names)
    folder = cache_root() / "bin" / cache_key(go_version())
    if all((folder / name).exists() for name in names):
        return folder
    with locked(folder / ".lock", steps, reason="another build of the same programs"):
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            with steps.step(
                f"build {', '.join(missing)}", expect="the first time: up to 10 minutes on 2 cores"
            ) as step:
                _build(missing, folder, step)
    _drop_old(folder)
    return folder


class BuildProgress:
    """The progress of a build of Go programs, computed from the output of `go build -v` and the linked programs.

    packages: number of packages to compile; 0 while unknown.
    programs: number of programs to link.
    clock:    returns the current time in seconds.
    """

    def __init__(self, *, packages: int, programs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.packages, self.programs = packages, programs
        self.compiled = self.linked = 0
        self._clock = clock
        self._begun = clock()

    def text(self) -> str:
        """Return the progress as text, with the remaining time if it can be estimated."""
        compiled = min(self.compiled, self.packages)
        parts = [f"{compiled} of {self.packages} packages", f"{self.linked} of {self.programs} programs"]
        whole = self.packages + LINK_PACKAGES * self.programs
        done = compiled + LINK_PACKAGES * self.linked
        if done * 20 >= whole and done < whole:
            left = (self._clock() - self._begun) * (whole - done) / done
            parts.append("less than a minute left" if left < 60 else f"about {math.ceil(left / 60)} min left")
        return ", ".join(parts)


def _build(names: Sequence[str], folder: Path, step: Step) -> None:
    """Build the programs `names` in one call of the Go compiler, and retry after network errors.

    In one call, the compiler can link one program, which occupies a single CPU, while it compiles another program.
    """
    flags = ["-mod=readonly", "-trimpath", "-ldflags", ldflags()]
    paths = [PACKAGES[name] for name in names]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for number in range(1, TRIES + 1):
            errors = _build_once(flags, paths, Path(scratch), step)
            if errors is None:
                for name in names:
                    (Path(scratch) / name).replace(folder / name)
                return
            if number == TRIES or not is_network_trouble(errors):
                raise ClusterError(f"building {', '.join(names)} failed (try {number} of {TRIES}):\n{tail(errors)}")
            time.sleep(2**number)


def _build_once(flags: Sequence[str], paths: Sequence[str], scratch: Path, step: Step) -> str | None:
    """Download the modules and build the programs. Return the compiler's messages if this fails, otherwise None."""
    environment = {"CGO_ENABLED": "0"}
    messages: deque[str] = deque(maxlen=200)
    modules = 0

    def on_download(line: str) -> None:
        nonlocal modules
        messages.append(line)
        if line.startswith("go: downloading "):
            modules += 1
            step.detail(f"{modules} modules downloaded")

    listing = scratch / "packages"
    # List the stale packages, which are not compiled yet. This command also downloads all modules.
    stale = ["sh", "-c", 'out=$1; shift; exec "$@" >"$out"', "sh", str(listing), "go", "list", *flags]
    command = [*stale, "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}", *paths]
    if follow(command, on_download, lambda: None, env=environment, cwd=MODULE):
        return "\n".join(messages)
    progress = BuildProgress(packages=len(listing.read_text().split()), programs=len(paths))
    listing.unlink()

    def on_package(line: str) -> None:
        if _PACKAGE.fullmatch(line):
            progress.compiled += 1
        else:
            messages.append(line)

    def on_tick() -> None:
        progress.linked = sum(1 for _ in scratch.iterdir())
        step.detail(progress.text())

    command = ["go", "build", "-v", *flags, "-o", f"{scratch}/", *paths]
    return "\n".join(messages) if follow(command, on_package, on_tick, env=environment, cwd=MODULE) else None


def _drop_old(current: Path, *, keep: int = 2) -> None:
    """Delete all but the newest `keep` sets of programs in the cache. A set has about 600 MB.

    Several sets are kept so that switching between branches does not rebuild them.
    """
    os.utime(current)
    folders = sorted((p for p in current.parent.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in folders[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
