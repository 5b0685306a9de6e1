"""Provides a model as vLLM reads it: a directory with config.json and safetensors in the layout of transformers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open

from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFileError, end_tokens
from megatron_runtime.checkpoints.remote.files import recorded_digests, replace_text
from megatron_runtime.checkpoints.source import StoredModel, require_format, resolve
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol import strict_json as json

MARKER_FILE = ".megatron-digests.json"
MANIFEST_FILE = ".megatron-manifest"
"""Manifest of a trainer's weights, in a directory that has such weights."""
READ_BYTES = 1 << 22

TensorTypes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor by its name."""


def model_directory(model: str, *, wanted_format: str = "Auto") -> Path:
    """Return a directory of the model that vLLM can read. Models in other formats are converted once, to bfloat16.

    model:         model reference, as for checkpoints.source.resolve().
    wanted_format: "Auto", which accepts every format, or the only format to accept.

    Raises the errors of resolve(), require_format() and convert().
    """
    source = resolve(model)
    require_format(source, wanted_format, model=model)
    if source.format == "SafeTensors":
        return source.path
    directory = _cache("converted") / _fingerprint(source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engines that start together convert it once
        if not (directory / "config.json").exists():
            # Only a conversion needs torch.
            from megatron_runtime.checkpoints.convert import convert
            from megatron_runtime.tokenization.loader import write_gguf_tokenizer

            convert(source, directory, dtype="bfloat16", write_gguf_tokenizer=write_gguf_tokenizer)
    return directory


def _cache(kind: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / kind


def _fingerprint(source: StoredModel) -> str:
    """Return a fingerprint that changes when the model's files change."""
    files = [source.path] if source.path.is_file() else sorted(source.path.rglob("*"))
    facts = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]


def weights_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(directory))


def weights_digest(directory: Path) -> str:
    """Return the digest of a model's weights, a SHA-256 over the names and contents of its weight files.

    For weights of a trainer, return the SHA-256 of their manifest.

    A file is read only if its digest was not recorded when it was downloaded, or in an earlier call. This function
    records digests in `directory` or, if the directory is read-only, in the cache of this machine.
    """
    manifest = directory / MANIFEST_FILE
    if manifest.exists():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = weight_files(directory)
    downloaded, markers = recorded_digests(directory), _Markers(directory)
    digests = {file: downloaded.get(file.name) or markers.digest(file) for file in files}
    unknown = [file for file, digest in digests.items() if digest is None]
    if unknown:
        before = {file: file.stat() for file in unknown}
        done, total, lock = 0, sum(status.st_size for status in before.values()), threading.Lock()

        def note(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                PROGRESS.report(Stage.VERIFY, done, total)

        note(0)
        with ThreadPoolExecutor(min(len(unknown), os.cpu_count() or 1)) as pool:
            computed = dict(zip(unknown, pool.map(lambda file: _file_digest(file, note), unknown), strict=True))
        markers.record(computed, before)
        digests |= computed
    lines = (f"{file.name} {digest}" for file, digest in digests.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Markers:
    """The recorded digests of the files in a directory.

    The record maps the name of a file to its size, its modification time in nanoseconds, and its SHA-256.
    """

    def __init__(self, directory: Path) -> None:
        name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:24]
        self._paths = (directory / MARKER_FILE, _cache("digests") / f"{name}.json")
        self._entries: dict[str, list[Any]] = {}
        for path in reversed(self._paths):
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_text())
                self._entries |= {name: entry for name, entry in found.items() if isinstance(entry, list)}

    def digest(self, file: Path) -> str | None:
        """Return the recorded digest of a file.

        Return None if no digest is recorded, or if the file has changed since its digest was recorded.
        """
        entry, status = self._entries.get(file.name), file.stat()
        return entry[2] if entry and entry[:2] == [status.st_size, status.st_mtime_ns] and len(entry) == 3 else None

    def record(self, digests: Mapping[Path, str], statuses: Mapping[Path, os.stat_result]) -> None:
        for file, digest in digests.items():
            status = statuses[file]
            self._entries[file.name] = [status.st_size, status.st_mtime_ns, digest]
        for path in self._paths:
            with contextlib.suppress(OSError):  # read-only
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, json.dumps(self._entries))
                return


def require_same_tensors(directory: Path, other: Path) -> None:
    """Raise ValueError if the tensors of two models differ in name, shape or type.

    The types may differ if a trainer published the weights of `other`.
    """
    found, wanted = _tensor_types(directory), _tensor_types(other)
    if (other / MANIFEST_FILE).exists():
        require_same_shapes({name: shape for name, (_, shape) in found.items()}, other, where=f"at {directory}")
        return
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name} at {directory} is {found.get(name, 'absent')}, the weights in use have "
                f"{wanted.get(name, 'none')}: give weights of the same model"
            )


def require_same_shapes(shapes: Mapping[str, tuple[int, ...]], directory: Path, *, where: str) -> None:
    """Raise ValueError if tensors differ in name or shape from the weights in `directory`, which are in use.

    shapes: shape of each tensor by name.
    where:  text that says where these tensors come from, for the error.
    """
    wanted = {name: shape for name, (_, shape) in _tensor_types(directory).items()}
    for name in sorted(shapes.keys() | wanted.keys()):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name} {where} is {shapes.get(name, 'absent')}, the weights in use have "
                f"{wanted.get(name, 'none')}: give whole tensors with the names that the files of the model have"
            )


def _tensor_types(directory: Path) -> TensorTypes:
    types: TensorTypes = {}
    for file in weight_files(directory):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is not a mapping
                described = opened.get_slice(name)
                types[name] = described.get_dtype(), tuple(described.get_shape())
    return types


def eos_ids(directory: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer of the model."""
    place = ModelDirectory(directory)
    config = place.file("config.json")
    if config is None:
        raise ModelFileError(f"{directory} has no config.json: complete the directory")
    return end_tokens(place, config.read_json())


def weight_files(directory: Path) -> Sequence[Path]:
    files = [file.path for file in ModelDirectory(directory).files(".safetensors")]
    if not files:
        raise ModelFileError(f"{directory} has no *.safetensors files: complete the directory")
    return files


def _file_digest(file: Path, note: Callable[[int], None]) -> str:
    """Return the SHA-256 of a file. note: called after each part with the part's number of bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while part := opened.read(READ_BYTES):
            digest.update(part)
            note(len(part))
    return digest.hexdigest()
