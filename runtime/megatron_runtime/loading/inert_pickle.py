"""Pickles of others, read without running anything of theirs.

A pickle names the functions it wants called. Here each name is looked up in a table of what the caller trusts; what is
not there becomes an object that does nothing, or is refused. No module is ever imported for a pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import IO, Any

Globals = Mapping[tuple[str, str], Any]
"""(module, name) as the pickle says -> what stands for it."""


class UnsafePickleError(ValueError):
    """The pickle names something that is not trusted, or is damaged. The message names the file and the name."""


class Opaque:
    """Stands for an object of a class that nobody here needs. Takes whatever a pickle does to it, and keeps nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> Opaque:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...

    def add(self, item: object) -> None: ...


def read_pickle(
    file: IO[bytes],
    *,
    where: str,
    trusted: Globals,
    opaque: Callable[[str, str], bool] = lambda module, name: False,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what the pickle in `file` holds.

    where:      names the file in errors.
    trusted:    classes and functions the pickle may use.
    opaque:     says of any other (module, name) whether it may stand there and do nothing; else it is refused.
    persistent: makes what a persistent id stands for; None refuses them.

    Raises UnsafePickleError.
    """
    reader = _Reader(file, where=where, trusted=trusted, opaque=opaque, persistent=persistent)
    try:
        return reader.load()
    except UnsafePickleError:
        raise
    except Exception as error:  # whatever a damaged pickle makes its own opcodes or the trusted classes raise
        raise UnsafePickleError(f"{where} is damaged or no pickle that is known here: {error}") from error


class _Reader(pickle.Unpickler):
    def __init__(
        self,
        file: IO[bytes],
        *,
        where: str,
        trusted: Globals,
        opaque: Callable[[str, str], bool],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(file)
        self._where = where
        self._trusted = trusted
        self._opaque = opaque
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._trusted:
            return self._trusted[module, name]
        if self._opaque(module, name):
            return Opaque
        raise UnsafePickleError(
            f"{self._where} asks for {module}.{name}, which has no place there: nothing was run and nothing is loaded; "
            "get the checkpoint from a source you trust"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._where} refers to data outside of itself: such a file is not known here")
        return self._persistent(pid)
