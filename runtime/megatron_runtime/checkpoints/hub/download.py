"""Fetch a repository of a hub: to a directory with a manifest of digests, or to the standard Hugging Face cache.

The cache is that of huggingface_hub, which other programs on the machine share: `models--ORG--NAME/` has contents by
digest in `blobs/`, links to them in `snapshots/COMMIT/`, and the commits of branches in `refs/`. Manifests and partial
files of this program are in `.megatron/` beside them.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_runtime.checkpoints.hub import hf_home
from megatron_runtime.checkpoints.hub.client import (
    FileTransfer,
    HubApi,
    HubError,
    Listing,
    Reference,
    RemoteFile,
    WrongContentError,
    check_file,
    patiently,
    read_token,
)
from megatron_runtime.checkpoints.model_files import ModelDirectory, require_safe_name
from megatron_runtime.protocol.text import shown

_log = logging.getLogger(__name__)

_OWN_PREFIX = ".megatron-"
MANIFEST_FILE = ".megatron-manifest.json"
_PARTIAL_DIRECTORY = ".megatron-partial"
_LOCK_FILE = ".megatron-lock"
_COMPLETE_FILE = ".megatron-complete"
"""Written to the cache after the last file: from then on this commit needs no request to the hub."""
_AT_ONCE = 4
"""Files. One connection seldom saturates the network."""

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
_ALWAYS_LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "coreml/*", ".git*", "*.md", "*.png", "*.jpg", "*.gif")
_TOKENIZER_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds. files: sha256 and size by path."""

    repository: str
    commit: str
    files: dict[str, dict[str, Any]]


class Progress(Protocol):
    """Receives the progress of a download."""

    def begin(self, *, files: int, size: int) -> None: ...

    def received(self, count: int) -> None: ...


class _Silent:
    def begin(self, *, files: int, size: int) -> None: ...

    def received(self, count: int) -> None: ...


class _Logged:
    """Implements Progress with a log line per tenth: an engine that fetches would look idle without them."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._size = self._done = self._tenths = 0

    def begin(self, *, files: int, size: int) -> None:
        self._size = size
        _log.info("fetching %s: %d files, %.1f GB", self._reference, files, size / 1e9)

    def received(self, count: int) -> None:
        self._done += count
        tenths = self._done * 10 // max(self._size, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            _log.info("fetching %s: %d %% of %.1f GB", self._reference, tenths * 10, self._size / 1e9)


def model_directory(model: str) -> Path:
    """Return the cached directory with all files of `model`, an `hf:` reference, fetched when first needed.

    Raises HubError, HubUnavailableError, ModelFileError, OSError.
    """
    return _snapshot(Reference.parse(model), tokenizer_only=False)


def tokenizer_directory(model: str) -> Path:
    """Return a directory with the tokenizer of `model`: of a repository with tokenizer.json no weights are fetched."""
    return _snapshot(Reference.parse(model), tokenizer_only=True)


def hub_cache() -> Path:
    """Return the directory of the cache that huggingface_hub uses."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub")


def _snapshot(reference: Reference, *, tokenizer_only: bool) -> Path:
    repository = ModelDirectory(hub_cache()).directory(f"models--{reference.repository.replace('/', '--')}")
    branch = repository.directory(f"refs/{reference.revision}").path
    with closing(HubApi(token=read_token())) as api:
        listing = None if reference.commit else patiently(lambda: api.list(reference), wait=time.sleep)
        commit = reference.revision if listing is None else listing.commit
        directory, whole, part, blobs = (
            repository.directory(name).path
            for name in (f"snapshots/{commit}", f".megatron/{commit}", f".megatron/{commit}-tokenizer", "blobs")
        )
        for own in (whole, part) if tokenizer_only else (whole,):
            if _is_complete(own, directory):
                return directory
        listing = listing or patiently(lambda: api.list(reference), wait=time.sleep)
        has_own_tokenizer = any(file.path == "tokenizer.json" for file in listing.files)
        own, include = (part, _TOKENIZER_PATTERNS) if tokenizer_only and has_own_tokenizer else (whole, ())
        progress = None if include else _Logged(reference)
        _fetch(reference, _Place(directory, own, blobs), api, listing, include=include, progress=progress)
    if not reference.commit:
        branch.parent.mkdir(parents=True, exist_ok=True)
        _write_own(branch, commit)
    (own / _COMPLETE_FILE).touch()
    return directory


def _is_complete(own: Path, directory: Path) -> bool:
    """Whether everything was fetched and is still there: other programs delete from the cache as well."""
    manifest = read_manifest(own) if (own / _COMPLETE_FILE).is_file() else None
    return manifest is not None and all((directory / name).is_file() for name in manifest.files)


def fetch(
    reference: Reference,
    directory: Path,
    *,
    api: HubApi,
    include: Sequence[str] = (),
    progress: Progress | None = None,
    wait: Callable[[float], object] | None = None,
) -> Manifest:
    """Fetch the files of `reference` to `directory`; files that are there and right are not transferred again.

    include: patterns of file names; by default every file of a model except pictures and copies in other formats.
    wait:    sleeps for a number of seconds.

    Raises HubError, HubUnavailableError, OSError.
    """
    place = _Place(directory, directory)
    return _fetch(reference, place, api, None, include=include, progress=progress, wait=wait)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where files go.

    directory: has the files by their names.
    own:       has manifest, lock and partial files.
    blobs:     of a cache: has the contents by digest, and `directory` has links to them. None: no cache.
    """

    directory: Path
    own: Path
    blobs: Path | None = None

    def content(self, file: RemoteFile) -> Path:
        """Return the path of the content of `file`. Raises HubError if a link leads elsewhere."""
        return _inside(self.directory, file.path) if self.blobs is None else _inside(self.blobs, file.digest)

    def name(self, file: RemoteFile, fresh: Path) -> None:
        """Link the name of `file` to its content, if this is a cache. fresh: a free path on the same file system."""
        if self.blobs is not None:
            path = _inside(self.directory, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(os.path.relpath(self.blobs / file.digest, path.parent))
            fresh.replace(path)


def _fetch(
    reference: Reference,
    place: _Place,
    api: HubApi,
    listing: Listing | None,
    *,
    include: Sequence[str],
    progress: Progress | None,
    wait: Callable[[float], object] | None = None,
) -> Manifest:
    progress = progress or _Silent()
    place.own.mkdir(parents=True, exist_ok=True)
    with _locked(place.own):
        listing = listing or patiently(lambda: api.list(reference), wait=wait or time.sleep)
        wanted = choose(listing.files, include)
        _require_apart(wanted, reference)
        if not wanted:
            names = ", ".join(file.path for file in listing.files[:12]) + ", …" * (len(listing.files) > 12)
            raise HubError(f"{reference} has no file that is wanted here: it has {names}")
        manifest = read_manifest(place.own)
        if manifest is not None and manifest.repository != listing.repository:
            raise HubError(
                f"{place.directory} holds files of {manifest.repository}: name another directory for {reference}"
            )
        known = manifest.files if manifest is not None else {}
        missing = [file for file in wanted if not _is_there(file, place.directory, known)]
        progress.begin(files=len(wanted), size=sum(file.size for file in wanted))
        progress.received(sum(file.size for file in wanted) - sum(file.size for file in missing))
        needed = sum(file.size for file in missing if not place.content(file).is_file())
        free = shutil.disk_usage(place.own).free
        if needed > free:
            raise OSError(f"no space left on device: {place.own} has {free} bytes free, {needed} are to be fetched")
        held = {file.path: known[file.path] for file in wanted if file not in missing}
        _Transfers(api=api, listing=listing, place=place, held=held, progress=progress, wait=wait).run(missing)
        found = Manifest(listing.repository, listing.commit, {file.path: held[file.path] for file in wanted})
        _write_manifest(place.own, found)
        # A file of an earlier revision that this revision does not have would be taken for a part of the model.
        for name in set(known) - {file.path for file in listing.files}:
            _inside(place.directory, name).unlink(missing_ok=True)
        shutil.rmtree(place.own / _PARTIAL_DIRECTORY, ignore_errors=True)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfers:
    """Transfers several files at a time; the first that fails ends all. held: sha256 and size by path, so far."""

    api: HubApi
    listing: Listing
    place: _Place
    held: dict[str, dict[str, Any]]
    progress: Progress
    wait: Callable[[float], object] | None
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, files: Sequence[RemoteFile]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch") as pool:
            transfers = [pool.submit(self._get, file) for file in files]
            try:
                for transfer in as_completed(transfers):
                    transfer.result()
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _get(self, file: RemoteFile) -> None:
        target = self.place.content(file)
        name = hashlib.sha256(f"{file.path}\0{file.digest}".encode()).hexdigest()[:40]
        partial = _inside(self.place.own, f"{_PARTIAL_DIRECTORY}/{name}")
        for path in (partial, target):
            path.parent.mkdir(parents=True, exist_ok=True)
        digest = check_file(file, target)
        if digest is not None:
            self._received(file.size)
        else:
            transfer = FileTransfer(
                api=self.api,
                listing=self.listing,
                file=file,
                target=target,
                partial=partial,
                received=self._received,
                wait=self.wait or self.stop.wait,
            )
            digest = transfer.run()
        self.place.name(file, partial.with_suffix(".link"))
        with self.lock:
            self.held[file.path] = {"sha256": digest, "size": file.size}
            # After every file, so that the next run need not read the files that are there.
            _write_manifest(self.place.own, Manifest(self.listing.repository, self.listing.commit, self.held))

    def _received(self, count: int) -> None:
        if self.stop.is_set():
            raise HubError("another file cannot be had")
        with self.lock:
            self.progress.received(count)


def verify_directory(directory: Path, *, progress: Progress | None = None) -> Manifest:
    """Read every file of a fetched directory again and compare it with the manifest.

    Raises WrongContentError naming every file that is missing or changed, and HubError if there is no manifest.
    """
    progress = progress or _Silent()
    manifest = read_manifest(directory)
    if manifest is None:
        raise HubError(f"{directory} has no {MANIFEST_FILE}: it was not made by `megatron fetch`")
    files = [RemoteFile(name, entry["size"], entry["sha256"], None) for name, entry in manifest.files.items()]
    progress.begin(files=len(files), size=sum(file.size for file in files))
    wrong = []
    for file in files:
        if check_file(file, directory / file.path) is None:
            path = directory / file.path
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            wrong.append(f"{file.path} ({found}, should be {file.size} bytes with sha256 {file.sha256})")
        progress.received(file.size)
    if wrong:
        raise WrongContentError(
            f"{len(wrong)} of {len(files)} files in {directory} are not what was fetched: {'; '.join(wrong)}: remove "
            f"them and run `megatron fetch {manifest.repository}@{manifest.commit} {directory}`"
        )
    return manifest


def choose(files: Sequence[RemoteFile], include: Sequence[str]) -> list[RemoteFile]:
    """Return the files that a model needs, or that match the patterns; never one with the name of our own files."""
    files = [file for file in files if not _folded(file.path).startswith(_OWN_PREFIX)]
    if include:
        return [file for file in files if _matches(file, include)]
    kept = [file for file in files if not _matches(file, _ALWAYS_LEFT_OUT)]
    if any(file.path.endswith((".safetensors", ".gguf", ".distcp")) for file in kept):
        distributed = any(file.path.endswith(".distcp") for file in kept)
        needed = ("common.pt",) if distributed else ()
        kept = [file for file in kept if file.path.endswith(needed) or not _matches(file, _OTHER_FORMATS)]
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
    # The hub knows no sha256 of small files: they are read again.
    return entry["sha256"] == file.sha256 if file.sha256 is not None else check_file(file, path) is not None


def _inside(directory: Path, name: str) -> Path:
    """Return the path of `name` in `directory`. Raises HubError if a link in it leads elsewhere."""
    path, root = directory / name, Path(os.path.realpath(directory))
    # Files are replaced, never written through a link: only the directories matter.
    if not Path(os.path.realpath(path.parent)).is_relative_to(root):
        raise HubError(
            f"{path.parent} is a link to {shown(os.path.realpath(path.parent))}, outside of {root}: nothing is written "
            "there; remove the link"
        )
    return path


def _require_apart(files: Sequence[RemoteFile], reference: Reference) -> None:
    """Raise HubError if two names differ by case only, or if a file is a directory of another."""
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
    """Open one of our own files; a link in its place is not followed."""
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; other processes wait and then find the files."""
    with os.fdopen(_open_own(directory / _LOCK_FILE, 0), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    _write_own(directory / MANIFEST_FILE, json.dumps(asdict(manifest), indent=2) + "\n")


def _write_own(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with os.fdopen(_open_own(fresh, os.O_TRUNC), "w") as file:
        file.write(text)
    os.replace(fresh, path)


def _matches(file: RemoteFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)
