"""Work buffers of steps. They grow to the largest step so far, and each step overwrites them."""

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
        """Return a float32 array of this shape with undefined values."""
        size = prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = self._arrays[name] = np.empty(size, dtype=np.float32)
        return array[:size].reshape(shape)
