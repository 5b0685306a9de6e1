"""Builds the project's images with buildah, and loads them into a running cluster.

No image is pulled from a registry. debootstrap creates the base image, and apt, pip and uv install everything else with
the settings of this machine. An image is built again only if its inputs have changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from localcluster import clientconfig, packages, store
from localcluster.errors import ClusterError
from localcluster.locking import locked
from localcluster.mounts import unmount_below
from localcluster.progress import Step, Steps
from localcluster.settings import REPOSITORY, cache_root
from localcluster.shell import run, tail

TARGETS = {
    "operator": "localhost/megatron-operator:dev",
    "runtime": "localhost/megatron-runtime:dev",
    "runtime-vllm": "localhost/megatron-runtime-vllm:dev",
}
DEFAULT_TARGETS = ("operator", "runtime")
"""The targets that are built by default. `runtime-vllm` is left out, because it needs 8 GB and only vLLM engines use
it.
"""
# The inputs of an image: the files that .dockerignore includes, and the two files that define the build.
INPUTS = (
    "Dockerfile",
    ".dockerignore",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "hatch_build.py",
    "requirements",
    "operator/megatron_operator",
    "runtime/megatron_runtime",
    "kernels/megatron_kernels",
)
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
BASE_REMOVED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)
BUILD_FOLDER = "/run/megatron-build"


def inputs_digest(repository: Path, base: str) -> str:
    """Return a digest of all inputs of the images. base: digest of the base image."""
    digest = hashlib.sha256(base.encode())
    for name in INPUTS:
        path = repository / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts and file.exists():
                digest.update(f"\0{file.relative_to(repository).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def build(targets: Sequence[str], steps: Steps, *, repository: Path = REPOSITORY) -> list[store.Image]:
    """Build the images of `targets` whose inputs have changed, and return the images of all `targets`."""
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ClusterError(f"image {', '.join(unknown)} is unknown; there are {', '.join(TARGETS)}")
    packages.ensure(packages.IMAGES, steps)
    with _exclusive(steps):
        base = _ensure_base(steps)
        wanted = inputs_digest(repository, base.reference)
        built = False
        for target in targets:
            first = store.find(TARGETS[target]) is None
            with steps.step(
                f"image {target}", expect="the first time up to 5 minutes on 2 cores" if first else ""
            ) as step:
                if _stamp(target, wanted) == _last_stamp(target):
                    step.note("unchanged")
                else:
                    _build(target, repository, base.reference, step)
                    _stamp_file(target).write_text(_stamp(target, wanted) or "")
                    built = True
        if built:
            run(store.buildah("rmi", "--prune"), check=False)
    return [_found(TARGETS[target]) for target in targets]


def _build(target: str, repository: Path, base: str, step: Step) -> None:
    with tempfile.TemporaryDirectory(dir=_scratch()) as folder:
        mounts = clientconfig.mounts(Path(folder), target=BUILD_FOLDER)
        apt = Path(folder) / "apt.conf"
        apt.write_text("".join(f'Acquire::http::Proxy "{proxy}";\n' for proxy in _apt_proxy().values()))
        mounts.append(clientconfig.Mount(apt, "/etc/apt/apt.conf.d/90megatron-build"))
        arguments = [
            "--layers",
            "--isolation=chroot",
            "--network=host",
            f"--target={target}",
            f"--tag={TARGETS[target]}",
            f"--build-arg=BASE_IMAGE={base}",
            "--build-arg=UV_NO_CACHE=false",
            f"--build-arg=UV_CONFIG_FILE={BUILD_FOLDER}/uv.toml",
            f"--build-arg=PIP_CONFIG_FILE={BUILD_FOLDER}/pip.conf",
            "--build-arg=VLLM_CPU=1",  # build vLLM for CPUs, because the node has no GPU
            *(f"--build-arg={name}" for name in clientconfig.PROXY_VARIABLES if name in os.environ),
            *(mount.argument() for mount in mounts),
        ]
        _stream(store.buildah("build", *arguments, str(repository)), _scratch() / f"{target}.log", step)


def _stamp(target: str, inputs: str) -> str | None:
    """Return the stamp of a target's image: the digest of the build's inputs, and the digest of the image.

    Returns None if there is no image. An image is built again if this stamp differs from the stored stamp.

    The launcher stores the stamp in a file next to the image store. A label of the image cannot contain the stamp,
    because buildah's layer cache ignores labels.
    """
    image = store.find(TARGETS[target])
    return f"{inputs} {image.digest}" if image is not None else None


def _stamp_file(target: str) -> Path:
    return store.root() / f"{target}.inputs"


def _last_stamp(target: str) -> str:
    path = _stamp_file(target)
    return path.read_text() if path.exists() else ""


def _stream(command: Sequence[str], log: Path, step: Step) -> None:
    """Run a build command, and show its current instruction in `step`. log: file that receives the whole output."""
    environment = {**os.environ, "TMPDIR": str(_scratch())}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            if " STEP " in line or line.startswith("STEP "):
                step.detail(line.partition("STEP ")[2].strip()[:70])
        code = process.wait()
    if code != 0:
        raise ClusterError(f"the build failed with exit status {code}; the end of {log}:\n{tail(log.read_text(), 25)}")


def _ensure_base(steps: Steps) -> store.Image:
    """Return the base image, a minimal system with Python, and create it if it does not exist.

    The packages are from this machine's distribution and mirror.
    """
    suite, mirror, components = _distribution()
    reference = f"localhost/megatron-base:{suite}"
    current = store.find(reference)
    if current is not None:
        return current
    with steps.step(f"base system {suite} by debootstrap", expect="about a minute") as step:
        folder = Path(tempfile.mkdtemp(dir=_scratch()))
        try:
            step.detail(mirror)
            _debootstrap(suite, mirror, components, folder / "root")
            recipe = folder / "Dockerfile"
            recipe.write_text('FROM scratch\nCOPY . /\nCMD ["/bin/sh"]\n')
            options = ["--isolation=chroot", f"--file={recipe}", f"--tag={reference}", str(folder / "root")]
            run(store.buildah("build", *options), env={"TMPDIR": str(_scratch())})
        finally:
            unmount_below(folder)
            shutil.rmtree(folder)
    return _found(reference)


def _debootstrap(suite: str, mirror: str, components: list[str], root: Path) -> None:
    options = ["--variant=minbase", f"--include={BASE_PACKAGES}", f"--components={','.join(components)}"]
    run(["debootstrap", *options, suite, str(root), mirror], env=_apt_proxy())
    for name in BASE_REMOVED:
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "var/cache/apt/archives/partial").mkdir(parents=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)
    # Clear the files that debootstrap copies from this machine.
    (root / "etc/resolv.conf").write_text("")
    (root / "etc/hostname").write_text("localhost\n")


def _distribution() -> tuple[str, str, list[str]]:
    """Return codename, mirror and components of this machine's distribution, from apt's configuration."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    listing = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Created-By: Packages"]
    )
    mirror, components = archive(listing.stdout, suite)
    if mirror:
        return suite, mirror, components
    raise ClusterError(
        f"apt knows no mirror for {suite or 'this system'}'s main component; see /etc/apt/sources.list.d"
    )


def archive(listing: str, suite: str) -> tuple[str, list[str]]:
    """Return the mirror of the suite's main component, and all components of the suite on this mirror.

    listing: apt's list of sources.

    All components are needed, because Ubuntu's package for venv is in universe.
    """
    lines = [line.split() for line in listing.splitlines()]
    mirror = next((uri for uri, codename, component in lines if (codename, component) == (suite, "main")), "")
    return mirror, list(
        dict.fromkeys(component for uri, codename, component in lines if (uri, codename) == (mirror, suite))
    )


def _apt_proxy() -> dict[str, str]:
    """Return apt's proxy as environment variables, which debootstrap reads."""
    shell = run(["apt-config", "shell", "PROXY", "Acquire::http::Proxy"]).stdout.strip()
    value = shlex.split(shell.partition("=")[2])[0] if shell else ""
    return {"http_proxy": value} if value and value != "DIRECT" else {}


def _found(reference: str) -> store.Image:
    image = store.find(reference)
    if image is None:
        raise ClusterError(f"image {reference} is not in the store at {store.root()}: run `build-images`")
    return image


def _scratch() -> Path:
    folder = cache_root() / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _exclusive(steps: Steps) -> Iterator[None]:
    """Return a context that holds the lock of the image store.

    On entry and on exit, the context removes the working containers and mounts of interrupted builds.
    """
    with locked(_scratch() / ".lock", steps, reason="another image build"):
        try:
            _forget_interrupted()
            yield
        finally:
            _forget_interrupted()


def _forget_interrupted() -> None:
    """Remove the working containers and mounts of interrupted builds.

    The caller must hold the lock, so that no other build uses them.
    """
    if (store.root() / "storage").exists():
        run(store.buildah("rm", "--all"), check=False)
        unmount_below(store.root())
    for left in _scratch().glob("tmp*"):
        unmount_below(left)
        shutil.rmtree(left)
