"""Where the directory of `hf:ORG/NAME[@REVISION]` is; it is fetched when it is first asked for."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from megatron_runtime.checkpoints.hub.api import HubApi, Listing, Reference, read_token
from megatron_runtime.checkpoints.hub.fetch import TOKENIZER_PATTERNS, fetch, read_manifest
from megatron_runtime.checkpoints.hub.transfer import patiently
from megatron_runtime.checkpoints.model_files import ModelDirectory

_log = logging.getLogger(__name__)


def model_directory(model: str) -> Path:
    """The directory with all files of `model`, an `hf:` reference. Raises HubError, HubUnavailableError, OSError."""
    return _directory(Reference.parse(model), tokenizer_only=False)


def tokenizer_directory(model: str) -> Path:
    """A directory with the tokenizer of `model`: where a repository has one apart, the weights are not fetched."""
    return _directory(Reference.parse(model), tokenizer_only=True)


def cache_root() -> Path:
    """Beside the caches of other programs for the same hub."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    return Path(home, "megatron")


def _directory(reference: Reference, *, tokenizer_only: bool) -> Path:
    api = HubApi(token=read_token())
    try:
        return _fetched(reference, api, tokenizer_only=tokenizer_only)
    finally:
        api.close()


def _fetched(reference: Reference, api: HubApi, *, tokenizer_only: bool) -> Path:
    root = ModelDirectory(cache_root())
    repository = reference.repository.replace("/", "--")
    listing = None if reference.commit else _list(api, reference)
    commit = reference.revision if listing is None else listing.commit
    whole, part = (root.directory(f"{repository}/{name}").path for name in (commit, f"{commit}-tokenizer"))
    for place in (whole, part) if tokenizer_only else (whole,):
        if _is_complete(place):
            return place
    listing = listing or _list(api, reference)
    apart = any(file.path == "tokenizer.json" for file in listing.files)
    if tokenizer_only and apart:
        fetch(reference, part, api=api, listing=listing, include=TOKENIZER_PATTERNS)
        return _completed(part)
    fetch(reference, whole, api=api, listing=listing, progress=_Logged(reference))
    return _completed(whole)


def _list(api: HubApi, reference: Reference) -> Listing:
    return patiently(lambda: api.list(reference), wait=time.sleep)


class _Logged:
    """Implements Progress with a line each tenth of the way: an engine that fetches looks idle otherwise."""

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


_COMPLETE_FILE = ".megatron-complete"
"""Written once every file is there: from then on the hub is not asked again for this commit."""


def _completed(directory: Path) -> Path:
    (directory / _COMPLETE_FILE).touch()
    return directory


def _is_complete(directory: Path) -> bool:
    return (directory / _COMPLETE_FILE).is_file() and read_manifest(directory) is not None
