"""Fetches a model from a hub or an object store, to a directory or to a cache.

The cache for hubs is the cache of huggingface_hub, which other programs on the machine share. In the directory
`models--ORG--NAME/`, `blobs/` has the contents of files, named by digest. `snapshots/COMMIT/` has links to these
contents, and `refs/` has the commits of branches. This program adds manifests of digests in `.megatron/`. It writes a
manifest when all files are complete and their digests match the hub's list. The cache for object stores has the same
layout, in which a commit is a digest of the list of objects.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.model_files import OTHER_VOCABULARIES, TOKENIZER_FILE, ModelDirectory
from megatron_runtime.checkpoints.remote import MODEL_CACHE, hf_home, hub_cache
from megatron_runtime.checkpoints.remote.files import (
    HubError,
    Listing,
    Manifest,
    Progress,
    RemoteFile,
    WrongContentError,
    check_file,
    choose,
    each_tenth,
    is_commit,
    read_manifest,
    replace_text,
    retried,
    silent,
    write_manifest,
)
from megatron_runtime.checkpoints.remote.hub import HubApi, Reference, offline_directory
from megatron_runtime.checkpoints.remote.object_store import ObjectReference, ObjectStoreApi, is_object_reference
from megatron_runtime.process.progress import PROGRESS, Stage

_log = logging.getLogger(__name__)

_PARTIAL_DIRECTORY = ".megatron-partial"
_CONCURRENT_FILES = 8
"""Number of files that are fetched concurrently, because one connection seldom saturates the network."""
_COMMIT_CHARACTERS = 256
_TOKENIZER_SUFFIX = "-tokenizer"
"""Suffix of the manifest directory for a commit if only its tokenizer was fetched."""
_TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
AnyReference = Reference | ObjectReference
Source = HubApi | ObjectStoreApi


def parse_reference(model: str) -> AnyReference:
    """Return the reference in `hf:ORG/NAME[@REVISION]` or in the URL of an object store. Raises HubError."""
    return ObjectReference.parse(model) if is_object_reference(model) else Reference.parse(model)


def connect(reference: AnyReference, *, endpoint: str | None = None, token_file: Path | None = None) -> Source:
    """Return the client that lists and reads the files of a reference. Raises HubError or SecretError.

    endpoint, token_file: endpoint and token of a hub. By default, huggingface_hub determines them.
    """
    if isinstance(reference, ObjectReference):
        return ObjectStoreApi(reference)
    return HubApi(reference, endpoint=endpoint, token_file=token_file)


def _cache_root(reference: AnyReference, cache: Path | None) -> Path:
    """Return the directory in which the repository of `reference` is cached.

    cache: directory of the caches for hubs and object stores; None means the caches of this user.
    """
    if isinstance(reference, ObjectReference):
        return (cache or hf_home()) / "megatron-objects"
    return hub_cache() if cache is None else cache / "hub"


def cached_directory(
    model: str, *, tokenizer_only: bool = False, cache: Path | None = None, progress: Progress | None = None
) -> Path:
    """Return the cached directory with all files of `model`, and fetch files that are missing.

    model:          an `hf:` reference or the URL of an object store.
    tokenizer_only: whether to fetch only the tokenizer. If the repository has no tokenizer, all files are fetched.
    cache:          cache directory. By default, this is $MEGATRON_MODEL_CACHE for a model that is there, and the cache
                    of the Hugging Face libraries for any other model.
    progress: called with the progress of the transfers. By default, the progress is logged.

    Raises HubError, HubUnavailableError, ModelFileError or OSError.
    """
    reference = parse_reference(model)
    snapshot = cached_snapshot(reference, tokenizer_only=tokenizer_only, cache=cache)
    if snapshot is not None:
        return snapshot
    root = _cache_root(reference, cache)
    repository = ModelDirectory(root).directory(reference.cache_name)
    branch = repository.directory(f"refs/{reference.revision}").path
    source = connect(reference)
    listing = source.list()
    directory = _complete_snapshot(repository, listing.commit, tokenizer_only=tokenizer_only)
    if directory is None:
        directory = repository.directory(f"snapshots/{listing.commit}").path
        part = tokenizer_only and any(file.path in (TOKENIZER_FILE, *OTHER_VOCABULARIES) for file in listing.files)
        own = repository.directory(f".megatron/{listing.commit}" + part * _TOKENIZER_SUFFIX).path
        logged = silent if part else _reported(reference)
        blobs = repository.path / "blobs"
        _Fetch(source, listing, directory, own, progress or logged, cache=root, blobs=blobs).run(
            choose(listing.files, _TOKENIZER_PATTERNS if part else ())
        )
    if not reference.commit and not (branch.is_file() and branch.read_text().strip() == listing.commit):
        branch.parent.mkdir(parents=True, exist_ok=True)
        replace_text(branch, listing.commit)
    return directory


def cached_snapshot(reference: AnyReference, *, tokenizer_only: bool = False, cache: Path | None = None) -> Path | None:
    """Return the cached directory of a model if it can be used without the network, otherwise None.

    Any revision can be used from $MEGATRON_MODEL_CACHE and, if HF_HUB_OFFLINE is set, from the user's cache. Otherwise,
    only a commit can be used, because a branch or an object store may have changed. The result is also None if a file
    is missing.

    Raises HubError if HF_HUB_OFFLINE is set and the cache lacks the model.
    """
    shared = os.environ.get(MODEL_CACHE) if cache is None else None
    if shared:
        repository = ModelDirectory(_cache_root(reference, Path(shared))).directory(reference.cache_name)
        branch = repository.file(f"refs/{reference.revision}") if not reference.commit else None
        commit = branch.read_text(_COMMIT_CHARACTERS).strip() if branch is not None else reference.revision
        snapshot = _complete_snapshot(repository, commit)
        if snapshot is not None:
            return snapshot
    root = _cache_root(reference, cache)
    repository = ModelDirectory(root).directory(reference.cache_name)
    snapshot = _complete_snapshot(repository, reference.commit or "", tokenizer_only=tokenizer_only)
    if snapshot is None and isinstance(reference, Reference):
        return offline_directory(reference, root)
    return snapshot


def _complete_snapshot(repository: ModelDirectory, commit: str, *, tokenizer_only: bool = False) -> Path | None:
    """Return the directory of a commit if it has all files of its manifest, otherwise None.

    Files can be missing because other programs may delete files in the cache.
    """
    if not is_commit(commit):
        return None
    directory = repository.directory(f"snapshots/{commit}").path
    for suffix in ("", _TOKENIZER_SUFFIX) if tokenizer_only else ("",):
        manifest = read_manifest(repository.directory(f".megatron/{commit}{suffix}").path)
        if manifest is not None and all((directory / name).is_file() for name in manifest.files):
            return directory
    return None


def _reported(reference: AnyReference) -> Progress:
    """Return a Progress that reports to the probes of this process and, after each tenth of the bytes, to its log.

    Without these reports, an engine that fetches a model would appear to be stalled.
    """

    def log(done: int, size: int, files: int) -> None:
        percent = done * 100 // size if size else 100
        _log.info("fetching %s: %d %% of %.1f GB in %d files", reference, percent, size / 1e9, files)

    logged = each_tenth(log)

    def progress(done: int, size: int, files: int) -> None:
        PROGRESS.report(Stage.DOWNLOAD, done, size)
        logged(done, size, files)

    return progress


def fetch(
    source: Source,
    listing: Listing,
    files: Sequence[RemoteFile],
    directory: Path,
    *,
    progress: Progress = silent,
    wait: Callable[[float], object] | None = None,
) -> Manifest:
    """Fetch `files` of a listing to `directory`, and return their manifest.

    Files that `directory` already has with the correct content are not transferred again.

    wait: function that sleeps for a number of seconds, called before each retry. By default, the sleep ends early if
          the transfer of another file fails.

    Raises HubError, HubUnavailableError or OSError.
    """
    cache = directory / _PARTIAL_DIRECTORY
    return _Fetch(source, listing, directory, directory, progress, cache=cache, wait=wait).run(files)


@dataclass(slots=True)
class _Fetch:
    """One call of fetch(), which transfers several files at a time. The first failure cancels all transfers.

    directory: target directory, in which the files have their names.
    own: directory of the manifest and the lock.
    cache: cache of repositories, to which the source fetches.
    blobs: folder of the cache that stores the contents of the files. `directory` gets links to these contents. If None,
           the files are moved from the cache to `directory`, and the cache is deleted.
    wait:  as in fetch().
    """

    source: Source
    listing: Listing
    directory: Path
    own: Path
    progress: Progress
    cache: Path
    blobs: Path | None = None
    wait: Callable[[float], object] | None = None
    files: int = field(default=0, init=False)
    size: int = field(default=0, init=False)
    received: dict[str, int] = field(default_factory=dict, init=False)
    done: int = field(default=0, init=False)
    copies: Counter[str] = field(default_factory=Counter, init=False)
    stop: threading.Event = field(default_factory=threading.Event, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, wanted: Sequence[RemoteFile]) -> Manifest:
        """Fetch the files, and return their manifest. Raises the errors of fetch()."""
        listing, name = self.listing, self.listing.repository
        self.own.mkdir(parents=True, exist_ok=True)
        with _locked(self.own):
            if not wanted:
                names = ", ".join(file.path for file in listing.files[:12]) + ", …" * (len(listing.files) > 12)
                raise HubError(f"{name} has no file that is wanted here: it has {names}")
            manifest = read_manifest(self.own)
            if manifest is not None and manifest.repository != name:
                raise HubError(f"{self.directory} holds files of {manifest.repository}: name another one for {name}")
            known = manifest.files if manifest is not None else {}
            missing = [file for file in wanted if not _is_there(file, self.directory, known)]
            self.files, self.size = len(wanted), sum(file.size for file in wanted)
            self.copies.update(file.digest for file in missing)
            self.done = self.size - sum(file.size for file in missing)
            self.progress(self.done, self.size, self.files)
            contents = [self.blobs / file.digest if self.blobs else self.directory / file.path for file in missing]
            needed = sum(file.size for file, path in zip(missing, contents, strict=True) if not path.is_file())
            free = shutil.disk_usage(self.own).free
            if needed > free:
                raise OSError(
                    f"no space left on device: {self.own} has {free} bytes free, {needed} are to be fetched: free "
                    "some, or name another directory"
                )
            held = known | self._get_all(missing)
            fetched = Manifest(name, listing.commit, {file.path: held[file.path] for file in wanted})
            write_manifest(fetched, self.own)
            # Remove files that only an earlier revision has. They would otherwise count as parts of the model.
            for path in set(known) - {file.path for file in listing.files}:
                (self.directory / path).unlink(missing_ok=True)
            if self.blobs is None:
                shutil.rmtree(self.cache, ignore_errors=True)
            return fetched

    def _get_all(self, files: Sequence[RemoteFile]) -> dict[str, dict[str, Any]]:
        """Fetch the files, and return the manifest's entry for each file, by path."""
        with ThreadPoolExecutor(_CONCURRENT_FILES, thread_name_prefix="fetch") as pool:
            transfers = {pool.submit(self._get, file): file for file in files}
            try:
                return {transfers[done].path: done.result() for done in as_completed(transfers)}
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                self.source.cancel()
                raise

    def _get(self, file: RemoteFile) -> dict[str, Any]:
        """Return the manifest's entry for a file. Fetch the file unless the target directory already has it."""
        path = self.directory / file.path
        sha256 = check_file(file, path) if self.blobs is None and not file.version else None
        if sha256 is None:
            content, sha256 = self._transfer(file)
            if self.blobs is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                move = os.replace if self.copies[file.digest] == 1 else shutil.copyfile
                move(os.path.realpath(content), path)
        self._received(file, file.size)
        return {"sha256": sha256, "size": file.size, **({"version": file.version} if file.version else {})}

    def _transfer(self, file: RemoteFile) -> tuple[Path, str]:
        """Fetch a file to the cache. Return its path in the cache and its sha256.

        If the content is wrong, fetch the file a second time.
        """
        for again in (False, True):
            get = partial(self.source.get, self.listing, file, self.cache, partial(self._received, file), again=again)
            content = retried(get, self.wait or self.stop.wait, reached=lambda: self.received.get(file.path, 0))
            sha256 = check_file(file, content)
            if sha256 is not None:
                return content, sha256
            _log.warning("%s does not have the digest that is listed, %s", file.path, file.digest)
        Path(os.path.realpath(content)).unlink(missing_ok=True)
        content.unlink(missing_ok=True)
        raise WrongContentError(
            f"{file.path} of {self.listing.repository}@{self.listing.commit} came twice without the digest that is "
            f"listed, {file.digest}: a proxy or the network changes it"
        )

    def _received(self, file: RemoteFile, count: int) -> None:
        """Report that `count` bytes of a file have been received."""
        if self.stop.is_set():
            raise HubError("the transfer of another file failed")
        with self.lock:
            self.done += count - self.received.get(file.path, 0)
            self.received[file.path] = count
            self.progress(self.done, self.size, self.files)


def _is_there(file: RemoteFile, directory: Path, known: dict[str, dict[str, Any]]) -> bool:
    entry, path = known.get(file.path), directory / file.path
    if entry is None or not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.version:
        return bool(entry.get("version") == file.version)
    # The hub lists no sha256 for small files, so these are read again.
    return entry["sha256"] == file.sha256 if file.sha256 is not None else check_file(file, path) is not None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Return a context that holds the lock of a directory. Another process waits until it can take this lock."""
    with (directory / ".megatron-lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
