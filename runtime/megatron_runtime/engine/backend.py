"""The seam at which an engine implementation is exchanged: `EngineBackend`, and the data that crosses it. No torch.

The worker (worker.py) above the seam speaks to the coordinator: registration, dispatches, two-phase signals,
heartbeats, epochs. It is the same for every backend. A backend may schedule and compute in a thread of this process, in
another process or in another library; the worker sees requests, outputs and verbs only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, Self

from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, RequestOutput
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams


class Capability(StrEnum):
    """What a backend may lack. The value names it in errors."""

    SUSPEND = "suspend and resume"
    UPDATE_WEIGHTS = "weight updates"
    ADAPTERS = "LoRA adapters"
    PROFILER = "the CUDA profiler"
    STRUCTURED_OUTPUT = "structured output"
    LOGIT_BIAS = "logit bias"
    LOG_PROBS = "log-probabilities"
    PROMPT_LOG_PROBS = "log-probabilities of prompt tokens"
    PRIORITY = "priorities"


class UnsupportedByBackendError(RuntimeError):
    """A verb needs a capability that the backend does not declare. The message names verb, backend and remedy."""

    reason = "UnsupportedByBackend"
    remedy = "choose a backend that has it with --executor"

    def __init__(self, verb: str, capability: Capability, backend: str) -> None:
        super().__init__(f"{verb} needs {capability.value}, which backend {backend!r} does not have: {self.remedy}")
        self.verb = verb
        self.capability = capability


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """What a backend is. Known before start(), and constant.

    name:                names it in errors.
    vocab_size, eos_ids: of the model.
    max_sequence_length: prompt and answer of one request, in tokens.
    block_size_tokens:   granularity of the prefix cache, for the coordinator's routing; 0 means no prefix cache.
    ranks:               ranks that confirm each verb.
    """

    name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    block_size_tokens: int = 0
    ranks: int = 1
    capabilities: frozenset[Capability] = frozenset()

    def require(self, verb: str, capability: Capability | None) -> None:
        """Raise UnsupportedByBackendError if `verb` needs a capability that is not declared."""
        if capability is not None and capability not in self.capabilities:
            raise UnsupportedByBackendError(verb, capability, self.name)

    def check_request(self, params: SamplingParams) -> None:
        """Raise InvalidSamplingParamsError for the first parameter that needs a capability that is not declared."""
        needs = (
            ("structured_output", Capability.STRUCTURED_OUTPUT, params.structured_output is not None),
            ("logit_bias", Capability.LOGIT_BIAS, bool(params.logit_bias)),
            ("top_n_logprobs", Capability.LOG_PROBS, params.top_n_logprobs > 0),
            ("return_log_probs", Capability.LOG_PROBS, params.return_log_probs),
            ("skip_prompt_log_probs", Capability.PROMPT_LOG_PROBS, params.wants_prompt_log_probs),
            ("priority", Capability.PRIORITY, params.priority != 0),
        )
        for name, capability, is_used in needs:
            if is_used and capability not in self.capabilities:
                remedy = f"its default: backend {self.name!r} of this engine has no support for {capability.value}"
                raise InvalidSamplingParamsError(name, getattr(params, name), remedy)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that the backend does not run, and why; an exception keeps its class and fields in the answer."""

    request_id: int
    code: ErrorCode
    error: Exception | str


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What one step, or several, brought; and the requests that were rejected since."""

    outputs: Sequence[RequestOutput] = ()
    rejected: Sequence[Rejection] = ()


@dataclass(frozen=True, slots=True)
class RankResults:
    """What each rank made of a verb: it is done, or failed with a cause.

    ranks:  how many there are.
    failed: the cause, by rank; ranks that are not in it are done.
    """

    ranks: int
    failed: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of_failure(cls, error: Exception, *, ranks: int) -> Self:
        """The results if `error` ended the verb: on the rank that the error names, or else on all ranks alike."""
        if hasattr(error, "rank"):
            return cls(ranks, {error.rank: str(getattr(error, "cause", error))})
        return cls(ranks, dict.fromkeys(range(ranks), str(error)))

    @property
    def error(self) -> str | None:
        """Every cause with its rank, or the cause alone if all ranks have the same; None if all ranks are done."""
        if not self.failed:
            return None
        causes = set(self.failed.values())
        if len(self.failed) == self.ranks and len(causes) == 1:
            return causes.pop()
        return "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(self.failed.items()))

    def require(self, verb: str) -> None:
        """Raise RuntimeError if a rank failed."""
        if self.failed:
            raise RuntimeError(f"{verb} failed: {self.error}")


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Changes of the prefix cache, as digests of blocks (requests.hashing.block_digests).

    stored:  blocks that requests can now find. evicted: blocks that they no longer find.
    cleared: no block of before can be found any more.
    """

    stored: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class BackendFailure:
    """Why a backend cannot go on.

    by_silence: a rank does not answer, and nothing shows that a request made it fail.
    """

    cause: BaseException
    rank: int = 0
    by_silence: bool = False

    @classmethod
    def of(cls, cause: BaseException) -> Self:
        return cls(cause, getattr(cause, "rank", 0), getattr(cause, "by_silence", False))


class BackendListener(Protocol):
    """What a backend calls, on the event loop of its start(). No call may block or raise."""

    def on_outputs(self, outputs: StepOutputs) -> None: ...
    def on_cache_events(self, events: CacheEvents) -> None: ...
    def on_failure(self, failure: BackendFailure) -> None:
        """The backend has failed and runs no further step. Called once."""

    def on_leave(self) -> None:
        """A process of the backend was asked to end: finish what is in flight and leave the coordinator."""


class Detokenizer(Protocol):
    """Text of one growing sequence of tokens; an unfinished character is kept back."""

    def feed(self, ids: Iterable[int]) -> str: ...


class EngineBackend(Protocol):
    """An engine implementation.

    All methods are called on one event loop. Life: start(), load() or not, verbs and requests, stop(). A backend starts
    paused. Verbs are called one at a time, and each returns what it came to on each rank. A verb that fails leaves the
    backend as it was. After a verb the worker calls confirm(); if a rank does not confirm, it calls the opposite verb.
    A verb whose capability the backend does not declare is never called: its default raises UnsupportedByBackendError.

    Outputs are delivered by callback (BackendListener), not by an async iterator, for two reasons. A step costs one
    wake-up of the event loop. And a verb can promise an order: what ran before pause(), release_memory() and stop() is
    delivered before they return.
    """

    info: BackendInfo

    def stats(self) -> BackendStats:
        """Counters and load. Called for each heartbeat and scrape, so it may not wait for a step."""

    async def start(self, listener: BackendListener) -> None:
        """Start threads and processes, without weights: an engine may join a suspended pool, where it loads nothing."""

    async def load(self) -> None:
        """Load and verify the weights and reserve the KV cache. Raises the cause, with nothing loaded."""

    async def stop(self, cause: BaseException | None = None) -> None:
        """End after the step in progress. Idempotent.

        cause: why the engine ends, if it failed.
        """

    def detokenizer(self) -> Detokenizer | None:
        """A new incremental decoder of the model's tokens; None if they have no text."""

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its outputs, or its rejection, go to the listener. The backend ends it at its deadline.

        Grammars are the backend's affair: it may compile them before the request joins the queue.
        """

    def abort(self, request_id: int) -> asyncio.Future[object]:
        """Forget a request that was aborted or that a stop text ended; it may be unknown.

        Returns a future that is done when the backend holds nothing of the request any more: until then the engine
        counts as busy.
        """

    # --- verbs --------------------------------------------------------------------------------------------------

    async def pause(self) -> RankResults:
        """No step runs, and all outputs are delivered, when this returns. Requests and KV stay."""

    async def unpause(self) -> RankResults: ...

    async def confirm(self, signal: Header) -> RankResults:
        """Every rank acknowledges that it has done all that came before, and is ready for the commit of `signal`."""
        return RankResults(self.info.ranks)

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        """Release memory of the paused engine (SUSPEND); requests keep their tokens.

        tags: what to release, of "weights" and "kv_cache"; None means all.
        """
        raise UnsupportedByBackendError("SUSPEND", Capability.SUSPEND, self.info.name)

    async def restore_memory(self) -> RankResults:
        """Reallocate what was released (RESUME). The engine stays paused."""
        raise UnsupportedByBackendError("RESUME", Capability.SUSPEND, self.info.name)

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        """Read and verify other weights of the same model while steps go on (UPDATE_WEIGHTS, phase one)."""
        raise UnsupportedByBackendError("UPDATE_WEIGHTS", Capability.UPDATE_WEIGHTS, self.info.name)

    async def commit_weights(self) -> RankResults:
        """Use the staged weights, as their epoch, from the next step on. Requests in flight keep their tokens."""
        raise UnsupportedByBackendError("UPDATE_WEIGHTS", Capability.UPDATE_WEIGHTS, self.info.name)

    async def discard_weights(self) -> None:
        """Forget staged weights, if there are any."""

    async def adopt_weights(self, source: str, epoch: int) -> None:
        """Have the weights that the coordinator names to an engine that joins: now if weights are loaded, else at the
        next load. Raises the cause if they cannot be used.
        """
        raise UnsupportedByBackendError("joining updated weights", Capability.UPDATE_WEIGHTS, self.info.name)

    async def set_epoch(self, epoch: int) -> None:
        """Label the weights in use with `epoch` (SET_GENERATION_EPOCH). KV of another epoch is not reused."""

    async def load_adapter(self, name: str, source: str) -> RankResults:
        """Load a LoRA adapter under `name`."""
        raise UnsupportedByBackendError("loading an adapter", Capability.ADAPTERS, self.info.name)

    async def unload_adapter(self, name: str) -> RankResults:
        raise UnsupportedByBackendError("unloading an adapter", Capability.ADAPTERS, self.info.name)

    async def profile(self, active: bool) -> RankResults:
        """Begin, or end, the range that a CUDA profiler around the engine records."""
        raise UnsupportedByBackendError("profiling", Capability.PROFILER, self.info.name)
