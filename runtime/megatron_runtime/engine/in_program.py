"""What a program does with an engine that it holds: generate at once, or let it serve a coordinator."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.backends.native.executor import Executor
    from megatron_runtime.backends.native.text import ModelText
    from megatron_runtime.coordinator.spawn import CoordinatorProcess
    from megatron_runtime.engine.listening import Listening
    from megatron_runtime.engine.state_events import StateEvents
    from megatron_runtime.requests.dynamic import DynamicInferenceRequest


class EngineInProgram:
    """Mixed into DynamicInferenceEngine. The modules it needs are loaded when they are: an engine process has its own
    worker, and a worker imports the engine.
    """

    executor: Executor

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._listening: Listening | None = None

    @property
    def controller(self) -> ModelText:
        """The text of the model. Raises RuntimeError for an executor whose tokens are no text."""
        controller = self._controller
        if controller is None:
            raise RuntimeError(f"{type(self.executor).__name__} has no controller: its tokens are no text")
        return controller

    @property
    def _controller(self) -> ModelText | None:
        return getattr(self.executor, "controller", None)

    # --- at once ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Answer all prompts, in this thread; one call at a time. What cannot be answered has status FAILED.

        Raises RuntimeError while the engine serves a coordinator.
        """
        from megatron_runtime.engine.offline import answer_all

        with self._alone():
            return answer_all(self, prompts, sampling_params)  # type: ignore[arg-type]

    def generate_stream(self, prompt: str | list[int], sampling_params: SamplingParams) -> Generator[dict[str, Any]]:
        """`{"partial": frame}` … `{"final": reply}` of one prompt, as the engine makes them, in this thread."""
        from megatron_runtime.engine.offline import stream_one

        with self._alone():
            yield from stream_one(self, prompt, sampling_params)  # type: ignore[arg-type]

    def _alone(self) -> threading.Lock:
        if self._listening is not None:
            raise RuntimeError("the engine serves a coordinator: send requests through an InferenceClient")
        return self._in_use

    # --- in the service of a coordinator ------------------------------------------------------------------------

    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        hostname: str | None = None,
        coordinator_schedule_output_path: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        name: str = "engine-0",
    ) -> str:
        """Serve a coordinator, and return its "tcp://host:port" once registered with the weights loaded.

        launch_inference_coordinator: start the coordinator as a process of its own, which ends with this one.
        inference_coordinator_port, hostname: where it listens, or is; by default a free port on the loopback interface.
        loop: where the engine's connection lives; None means the caller's loop.
        name: of this engine; unique at its coordinator.

        Raises EngineFailedError, CoordinatorStartError; nothing is left running then.
        """
        from megatron_runtime.engine.listening import Listening

        if self._listening is not None:
            raise RuntimeError("the engine serves a coordinator already: stop_listening() first")
        if inference_coordinator_port is None and not launch_inference_coordinator:
            raise ValueError("inference_coordinator_port is wanted where no coordinator is launched")
        listening = Listening(self, name=name)  # type: ignore[arg-type]
        starting = listening.start(
            host=hostname,
            port=inference_coordinator_port,
            launch=launch_inference_coordinator,
            schedule_output_path=coordinator_schedule_output_path,
        )
        self._listening = listening
        try:
            if loop is None or loop is asyncio.get_running_loop():
                return await starting
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, loop))
        except BaseException:
            self._listening = None
            raise

    @property
    def engine_loop_task(self) -> asyncio.Task[None]:
        """Ends when the engine was stopped, and raises EngineFailedError when it failed."""
        task = self._require_listening().task
        assert task is not None
        return task

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """The coordinator that was launched here."""
        return self._listening.coordinator if self._listening is not None else None

    @property
    def state_events(self) -> StateEvents:
        """The engine's states as events. They belong to the loop of the engine's connection."""
        return self._require_listening().events

    async def wait_until(self, state: EngineState, *, times: int | None = None) -> None:
        """Return when the engine has reached RUNNING, PAUSED, SUSPENDED, RESUMED or STOPPED (for the n-th time), on the
        loop of the engine's connection. Raises EngineFailedError if the engine ends first.
        """
        await self._require_listening().wait_until(state, times=times)

    async def stop_listening(self) -> None:
        """Leave the coordinator, and end it if it was launched here. Call it on the loop of the engine's connection.
        Idempotent.
        """
        if self._listening is not None:
            await self._listening.stop()
            self._listening = None

    def _require_listening(self) -> Listening:
        if self._listening is None:
            raise RuntimeError(
                "the engine serves no coordinator: start_listening_to_data_parallel_coordinator() comes first"
            )
        return self._listening
