"""The control messages that a client may send, as methods. What carries them is for the class that inherits."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import ControlAck


class EngineVerbs(ABC):
    """Each verb is sent by the call itself; the future gives the confirmed answer and may be ignored."""

    @abstractmethod
    def _send_signal_to_engines(self, signal: Header, **options: Any) -> asyncio.Future[ControlAck]:
        """Send a control message now; its number will do. Raises ValueError for what is none."""

    def pause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Freeze generation. The future gives the confirmed answer when every engine has paused.

        All verbs take `operation_id`, `fence`, `timeout_seconds` and `expected_engines`; their futures raise
        ControlRefusedError, or CoordinatorUnreachableError when no answer came. They are sent by the call itself.
        A coordinator with three ports takes them on its admin port only: see ControlLink.
        """
        return self._send_signal_to_engines(Header.PAUSE, **options)

    def unpause_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Generate again, from where it was."""
        return self._send_signal_to_engines(Header.UNPAUSE, **options)

    def suspend_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Give memory back. Legal when paused."""
        return self._send_signal_to_engines(Header.SUSPEND, **options)

    def resume_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Take memory again; the engines are paused then."""
        return self._send_signal_to_engines(Header.RESUME, **options)

    def stop_engines(self, **options: Any) -> asyncio.Future[ControlAck]:
        """End the engines; what is open is answered with an error. Legal when paused or suspended."""
        return self._send_signal_to_engines(Header.STOP, **options)

    def set_generation_epoch(self, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Label the tokens sampled from now on with `epoch`."""
        return self._send_signal_to_engines(Header.SET_GENERATION_EPOCH, **options, epoch=epoch)

    def update_weights(self, source: str, epoch: int, **options: Any) -> asyncio.Future[ControlAck]:
        """Go on with the weights at `source`, a model reference that every engine can read, labelled `epoch`.

        Confirmed when every engine has verified and taken them. Requests in flight go on; their cache is computed anew.
        """
        return self._send_signal_to_engines(Header.UPDATE_WEIGHTS, **options, source=source, epoch=epoch)

    def drain(self, engine: str | None = None, **options: Any) -> asyncio.Future[ControlAck]:
        """Give no more work to `engine` (None: to all); confirmed when it has nothing in flight."""
        return self._send_signal_to_engines(Header.DRAIN, **options, engine=engine)

    def start_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Have every rank begin its profiled range (cudaProfilerStart), in any state. Nsight Systems records it when it
        runs the engines with `--capture-range=cudaProfilerApi --capture-range-end=repeat` (by default the end of a
        range ends the engine, too); without a profiler around them nothing is recorded.

        ENGINE_FAILED, naming them, when some engine has no GPU; it serves on.
        """
        return self._send_signal_to_engines(Header.START_CUDA_PROFILER, **options)

    def stop_cuda_profiler(self, **options: Any) -> asyncio.Future[ControlAck]:
        """Have every rank end its profiled range (cudaProfilerStop)."""
        return self._send_signal_to_engines(Header.STOP_CUDA_PROFILER, **options)
