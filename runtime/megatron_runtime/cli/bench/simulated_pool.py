"""Runs the core of a coordinator and the cores of native engines in simulated time. Only the model is simulated.

Engines run the real scheduler, slots and prefix cache. StepModel computes the duration of a step. Engines transfer KV
blocks while steps run. The network link of an engine carries one transfer at a time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.backends.native.scheduler import Scheduler
from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy, Timing
from megatron_runtime.coordinator.core.transfers import CHUNK_TOKENS
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.protocol import messages
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.config import InferenceConfig, PrefixCachingEvictionPolicy
from megatron_runtime.requests.hashing import hash_of_digest
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams
from megatron_runtime.sampling.batch import NO_TOKEN

PAGE_TOKENS = 16
BLOCK_TOKENS = 256
HEARTBEAT_SECONDS = 0.5
TRANSFER_SECONDS = 0.002
"""Fixed time of a transfer for the connection, the ticket and the messages, in seconds."""
_CLIENT = (SHARED_PORT, b"client")
_REPLY = messages.pack({"status": "COMPLETED", "finish_reason": "length"})
_PARAMS = messages.pack({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """A model of an engine: the duration of its steps in seconds, its KV cache and its network link.

    step:       fixed part of a step's duration, in seconds.
    prompt:     seconds per prompt token.
    decode:     seconds per request that generates a token.
    held:       seconds per token of the requests' contexts in the KV cache.
    kv_tokens:  number of tokens that the KV cache holds.
    kv_bytes:   bytes per token in the KV cache.
    link_bytes: bytes per second that the engine's link can send or receive.
    """

    step: float
    prompt: float
    decode: float
    held: float
    kv_tokens: int
    kv_bytes: int
    link_bytes: float

    def seconds(self, plan: StepPlan) -> float:
        prompts = plan.query_lengths > 1
        prompt_tokens, decodes = int(plan.query_lengths[prompts].sum()), int((~prompts).sum())
        return (
            self.step
            + self.prompt * prompt_tokens
            + self.decode * decodes
            + self.held * int(plan.context_lengths.sum())
        )


@dataclass(slots=True, eq=False, kw_only=True)
class TraceRequest:
    """A request of a trace. A run of the trace sets the times of the request, in seconds.

    prompt:  token ids, int32 [n].
    tokens:  number of tokens in the answer.
    session: session id of the request; empty if the request has no session.
    """

    arrival: float
    prompt: np.ndarray
    tokens: int
    session: str = ""
    admitted: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)


class _Model:
    """An Executor that computes no tokens. A step only advances the simulated time.

    now:           simulated time at the end of the last step, in seconds.
    prompt_tokens: number of prompt tokens in the last step.
    """

    vocab_size = 1 << 16
    short_length = None
    eos_ids: tuple[int, ...] = ()
    page_size = PAGE_TOKENS
    kv_cache_bytes = 0
    expert_size = 1
    records_routing = False
    has_weights = True
    digest = ""

    def __init__(self, model: StepModel, *, max_sequence_length: int) -> None:
        self.max_sequence_length = max_sequence_length
        self.num_pages = model.kv_tokens // PAGE_TOKENS + 1
        self.now = 0.0
        self.prompt_tokens = 0
        self._model = model

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += self._model.seconds(plan)
        self.prompt_tokens = int(plan.query_lengths[plan.query_lengths > 1].sum())
        return StepResult(np.where(plan.needs_sample, 1, NO_TOKEN).astype(np.int32))

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"the simulation does not use {name}()")


class FirstComeScheduler(Scheduler):
    """A scheduler for comparison, which assigns all prompt tokens of a step to prompts by CoreRequest.rank."""

    def _budgets(self, num_decodes: int) -> tuple[int, int]:
        return sum(super()._budgets(num_decodes)), 0


class _Engine:
    """One engine of the simulated pool.

    role:      "prefill" or "decode"; None if the engine does both.
    received:  dispatch and prefill messages that the engine reads before its next step.
    link_free: time at which the engine's link has finished all transfers so far, in seconds.
    """

    def __init__(
        self,
        number: int,
        model: StepModel,
        config: InferenceConfig,
        *,
        role: Literal["prefill", "decode"] | None,
        longest: int,
        scheduler: type[Scheduler],
    ) -> None:
        self.name = f"engine-{number}"
        self.role = role
        self.link_free = 0.0
        self.peer = (SHARED_PORT, self.name.encode())
        self.model = _Model(model, max_sequence_length=longest)
        self.core = EngineCore(
            self.model,  # type: ignore[arg-type]
            config,
            clock=lambda: self.model.now,
            scheduler=scheduler,
        )
        self.dispatches: dict[int, tuple[messages.Dispatch, float]] = {}
        """Open dispatches by id, each with the time of its last token; 0 before the first token."""
        self.received: list[messages.Dispatch | messages.Prefill] = []
        self.is_stepping = False
        self.outputs: list[Any] = []


class SimulatedPool:
    """Runs traces on `engines` engines of equal speed.

    prefill_engines: number of engines with the role prefill. The other engines have the role decode. If 0, every engine
                     does both.
    chunk:     maximum number of prompt tokens per step. An engine with the role decode computes at most 256 prompt
               tokens.
    scheduler: class of the engines' scheduler.
    options:   fields of CoordinatorSettings.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        engines: int,
        prefill_engines: int = 0,
        policy: RoutingPolicy,
        chunk: int,
        scheduler: type[Scheduler] = Scheduler,
        max_requests: int = 64,
        max_sequence_length: int = 40_960,
        **options: Any,
    ) -> None:
        timing = Timing(recovery=0.0, client_dead=1e9)
        settings = CoordinatorSettings(single_port=True, routing_policy=policy, timing=timing, **options)
        self.now = 0.0
        self._core = CoordinatorCore(settings, now=0.0, randbits=random.Random(7).getrandbits)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._requests: dict[bytes, TraceRequest] = {}
        config = InferenceConfig(
            max_requests=max_requests,
            max_tokens=chunk + max_requests,
            max_sequence_length=max_sequence_length,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            block_size_tokens=BLOCK_TOKENS,
        )
        pool = []
        for number in range(engines):
            role: Literal["prefill", "decode"] | None = None
            if prefill_engines:
                role = "prefill" if number < prefill_engines else "decode"
            limit = min(chunk, CHUNK_TOKENS) if role == "decode" else chunk
            own = replace(config, max_prefill_tokens=limit)
            pool.append(_Engine(number, model, own, role=role, longest=max_sequence_length, scheduler=scheduler))
        self._engines = {engine.peer: engine for engine in pool}
        self._model = model
        self._block_bytes = BLOCK_TOKENS * model.kv_bytes
        self._core.start(0.0)
        for engine in self._engines.values():
            self._say(
                engine.peer,
                messages.Hello(
                    role=Role.ENGINE,
                    name=engine.name,
                    incarnation=1,
                    serving=True,
                    state=EngineState.RUNNING,
                    max_requests=max_requests,
                    max_tokens=chunk,
                    block_size_tokens=BLOCK_TOKENS,
                    engine_role=engine.role,
                    kv=messages.KVPort(address=engine.name, layout="", block_bytes=self._block_bytes),
                ),
            )
        self._say(_CLIENT, messages.Hello(role=Role.CLIENT, name="client", incarnation=1))

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that the engines read from their prefix caches, from 0 to 1."""
        stats = [engine.core.stats() for engine in self._engines.values()]
        return sum(one.prefix_cache_hits for one in stats) / max(1, sum(one.prefix_cache_queries for one in stats))

    @property
    def num_split(self) -> int:
        """Number of prompts that a prefill engine has begun to compute for another engine."""
        return self._core.counters.split_requests

    def run(self, trace: Sequence[TraceRequest]) -> None:
        """Serve all requests of a trace, and store the measured times in the requests."""
        for index, request in enumerate(trace):
            self._at(request.arrival, lambda index=index, request=request: self._submit(index, request))  # type: ignore[misc]
        for place, engine in enumerate(self._engines.values()):
            self._at(HEARTBEAT_SECONDS * place / len(self._engines), lambda engine=engine: self._beat(engine))  # type: ignore[misc]
        open_requests = len(trace)
        while open_requests:
            due = self._core.context.next_timer
            if due <= self._events[0][0]:
                self.now = max(self.now, due)
                self._core.run_timers(self.now)
                self._perform()
                continue
            self.now, _, act = heapq.heappop(self._events)
            ended = self._core.counters.completed
            act()
            open_requests -= self._core.counters.completed - ended

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _say(self, peer: tuple[int, bytes], message: messages.NativeMessage) -> None:
        self._core.received(self.now, peer, message.to_frames())
        self._perform()

    def _perform(self) -> None:
        context = self._core.context
        while context.effects:
            effects, context.effects = context.effects, []
            for peer, message in effects:
                engine = self._engines.get(peer)
                if engine is not None and isinstance(message, messages.Dispatch | messages.Prefill):
                    engine.received.append(message)
                    if not engine.is_stepping:
                        engine.is_stepping = True
                        self._at(self.now, lambda engine=engine: self._step(engine))  # type: ignore[misc]
                elif engine is not None and isinstance(message, messages.ReleaseBlocks):
                    engine.core.abort_request(message.dispatch_id)
                elif engine is not None and isinstance(message, messages.Transfer) and message.address:
                    self._at(self.now, lambda engine=engine, message=message: self._transfer(engine, message))  # type: ignore[misc]
                elif isinstance(message, messages.Error):
                    raise RuntimeError(f"the coordinator rejected a message: {message}")

    def _submit(self, index: int, request: TraceRequest) -> None:
        uid = index.to_bytes(16, "little")
        self._requests[uid] = request
        meta = messages.RequestMeta(streaming=True, seed=1, session=request.session)
        self._say(_CLIENT, messages.Submit(uid, meta, messages.tokens_to_bytes(request.prompt), b"", _PARAMS))

    def _beat(self, engine: _Engine) -> None:
        stats = engine.core.stats()  # as of the end of the step in progress
        in_step = engine.model.prompt_tokens if engine.is_stepping else 0
        heartbeat = messages.Heartbeat(
            incarnation=1,
            state=EngineState.RUNNING,
            running=len(engine.dispatches),
            prefill_rate=stats.prefill_rate,
            decode_rate=stats.decode_rate,
            queued_tokens=(stats.queued_tokens or 0) + in_step,
            last_dispatch=stats.last_request,
            free_blocks=stats.free_blocks,
        )
        self._say(engine.peer, heartbeat)
        self._at(self.now + HEARTBEAT_SECONDS, lambda: self._beat(engine))

    def _step(self, engine: _Engine) -> None:
        """Run one step of an engine, and schedule the delivery of its outputs for the end of the step."""
        engine.model.now = self.now
        for message in engine.received:
            is_prefill = isinstance(message, messages.Prefill)
            dispatch = message.dispatch if isinstance(message, messages.Prefill) else message
            request = self._requests[dispatch.uid]
            params = SamplingParams(num_tokens_to_generate=request.tokens, termination_id=IGNORE_EOS, temperature=0.0)
            if not is_prefill:
                engine.dispatches[dispatch.dispatch_id] = dispatch, 0.0
            engine.core.add_request(
                EngineRequest(
                    dispatch.dispatch_id, request.prompt, np.empty(0, np.int32), params, prefill_only=is_prefill
                )
            )
        engine.received.clear()
        outputs = engine.core.step()
        self._at(engine.model.now, lambda: self._stepped(engine, outputs))

    def _stepped(self, engine: _Engine, outputs: list[Any]) -> None:
        for output in outputs:
            if output.exported is not None:
                digests = b"".join(output.exported.digests)
                self._say(engine.peer, messages.Exported(output.request_id, digests, output.exported.weights))
                continue
            dispatch, last_token = engine.dispatches[output.request_id]
            request = self._requests[dispatch.uid]
            if last_token:
                request.gaps.append(self.now - last_token)
            else:
                request.first_token = self.now
            if output.finish_reason is not None:
                del engine.dispatches[output.request_id]
                request.admitted = request.first_token - output.summary.prefill_seconds
                request.ended = self.now
                tokens = b"\1\0\0\0" * request.tokens
                self._say(engine.peer, messages.Final(dispatch.dispatch_id, dispatch.uid, tokens, _REPLY))
                continue
            engine.dispatches[output.request_id] = dispatch, self.now
            if not last_token:
                # Routing policies do not depend on later tokens.
                entry = messages.PartialEntry(dispatch.uid, dispatch.dispatch_id, 0, 1)
                self._say(engine.peer, messages.Partial(dispatch.route, [entry], b"\1\0\0\0"))
        if evicted := engine.core.take_block_events().evicted:
            hashes = np.array([hash_of_digest(digest) for digest in evicted], "<i8")
            self._say(engine.peer, messages.CachedBlocks(hashes.tobytes()))
        if engine.received or engine.core.has_work:
            self._step(engine)
        else:
            engine.is_stepping = False

    def _transfer(self, engine: _Engine, message: messages.Transfer) -> None:
        """Start the transfer of KV blocks to `engine` from the engine that `message` names."""
        size = messages.DIGEST_BYTES
        digests = [message.digests[at : at + size] for at in range(0, len(message.digests), size)]
        cached = engine.core.context.transfers.reserve(message.dispatch_id, digests)
        if cached is None:
            self._say(engine.peer, messages.Imported(message.dispatch_id, ok=False, has_room=False))
            return
        exporter = next(other for other in self._engines.values() if other.name == message.address)
        received = (len(digests) - cached) * self._block_bytes
        seconds = TRANSFER_SECONDS + received / self._model.link_bytes
        end = max(self.now, engine.link_free, exporter.link_free) + seconds
        engine.link_free = exporter.link_free = end

        def arrived() -> None:
            engine.core.context.transfers.complete(message.dispatch_id)
            result = messages.Imported(message.dispatch_id, ok=True, received_bytes=received, seconds=seconds)
            self._say(engine.peer, result)

        self._at(end, arrived)
