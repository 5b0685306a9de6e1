"""A target that fails in every way that the harness must detect."""

from __future__ import annotations

import os
import time

from tests.fuzz.harness import Target


class RejectedError(ValueError):
    """The error that this target may raise."""


def _run(data: bytes) -> None:
    match data:
        case b"raise":
            raise KeyError("x")
        case b"hang":
            while True:
                pass
        case b"wait":
            time.sleep(3600)
        case b"crash":
            os.abort()
        case b"memory":
            _fill(400 << 20)
        case b"hidden":
            try:
                _fill(8 << 30)
            except MemoryError as error:
                raise RejectedError("too large") from error
        case b"reject":
            raise RejectedError("no")


def _fill(count: int) -> None:
    held = bytearray(count)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])


MISBEHAVING = Target(name="misbehaving", run=_run, errors=(RejectedError,))
