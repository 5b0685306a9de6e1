"""Opens the files of a model safely. This module opens only files in the model's directory, and does not import torch.

A model directory can come from an untrusted source. A link in it can point to any file that this process may read, such
as a private key or /proc/self/environ, and clients receive the content of some model files. Therefore, every reader of
model files opens them through this module, with these rules:

- A link is followed only to a regular file in the same directory, at any depth. That includes the layout of a
  Kubernetes volume (`file -> ..data/file`, `..data -> ..2026_11_23/`).
- A directory `snapshots/COMMIT` of a hub cache may also link to the files of the `blobs` directory next to `snapshots`,
  and to the `blobs` directory of the cache, which repositories share.
- The path of the directory comes from the caller and is trusted, so links in this path are followed. The path is
resolved once.
- FIFOs, devices and sockets are rejected, and files that are read whole have a size limit.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import shown

TOKENIZER_FILE = "tokenizer.json"
OTHER_VOCABULARIES = ("tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
"""Files from which vLLM reads a tokenizer without a tokenizer.json."""
MAX_METADATA_BYTES = 16 << 20
"""Maximum size of config.json and the other small files."""
MAX_INDEX_BYTES = 64 << 20
"""Maximum size of model.safetensors.index.json, the header of a .safetensors file, and a Megatron checkpoint's index.
"""
MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of tokenizer.json and the other files of a vocabulary."""
MAX_ELEMENTS, MAX_INDEX_ELEMENTS = 1 << 18, 1 << 21
"""Maximum numbers of elements in a JSON document, in small files and in an index.

A parsed element takes up to 100 bytes.
"""
MAX_NAME_BYTES, MAX_PART_BYTES = 1024, 255
NO_TOKEN = -1
"""The id with which some files say that a model has no such token."""
MAX_AXES, _MAX_EXTENT = 16, 1 << 63
_MAX_END_TOKENS = 1024

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OPENED = Path("/proc/self/fd")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class ModelFileError(ValueError):
    """Raised if a model file is unsafe to read, damaged or of an unsupported format.

    The message names the file and the cause.
    """


class UnsafeNameError(ValueError):
    """Raised if a file name leads out of its directory or is not portable. The message gives the reason."""


def require_safe_name(name: object) -> str:
    """Return `name` if it is a relative path that stays below the directory to which the caller joins it.

    Raises UnsafeNameError.
    """
    if not isinstance(name, str) or not name:
        raise UnsafeNameError(f"the file name {shown(name)} is not a non-empty string")
    reason = ""
    if name.startswith("/"):
        reason = "is absolute"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        reason = "has an empty part or one that is '.' or '..'"
    elif "\\" in name or not all(char.isprintable() or unicodedata.category(char) == "Zs" for char in name):
        reason = "has a backslash or a character that cannot be printed"
    elif len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in name.split("/")):
        reason = f"is longer than {MAX_NAME_BYTES} bytes, or a part of it than {MAX_PART_BYTES}"
    if reason:
        raise UnsafeNameError(f"the file name {shown(name)} {reason}: want a relative path below the directory")
    return name


def parse_json(data: bytes, *, where: str, elements: int = MAX_ELEMENTS) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises ModelFileError, whose message names the file `where`.

    elements: maximum number of elements in the JSON text.
    """
    if sum(data.count(mark) for mark in (b",", b":", b"[", b"{")) > elements:
        raise ModelFileError(f"{where} has more than {elements} JSON elements: it is not a file of a model")
    try:
        values = json.loads_python(data.decode())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{where} holds {type(values).__name__}: want a JSON object")
    return values


def size_of(values: Any = ()) -> tuple[int, ...]:
    """Check a shape, or the offsets of a slice, that was read from a file. Return it as a tuple.

    Raises ValueError unless `values` is a list of at most MAX_AXES whole numbers of 63 bits.
    """
    if not isinstance(values, list | tuple) or len(values) > MAX_AXES:
        raise ValueError(f"{shown(values)} is not a shape of at most {MAX_AXES} axes")
    if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_EXTENT for value in values):
        raise ValueError("a shape has an extent that is not a whole number of 63 bits")
    return tuple(values)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model.

    path: path of the file, which may contain symbolic links.
    root: the resolved directory that must contain the file; None if the path comes from the caller and is trusted.
    """

    path: Path
    root: Path | None = None

    def open(self) -> BinaryIO:
        """Open the file for reading. Raises ModelFileError or OSError."""
        target = self._target()
        opened = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if self.root else 0))
        try:
            self._require_regular(os.fstat(opened))
            # A directory on the path may have become a link after it was resolved.
            if self.root is not None and _OPENED.is_dir():
                self._require_inside(os.readlink(_OPENED / str(opened)).removesuffix(" (deleted)"))
            if os.pread(opened, len(_LFS_POINTER), 0) == _LFS_POINTER:
                raise ModelFileError(
                    f"{self.path} is a Git LFS pointer instead of the file: run `git lfs pull` in its repository, or "
                    "download the file"
                )
        except BaseException:
            os.close(opened)
            raise
        return os.fdopen(opened, "rb")

    def status(self) -> os.stat_result:
        """Return the status of the file. Raises ModelFileError or OSError."""
        status = os.stat(self._target())
        self._require_regular(status)
        return status

    def read_bytes(self, limit: int = MAX_METADATA_BYTES) -> bytes:
        """Return the content of the file. limit: maximum size in bytes. Raises ModelFileError or OSError."""
        with self.open() as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            size = self.path.stat().st_size
            raise ModelFileError(f"{self.path} has {size} bytes: at most {limit} are read of such a file")
        return data

    def read_text(self, limit: int = MAX_METADATA_BYTES) -> str:
        """Return the content of a UTF-8 file. limit: maximum size in bytes. Raises ModelFileError or OSError."""
        try:
            return self.read_bytes(limit).decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path} is not UTF-8: {error}") from error

    def read_json(self) -> dict[str, Any]:
        """Return the JSON object in the file. Raises ModelFileError or OSError."""
        return parse_json(self.read_bytes(), where=str(self.path))

    def _target(self) -> str:
        """Return the path of the file with all links resolved.

        Raises ModelFileError if this path is outside the root.
        """
        if self.root is None:
            return str(self.path)
        target = os.path.realpath(self.path)
        self._require_inside(target)
        return target

    def _require_inside(self, target: str) -> None:
        root, path = self.root, Path(target)
        assert root is not None
        if path.is_relative_to(root):
            return
        # A hub cache stores contents in another directory: models--ORG--NAME/snapshots/COMMIT/file -> ../../blobs/ID.
        # The blob can be a link to a content that repositories share, ../../blobs/XX/ID.
        is_snapshot = root.parent.name == "snapshots" and _COMMIT.fullmatch(root.name) is not None
        repository = root.parent.parent
        blobs = (repository / "blobs", repository.parent / "blobs" / path.name[:2])
        if is_snapshot and path.parent in blobs and _COMMIT.fullmatch(path.name):
            return
        link = "a link to " if self.path.is_symlink() else ""
        raise ModelFileError(
            f"{self.path} is {link}{shown(target)}, outside of the model directory {root}: it is not read; "
            "put the file itself into the directory"
        )

    def _require_regular(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{self.path} is not a regular file: put the file itself there")


class ModelDirectory:
    """The directory of a model, and the files that may be read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = Path(os.path.realpath(path))

    def file(self, name: str) -> ModelFile | None:
        """Return the file `name`; None if it does not exist or is a directory.

        Raises ModelFileError if the name or a link leads out of the directory, or if `name` is neither a file nor a
        directory.
        """
        try:
            require_safe_name(name)
        except UnsafeNameError as error:
            raise ModelFileError(f"{self.path}: {error}") from error
        file = ModelFile(self.path / name, self._root)
        try:
            status = os.stat(file._target())
            if stat.S_ISDIR(status.st_mode):
                return None
            file._require_regular(status)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return file

    def directory(self, name: str) -> ModelDirectory:
        """Return the subdirectory `name`. Raises ModelFileError if a link leads out of this directory."""
        below = ModelFile(self.path / require_safe_name(name), self._root)
        below._target()
        return ModelDirectory(below.path)

    def files(self, suffix: str) -> list[ModelFile]:
        """Return the files whose names end in `suffix`, sorted by name. Raises ModelFileError as file() does."""
        named = sorted(entry for entry in os.listdir(self.path) if entry.endswith(suffix))
        return [file for name in named if (file := self.file(name)) is not None]


def text_part(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json that describe the text model: `text_config` of a multimodal model."""
    text = values.get("text_config")
    return text if isinstance(text, dict) else values


def end_tokens(directory: ModelDirectory, values: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end an answer, from generation_config.json and config.json.

    values: content of config.json, which often lists only one of these tokens.
    """
    file = directory.file("generation_config.json")
    generation = file.read_json() if file is not None else {}
    parts = (generation, values, text_part(values))
    eos = next((value for part in parts if (value := part.get("eos_token_id")) is not None), None)
    ends = [] if eos in (None, NO_TOKEN) else eos if isinstance(eos, list) else [eos]
    if len(ends) > _MAX_END_TOKENS or not all(_is_token_id(end) for end in ends):
        raise ModelFileError(
            f"{directory.path} has eos_token_id {shown(eos)}: want a token id, or a list of at most {_MAX_END_TOKENS}"
        )
    return tuple(ends)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
