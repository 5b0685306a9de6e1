"""Hostile inputs that are too large for the corpus, by target and name."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping

_PRIME = (1 << 61) - 1
"""Integers that differ by a multiple of it have the same hash."""


def _pickled_key(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return pickle.LONG1 + bytes([len(data)]) + data


def _archive(pickled: bytes, compression: int) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
    return written.getvalue()


def _pickles() -> dict[str, bytes]:
    keys = b"".join(_pickled_key(_PRIME * number) + pickle.NONE for number in range(1, 12_000))
    puts = b"".join(pickle.PUT + str(_PRIME * number).encode() + b"\n" for number in range(1, 8_000))
    return {
        "a key of 200,000 nested tuples": b"\x80\x04})" + pickle.TUPLE1 * 200_000 + b"Ns.",
        "keys that collide": b"\x80\x04}(" + keys + b"u.",
        "memo indices that collide": b"\x80\x04N" + puts + b".",
        "200,000 nested lists": b"\x80\x04" + pickle.EMPTY_LIST * 200_000 + pickle.APPEND * 199_999 + b".",
    }


def _archives() -> dict[str, bytes]:
    return {
        "a pickle of 256 MiB in 256 kB": _archive(bytes(256 << 20), zipfile.ZIP_DEFLATED),
        "a pickle of 100 MiB": _archive(bytes(100 << 20), zipfile.ZIP_STORED),
    }


LARGE_INPUTS: Mapping[str, Callable[[], dict[str, bytes]]] = {
    "pickle": _pickles,
    "torch_dist_arguments": _archives,
    "config": lambda: {"a million empty lists": b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"},
}
"""Functions that generate the inputs of a target: description to bytes."""
