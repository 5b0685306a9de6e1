"""Decode steps captured as CUDA graphs: one launch from the host replays all kernels of a step, sampling included."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP_RUNS = 2
"""Before a capture: kernels are compiled and libraries set up outside of it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves on the device, by row.

    logits_BV:   of each row's last token, in the model's type. tokens_B: int32, drawn from them.
    log_probs_B: float32, of these tokens under the logits as they are.
    x_TD:        last hidden states of all tokens; None in a graph, where nobody asks for more than the last.
    """

    logits_BV: torch.Tensor
    tokens_B: torch.Tensor
    log_probs_B: torch.Tensor
    x_TD: torch.Tensor | None = None


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 to 128, of 16 to 256, of 32 beyond; the largest is `max_rows`. None for 0."""
    if max_rows == 0:
        return ()
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_rows + 1, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def graph_size(rows: int, sizes: Sequence[int]) -> int | None:
    """The rows that a step of `rows` is padded to; None beyond the largest graph."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


class DecodeGraphs:
    """A graph a size, captured when the size is first needed; all share their memory.

    run: computes the step of so many rows from buffers that stay where they are.
    """

    def __init__(self, run: Callable[[int], StepOutput]) -> None:
        self._run = run
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, StepOutput]] = {}

    def replay(self, size: int) -> StepOutput:
        """Compute the step from what the buffers hold now. The output is overwritten by the next replay."""
        graph, output = self._graph(size)
        graph.replay()
        return output

    def _graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._capture(size)
        return captured

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, StepOutput]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self._run(size)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._run(size)
        return graph, output
