"""Pickles of others, read without running anything of theirs.

A pickle names the functions it wants called. Here each name is looked up in a table of what the caller trusts; what is
not there becomes an object that does nothing, or is refused. No module is ever imported for a pickle.

The reader is the standard library's in Python, as in torch's own reader of weights: the compiled one lets a pickle
allocate gigabytes with one opcode, overflow the C stack with a nested key, and set attributes of classes and functions.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import IO, Any, ClassVar

from megatron_runtime.checkpoints.model_files import MAX_INDEX_BYTES
from megatron_runtime.protocol.text import escaped, shown

Globals = Mapping[tuple[str, str], Any]
"""(module, name) as the pickle says -> what stands for it."""

MAX_AXES = 16
_MAX_SIZE = 1 << 63
_MAX_ARGUMENTS = 64


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
    data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise UnsafePickleError(f"{where} has more than {MAX_INDEX_BYTES} bytes: it is no index of a checkpoint")
    reader = _Reader(data, where=where, trusted=trusted, opaque=opaque, persistent=persistent)
    try:
        return reader.load()
    except UnsafePickleError:
        raise
    except Exception as error:  # whatever a damaged pickle makes its own opcodes or the trusted classes raise
        raise UnsafePickleError(
            f"{where} is damaged or no pickle that is known here: {type(error).__name__} {shown(str(error))}"
        ) from error


def size_of(values: Any = ()) -> tuple[int, ...]:
    """Stands for torch.Size in a table of trusted names. Raises ValueError for what is no shape."""
    if not isinstance(values, list | tuple) or len(values) > MAX_AXES:
        raise ValueError(f"{shown(values)} is no shape of at most {MAX_AXES} axes")
    if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE for value in values):
        raise ValueError("a shape has an extent that is no whole number of 63 bits")
    return tuple(values)


def ordered_dict(*_: object) -> OrderedDict[Any, Any]:
    """Stands for collections.OrderedDict, whose entries follow one by one."""
    return OrderedDict()


class _Reader(pickle._Unpickler):
    """Time and memory are proportional to the bytes of the pickle, whatever is in it."""

    # Of the standard library's reader.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    readline: Callable[[], bytes]

    def __init__(
        self,
        data: bytes,
        *,
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
            f"{self._where} asks for {escaped(f'{module}.{name}')}, which has no place there: nothing was run and "
            "nothing is loaded; get the checkpoint from a source you trust"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise UnsafePickleError(f"{self._where} refers to data outside of itself: such a file is not known here")
        return self._persistent(pid)

    # --- opcodes whose standard reading a pickle could misuse ---

    def _build(self) -> None:
        """Attributes of an instance; classes and functions keep theirs."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is OrderedDict:
            return
        if type(target) not in self._classes:
            raise ValueError(f"{shown(target)} has no attributes that a pickle may set")
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is not None:
            set_state(target, state)
            return
        if isinstance(state, tuple):
            own, slots = state
            state = {**(own or {}), **(slots or {})}
        # A state can be shared by many objects, each of which copies it.
        self._attributes_left -= len(state)
        if self._attributes_left < 0:
            raise ValueError("it sets more attributes than it has bytes")
        vars(target).update(state)

    def _set_items(self, target: Any, items: list[Any]) -> None:
        """Entries of a mapping. Those under other keys than below are left out: nothing reads them.

        The hash of a tuple or of a long integer is no secret, so that a pickle could have all its keys collide.
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
        found: dict[Any, Any] = {}
        self._set_items(found, items)
        self.append(found)

    def _load_frozen_set(self) -> None:
        self.pop_mark()
        self.append(Opaque())

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
        """Arguments of a call. Many calls could share a long tuple, which each of them copies."""
        if not isinstance(arguments, tuple) or len(arguments) > _MAX_ARGUMENTS:
            raise ValueError(f"it calls something with {shown(arguments)}: want at most {_MAX_ARGUMENTS} arguments")
        return arguments

    def _load_put(self) -> None:
        index = int(self.readline())
        if not 0 <= index < self._size:
            raise ValueError("it memoizes more objects than it has bytes")
        self.memo[index] = self.stack[-1]

    def _refuse(self) -> None:
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
        # They allocate what they announce, keep integers of megabytes, or ask tables of this process.
        **dict.fromkeys(
            b"".join(
                (
                    pickle.LONG4,
                    pickle.BYTEARRAY8,
                    pickle.NEXT_BUFFER,
                    pickle.READONLY_BUFFER,
                    pickle.EXT1,
                    pickle.EXT2,
                    pickle.EXT4,
                    pickle.INST,
                    pickle.OBJ,
                )
            ),
            _refuse,
        ),
    }
