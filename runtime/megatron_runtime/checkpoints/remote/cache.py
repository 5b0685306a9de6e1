"""The models in the caches of this user: size, format and last use, and their removal. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_runtime.checkpoints.remote import HUB_PREFIX, LOCK_FILE, MODEL_CACHE, hf_home, hub_cache
from megatron_runtime.checkpoints.remote.files import read_manifest

_HUB_DIRECTORY = "models--"


class ModelInUseError(ValueError):
    """A model cannot be removed now. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """All revisions of one repository in a cache.

    reference: as `megatron serve` takes it, without a revision.
    format:    "GGUF", "SafeTensors", "TorchDist", or "" if no revision has weights of these formats.
    size:      of the contents, in bytes.
    used:      time of the last access to a content, as the file system records it, in seconds since 1970.
    """

    reference: str
    path: Path
    format: str
    size: int
    used: float


def cached_models() -> list[CachedModel]:
    """Return the models in the caches, by reference: the cache of huggingface_hub, that of object stores, and
    $MEGATRON_MODEL_CACHE.
    """
    roots = {hub_cache(), hf_home() / "megatron-objects"}
    if shared := os.environ.get(MODEL_CACHE):
        roots |= {Path(shared) / "hub", Path(shared) / "megatron-objects"}
    found = [_model(path) for root in roots if root.is_dir() for path in root.iterdir() if _is_model(path)]
    return sorted(found, key=lambda model: (model.reference, model.path))


def remove(model: CachedModel) -> None:
    """Delete all revisions of a model. Raises ModelInUseError while one is fetched, OSError."""
    with ExitStack() as locks:
        for path in model.path.glob(f".megatron/*/{LOCK_FILE}"):
            lock = locks.enter_context(path.open("rb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelInUseError(f"{model.reference} is being fetched: end that command first") from None
        if model.path.name.startswith(_HUB_DIRECTORY):
            _remove_from_hub_cache(model.path)
        if model.path.exists():
            shutil.rmtree(model.path)


def _remove_from_hub_cache(path: Path) -> None:
    """Delete the revisions of a repository with the contents that the cache shares between repositories."""
    from huggingface_hub import scan_cache_dir

    cache = scan_cache_dir(path.parent)
    # Another repository may have a revision of the same name.
    cache = replace(cache, repos=frozenset(repo for repo in cache.repos if repo.repo_path == path.resolve()))
    cache.delete_revisions(*(found.commit_hash for repo in cache.repos for found in repo.revisions)).execute()


def _is_model(path: Path) -> bool:
    is_hub = path.name.startswith(_HUB_DIRECTORY)
    return path.is_dir() and not path.is_symlink() and (is_hub or path.parent.name == "megatron-objects")


def _model(path: Path) -> CachedModel:
    contents = [file.stat() for file in _contents(path)]
    return CachedModel(
        _reference(path),
        path,
        _format(path),
        sum(status.st_size for status in contents),
        max((max(status.st_atime, status.st_mtime) for status in contents), default=path.stat().st_mtime),
    )


def _contents(path: Path) -> set[Path]:
    """Return the contents of a repository, of which some are beside the repositories."""
    return {file.resolve() for file in path.rglob("*") if file.is_file()}


def _reference(path: Path) -> str:
    if path.name.startswith(_HUB_DIRECTORY):
        return HUB_PREFIX + path.name.removeprefix(_HUB_DIRECTORY).replace("--", "/", 1)
    for own in path.glob(".megatron/*/"):
        if (manifest := read_manifest(own)) is not None:
            return manifest.repository
    return path.name  # an interrupted first download


def _format(path: Path) -> str:
    names = {file.name for file in path.glob("snapshots/*/**/*")}
    formats = {".gguf": "GGUF", ".distcp": "TorchDist", ".packed": "Packed", ".safetensors": "SafeTensors"}
    for ending, name in formats.items():
        if any(each.endswith(ending) for each in names):
            return name
    return ""
