"""An engine without a coordinator: requests in, answers out, in the caller's thread. No torch.

The engine's own loop makes the tokens, and the output stage that serves a coordinator makes the messages; a client's
pending request reads them. So an answer is the same with and without processes in between.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron_runtime.backends.native.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.client.pending import PendingRequest, partial_frames
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.output_stage import Detokenizer, OutputStage
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
from megatron_runtime.requests.errors import RequestRefusedError
from megatron_runtime.requests.request import DynamicInferenceRequest, answered_request
from megatron_runtime.requests.sampling_params import SamplingParams

_dispatch_ids = count(1)


@dataclass(slots=True)
class _Offline:
    """A request of this run, and what is to be told of it."""

    pending: PendingRequest
    dispatch: Dispatch
    sampling_params: SamplingParams


class OfflineRun:
    """Runs a list of prompts on an engine that nobody else uses meanwhile.

    prompts:         token ids of each.
    sampling_params: of each; a request without a seed gets one.
    detokenizer:     see OutputStage.
    begin_grammar:   what an answer must match, for parameters that ask for a structured output.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        prompts: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
        *,
        detokenizer: Callable[[], Detokenizer | None],
        begin_grammar: Callable[[SamplingParams, Sequence[int]], Any] = lambda params, generated: None,
        streaming: bool = False,
    ) -> None:
        self._engine = engine
        self._begin_grammar = begin_grammar
        self._items: deque[dict[str, Any]] = deque()
        self._open: dict[bytes, _Offline] = {}
        self._queue = deque(
            self._make(number, prompt, params, streaming=streaming)
            for number, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        )
        self._stage = OutputStage(send=self._receive, finish_early=engine.abort_request, detokenizer=detokenizer)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """`{"partial": frame}` while streaming, and one `{"final": reply}` for each prompt, as they come.

        `request_id` in frame and reply is the prompt's number. Closed early, it takes back what the engine still has.
        """
        try:
            while self._queue or self._open:
                self._feed()
                if self._open:
                    self._stage.step(self._engine.step())
                while self._items:
                    yield self._items.popleft()
        finally:
            for request in self._open.values():
                self._engine.abort_request(request.dispatch.dispatch_id)

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

    def _feed(self) -> None:
        """Give the engine as much as it keeps waiting."""
        while self._queue and len(self._open) < self._engine.config.max_waiting:
            self._add(self._queue.popleft())

    def _add(self, request: _Offline) -> None:
        dispatch, params = request.dispatch, request.sampling_params
        self._open[dispatch.uid] = request
        try:
            grammar = self._begin_grammar(params, [])
            engine_request = EngineRequest(
                request_id=dispatch.dispatch_id,
                prompt_tokens=tokens_from_bytes(dispatch.prompt),
                generated_tokens=tokens_from_bytes(b""),
                sampling_params=params,
                seed=dispatch.meta.seed,
                grammar=grammar,
            )
            self._stage.add(dispatch, params, [])
            if dispatch.dispatch_id in self._stage.open:
                self._engine.add_request(engine_request)
        except (RequestRefusedError, ValueError) as error:
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


def answer_all(
    engine: DynamicInferenceEngine,
    prompts: Sequence[str | list[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[DynamicInferenceRequest]:
    """The answers in the order of the prompts."""
    params = _for_each(prompts, sampling_params)
    tokens = [_tokens(engine, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    replies: dict[int, dict[str, Any]] = {}
    for item in _run(engine, tokens, params, streaming=False):
        replies[item["final"]["request_id"]] = item["final"]
    return [
        answered_request(
            replies[number],
            prompt=prompt,
            prompt_tokens=tokens[number],
            sampling_params=params[number],
            text=engine._controller,
        )
        for number, prompt in enumerate(prompts)
    ]


def stream_one(
    engine: DynamicInferenceEngine, prompt: str | list[int], params: SamplingParams
) -> Iterator[dict[str, Any]]:
    params.streaming = True
    yield from _run(engine, [_tokens(engine, prompt, params)], [params], streaming=True)


def _run(
    engine: DynamicInferenceEngine, tokens: list[list[int]], params: list[SamplingParams], *, streaming: bool
) -> Iterator[dict[str, Any]]:
    engine.executor.load()
    controller = engine._controller
    if controller is None:
        run = OfflineRun(engine, tokens, params, detokenizer=lambda: None, streaming=streaming)
    else:
        run = OfflineRun(
            engine,
            tokens,
            params,
            detokenizer=controller.detokenizer,
            begin_grammar=controller.begin_grammar,
            streaming=streaming,
        )
    return iter(run)


def _tokens(engine: DynamicInferenceEngine, prompt: str | list[int], params: SamplingParams) -> list[int]:
    return engine.controller.tokenize_prompt(prompt, params.add_BOS) if isinstance(prompt, str) else list(prompt)


def _for_each(
    prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: want one, or one for each"
        )
    return list(sampling_params)
