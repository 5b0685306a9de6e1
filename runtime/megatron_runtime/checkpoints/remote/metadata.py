"""Fetches a remote model without its weights: the small files, and the headers of the weight files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_runtime.checkpoints.gguf_metadata import read_gguf_header
from megatron_runtime.checkpoints.model_files import MAX_INDEX_BYTES, MAX_TOKENIZER_BYTES, ModelFileError
from megatron_runtime.checkpoints.remote.download import (
    Source,
    cached_snapshot,
    connect,
    fetch,
    parse_reference,
)
from megatron_runtime.checkpoints.remote.files import Listing, RemoteFile, choose

_WEIGHTS = (".safetensors", ".gguf", ".distcp", ".packed")
_LENGTH_BYTES = 8
_FIRST_GGUF_BYTES = 16 << 20
"""Number of bytes of a GGUF file that are fetched first. Most headers, which contain the vocabulary, are smaller."""


@contextmanager
def metadata_directory(model: str) -> Iterator[Path]:
    """Yield a directory from which the configuration of a remote `model` can be read without its weights.

    Small files are complete. Weight files are sparse files of the full size that contain only their header. If the
    cache has the complete model, the model's directory in the cache is used. Otherwise, the directory is temporary and
    is removed at the end of the block.

    Raises HubError, HubUnavailableError, ModelFileError or OSError.
    """
    reference = parse_reference(model)
    cached = cached_snapshot(reference)
    if cached is not None:
        yield cached
        return
    source = connect(reference)
    listing = source.list()
    wanted = choose(listing.files, ())
    weights = [file for file in wanted if file.path.endswith(_WEIGHTS)]
    small = [file for file in wanted if not file.path.endswith(_WEIGHTS)]
    with tempfile.TemporaryDirectory(prefix="megatron-metadata-") as name:
        directory = Path(name)
        if small:
            fetch(source, listing, small, directory)
        for file in weights:
            path = directory / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_header(source, listing, file, path)
        yield directory


def _write_header(source: Source, listing: Listing, file: RemoteFile, path: Path) -> None:
    if file.path.endswith((".safetensors", ".packed")):
        _write_start(source, listing, file, path, _LENGTH_BYTES)
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        # Fetch at most MAX_INDEX_BYTES, because the reader of the file rejects a longer header.
        _write_start(source, listing, file, path, _LENGTH_BYTES + min(length, MAX_INDEX_BYTES))
        return
    size = min(_FIRST_GGUF_BYTES, file.size) if file.path.endswith(".gguf") else 0
    _write_start(source, listing, file, path, size)
    while 0 < size < min(file.size, MAX_TOKENIZER_BYTES) and not _has_gguf_header(path, size):
        size = min(2 * size, file.size)
        _write_start(source, listing, file, path, size)


def _write_start(source: Source, listing: Listing, file: RemoteFile, path: Path, size: int) -> None:
    """Write the first `size` bytes of a file to `path`, and extend `path` to the file's full size."""
    with path.open("wb") as out:
        for piece in source.read(listing, file, size) if size else ():
            out.write(piece[: size - out.tell()])
            if out.tell() >= size:
                break
        out.truncate(file.size)


def _has_gguf_header(path: Path, size: int) -> bool:
    """Return whether the first `size` bytes of a GGUF file contain its whole header. All later bytes are zero."""
    try:
        _, index = read_gguf_header(path, vocabulary=True)
    except ModelFileError:
        return False
    return bool(index) and min(info.offset for info in index) <= size
