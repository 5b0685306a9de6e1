"""`EngineBackend`, the interface of an engine implementation, and the data that passes through it. Imports no torch.

The worker (worker.py) communicates with the coordinator: registration, dispatches, two-phase signals, heartbeats and
epochs. The worker is the same for every backend. A backend may schedule and compute in a thread of this process, in
another process or in another library. The worker sees only requests, outputs and verbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from prometheus_client import Metric

from megatron_runtime.distributed.errors import RankError
from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, RequestOutput
from megatron_runtime.engine.kv_transfer import KVConnector, KVTransfer
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.capabilities import NEEDS
from megatron_runtime.requests.capabilities import Capability as Capability
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.tokenization import Tokenizer


class UnsupportedVerbError(RuntimeError):
    """A verb needs a capability that the backend does not declare.

    The message names the verb, the backend and the remedy.
    """

    reason = "UnsupportedByBackend"
    remedy = "choose a backend that has it with --backend"

    def __init__(self, verb: str, capability: Capability, backend: str, *, remedy: str | None = None) -> None:
        self.remedy = remedy or self.remedy
        super().__init__(f"{verb} needs {capability.value}, which backend {backend!r} does not have: {self.remedy}")
        self.verb = verb
        self.capability = capability


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """Constant properties of a backend, which are known before start().

    name:                name of the backend in errors.
    vocab_size, eos_ids: vocabulary size and end-of-sequence tokens of the model.
    max_sequence_length: limit of prompt plus answer of one request, in tokens. The first load may lower it.
    max_requests:        limit of concurrent requests.
    max_tokens:          limit of tokens of one step; 0 if unknown.
    kv_cache_bytes:      size of each rank's KV cache; 0 if unknown, for example before the first load of a backend that
                         measures it.
    block_size_tokens:   granularity of the prefix cache, for the coordinator's routing; 0 means no prefix cache.
    ranks:               number of ranks that confirm each verb.
    task:                one of POOLING_TASKS for a pooling model, which generates nothing; None for a model that
                         generates.
    loads_under_pause:   whether load_staged_weights() pauses the engine and overwrites the weights in use.
    remedies:            how the user can enable each capability that is not declared but that the backend supports.
    """

    name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    max_requests: int
    max_tokens: int = 0
    kv_cache_bytes: int = 0
    block_size_tokens: int = 0
    ranks: int = 1
    capabilities: frozenset[Capability] = frozenset()
    task: str | None = None
    loads_under_pause: bool = False
    remedies: Mapping[Capability, str] = field(default_factory=dict)

    def require(self, verb: str, capability: Capability | None) -> None:
        """Raise UnsupportedVerbError if the backend does not declare the capability that `verb` needs."""
        if capability is not None and capability not in self.capabilities:
            raise UnsupportedVerbError(verb, capability, self.name, remedy=self.remedies.get(capability))

    def check_request(self, params: SamplingParams) -> None:
        """Check whether the backend can run a request with these parameters.

        Raises InvalidSamplingParamsError for the first parameter whose capability the backend does not declare. A
        pooling model also rejects a request without `pooling`.
        """
        if self.task is not None and params.pooling is None:
            raise InvalidSamplingParamsError("pooling", None, f"the task {self.task!r}: the model generates no tokens")
        for name, capability, is_used in NEEDS:
            if capability not in self.capabilities and is_used(params):
                remedy = f"its default: backend {self.name!r} of this engine has no support for {capability.value}"
                raise InvalidSamplingParamsError(name, getattr(params, name), remedy)

    @property
    def lacks(self) -> tuple[str, ...]:
        """Names of the capabilities that requests can need and that the backend does not declare."""
        return tuple(dict.fromkeys(need.capability.name for need in NEEDS if need.capability not in self.capabilities))


@dataclass(frozen=True, slots=True)
class RankResults:
    """The result of a verb on each rank.

    ranks:  number of ranks.
    failed: cause of the failure by rank. All other ranks succeeded.
    """

    ranks: int
    failed: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of_failure(cls, error: Exception, *, ranks: int) -> Self:
        """Return the results of a verb that raised `error`.

        If the error names a rank, only the named rank has failed. Otherwise all ranks have failed.
        """
        if isinstance(error, RankError):
            return cls(ranks, {error.rank: error.cause})
        return cls(ranks, dict.fromkeys(range(ranks), str(error)))

    @property
    def error(self) -> str | None:
        """The causes of the failure as text: one cause if it is the same on all ranks, otherwise each cause with its
        rank.

        The value is None if no rank failed.
        """
        if not self.failed:
            return None
        causes = set(self.failed.values())
        if len(self.failed) == self.ranks and len(causes) == 1:
            return causes.pop()
        return "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(self.failed.items()))

    def require(self, verb: str) -> None:
        """Raise RuntimeError if a rank failed. verb: name of the verb, for the message."""
        if self.failed:
            raise RuntimeError(f"{verb} failed: {self.error}")


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Changes of the prefix cache, as digests of blocks (requests.hashing.block_digests).

    stored, evicted: blocks that were added and removed.
    cleared:         all earlier blocks were removed before these changes.
    """

    stored: Sequence[bytes] = ()
    evicted: Sequence[bytes] = ()
    cleared: bool = False

    def __bool__(self) -> bool:
        return self.cleared or bool(self.stored) or bool(self.evicted)


class BackendListener(Protocol):
    """Callbacks that a backend calls on the event loop on which start() ran. They must neither block nor raise."""

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Handle the outputs of one or several steps, or the errors of requests that were not run."""

    def on_cache_events(self, events: CacheEvents) -> None: ...
    def on_failure(self, cause: BaseException) -> None:
        """Handle the failure of the backend, which will run no further step. Called once.

        cause: the error that stopped the backend. If it is a RankError, it names the rank that failed. A RankLostError
               with `by_silence` is not evidence that a request crashed the engine.
        """

    def on_leave(self) -> None:
        """Drain the engine and leave the coordinator.

        The backend calls this method when one of its processes gets SIGTERM.
        """


class EngineBackend(Protocol):
    """An engine implementation.

    All methods are called on one event loop, in this order: start(), load() if weights are needed, verbs and requests,
    stop(). A backend starts paused. Verbs are called one at a time, and each returns its result for each rank. A failed
    verb leaves the backend unchanged. After a verb the worker calls confirm(). If a rank does not confirm, the worker
    calls the opposite verb. The worker never calls a verb whose capability the backend does not declare. The default
    implementations of verbs raise UnsupportedVerbError.

    Outputs are delivered by callback (BackendListener) instead of an async iterator, for two reasons. First, each step
    costs only one wake-up of the event loop. Second, pause(), release_memory() and stop() can deliver the outputs of
    all earlier steps before they return.
    """

    info: BackendInfo
    kv: KVTransfer | None = None
    kv_connector: KVConnector | None = None
    """The export and import of KV blocks. A backend that declares Capability.KV_TRANSFER has one of both."""

    def stats(self) -> BackendStats:
        """Return counters and load. The worker calls this method for each heartbeat and scrape, so it must not wait."""

    def metrics(self) -> Iterable[Metric] | None:
        """Return vLLM's own metrics, or None for a backend without vLLM.

        The stats() of a backend without vLLM are also exposed under vLLM's names.
        """
        return None

    async def start(self, listener: BackendListener) -> None:
        """Start threads and processes. Do not load weights yet, because the other engines may be suspended."""

    async def load(self) -> None:
        """Load and verify the weights, and allocate the KV cache.

        If this method raises, the backend must release both.
        """

    async def stop(self, cause: BaseException | None = None) -> None:
        """Stop after the step in progress. This method is idempotent.

        cause: the error that stopped the engine; None if the engine has not failed.
        """

    def tokenize(self, prompt: str, *, add_bos: bool) -> list[int]:
        """Return the token ids of a text prompt. Only for a backend that declares Capability.TEXT.

        Raises ValueError if the text cannot be tokenized.
        """
        raise NotImplementedError

    def bad_words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the token sequences for the texts of SamplingParams.bad_words.

        Only for a backend that declares BAD_WORDS. Raises ValueError if a text cannot be tokenized.
        """
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the model, or None if its tokens have no text."""

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. The listener gets its outputs. If the request is rejected, its only output has an error.

        The request ends at its deadline. The backend may compile the grammar of structured output before the request
        joins the queue.
        """

    def abort(self, request_id: int) -> asyncio.Future[object]:
        """Drop a request that was aborted or that a stop text ended. An unknown request is ignored.

        Return a future that is done when the backend has released the request. Until then the engine counts as busy.
        """

    # --- verbs --------------------------------------------------------------------------------------------------

    async def pause(self) -> RankResults:
        """Stop running steps, and deliver all outputs before returning. Requests and their KV are kept."""

    async def unpause(self) -> RankResults: ...

    async def confirm(self, signal: Header) -> RankResults:
        """Wait until every rank confirms that it has executed all earlier commands and is ready to commit `signal`."""
        return RankResults(self.info.ranks)

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        """Release memory of the paused engine (SUSPEND). Requests keep their tokens.

        tags: subset of "weights" and "kv_cache"; None means both.
        """
        raise UnsupportedVerbError("SUSPEND", Capability.SUSPEND, self.info.name)

    async def restore_memory(self) -> RankResults:
        """Reallocate the released memory (RESUME). The engine stays paused."""
        raise UnsupportedVerbError("RESUME", Capability.SUSPEND, self.info.name)

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        """Read and verify other weights of the same model while steps run. This is phase one of UPDATE_WEIGHTS.

        source: reference of the weights.
        epoch:  number of the weights, which takes effect with commit_weights().
        """
        raise UnsupportedVerbError("UPDATE_WEIGHTS", Capability.UPDATE_WEIGHTS, self.info.name)

    async def load_staged_weights(self) -> RankResults:
        """Pause, and overwrite the weights in use with the staged weights. Only for a backend with `loads_under_pause`.

        commit_weights() or discard_weights() ends the pause. After a failure it is unknown which weights are in use.
        """
        raise UnsupportedVerbError("UPDATE_WEIGHTS", Capability.UPDATE_WEIGHTS, self.info.name)

    async def commit_weights(self) -> RankResults:
        """Use the staged weights and their epoch from the next step on.

        Open requests keep the tokens generated so far.
        """
        raise UnsupportedVerbError("UPDATE_WEIGHTS", Capability.UPDATE_WEIGHTS, self.info.name)

    async def discard_weights(self) -> None:
        """Discard the staged weights, if there are any.

        If load_staged_weights() has already loaded them, reload the previous weights and end the pause.
        """

    @property
    def copies(self) -> tuple[str, ...]:
        """Addresses of the ranks from which other engines can get a trainer's weights, one address per rank.

        The value is empty if this engine does not offer its weights.
        """
        return ()

    async def adopt_weights(self, source: str, epoch: int) -> None:
        """Use the weights that the coordinator named when this engine joined.

        If other weights are loaded, the new weights replace them immediately. Otherwise the next load() uses the new
        weights. Raises if the weights cannot be used.

        source: reference of the weights. A trainer's reference may have PublishedSource.copies.
        """
        raise UnsupportedVerbError("joining updated weights", Capability.UPDATE_WEIGHTS, self.info.name)

    async def set_epoch(self, epoch: int) -> None:
        """Label the current weights with `epoch` (SET_GENERATION_EPOCH). KV from other epochs is not reused."""

    async def load_adapter(self, name: str, source: str) -> RankResults:
        """Load and verify a LoRA adapter while steps run.

        If the base model's weights are not loaded, the adapter is loaded later, together with these weights.

        Loaded adapters stay loaded after release_memory(), restore_memory() and updates of the weights. KV and prefix
        blocks of a request are shared only with requests of the same adapter.

        name:   Adapter.key, as in EngineRequest.adapter. A different source has a different name.
        source: "hf:ORG/NAME[@REVISION]" or the path of a directory; see checkpoints.adapters.adapter_directory().
        """
        raise UnsupportedVerbError("loading an adapter", Capability.ADAPTERS, self.info.name)

    async def unload_adapter(self, name: str) -> RankResults:
        """Release an adapter that no open request uses."""
        raise UnsupportedVerbError("unloading an adapter", Capability.ADAPTERS, self.info.name)

    async def profile(self, active: bool) -> RankResults:
        """Start or stop recording by a CUDA profiler that is attached to this process.

        active: True starts recording.
        """
        raise UnsupportedVerbError("profiling", Capability.PROFILER, self.info.name)
