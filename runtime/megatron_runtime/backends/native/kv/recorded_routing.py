"""The experts of the tokens in the KV cache, if they are recorded. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Routing = npt.NDArray[Any]


class RecordedRouting:
    """The experts of each token by its place in the KV cache: shared, and kept over a suspend, as the KV is."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._shape = num_pages, page_size
        self._of_pages: Routing | None = None
        """[pages, page_size, layers with experts, experts of a token]; None before the first record."""

    def record(self, cache_slots: npt.NDArray[np.int64], routing: Routing) -> None:
        """Keep StepResult.routing. cache_slots: int64 [T], StepPlan.slot_mapping."""
        if self._of_pages is None:
            self._of_pages = np.empty((*self._shape, *routing.shape[1:]), dtype=routing.dtype)
        page_size = self._shape[1]
        self._of_pages[cache_slots // page_size, cache_slots % page_size] = routing

    def of_tokens(self, pages: npt.NDArray[np.int32], count: int) -> Routing | None:
        """Return the experts of the first `count` tokens of some pages; None if they are not recorded."""
        if self._of_pages is None:
            return None
        return self._of_pages[pages].reshape(-1, *self._of_pages.shape[2:])[:count]
