"""Memory that a step is told to use: grown to what was needed so far, written anew by each step."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt


class Buffers:
    """Arrays by name."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def floats(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """float32 of this shape; the values are those of an earlier step."""
        size = prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, dtype=np.float32)
        return array[:size].reshape(shape)
