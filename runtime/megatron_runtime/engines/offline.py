"""Runs prompts on an engine in the caller's thread, without a coordinator. No torch.

The core generates tokens, the worker's OutputStage builds the protocol messages, and the client's PendingRequest reads
them. So an answer is the same with and without a coordinator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.client.pending import PendingRequest, partial_frames
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import Dispatch, Final, Frames, Partial, decode
from megatron_runtime.requests.sampling_params import SamplingParams

_dispatch_ids = count(1)


class OfflineRun:
    """Runs a list of prompts on a core that no other caller uses meanwhile.

    prompts:         token ids of each.
    sampling_params: of each; a request without a seed gets a random one. Later changes by the caller have no effect.
    text:            for stop texts and structured output; None if the tokens have no text.
    """

    def __init__(
        self,
        core: EngineCore,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        text: ModelText | None,
        streaming: bool = False,
    ) -> None:
        self._core = core
        self._text = text
        self._items: deque[dict[str, Any]] = deque()
        self._queue: deque[PendingRequest] = deque()
        self._open: dict[bytes, tuple[int, PendingRequest]] = {}
        """Dispatch id and request, by uid."""
        for number, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            params.validate()
            request = PendingRequest.make(prompt, params, streaming=streaming)
            request.request_id = number
            self._queue.append(request)
        self._stage = OutputStage(
            send=self._receive,
            finish_early=core.abort_request,
            detokenizer=text.detokenizer if text is not None else lambda: None,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{"partial": frame}` while streaming, and one `{"final": reply}` for each prompt, in completion order.

        `request_id` in frame and reply is the prompt's number. Closing the iterator early aborts the open requests.
        """
        try:
            while self._queue or self._open:
                while self._queue and len(self._open) < self._core.config.max_waiting:
                    self._add(self._queue.popleft())
                if self._open:
                    self._stage.step(self._core.step())
                while self._items:
                    yield self._items.popleft()
        finally:
            for dispatch_id, _ in self._open.values():
                self._core.abort_request(dispatch_id)

    def _add(self, request: PendingRequest) -> None:
        dispatch = Dispatch(next(_dispatch_ids), request.uid, 0, request.meta, request.prompt, b"", request.params)
        params = request.sampling_params
        self._open[request.uid] = (dispatch.dispatch_id, request)
        try:
            grammar = self._text.begin_grammar(params) if self._text is not None else None
            engine_request = EngineRequest.of_dispatch(dispatch, params)
            self._stage.add(dispatch, params, [])
            if dispatch.dispatch_id in self._stage.open:
                self._core.add_request(engine_request, grammar=grammar)
        except ValueError as error:
            self._stage.reject(dispatch, ErrorCode.INVALID_REQUEST, error)

    def _receive(self, frames: Frames) -> None:
        match decode(list(frames)):
            case Partial() as partial:
                for _, frame in partial_frames(partial, lambda uid: self._open[uid][1]):
                    self._items.append({"partial": frame})
            case Final() as final:
                _, request = self._open.pop(final.uid)
                self._items.append({"final": request.reply(final)})
