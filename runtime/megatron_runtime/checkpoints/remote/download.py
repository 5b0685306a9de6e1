"""Fetch a repository of a hub or a model of an object store: to a directory with a manifest of digests, or to a cache.

The cache of hubs is that of huggingface_hub, which other programs on the machine share: `models--ORG--NAME/` has
contents by digest in `blobs/`, links to them in `snapshots/COMMIT/`, and the commits of branches in `refs/`. Manifests
and partial files of this program are in `.megatron/` beside them. A manifest is written when all its files are
complete. The cache of object stores has the same layout; a commit is the digest of the list of objects.
"""

from __future__ import annotations

import fcntl
import fnmatch
import glob
import hashlib
import logging
import os
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from megatron_runtime.checkpoints.model_files import ModelDirectory, require_safe_name
from megatron_runtime.checkpoints.remote import hf_home
from megatron_runtime.checkpoints.remote.hub import (
    MAX_ATTEMPTS,
    HubApi,
    HubError,
    HubUnavailableError,
    Listing,
    Reference,
    RemoteFile,
    is_commit,
    pause,
    read_token,
)
from megatron_runtime.checkpoints.remote.object_store import (
    MANIFEST_FILE,
    ObjectReference,
    ObjectStoreApi,
    is_object_reference,
)
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import shown

_log = logging.getLogger(__name__)

_OWN_PREFIX = ".megatron-"
_PARTIAL_DIRECTORY = ".megatron-partial"
LOCK_FILE = ".megatron-lock"
_CONCURRENT_FILES = 4
"""One connection seldom saturates the network."""
_LEAST_BYTES, _PACE_SECONDS = 1 << 16, 60.0
"""A connection that transfers fewer bytes in that time is closed; an attempt that transfers fewer makes no progress."""
_READ_BYTES = 1 << 20
_COMMIT_CHARACTERS = 256

_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
_ALWAYS_LEFT_OUT = ("original/*", "onnx/*", "openvino/*", "coreml/*", ".git*", "*.md", "*.png", "*.jpg", "*.gif")
_TOKENIZER_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


class WrongContentError(HubError):
    """The content of a file does not match the hub's list. The message names both digests."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds. files: sha256 and size by path."""

    repository: str
    commit: str
    files: dict[str, dict[str, Any]]


Progress = Callable[[int, int, int], None]
"""Called with the bytes received so far, the bytes of all files, and the number of files."""


def each_tenth(report: Progress) -> Progress:
    """Return a Progress that calls `report` at the beginning and after each tenth of the bytes."""
    reported = -1

    def progress(done: int, size: int, files: int) -> None:
        nonlocal reported
        tenths = done * 10 // size if size else 10
        if tenths > reported:
            reported = tenths
            report(done, size, files)

    return progress


MODEL_CACHE = "MEGATRON_MODEL_CACHE"
"""Variable that names a directory which `megatron fetch --cache` fills. Models in it are used without the network."""
AnyReference = Reference | ObjectReference


class FileSource(Protocol):
    """Reads the files of a listing."""

    clock: Callable[[], float]

    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> AbstractContextManager[Iterator[bytes]]: ...


def parse_reference(model: str) -> AnyReference:
    """Return the reference of `hf:ORG/NAME[@REVISION]`, or of the URL of an object store. Raises HubError."""
    return ObjectReference.parse(model) if is_object_reference(model) else Reference.parse(model)


def connect(reference: AnyReference, *, endpoint: str | None = None, token: str | None = None) -> Any:
    """Return the HubApi or ObjectStoreApi that lists and reads a reference. Raises HubError.

    endpoint, token: of a hub; by default as HubApi and read_token() find them.
    """
    if isinstance(reference, ObjectReference):
        return ObjectStoreApi(reference)
    return HubApi(endpoint=endpoint, token=token or read_token())


def hub_cache() -> Path:
    """Return the directory of the cache that huggingface_hub uses."""
    return Path(os.environ.get("HF_HUB_CACHE") or hf_home() / "hub")


def _repository(reference: AnyReference, cache: Path | None) -> ModelDirectory:
    """Return the directory of a repository in a cache. cache: None means those of this user."""
    if isinstance(reference, ObjectReference):
        root, name = (cache or hf_home()) / "megatron-objects", reference.cache_name
    else:
        root = hub_cache() if cache is None else cache / "hub"
        name = f"models--{reference.repository.replace('/', '--')}"
    return ModelDirectory(root).directory(name)


def cached_directory(
    model: str, *, tokenizer_only: bool = False, cache: Path | None = None, progress: Progress | None = None
) -> Path:
    """Return the cached directory with all files of `model`, fetched when first needed.

    model:          an `hf:` reference or the URL of an object store.
    tokenizer_only: fetch only the tokenizer of a repository that has a tokenizer.json.
    cache:          directory of the cache to fetch to; by default a model in $MEGATRON_MODEL_CACHE is used, and others
                    are fetched to the cache of the Hugging Face libraries.
    progress:       by default it is logged.

    Raises HubError, HubUnavailableError, ModelFileError, OSError.
    """
    reference = parse_reference(model)
    if cache is None:
        found = _in_model_cache(reference)
        if found is not None:
            return found
    repository = _repository(reference, cache)
    branch = repository.directory(f"refs/{reference.revision}").path
    with closing(connect(reference)) as api:
        listing = None if reference.commit else api.list(reference)
        commit = reference.revision if listing is None else listing.commit
        directory, whole, part, blobs = (
            repository.directory(name).path
            for name in (f"snapshots/{commit}", f".megatron/{commit}", f".megatron/{commit}-tokenizer", "blobs")
        )
        for own in (whole, part) if tokenizer_only else (whole,):
            if _is_complete(own, directory):
                _write_branch(reference, branch, commit)
                return directory
        listing = listing or api.list(reference)
        has_own_tokenizer = any(file.path == "tokenizer.json" for file in listing.files)
        own, include = (part, _TOKENIZER_PATTERNS) if tokenizer_only and has_own_tokenizer else (whole, ())
        logged = _silent if include else each_tenth(lambda *counts: _log_progress(reference, *counts))
        _Fetch(api, reference, listing, directory, own, progress or logged, blobs=blobs).run(include)
    _write_branch(reference, branch, commit)
    return directory


def _write_branch(reference: AnyReference, branch: Path, commit: str) -> None:
    if reference.commit or (branch.is_file() and branch.read_text().strip() == commit):
        return
    branch.parent.mkdir(parents=True, exist_ok=True)
    _write_own(branch, commit)


def _in_model_cache(reference: AnyReference) -> Path | None:
    """Return the directory of a reference in $MEGATRON_MODEL_CACHE; None if it is not complete there."""
    cache = os.environ.get(MODEL_CACHE)
    if not cache:
        return None
    repository = _repository(reference, Path(cache))
    commit = reference.commit
    if commit is None:
        branch = repository.file(f"refs/{reference.revision}")
        commit = branch.read_text(_COMMIT_CHARACTERS).strip() if branch is not None else ""
    if not is_commit(commit):
        return None
    directory = repository.directory(f"snapshots/{commit}").path
    return directory if _is_complete(repository.directory(f".megatron/{commit}").path, directory) else None


def cached_snapshot(reference: AnyReference) -> Path | None:
    """Return the directory of a model in $MEGATRON_MODEL_CACHE, or the cached one of a commit; None if a file is
    missing, or for a branch or an object store, which may have changed."""
    found = _in_model_cache(reference)
    if found is not None or reference.commit is None:
        return found
    repository = _repository(reference, None)
    directory, own = (repository.directory(f"{name}/{reference.commit}").path for name in ("snapshots", ".megatron"))
    return directory if _is_complete(own, directory) else None


def _is_complete(own: Path, directory: Path) -> bool:
    """Return whether `directory` has all files of the manifest in `own`: other programs delete from the cache too."""
    manifest = read_manifest(own)
    return manifest is not None and all((directory / name).is_file() for name in manifest.files)


def _silent(done: int, size: int, files: int) -> None: ...


def _log_progress(reference: AnyReference, done: int, size: int, files: int) -> None:
    """Log a line: an engine that fetches would look idle otherwise."""
    percent = done * 100 // size if size else 100
    _log.info("fetching %s: %d %% of %.1f GB in %d files", reference, percent, size / 1e9, files)


def fetch(
    reference: AnyReference,
    directory: Path,
    *,
    api: Any,
    include: Sequence[str] = (),
    progress: Progress = _silent,
    wait: Callable[[float], object] | None = None,
) -> Manifest:
    """Fetch the files of `reference` to `directory`; files that are there and right are not transferred again.

    include: patterns of file names; by default every file of a model except pictures and copies in other formats.
    wait:    sleeps for a number of seconds.

    Raises HubError, HubUnavailableError, OSError.
    """
    listing = api.list(reference, wait=wait or time.sleep)
    return _Fetch(api, reference, listing, directory, directory, progress, wait=wait).run(include)


def fetch_listed(
    reference: AnyReference, listing: Listing, files: Sequence[RemoteFile], directory: Path, *, api: FileSource
) -> None:
    """Fetch these files of a listing to `directory`. Raises HubError, HubUnavailableError, OSError."""
    if files:
        patterns = [glob.escape(file.path) for file in files]
        _Fetch(api, reference, listing, directory, directory, _silent).run(patterns)


@dataclass(slots=True)
class _Fetch:
    """Fetches files, several at a time; the first that fails ends all.

    directory: has the files by their names.
    own:       has manifest, lock and partial files.
    blobs:     of a cache: has the contents by digest, and `directory` has links to them. None: no cache.
    wait:      sleeps for a number of seconds; None: until another file fails.
    """

    api: FileSource
    reference: AnyReference
    listing: Listing
    directory: Path
    own: Path
    progress: Progress
    blobs: Path | None = None
    wait: Callable[[float], object] | None = None
    done: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    files: int = field(default=0, init=False)
    stop: threading.Event = field(default_factory=threading.Event, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, include: Sequence[str]) -> Manifest:
        """Fetch the files that match `include`. Raises as fetch() does."""
        reference, listing = self.reference, self.listing
        self.own.mkdir(parents=True, exist_ok=True)
        with _locked(self.own):
            wanted = choose(listing.files, include)
            _require_apart(wanted, reference)
            if not wanted:
                names = ", ".join(file.path for file in listing.files[:12]) + ", …" * (len(listing.files) > 12)
                raise HubError(f"{reference} has no file that is wanted here: it has {names}")
            manifest = read_manifest(self.own)
            if manifest is not None and manifest.repository != listing.repository:
                raise HubError(
                    f"{self.directory} holds files of {manifest.repository}: name another directory for {reference}"
                )
            known = manifest.files if manifest is not None else {}
            missing = [file for file in wanted if not _is_there(file, self.directory, known)]
            self.files, self.size = len(wanted), sum(file.size for file in wanted)
            self._received(self.size - sum(file.size for file in missing))
            needed = sum(file.size for file in missing if not self._content(file).is_file())
            free = shutil.disk_usage(self.own).free
            if needed > free:
                raise OSError(f"no space left on device: {self.own} has {free} bytes free, {needed} are to be fetched")
            held = known | self._get_all(missing)
            found = Manifest(listing.repository, listing.commit, {file.path: held[file.path] for file in wanted})
            _write_own(self.own / MANIFEST_FILE, json.dumps(asdict(found), indent=2) + "\n")
            # A file of an earlier revision that this revision does not have would be taken for a part of the model.
            for name in set(known) - {file.path for file in listing.files}:
                _inside(self.directory, name).unlink(missing_ok=True)
            shutil.rmtree(self.own / _PARTIAL_DIRECTORY, ignore_errors=True)
            return found

    def _get_all(self, files: Sequence[RemoteFile]) -> dict[str, dict[str, Any]]:
        """Return sha256 and size by path."""
        with ThreadPoolExecutor(_CONCURRENT_FILES, thread_name_prefix="fetch") as pool:
            transfers = {pool.submit(self._get, file): file for file in files}
            try:
                return {
                    transfers[done].path: _entry(transfers[done], done.result()) for done in as_completed(transfers)
                }
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _get(self, file: RemoteFile) -> str:
        """Return the sha256 of a file, which is transferred unless its content is there."""
        target = self._content(file)
        name = hashlib.sha256(f"{file.path}\0{file.digest}".encode()).hexdigest()[:40]
        partial = _inside(self.own, f"{_PARTIAL_DIRECTORY}/{name}")
        for path in (partial, target):
            path.parent.mkdir(parents=True, exist_ok=True)
        # The name of a content in a cache has its version. Another file of that size may have another content.
        comparable = self.blobs is not None or not file.version
        digest = check_file(file, target) if comparable else None
        if digest is not None:
            self._received(file.size)
        else:
            digest = self._transfer(file, partial)
            partial.replace(target)
        if self.blobs is not None:
            path, link = _inside(self.directory, file.path), partial.with_suffix(".link")
            path.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, path.parent))
            link.replace(path)
        return digest

    def _content(self, file: RemoteFile) -> Path:
        """Return the path of the content of `file`. Raises HubError if a link leads elsewhere."""
        return _inside(self.directory, file.path) if self.blobs is None else _inside(self.blobs, file.digest)

    def _transfer(self, file: RemoteFile, partial: Path) -> str:
        """Fetch a file to `partial` and return its sha256. A file with the wrong content is transferred again once.

        partial: holds the bytes received so far; bytes of an earlier process are not transferred again.
        """
        content = _Content(file)
        if partial.is_file():
            content.read(partial)
            self._received(content.size)
        for _ in range(2):
            self._append(file, content, partial)
            if content.is_right:
                return content.sha256
            partial.unlink()
            self._received(-content.size)
            wrong, content = content, _Content(file)
            _log.warning("%s came with digest %s, it should be %s", file.path, wrong.digest, file.digest)
        raise WrongContentError(
            f"{file.path} of {self.listing.repository}@{self.listing.commit} came twice with digest {wrong.digest}, "
            f"the hub lists {file.digest}: a proxy or the network changes it"
        )

    def _append(self, file: RemoteFile, content: _Content, partial: Path) -> None:
        """Write to `partial` until it has the file's size. Writes are unbuffered, so a killed process loses nothing."""
        failures = 0
        with os.fdopen(_open_own(partial, os.O_APPEND), "ab", 0) as out:
            while content.size < file.size:
                before = content.size
                try:
                    self._receive(file, content, out)
                except HubUnavailableError as error:
                    gained = content.size - before
                    failures = 1 if gained >= min(_LEAST_BYTES, file.size - before) else failures + 1
                    if failures >= MAX_ATTEMPTS:
                        raise HubUnavailableError(
                            f"{error}; {content.size} of {file.size} bytes of {file.path} are here: run this again to "
                            "resume"
                        ) from error
                    pause(error, failures, self.wait or self.stop.wait)
            # The manifest vouches for the whole file, so the file must survive a power failure if the manifest does.
            os.fsync(out.fileno())

    def _receive(self, file: RemoteFile, content: _Content, out: BinaryIO) -> None:
        """Write what one connection transfers."""
        clock = self.api.clock
        since, arrived = clock(), 0
        with self.api.open(self.listing, file, start=content.size) as pieces:
            for piece in pieces:
                out.write(piece)
                content.add(piece)
                self._received(len(piece))
                if content.size > file.size:
                    return
                arrived += len(piece)
                passed = clock() - since
                if passed >= _PACE_SECONDS:
                    if arrived < _LEAST_BYTES:
                        raise HubUnavailableError(f"{file.path} came at {arrived} bytes in {passed:.0f} s")
                    since, arrived = clock(), 0
        if content.size < file.size:
            raise HubUnavailableError(f"{file.path} ended after {content.size} of {file.size} bytes")

    def _received(self, count: int) -> None:
        """Report `count` bytes, which is negative if bytes reported before were wrong."""
        if self.stop.is_set():
            raise HubError("the transfer of another file failed")
        with self.lock:
            self.done += count
            self.progress(self.done, self.size, self.files)


def _entry(file: RemoteFile, sha256: str) -> dict[str, Any]:
    """Return the entry of a file in a manifest."""
    return {"sha256": sha256, "size": file.size, **({"version": file.version} if file.version else {})}


class _Content:
    """The digests of the received bytes of a file: sha256 always, and git's if the source knows no other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = self._listed = hashlib.sha256()
        if file.sha256 is None and file.blob is not None:
            # Git names contents by SHA-1, or by SHA-256 in repositories of that format.
            kind = "sha256" if len(file.digest) == 64 else "sha1"
            self._listed = hashlib.new(kind, f"blob {file.size}\0".encode(), usedforsecurity=False)
        self.size = 0

    def add(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._listed is not self._sha256:
            self._listed.update(data)
        self.size += len(data)

    def read(self, path: Path) -> None:
        """Add the content of a file."""
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                self.add(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def digest(self) -> str:
        """The digest to compare with that of the hub's list."""
        return self._listed.hexdigest()

    @property
    def is_right(self) -> bool:
        return self.size == self._file.size and (bool(self._file.version) or self.digest == self._file.digest)


def check_file(file: RemoteFile, path: Path) -> str | None:
    """Return the sha256 of the file at `path` if its content is that of `file`, else None."""
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    content = _Content(file)
    content.read(path)
    return content.sha256 if content.is_right else None


def verify_directory(directory: Path, *, progress: Progress = _silent) -> Manifest:
    """Read every file of a fetched directory again and compare it with the manifest.

    Raises WrongContentError naming every file that is missing or changed, and HubError if there is no manifest.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise HubError(f"{directory} has no {MANIFEST_FILE}: it was not made by `megatron fetch`")
    files = [RemoteFile(name, entry["size"], entry["sha256"], None) for name, entry in manifest.files.items()]
    wrong, done, size = [], 0, sum(file.size for file in files)
    for file in files:
        if check_file(file, directory / file.path) is None:
            path = directory / file.path
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            wrong.append(f"{file.path} ({found}, should be {file.size} bytes with sha256 {file.sha256})")
        done += file.size
        progress(done, size, len(files))
    if wrong:
        raise WrongContentError(
            f"{len(wrong)} of {len(files)} files in {directory} differ from the fetched ones: {'; '.join(wrong)}: "
            f"remove them and run `megatron fetch {manifest.repository}@{manifest.commit} {directory}`"
        )
    return manifest


def choose(files: Sequence[RemoteFile], include: Sequence[str]) -> list[RemoteFile]:
    """Return the files that a model needs, or that match the patterns; never one with the name of our own files."""
    files = [file for file in files if not _folded(file.path).startswith(_OWN_PREFIX)]
    if include:
        return [file for file in files if _matches(file, include)]
    kept = [file for file in files if not _matches(file, _ALWAYS_LEFT_OUT)]
    if any(file.path.endswith((".safetensors", ".gguf", ".distcp", ".packed")) for file in kept):
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
    if file.version:
        return bool(entry.get("version") == file.version)
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


def _require_apart(files: Sequence[RemoteFile], reference: AnyReference) -> None:
    """Raise HubError if two names differ by case only, or if a file is a directory of another."""
    names: dict[str, str] = {}
    for file in files:
        other = names.setdefault(_folded(file.path), file.path)
        if other is not file.path:
            raise HubError(f"{reference} lists {shown(other)} and {shown(file.path)}, which differ by case only")
    for file in files:
        for parent in map(str, reversed(PurePosixPath(file.path).parents)):
            if _folded(parent) in names:
                raise HubError(f"{reference} lists {shown(file.path)} and its directory {shown(parent)} as a file")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _open_own(path: Path, flags: int) -> int:
    """Open one of our own files; a link in its place is not followed."""
    return os.open(path, flags | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory; other processes wait and then find the files."""
    with os.fdopen(_open_own(directory / LOCK_FILE, 0), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_own(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with os.fdopen(_open_own(fresh, os.O_TRUNC), "w") as file:
        file.write(text)
    os.replace(fresh, path)


def _matches(file: RemoteFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)
