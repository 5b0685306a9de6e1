"""An engine without a coordinator: requests in, answers out, in the caller's thread. No torch.

The core makes the tokens, the output stage that serves a coordinator makes the messages, and a client's pending request
reads them. So an answer is the same with and without processes in between.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.client.pending import PendingRequest, partial_frames
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    Dispatch,
    Final,
    Frames,
    Partial,
    RequestMeta,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
)
from megatron_runtime.requests.sampling_params import SamplingParams

_dispatch_ids = count(1)


@dataclass(slots=True)
class _Offline:
    """A request of this run, and the client's side of it."""

    pending: PendingRequest
    dispatch: Dispatch
    sampling_params: SamplingParams


class OfflineRun:
    """Runs a list of prompts on a core that nothing else uses meanwhile.

    prompts:         token ids of each.
    sampling_params: of each; a request without a seed gets one.
    controller:      for stop texts and structured output; None if the tokens have no text.
    """

    def __init__(
        self,
        core: EngineCore,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        controller: ModelText | None,
        streaming: bool = False,
    ) -> None:
        self._core = core
        self._controller = controller
        self._items: deque[dict[str, Any]] = deque()
        self._open: dict[bytes, _Offline] = {}
        self._queue = deque(
            self._make(number, prompt, params, streaming=streaming)
            for number, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        )
        self._stage = OutputStage(
            send=self._receive,
            finish_early=core.abort_request,
            detokenizer=controller.detokenizer if controller is not None else lambda: None,
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield `{"partial": frame}` while streaming, and one `{"final": reply}` for each prompt, as they come.

        `request_id` in frame and reply is the prompt's number. Closed early, it aborts what the engine still has.
        """
        try:
            while self._queue or self._open:
                # As much as the engine keeps waiting.
                while self._queue and len(self._open) < self._core.config.max_waiting:
                    self._add(self._queue.popleft())
                if self._open:
                    self._stage.step(self._core.step())
                while self._items:
                    yield self._items.popleft()
        finally:
            for request in self._open.values():
                self._core.abort_request(request.dispatch.dispatch_id)

    def _make(self, number: int, prompt: Sequence[int], params: SamplingParams, *, streaming: bool) -> _Offline:
        uid = secrets.token_bytes(limits.UID_BYTES)
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        meta = RequestMeta(streaming=streaming, seed=seed)
        body = tokens_to_bytes(prompt)
        packed = pack(params.serialize())
        pending = PendingRequest(number, uid, meta, body, packed, params, submitted=time.perf_counter())
        # The caller may change its object while the request runs.
        own = SamplingParams.deserialize(params.serialize())
        return _Offline(pending, Dispatch(next(_dispatch_ids), uid, 0, meta, body, b"", packed), own)

    def _add(self, request: _Offline) -> None:
        dispatch, params = request.dispatch, request.sampling_params
        self._open[dispatch.uid] = request
        try:
            grammar = self._controller.begin_grammar(params, []) if self._controller is not None else None
            engine_request = EngineRequest(
                request_id=dispatch.dispatch_id,
                prompt_tokens=tokens_from_bytes(dispatch.prompt),
                generated_tokens=tokens_from_bytes(b""),
                sampling_params=params,
                seed=dispatch.meta.seed,
            )
            self._stage.add(dispatch, params, [])
            if dispatch.dispatch_id in self._stage.open:
                self._core.add_request(engine_request, grammar=grammar)
        except ValueError as error:
            self._stage.refuse(dispatch, ErrorCode.INVALID_REQUEST, error)

    def _receive(self, frames: Frames) -> None:
        match decode(list(frames)):
            case Partial() as partial:
                for _, frame in partial_frames(partial, lambda uid: self._open[uid].pending):
                    if frame is not None:
                        self._items.append({"partial": frame})
            case Final() as final:
                request = self._open.pop(final.uid)
                self._items.append({"final": request.pending.reply(final)})
