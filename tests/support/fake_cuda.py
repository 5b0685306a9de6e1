"""The functions of a CUDA device, on the CPU. As on a device, a capture fails if another thread uses the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from megatron_runtime.backends.native.cuda.device import HostFunctions, Record


class FakeCuda(HostFunctions):
    """Implements DeviceFunctions.

    overlap_seconds: how long the first recording waits for another thread to use the device, which it must not.
    recorded:  number of recordings.
    recording: set while a function is recorded.
    """

    def __init__(self, overlap_seconds: float = 0.0) -> None:
        self._overlap_seconds = overlap_seconds
        self.recorded = 0
        self.recording = threading.Event()
        self._open = 0
        """Threads inside aside()."""
        self._was_used = threading.Event()

    def recorder(self) -> Record:
        def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            if not self._open:
                self._was_used.clear()
            self.recording.set()
            output = run()
            is_invalid = self._was_used.wait(0 if self.recorded else self._overlap_seconds)
            self.recording.clear()
            self.recorded += 1
            if is_invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            return lambda: _overwrite(output, run()), output

        return record

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._open += 1
        self._was_used.set()
        try:
            yield
        finally:
            self._open -= 1


def _overwrite(output: Any, new: Any) -> None:
    """Copy a new output into the tensors of an earlier output with the same shapes, as a replay of a graph does."""
    assert is_dataclass(output)
    for field in fields(output):
        target, source = getattr(output, field.name), getattr(new, field.name)
        if isinstance(target, torch.Tensor):
            target.copy_(source)
