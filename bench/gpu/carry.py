"""Packs the GPU campaign into bundles of a limited size, for a machine without a network.

README.md describes how to use the bundles.

    python -m bench.gpu.carry packages
    python -m bench.gpu.carry pack --size 64 --wheels FOLDER build/gpu-carry

The bundles are consecutive parts of one compressed archive. The archive contains the checkout, wheels of the packages
that a machine with torch lacks, and the model for the steps with a server.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from importlib.metadata import distributions, requires, version
from pathlib import Path
from typing import IO, cast

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu.campaign import MODEL
from bench.gpu.report import ROOT
from megatron_runtime.checkpoints.source import StoredModel, resolve

EXPECTED = ("torch", "triton", "numpy", "pytest", "pytest-xdist", "pip")
"""Packages that the machine must already have, including their dependencies."""
PROJECT = "megatron-inference[runtime]"
LEFT_OUT = ("docs/", ".github/")
"""Folders of the checkout that the campaign does not read."""


def closure(*requirements: str) -> set[str]:
    """Return the normalized names of the installed packages that `requirements` need, directly or indirectly."""
    names: set[str] = set()
    todo = list(map(Requirement, requirements))
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in names or not any(distributions(name=name)):
            continue
        names.add(name)
        extras = (*requirement.extras, "")
        for other in map(Requirement, requires(name) or []):
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(other)
    return names


def carried() -> list[str]:
    """Return the packages that the runtime needs and that the target machine may lack."""
    return sorted(closure(PROJECT) - closure(*EXPECTED) - {"megatron-inference"})


class Bundles:
    """A binary file that is written as several files of `size` bytes or less: bundle-01, bundle-02, …"""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._file: IO[bytes] | None = None
        self.paths: list[Path] = []

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left:
            if self._file is None or self._file.tell() == self._size:
                self.close()
                self.paths.append(self._folder / f"bundle-{len(self.paths) + 1:02}")
                self._file = self.paths[-1].open("wb")
            part = left[: self._size - self._file.tell()]
            self._file.write(part)
            left = left[len(part) :]
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def checkout() -> Iterator[Path]:
    """Yield the paths of the tracked and the new files of the checkout, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted(set(names.split("\0")) - {""}):
        if (ROOT / name).is_file() and not name.startswith(LEFT_OUT):
            yield Path(name)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command(help="Print the packages that travel, with their versions here.")
def packages() -> None:
    click.echo("\n".join(f"{name}=={version(name)}" for name in carried()))


@main.command(help="Write the bundles to FOLDER.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--size", type=click.IntRange(1), required=True, help="Maximum size of a bundle in MiB.")
@click.option("--wheels", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--model", default=MODEL, show_default=True, help="Model for the steps that run a server: a GGUF file.")
def pack(folder: Path, size: int, wheels: Path, model: str) -> None:
    source = resolve(model)
    if not isinstance(source, StoredModel) or source.format != "GGUF":
        raise click.BadParameter(f"{model}: want a GGUF file", param_hint="--model")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("bundle-*"):
        path.unlink()
    bundles = Bundles(folder, size << 20)
    with tarfile.open(fileobj=cast(IO[bytes], bundles), mode="w|gz") as archive:
        for name in checkout():
            archive.add(ROOT / name, arcname=str(name))
        for wheel in sorted(wheels.glob("*.whl")):
            archive.add(wheel, arcname=f"wheels/{wheel.name}")
        archive.add(source.path.resolve(), arcname="model.gguf")
    bundles.close()
    sizes = ", ".join(f"{path.stat().st_size / (1 << 20):.0f}" for path in bundles.paths)
    click.echo(f"{len(bundles.paths)} bundles of {sizes} MiB in {folder}")
    click.echo("there: cat bundle-* | tar -xz -C FOLDER && OUT=RESULTS bash FOLDER/bench/gpu/carried.sh")


if __name__ == "__main__":
    main()
