"""A repository of the hub in a directory, with a manifest of what every file must be."""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_runtime.checkpoints.hub.api import HubApi, HubError, Listing, Reference, RemoteFile
from megatron_runtime.checkpoints.hub.transfer import WrongContentError, check_file, fetch_file, patiently
from megatron_runtime.checkpoints.model_files import require_safe_name
from megatron_runtime.protocol.text import shown

_OWN_PREFIX = ".megatron-"
MANIFEST_FILE = ".megatron-manifest.json"
_PARTIAL_DIRECTORY = ".megatron-partial"
_LOCK_FILE = ".megatron-lock"
_AT_ONCE = 4
"""Files. One connection seldom fills a line."""

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
_ALWAYS_LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "coreml/*", ".git*", "*.md", "*.png", "*.jpg", "*.gif")
TOKENIZER_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds. files: sha256 and size by path."""

    repository: str
    commit: str
    files: dict[str, dict[str, Any]]


class Progress(Protocol):
    """What is told while files come."""

    def begin(self, *, files: int, size: int) -> None: ...

    def received(self, count: int) -> None: ...


class _Silent:
    def begin(self, *, files: int, size: int) -> None: ...

    def received(self, count: int) -> None: ...


def fetch(
    reference: Reference,
    directory: Path,
    *,
    api: HubApi,
    listing: Listing | None = None,
    include: Sequence[str] = (),
    progress: Progress | None = None,
    wait: Callable[[float], object] | None = None,
) -> Manifest:
    """Get the files of `reference` to `directory`; those that are there and right are not fetched again.

    listing: of `reference`, where the caller has asked for it.
    include: patterns of what to get; by default all but what the same weights are in other formats, and pictures.
    wait:    lets a number of seconds pass.

    Raises HubError, HubUnavailableError, OSError.
    """
    told = progress or _Silent()
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        listing = listing or patiently(lambda: api.list(reference), wait=wait or time.sleep)
        wanted = choose(listing.files, include)
        _require_apart(wanted, reference)
        if not wanted:
            raise HubError(f"{reference} has no file that is wanted here: it has {_names(listing.files)}")
        manifest = read_manifest(directory)
        if manifest is not None and manifest.repository != listing.repository:
            raise HubError(f"{directory} holds files of {manifest.repository}: name another directory for {reference}")
        known = manifest.files if manifest is not None else {}
        missing = [file for file in wanted if not _is_there(file, directory, known)]
        told.begin(files=len(wanted), size=sum(file.size for file in wanted))
        told.received(sum(file.size for file in wanted) - sum(file.size for file in missing))
        _require_space(missing, directory)
        held = {file.path: known[file.path] for file in wanted if file not in missing}
        _Transfers(api, listing, directory, held=held, told=told, wait=wait).run(missing)
        found = Manifest(listing.repository, listing.commit, {file.path: held[file.path] for file in wanted})
        _write_manifest(directory, found)
        # What an earlier revision had and this one has not would be taken for a part of the model.
        for name in set(known) - {file.path for file in listing.files}:
            _inside(directory, name).unlink(missing_ok=True)
        shutil.rmtree(directory / _PARTIAL_DIRECTORY, ignore_errors=True)
        return found


class _Transfers:
    """Several files at once; the first that cannot be had ends all."""

    def __init__(
        self,
        api: HubApi,
        listing: Listing,
        directory: Path,
        *,
        held: dict[str, dict[str, Any]],
        told: Progress,
        wait: Callable[[float], object] | None,
    ) -> None:
        self._api = api
        self._listing = listing
        self._directory = directory
        self._held = held
        self._told = told
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._lock = threading.Lock()

    def run(self, files: Sequence[RemoteFile]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            transfers = [pool.submit(self._get, file) for file in files]
            try:
                for transfer in as_completed(transfers):
                    transfer.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _get(self, file: RemoteFile) -> None:
        target = _inside(self._directory, file.path)
        digest = check_file(file, target)
        if digest is not None:
            self._received(file.size)
        else:
            name = hashlib.sha256(f"{file.path}\0{file.sha256 or file.blob}".encode()).hexdigest()[:40]
            partial = _inside(self._directory, f"{_PARTIAL_DIRECTORY}/{name}")
            for place in (partial, target):
                place.parent.mkdir(parents=True, exist_ok=True)
            digest = fetch_file(
                self._api,
                self._listing,
                file,
                target=target,
                partial=partial,
                received=self._received,
                wait=self._wait,
            )
        with self._lock:
            self._held[file.path] = {"sha256": digest, "size": file.size}
            # After every file, so that what is there needs no second look when this is run again.
            _write_manifest(self._directory, Manifest(self._listing.repository, self._listing.commit, self._held))

    def _received(self, count: int) -> None:
        if self._stop.is_set():
            raise HubError("another file cannot be had")
        with self._lock:
            self._told.received(count)


def verify_directory(directory: Path, *, progress: Progress | None = None) -> Manifest:
    """Read every file of a fetched directory again and compare it with the manifest.

    Raises WrongContentError naming every file that is missing or changed, and HubError where there is no manifest.
    """
    told = progress or _Silent()
    manifest = read_manifest(directory)
    if manifest is None:
        raise HubError(f"{directory} has no {MANIFEST_FILE}: it was not made by `megatron fetch`")
    files = [RemoteFile(name, entry["size"], entry["sha256"], None) for name, entry in manifest.files.items()]
    told.begin(files=len(files), size=sum(file.size for file in files))
    wrong = []
    for file in files:
        if check_file(file, directory / file.path) is None:
            path = directory / file.path
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            wrong.append(f"{file.path} ({found}, should be {file.size} bytes with sha256 {file.sha256})")
        told.received(file.size)
    if wrong:
        raise WrongContentError(
            f"{len(wrong)} of {len(files)} files in {directory} are not what was fetched: {'; '.join(wrong)}: remove "
            f"them and run `megatron fetch {manifest.repository}@{manifest.commit} {directory}`"
        )
    return manifest


def choose(files: Sequence[RemoteFile], include: Sequence[str]) -> list[RemoteFile]:
    """Those of `files` that a model needs, or that the patterns name; none that is called as our own are."""
    files = [file for file in files if not _folded(file.path).startswith(_OWN_PREFIX)]
    if include:
        return [file for file in files if _matches(file, include)]
    kept = [file for file in files if not _matches(file, _ALWAYS_LEFT_OUT)]
    if any(file.path.endswith((".safetensors", ".gguf", ".distcp")) for file in kept):
        distributed = any(file.path.endswith(".distcp") for file in kept)
        kept = [
            file
            for file in kept
            if not _matches(file, _OTHER_FORMATS) or (distributed and file.path.endswith("common.pt"))
        ]
    return kept


def read_manifest(directory: Path) -> Manifest | None:
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        manifest = Manifest(**json.loads(path.read_text()))
        for name, entry in manifest.files.items():
            require_safe_name(name)
            if not isinstance(entry["size"], int) or not isinstance(entry["sha256"], str):
                raise ValueError(f"{shown(name)} has no size or no sha256")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise HubError(f"{path} is damaged ({error}): remove it and fetch again") from error
    return manifest


def _is_there(file: RemoteFile, directory: Path, known: dict[str, dict[str, Any]]) -> bool:
    entry, path = known.get(file.path), _inside(directory, file.path)
    if entry is None or not path.is_file() or path.stat().st_size != file.size:
        return False
    # Small files have no sha256 on the hub: they are looked at again.
    return entry["sha256"] == file.sha256 if file.sha256 is not None else check_file(file, path) is not None


def _inside(directory: Path, name: str) -> Path:
    """Where `name` is in `directory`. Raises HubError if a link in it leads elsewhere."""
    path, root = directory / name, Path(os.path.realpath(directory))
    # What a link is to is replaced, never written to: the directories before it count.
    if not Path(os.path.realpath(path.parent)).is_relative_to(root):
        raise HubError(
            f"{path.parent} is a link to {shown(os.path.realpath(path.parent))}, outside of {root}: nothing is written "
            "there; remove the link"
        )
    return path


def _require_apart(files: Sequence[RemoteFile], reference: Reference) -> None:
    """No two files are one where case does not count, and none is a directory of another. Raises HubError."""
    names: dict[str, str] = {}
    for file in files:
        other = names.setdefault(_folded(file.path), file.path)
        if other is not file.path:
            raise HubError(f"{reference} lists {shown(other)} and {shown(file.path)}, which differ by case only")
    for file in files:
        parts = file.path.split("/")
        for count in range(1, len(parts)):
            if _folded("/".join(parts[:count])) in names:
                raise HubError(
                    f"{reference} lists {shown(file.path)} and its directory {shown('/'.join(parts[:count]))} as a file"
                )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _open_own(path: Path, flags: int) -> int:
    """One of our own files; a link in its place is not followed."""
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _require_space(missing: Sequence[RemoteFile], directory: Path) -> None:
    needed, free = sum(file.size for file in missing), shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"no space left on device: {directory} has {free} bytes free, {needed} are to be fetched")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time; the others wait and find everything there."""
    with os.fdopen(_open_own(directory / _LOCK_FILE, 0), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    fresh = directory / f"{MANIFEST_FILE}.new"
    with os.fdopen(_open_own(fresh, os.O_TRUNC), "w") as file:
        file.write(json.dumps(asdict(manifest), indent=2) + "\n")
    os.replace(fresh, directory / MANIFEST_FILE)


def _matches(file: RemoteFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)


def _names(files: Sequence[RemoteFile]) -> str:
    return ", ".join(file.path for file in files[:12]) + (", …" if len(files) > 12 else "")
