"""Descriptions of LoRA adapters in messages: one adapter, and the list of all adapters of a pool of engines."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

MAX_ADAPTERS = 64
"""Maximum number of adapters of one pool."""
MAX_ADAPTER_NAME_CHARACTERS = 128
MAX_ADAPTER_SOURCE_CHARACTERS = 1024

_DIGITS = 16
_NAME = re.compile(r"[A-Za-z0-9][\w./:-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. Adapters with the same name but different sources are different adapters.

    name:   the model name that requests for the adapter use.
    source: `hf:ORG/NAME[@REVISION]`, or the path of a directory that every engine can read.

    Raises:
        ValueError: a field is invalid.
    """

    name: str
    source: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > MAX_ADAPTER_NAME_CHARACTERS:
            raise ValueError(
                f"adapter name {self.name[:200]!r}: use a letter or digit, then letters, digits and . _ / : -, at most "
                f"{MAX_ADAPTER_NAME_CHARACTERS} characters"
            )
        if not self.source or len(self.source) > MAX_ADAPTER_SOURCE_CHARACTERS:
            raise ValueError(
                f"source {self.source[:200]!r} of adapter {self.name!r}: use hf:ORG/NAME[@REVISION] or the path of a "
                f"directory, at most {MAX_ADAPTER_SOURCE_CHARACTERS} characters"
            )

    @property
    def key(self) -> str:
        """The name under which backends load the adapter. It differs between adapters with different names or sources.

        The key also seeds the block hashes of the adapter's requests, because the adapter's KV differs from the base
        model's KV.
        """
        return f"{self.name}@{hashlib.sha256(self.source.encode()).hexdigest()[:_DIGITS]}"


@dataclass(frozen=True, slots=True)
class AdapterList:
    """All adapters of a pool. Their order has no meaning.

    generation: number of the change that set the list, assigned by the coordinator. A list with a higher generation is
                newer. 0 means that no list was set.

    Raises:
        ValueError: there are too many adapters, or two with the same name.
    """

    adapters: tuple[Adapter, ...] = ()
    generation: int = 0

    def __post_init__(self) -> None:
        if len(self.adapters) > MAX_ADAPTERS:
            raise ValueError(f"{len(self.adapters)} adapters: use at most {MAX_ADAPTERS}")
        names = [adapter.name for adapter in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"adapter {twice!r} is listed twice: give each adapter a name of its own")
        if not 0 <= self.generation < 1 << 53:
            raise ValueError(f"generation {self.generation} of the adapters: use 0 to 2**53 - 1")

    def find(self, name: str) -> Adapter | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)
