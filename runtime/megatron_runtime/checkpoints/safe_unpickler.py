"""Reads untrusted pickles without running any code that a pickle names.

A pickle names the functions to call. In this module, a table maps the trusted names to objects. An object with any
other name is replaced by an inert object, or the pickle is rejected. The reader never imports a module that a pickle
names. The reader is the standard library's pure Python reader, which torch also uses to read weights. The C reader is
not safe, because it lets a pickle allocate gigabytes with one opcode, overflow the C stack with a nested key, and set
attributes of classes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.protocol.text import escaped, shown

Globals = Mapping[tuple[str, str], Any]
"""The object to use for each (module, name) in a pickle."""

_MAX_SIZE = 1 << 63
_REJECTED = ("LONG4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "INST", "OBJ")
"""Rejected opcodes.

They allocate a size that the pickle states, build integers of megabytes, or read tables of this process.
"""
_MAX_ARGUMENTS = 64


class UnsafePickleError(ModelFileError):
    """Raised if a pickle names an untrusted object or is damaged. The message names the file and the object."""


class Opaque:
    """An inert object that replaces an object whose class is not needed. It accepts every operation of a pickle."""

    def __new__(cls, *args: object, **kwargs: object) -> Opaque:
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    extend = add = append


def read_pickle(
    data: bytes,
    *,
    where: str,
    trusted: Globals,
    opaque: Callable[[str, str], bool] = lambda module, name: False,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the object in the pickle `data`. The caller must limit the size of `data`.

    where:      name of the file, for errors.
    trusted:    classes and functions that the pickle may use.
    opaque:     returns whether an object with an untrusted module and name is replaced by an Opaque. If not, the pickle
                is rejected.
    persistent: returns the object for a persistent id. If None, a pickle with persistent ids is rejected.

    Raises UnsafePickleError.
    """
    try:
        return _Reader(data, where, trusted, opaque, persistent).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # a damaged pickle can make opcodes and trusted classes raise any type
        raise UnsafePickleError(
            f"{where} is damaged or not a supported pickle: {type(error).__name__} {shown(str(error))}"
        ) from error


def ordered_dict(*_: object) -> OrderedDict[Any, Any]:
    """Return an empty OrderedDict, to which the unpickler then adds the entries.

    This function replaces collections.OrderedDict in pickles.
    """
    return OrderedDict()


class _Reader(pickle._Unpickler):
    """An unpickler whose time and memory are proportional to the size of the pickle, for any content of the pickle."""

    # attribute of the standard library's reader
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    readline: Callable[[], bytes]

    def __init__(
        self,
        data: bytes,
        where: str,
        trusted: Globals,
        opaque: Callable[[str, str], bool],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where
        self._trusted = trusted
        self._opaque = opaque
        self._persistent = persistent
        self._classes = (Opaque, *{value for value in trusted.values() if isinstance(value, type)})
        self._keys = (str, bytes, *self._classes)
        self._size = self._attributes_left = len(data)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._trusted:
            return self._trusted[module, name]
        if self._opaque(module, name):
            return Opaque
        raise UnsafePickleError(
            f"{self._where} asks for {escaped(f'{module}.{name}')}, which is not allowed there: no code was run and "
            "nothing is loaded; get the checkpoint from a source you trust"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._where} refers to data outside of itself: no references are allowed there")
        return self._persistent(pid)

    # --- opcodes that a pickle could misuse ---

    def _build(self) -> None:
        """Execute the opcode BUILD, which sets attributes of an object. Raises ValueError for an untrusted class."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is OrderedDict:
            return
        if type(target) not in self._classes:
            raise ValueError(f"{shown(target)} has no attributes that a pickle may set")
        # Look up the method on the class, because a pickle can set an attribute of this name on the instance.
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is not None:
            set_state(target, state)
            return
        if isinstance(state, tuple):
            own, slots = state
            state = {**(own or {}), **(slots or {})}
        # Count the attributes, because many objects can share one state, and each object copies it.
        self._attributes_left -= len(state)
        if self._attributes_left < 0:
            raise ValueError("it sets more attributes than it has bytes")
        vars(target).update(state)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        """Execute an opcode that sets entries of a mapping.

        Entries whose keys have other types than the allowed types are dropped, because no caller reads them. Otherwise,
        a pickle could make all keys collide, because the hashes of tuples and long integers are predictable.
        """
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, self._keys) or (isinstance(key, int) and abs(key) < _MAX_SIZE):
                target[key] = value

    def _load_set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items(self.stack[-1], [key, value])

    def _load_set_items(self) -> None:
        items = self.pop_mark()
        self._set_items(self.stack[-1], items)

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(self.stack[-1], items)

    def _load_frozen_set(self) -> None:
        self.pop_mark()
        self._load_empty_set()

    def _load_empty_set(self) -> None:
        self.append(Opaque())

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*self._few(arguments))

    def _load_new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(kind.__new__(kind, *self._few(arguments)))

    def _load_new_with_keywords(self) -> None:
        self.stack.pop()
        self._load_new()

    def _few(self, arguments: Any) -> tuple[Any, ...]:
        """Return the argument tuple of a call in the pickle. Raise an error if the tuple is long.

        Many calls could share a long tuple, and each call would copy it.
        """
        if not isinstance(arguments, tuple) or len(arguments) > _MAX_ARGUMENTS:
            raise ValueError(f"it calls something with {shown(arguments)}: want at most {_MAX_ARGUMENTS} arguments")
        return arguments

    def _load_put(self) -> None:
        index = int(self.readline())
        if not 0 <= index < self._size:
            raise ValueError("it memoizes more objects than it has bytes")
        self.memo[index] = self.stack[-1]

    def _reject(self) -> None:
        raise ValueError("it has an opcode that no checkpoint needs")

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _load_set_item,
        pickle.SETITEMS[0]: _load_set_items,
        pickle.DICT[0]: _load_dict,
        pickle.FROZENSET[0]: _load_frozen_set,
        pickle.EMPTY_SET[0]: _load_empty_set,
        pickle.REDUCE[0]: _load_reduce,
        pickle.NEWOBJ[0]: _load_new,
        pickle.NEWOBJ_EX[0]: _load_new_with_keywords,
        pickle.PUT[0]: _load_put,
        **dict.fromkeys((getattr(pickle, name)[0] for name in _REJECTED), _reject),
    }
