"""The EngineBackend of vLLM, which runs in a separate process (process.py, service.py).

This module imports neither vLLM nor torch. The engine's process keeps the prompt and the generated tokens of every
request. SUSPEND ends vLLM's process, which releases all its memory. The requests continue after the next start of the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from megatron_runtime.backends.open_request import BackendRequest
from megatron_runtime.backends.step_rates import OutputRates
from megatron_runtime.backends.text import GrammarQueue, ModelText
from megatron_runtime.backends.vllm.kv_connector import EXPORT, VllmKVConnector
from megatron_runtime.backends.vllm.nodes import Followers
from megatron_runtime.backends.vllm.process import VllmError, VllmProcess, VllmRejectedError, note_progress
from megatron_runtime.backends.vllm.shared_memory import SharedMemory
from megatron_runtime.checkpoints.adapters import adapter_directory
from megatron_runtime.distributed.shard import node_identity
from megatron_runtime.engine.backend import (
    BackendInfo,
    BackendListener,
    CacheEvents,
    Capability,
    EngineBackend,
    RankResults,
)
from megatron_runtime.engine.engine_request import BackendStats, EngineRequest, FinishReason, RequestOutput
from megatron_runtime.engine.kv_transfer import TransferEndedError
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.fair_lanes import BudgetExceededError
from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol.codec import tokens_from_bytes
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.published_weights import PublishedSource, is_published
from megatron_runtime.requests.capabilities import POOLING
from megatron_runtime.requests.events import DynamicInferenceEventType as Event
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.answer_parts import AnswerPart, AnswerParts

if TYPE_CHECKING:
    from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

UNUSED_SECONDS = 60.0
"""Seconds after which a vLLM process exits if it gets no request to load weights.

An engine that joins a suspended pool has such a process. The imports of the process take 900 MiB.
"""

CAPABILITIES = frozenset(Capability) - {
    Capability.KV_TRANSFER,
    Capability.PROFILER,
    Capability.ADAPTERS,
    Capability.MEDIA,
    Capability.HIDDEN_STATES,
    Capability.HIGH_TEMPERATURE,
    *POOLING.values(),
}
POOLING_CAPABILITIES = frozenset({Capability.SUSPEND, Capability.UPDATE_WEIGHTS, Capability.TEXT, Capability.PRIORITY})
"""Capabilities that every pooling model has in addition to its task."""
WITHOUT_FORCED_TOKENS = frozenset(
    {
        Capability.PENALTIES,
        Capability.BAD_WORDS,
        Capability.STRUCTURED_OUTPUT,
        Capability.STRUCTURE_AFTER_REASONING,
        Capability.CALL_STRUCTURE,
    }
)
"""Features that an engine lacks if it cannot force the tokens of an interrupted answer.

This is the case for Model Runner V1 with speculation.
"""
WITH_SPECULATION_LACKS = frozenset({Capability.MIN_P, Capability.LOGIT_BIAS})
"""Features that vLLM rejects in combination with speculation, with both model runners."""
FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Finish reasons of vLLM that stand for a complete answer."""
REMEDIES = {
    Capability.ADAPTERS: "set the engine argument enable_lora of vLLM to true (spec.engine.vllm.args, "
    "--vllm-arguments)",
    Capability.KV_TRANSFER: "allow connections of NIXL, which authenticates no peer (--vllm-allow-nixl, "
    "spec.engine.vllm.allowNixlBetweenPods), and use prefix caching and one pod, without data and pipeline parallelism",
}


@dataclass(slots=True, eq=False, kw_only=True)
class VllmRequest(BackendRequest):
    """A request of a vLLM engine. Its queue time is reported as 0, because vLLM counts this time as prefill time.

    tokens:         tokens that this or another engine has generated.
    is_running:     whether vLLM has the request now.
    is_prefilling:  whether vLLM has the request and has sent no output for it.
    timer:          timer of the request's deadline.
    grammar:        task that checks the request's grammar or starts the next part of the answer; None if no such task
                    runs.
    parts:          parts of the answer; None if the answer has only one part. vLLM runs each part as a request that
                    continues the previous part, because vLLM's grammars describe the whole text of a request.
    released:       task that ends when vLLM has dropped the previous part.
    kv:             vLLM's `kv_transfer_params` of a request that exports or imports KV; None for other requests.
    """

    tokens: list[int]
    is_running: bool = False
    is_prefilling: bool = False
    timer: asyncio.TimerHandle | None = None
    grammar: asyncio.Task[None] | None = None
    parts: AnswerParts | None = None
    released: asyncio.Task[None] | None = None
    kv: Mapping[str, Any] | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_length + len(self.tokens)

    def submission(self) -> tuple[SamplingParams, int]:
        """Return the sampling parameters of the next of `parts`, and the number of answer tokens in its prompt.

        The prompt of a part can end with the answer tokens of the previous parts.
        """
        params, parts = copy.copy(self.params), self.parts
        params.call_structure = params.reasoning = None
        if parts is None:
            return params, 0
        params.structured_output = parts.structure
        if parts.structure is None:
            return params, 0
        params.min_tokens = max(0, params.min_tokens - parts.free)
        params.skip_prompt_log_probs = params.skip_prompt_log_probs or parts.free > 0  # reported already
        return params, parts.free

    def take(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Append `tokens`, which vLLM has generated, up to the end of the current part.

        Return the number of appended tokens, and whether another part follows.
        """
        parts = self.parts
        if parts is None or parts.part is AnswerPart.STRUCTURE:
            self.tokens += tokens
            return len(tokens), False
        before, ends = len(self.tokens), False
        for token in tokens:
            parts.feed(token)
            self.tokens.append(token)
            ends = parts.structure is not None or parts.forced is not None
            if ends:
                break
        if parts.structure is not None:
            del self.tokens[parts.free :]
        return len(self.tokens) - before, ends

    def end_reasoning(self) -> list[int]:
        """End the reasoning if it has used up its token budget. Return the tokens that this appends to the answer.

        Tokens beyond the length limit of the answer are not appended.
        """
        added: list[int] = []
        while self.parts is not None and (token := self.parts.forced) is not None:
            if self.total_tokens >= self.max_total_tokens:
                break
            self.parts.feed(token)
            self.tokens.append(token)
            added.append(token)
        return added


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The state of the engine before load_staged_weights().

    directory:   directory of the weights that were in use.
    was_running: whether the engine was running.
    """

    directory: str
    was_running: bool


class VllmBackend(EngineBackend):
    """The EngineBackend of vLLM. All methods run on one event loop.

    The constructor starts vLLM's process, which takes ten seconds or more.

    Raises:
        VllmRejectedError: a setting, the model or the version of vLLM is not usable. The message has the remedy.
        VllmError: vLLM's process failed.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process: VllmProcess | None = VllmProcess(settings)
        started = self._process.started
        self._text = ModelText.of_model(settings.model)
        self._grammars = GrammarQueue(self._text)
        self.info = BackendInfo(
            name="vllm",
            vocab_size=started["vocab_size"],
            eos_ids=tuple(started["eos_ids"]),
            max_sequence_length=started["max_sequence_length"],
            max_requests=started["max_requests"],
            max_tokens=started["max_tokens"],
            block_size_tokens=started["block_size_tokens"],
            ranks=started["ranks"],
            capabilities=_capabilities(started),
            task=started["task"],
            loads_under_pause=True,
            remedies=REMEDIES,
        )
        node = node_identity(settings.parallel)
        self._followers = (
            Followers(node, on_lost=self._fail, on_leave=lambda: self._listener.on_leave()) if node.nodes > 1 else None
        )
        self._adapters: dict[str, str] = {}
        """Directory of each loaded LoRA adapter, by its key."""
        self._kv: VllmKVConnector | None = None
        if Capability.KV_TRANSFER in self.info.capabilities:
            self._kv = VllmKVConnector(self._submit, self.info.block_size_tokens, adapters=self._adapters.keys())
        self.kv_connector = self._kv
        self._can_sleep: bool = started["can_sleep"]
        self._directory: str = started["directory"]
        self._is_connected = False
        self._is_loaded = False
        self._is_asleep = False
        self._running = False
        self._open: dict[int, VllmRequest] = {}
        self._held: list[RequestOutput] = []
        """Outputs that are kept until unpause()."""
        self._epoch = 0
        self._digest = ""
        self._received = SharedMemory()
        """Directories of a trainer's weights. The weights are in use, staged, or replaced and not yet discarded."""
        self._copies = ""
        """Address at which vLLM's process offers the weights of a trainer to other engines."""
        self._awaited: tuple[str, int] | None = None
        """Source and epoch of a trainer's weights that the next load() must receive."""
        self._staged: tuple[str, str, int] | None = None
        self._replaced: _Replaced | None = None
        """Set from load_staged_weights() until the weights are committed or discarded."""
        self._last_request = 0
        self._rates = OutputRates()
        self._stats: Mapping[str, float] = {}
        self._metrics = b""
        self._failed = False

    # --- start and stop -----------------------------------------------------------------------------------------

    async def start(self, listener: BackendListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._unused = self._end_unused()
        if self._followers is not None:
            await self._followers.listen()

    def _end_unused(self) -> asyncio.Task[None]:
        """Start and return a task that stops vLLM's process after UNUSED_SECONDS, unless _vllm() is called before.

        Used for a process that has loaded no weights.
        """

        async def end() -> None:
            await asyncio.sleep(UNUSED_SECONDS)
            await asyncio.shield(self._end_process())  # once begun, it is not interrupted by _vllm()

        return asyncio.create_task(end())

    async def _vllm(self) -> VllmProcess:
        """Return vLLM's process. Start a new process if the last one has ended."""
        self._unused.cancel()
        if self._process is None:
            self._process = await asyncio.to_thread(VllmProcess, self._settings)
        if not self._is_connected:
            self._is_connected = True
            await self._process.connect(self._on_message, self._fail)
        return self._process

    async def load(self) -> None:
        if self._is_loaded:
            return
        if self._awaited is not None:
            await self._stage(*self._awaited)
            await self._commit()
        vllm = await self._vllm()
        digest = await vllm.call("digest", self._directory)
        if self._digest not in ("", digest):
            raise ValueError(
                f"the weights at {self._directory} have digest {digest[:12]}, the released weights had "
                f"{self._digest[:12]}: restore the files, or update the weights under a new epoch"
            )
        self._copies = await vllm.call("use_weights", self._directory)
        if self._followers is not None:
            await self._followers.start(timeout_seconds=self._settings.rendezvous_seconds)
        try:
            await asyncio.to_thread(self._text.load)
            kv = self._kv
            if kv is not None and kv.address is None:
                kv.listen("127.0.0.1", 0)
            length, cache_bytes, num_blocks, layout = await vllm.call("load", kv and kv.address)
            cache_bytes = cache_bytes or vllm.kv_cache_bytes
            self.info = replace(self.info, max_sequence_length=length, kv_cache_bytes=cache_bytes)
            if kv is not None:
                kv.loaded(layout=layout, num_blocks=num_blocks, cache_bytes=cache_bytes * self.info.ranks)
            vllm.is_starting = False
            await vllm.call("set_adapters", self._adapters)
        except Exception:
            await self._end_process()
            raise
        self._digest = digest
        self._is_loaded = True
        self._identify_weights()

    def _identify_weights(self) -> None:
        """Note the weights in use, after a change of their epoch or digest. KV of other weights is not imported."""
        if self._kv is not None:
            self._kv.weights = f"{self._epoch} {self._digest}"

    async def stop(self, cause: BaseException | None = None) -> None:
        self._unused.cancel()
        for opened in list(self._open.values()):
            self._close(opened)
        await self._end_process()
        if self._followers is not None:
            await self._followers.close()
        await asyncio.to_thread(self._received.close)
        self._grammars.close()
        await asyncio.to_thread(self._text.close_grammars)

    async def _end_process(self) -> None:
        """Stop vLLM's process, which releases all memory of the engine."""
        process, self._process = self._process, None
        self._is_connected = self._is_loaded = self._is_asleep = False
        self._copies = ""
        if process is not None:
            await process.end()
        if self._followers is not None:
            self._followers.end()

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._listener.on_failure(error)

    def tokenize(self, prompt: str, *, add_bos: bool) -> list[int]:
        return self._text.tokenize_prompt(prompt, add_bos)

    def bad_words(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._text.bad_words(texts, vocab_size=self.info.vocab_size)

    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    def stats(self) -> BackendStats:
        counts: dict[str, Any] = {name: int(value) for name, value in self._stats.items()}
        counts["kv_usage"] = self._stats.get("kv_usage", 0.0)
        prefill_rate, decode_rate = self._rates.rates()
        return BackendStats(
            weights_digest=self._digest,
            prefill_rate=prefill_rate,
            decode_rate=decode_rate,
            queued_tokens=self._queued_tokens(),
            last_request=self._last_request,
            **counts,
        )

    def _queued_tokens(self) -> int:
        """Return the estimated number of uncached tokens of the requests without an output.

        vLLM reports the cached tokens of a request with its first output. Before this output, a request is assumed to
        have the average share of cached tokens.
        """
        opened = list(self._open.values())  # another thread may ask for metrics
        tokens = sum(request.total_tokens for request in opened if request.is_prefilling or not request.is_running)
        queries, hits = self._stats.get("prefix_cache_queries", 0.0), self._stats.get("prefix_cache_hits", 0.0)
        return round(tokens * (1 - hits / queries)) if queries else tokens

    def metrics(self) -> Iterable[Metric]:
        return text_string_to_metric_families(self._metrics.decode())

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        if not request.prefill_only:
            self._submit(request)
            return
        assert self._kv is not None, "the engine has a role"
        try:
            request = self._kv.begin(request)
        except TransferEndedError as error:
            self._reject(request, error)
            return
        self._submit(request, EXPORT)

    def _reject(self, request: EngineRequest, error: Exception) -> None:
        output = RequestOutput(request.request_id, [], len(request.prompt_tokens), finish_reason="error")
        output.error, output.error_code = error, ErrorCode.INVALID_REQUEST
        self._listener.on_outputs([output])

    def _submit(self, request: EngineRequest, kv: Mapping[str, Any] | None = None) -> None:
        """Queue a request, or an export or import with vLLM's `kv_transfer_params`."""
        now = time.monotonic()
        try:
            request.sampling_params.check_vocabulary(self.info.vocab_size)
            opened = VllmRequest.open(
                request,
                longest=self.info.max_sequence_length,
                eos_ids=self.info.eos_ids,
                vocab_size=self.info.vocab_size,
                now=now,
                epoch=self._epoch,
                admitted=now,
                tokens=request.generated_tokens.tolist(),
                parts=self._parts_of(request.sampling_params),
                kv=kv,
            )
        except ValueError as error:
            self._end_transfer(request.request_id, str(error))
            self._reject(request, error)
            return
        if opened.parts is not None:
            opened.parts.feed_all(opened.tokens)
        opened.note(Event.ADD_ENGINE)
        self._open[request.request_id] = opened
        self._last_request = max(self._last_request, request.request_id)
        if request.deadline_seconds is not None:
            opened.timer = self._loop.call_later(request.deadline_seconds, self._on_deadline, opened)
        reason = opened.finish_reason(opened.tokens[-1], opened.total_tokens) if opened.tokens else None
        if reason is not None:
            self._deliver([self._ended(opened, opened.output([]), reason)])
        elif request.sampling_params.structured_output is not None:
            opened.grammar = asyncio.create_task(self._check_grammar(opened))
        elif opened.parts is not None and opened.parts.structure is not None:
            self._enter_part(opened)
        elif self._running:
            self._attach(opened)

    def _parts_of(self, params: SamplingParams) -> AnswerParts | None:
        if Capability.CALL_STRUCTURE not in self.info.capabilities and params.call_structure is not None:
            params = copy.copy(params)
            params.call_structure = None
        return AnswerParts.of(params, token_bytes=lambda id_: self._text.tokenizer.token_bytes(id_))

    def _end_part(self, opened: VllmRequest, *, is_ended: bool) -> None:
        """End the current one of `VllmRequest.parts`, and start the next one.

        is_ended: whether vLLM has completed the current part. If not, vLLM aborts it.
        """
        opened.is_running = False
        opened.released = asyncio.create_task(_dropped(opened.request_id, None if is_ended else self._process))
        self._enter_part(opened)

    def _enter_part(self, opened: VllmRequest) -> None:
        """Start the task that runs the next of `VllmRequest.parts`, after vLLM has dropped the previous part."""
        opened.grammar = asyncio.create_task(self._begin_part(opened))

    async def _begin_part(self, opened: VllmRequest) -> None:
        if opened.released is not None:
            await asyncio.wait([opened.released])
        parts = opened.parts
        assert parts is not None
        if parts.is_best_effort and parts.structure is not None:
            try:
                await self._grammars.begin_calls(opened.request, parts.structure)
            except Exception as error:
                extra = of_request(opened.request.client_request_id)
                logger.info("request %d: no grammar of its calls: %s", opened.request_id, error, extra=extra)
                parts.give_up()
        opened.grammar = None
        if self._running and opened.request_id in self._open:
            self._attach(opened)

    async def _check_grammar(self, opened: VllmRequest) -> None:
        """Check the request's grammar in a separate process, because the check can crash the process that runs it.

        Reject the request if the grammar is invalid or too expensive, otherwise run the request.
        """
        try:
            await self._grammars.begin(replace(opened.request, deadline_seconds=None))  # opened.timer stops it
        except BudgetExceededError as error:
            self._deliver([self._failed_output(opened, ErrorCode.QUEUE_FULL, error)])
            return
        except ValueError as error:
            self._deliver([self._failed_output(opened, ErrorCode.INVALID_REQUEST, error)])
            return
        except Exception as error:
            extra = of_request(opened.request.client_request_id)
            logger.exception("request %d failed", opened.request_id, extra=extra)
            self._deliver([self._failed_output(opened, ErrorCode.ENGINE_FAILED, error)])
            return
        opened.grammar = None
        if self._running and opened.request_id in self._open:
            self._attach(opened)

    def abort(self, request_id: int) -> asyncio.Future[object]:
        self._end_transfer(request_id, "it was released")
        opened = self._open.pop(request_id, None)
        if opened is not None:
            self._close(opened)
            if opened.is_running and self._process is not None:
                return asyncio.ensure_future(self._process.call("abort", request_id))
            if opened.released is not None:
                return asyncio.ensure_future(asyncio.wait([opened.released]))
        done: asyncio.Future[object] = self._loop.create_future()
        done.set_result(None)
        return done

    def _attach(self, opened: VllmRequest) -> None:
        """Submit a request to vLLM. The request continues after the tokens that it already has."""
        if (added := opened.end_reasoning()) and self._is_over(opened, added):
            return
        request, (params, free) = opened.request, opened.submission()
        assert self._process is not None
        opened.is_running = True
        if not self._is_import(opened):  # vLLM waits for the transfer, and computes no prompt
            opened.is_prefilling = True
            self._rates.begin(time.monotonic())
        if params.pooling is not None:
            tokens, salt = request.prompt_tokens.tolist(), params.cache_salt
            of_request = (request.text, tokens, request.adapter, params.priority, salt)
            self._process.send("pool", request.request_id, params.pooling, *of_request)
            return
        self._process.send(
            "submit",
            request.request_id,
            params.serialize(),
            request.bad_words,
            request.adapter,
            request.prompt_tokens.tolist() + opened.tokens[:free],
            opened.tokens[free:],
            sorted(opened.stop_ids),
            opened.max_total_tokens - opened.prompt_length - free,
            _sent_media(request),
            opened.kv,
        )

    def _is_over(self, opened: VllmRequest, added: list[int]) -> bool:
        """Deliver the tokens `added`, which end the reasoning. If the answer has its maximum length, end the request.

        Return whether the request has ended.
        """
        output = opened.output(added)
        if opened.params.wants_log_probs:
            output.new_log_probs = [0.0] * len(added)
        if opened.params.wants_log_probs and opened.params.top_n_logprobs:
            output.new_top_n_logprobs = [[(token, 0.0)] for token in added]
        is_over = opened.total_tokens >= opened.max_total_tokens
        self._deliver([self._ended(opened, output, "length") if is_over else output])
        return is_over

    def _on_deadline(self, opened: VllmRequest) -> None:
        if self._open.get(opened.request_id) is opened:
            if opened.is_running and self._process is not None:
                self._process.send("abort", opened.request_id)
            self._end_transfer(opened.request_id, "its deadline passed")
            self._forget(opened)
            self._deliver([opened.expire(now=time.monotonic())])

    # --- reports of vLLM's process ------------------------------------------------------------------------------

    def _on_message(self, message: list[Any]) -> None:
        match message:
            case ["outputs", entries]:
                outputs = []
                for entry in entries:
                    opened = self._open.get(entry[0])
                    if opened is not None and opened.is_running:  # otherwise it belongs to the previous part
                        take = self._take_pooled if entry[1] == "pooled" else self._take
                        output = take(opened, *entry[1:])
                        if not self._is_import(opened):
                            outputs.append(output)
                self._note_arrival()
                self._deliver(outputs)
            case ["cache", stored, evicted, cleared]:
                self._listener.on_cache_events(CacheEvents(stored, evicted, cleared=cleared))
            case ["metrics", stats, text]:
                self._stats, self._metrics = stats, text
            case ["progress", *_]:
                note_progress(message)

    def _note_arrival(self) -> None:
        opened = self._open.values()
        running = [each.is_prefilling for each in opened if each.is_running and not self._is_import(each)]
        self._rates.arrived(time.monotonic(), has_prompts=any(running), has_work=bool(running))

    def _take(self, opened: VllmRequest, tokens: list[int] | str, reason: str | None, *details: Any) -> RequestOutput:
        """Return the RequestOutput for a message of service.py, which contains new tokens or an error."""
        if isinstance(tokens, str):
            if tokens == "rejected":
                error = VllmRejectedError(reason or "", field=details[0] if details else "")
                return self._failed_output(opened, ErrorCode.INVALID_REQUEST, error)
            return self._failed_output(opened, ErrorCode.ENGINE_FAILED, reason or "")
        stop, cached, chosen, top, prompt, prompt_top, kv = details
        if self._is_import(opened):
            return self._imported(opened, reason, cached)
        if opened.released is None:  # a later part finds the earlier ones in the cache
            opened.num_cached_tokens = cached
        uncached = opened.total_tokens - cached if opened.is_prefilling else 0
        self._rates.output(prompt_tokens=uncached, held_tokens=opened.total_tokens)
        opened.is_prefilling = False
        if opened.kv is not None and reason == "length":
            return self._exported(opened, kv)
        if tokens and opened.first_token is None:
            opened.first_token = time.monotonic()
        kept, ends = opened.take(tokens)
        output = opened.output(tokens[:kept])
        output.new_log_probs = chosen if chosen is None else chosen[:kept]
        output.new_top_n_logprobs = _pairs(top if top is None else top[:kept])
        output.prompt_log_probs, output.prompt_top_n_logprobs = prompt, _pairs(prompt_top)
        if ends and (reason is None or kept < len(tokens)):
            self._end_part(opened, is_ended=reason is not None)
            return output
        output.stop_token = stop
        if reason is None:
            return output
        if reason in FINISHED:
            return self._ended(opened, output, FINISHED[reason])
        return self._failed_output(opened, ErrorCode.ENGINE_FAILED, f"vLLM ended it: {reason}")

    def _exported(self, opened: VllmRequest, kv: Mapping[str, Any] | None) -> RequestOutput:
        """Return the output of an export. kv: vLLM's parameters for the import."""
        output = self._ended(opened, opened.output([]), "length")
        if kv and self._kv is not None:
            output.exported = self._kv.exported(opened.request, kv)
        return output

    def _imported(self, opened: VllmRequest, reason: str | None, cached: int) -> RequestOutput:
        """Report the end of an import. Its output is not delivered."""
        if reason == "length" and self._kv is not None:
            self._kv.imported(opened.request_id, cached)
        self._end_transfer(opened.request_id, f"vLLM ended it: {reason}")
        return self._ended(opened, opened.output([]), "length")

    @staticmethod
    def _is_import(opened: VllmRequest) -> bool:
        return opened.kv is not None and not opened.request.prefill_only

    def _end_transfer(self, request_id: int, error: str) -> None:
        """End the export or import with this id, if there is one."""
        if self._kv is not None:
            self._kv.end(request_id, error)

    def _take_pooled(
        self,
        opened: VllmRequest,
        _: str,
        shape: list[int],
        values: bytes,
        tokens: int,
        cached: int,
        label: str | None,
    ) -> RequestOutput:
        """Return the output of a pooling request from the fields of the message that Pooling.run() returned."""
        output = opened.output([])
        output.pooled = np.frombuffer(values, "<f4").reshape(shape)
        output.prompt_length, output.num_cached_tokens, output.label = tokens, cached, label
        return self._ended(opened, output, "stop")

    def _ended(self, opened: VllmRequest, output: RequestOutput, reason: FinishReason) -> RequestOutput:
        self._forget(opened)
        return opened.end(output, reason, now=time.monotonic())

    def _failed_output(self, opened: VllmRequest, code: ErrorCode, error: Exception | str) -> RequestOutput:
        if opened.kv is not None:
            self._end_transfer(opened.request_id, str(error))
        self._forget(opened)
        return opened.fail(error, code, now=time.monotonic())

    def _forget(self, opened: VllmRequest) -> None:
        del self._open[opened.request_id]
        self._close(opened)

    def _close(self, opened: VllmRequest) -> None:
        if opened.timer is not None:
            opened.timer.cancel()
        if opened.grammar is not None and opened.grammar is not asyncio.current_task():
            opened.grammar.cancel()

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Deliver outputs. While the engine is paused, keep the outputs for later."""
        if not self._running:
            self._held += outputs
        elif outputs:
            self._listener.on_outputs(outputs)

    # --- verbs --------------------------------------------------------------------------------------------------

    async def pause(self) -> RankResults:
        return await self._perform(self._pause())

    async def _pause(self) -> None:
        self._rates.stop()
        if self._is_loaded and not self._is_asleep:
            await (await self._vllm()).call("pause")
        self._running = False

    async def unpause(self) -> RankResults:
        return await self._perform(self._unpause())

    async def _unpause(self) -> None:
        self._running = True
        held, self._held = self._held, []
        self._deliver(held)
        for opened in self._open.values():
            if not opened.is_running and opened.grammar is None:
                self._attach(opened)
        if self._is_loaded:
            await (await self._vllm()).call("unpause")

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        """Release all memory.

        `tags` is ignored, because vLLM needs both its weights and its KV cache to run requests.
        """
        return await self._perform(self._release_memory())

    async def _release_memory(self) -> None:
        if self._can_sleep and self._is_loaded:
            await (await self._vllm()).call("sleep")
            self._is_asleep = True
        else:
            await self._end_process()
        for opened in self._open.values():
            opened.is_running = False

    async def restore_memory(self) -> RankResults:
        return await self._perform(self._restore_memory())

    async def _restore_memory(self) -> None:
        if self._is_asleep:
            vllm = await self._vllm()
            try:
                await vllm.call("wake_up")
                await vllm.call("set_adapters", self._adapters)
            except Exception:
                await vllm.call("sleep")
                raise
            self._is_asleep = False
        await self.load()

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        return await self._perform(self._stage(source, epoch))

    async def _stage(self, source: str, epoch: int) -> None:
        self._staged = None
        await self._remove_unused()
        vllm = await self._vllm()
        directory, digest = await vllm.call("stage", source, self._directory, self._place_of(source))
        self._staged = directory, digest, epoch
        if not self._is_loaded:
            self._unused = self._end_unused()

    async def commit_weights(self) -> RankResults:
        return await self._perform(self._commit())

    async def load_staged_weights(self) -> RankResults:
        return await self._perform(self._load_staged())

    async def _load_staged(self) -> None:
        if self._staged is None:
            raise RuntimeError("load_staged_weights() without staged weights: stage_weights() first")
        if self._is_loaded and not self._is_asleep:
            directory, _, _ = self._staged
            self._replaced = _Replaced(self._directory, was_running=self._running)
            await self._pause()
            self._copies = await (await self._vllm()).call("use_weights", directory)

    async def _commit(self) -> None:
        if self._staged is None:
            raise RuntimeError("commit_weights() without staged weights: stage_weights() first")
        if self._replaced is None:  # the engine is joining, or its coordinator does not know the second step
            await self._load_staged()
        (directory, digest, epoch), self._staged = self._staged, None
        if self._is_asleep:
            await self._end_process()  # with the old weights
        self._set_epoch(epoch)
        self._directory, self._digest, self._awaited = directory, digest, None
        self._identify_weights()
        await self._end_replacing()
        await self._remove_unused()

    async def discard_weights(self) -> None:
        self._staged = None
        if self._replaced is not None:
            self._copies = await (await self._vllm()).call("use_weights", self._replaced.directory)
            await self._end_replacing()
        await self._remove_unused()

    async def _end_replacing(self) -> None:
        """Unpause the engine if load_staged_weights() paused it.

        Called after the new weights are committed or discarded.
        """
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.was_running:
            await self._unpause()

    async def adopt_weights(self, source: str, epoch: int) -> None:
        if is_published(source) and self._place_of(source) == self._directory:
            return  # only addresses have changed
        if not is_published(source) or (self._is_loaded and not self._is_asleep):
            await self._stage(source, epoch)
            await self._commit()
            return
        if self._is_asleep:
            await self._end_process()  # with the old weights
        self._awaited = source, epoch

    @property
    def copies(self) -> tuple[str, ...]:
        return (self._copies,) if self._copies and self._received.holds(self._directory) else ()

    def _place_of(self, source: str) -> str:
        """Return the directory for the trainer's weights that `source` names; empty if `source` names other weights.

        Raises ValueError if this engine cannot receive weights of a trainer, and OSError if shared memory is missing.
        """
        if not is_published(source):
            return ""
        if self._followers is not None:
            raise ValueError(
                "a vLLM engine of several pods receives no weights of a trainer: give the engine one pod "
                "(spec.engine.ranksPerPod or gpusPerPod), or update it from files"
            )
        return self._received.path(PublishedSource.parse(source).session)

    async def _remove_unused(self) -> None:
        """Remove weights of a trainer that are neither in use nor staged."""
        staged = self._staged[0] if self._staged is not None else ""
        await asyncio.to_thread(self._received.keep, self._directory, staged)

    async def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._set_epoch(epoch)
            if self._is_loaded:
                was_running = self._running
                if self._kv is not None:  # vLLM cannot reset the cache before its exports have ended
                    await self._pause()
                await (await self._vllm()).call("reset_prefix_cache")
                if was_running and not self._running:
                    await self._unpause()

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._identify_weights()
        for opened in self._open.values():
            opened.stamp_epoch(epoch, total_tokens=opened.total_tokens, num_computed=0)

    async def load_adapter(self, name: str, source: str) -> RankResults:
        return await self._perform(self._load_adapter(name, source))

    async def _load_adapter(self, name: str, source: str) -> None:
        directory = str(await asyncio.to_thread(adapter_directory, source))
        if self._is_loaded and not self._is_asleep:
            await (await self._vllm()).call("load_adapter", name, directory)
        self._adapters[name] = directory

    async def unload_adapter(self, name: str) -> RankResults:
        return await self._perform(self._unload_adapter(name))

    async def _unload_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)
        # No open request uses the adapter, but imports may. vLLM would load the adapter again for them.
        for opened in [opened for opened in self._open.values() if opened.request.adapter == name]:
            self._end_transfer(opened.request_id, f"the adapter {name} was unloaded")
            await self.abort(opened.request_id)
        if self._is_loaded and not self._is_asleep:
            await (await self._vllm()).call("unload_adapter", name)

    async def _perform(self, work: Coroutine[Any, Any, None]) -> RankResults:
        try:
            await work
        except Exception as error:
            logger.exception("a verb failed")
            return RankResults.of_failure(error, ranks=self.info.ranks)
        return RankResults(self.info.ranks)


async def _dropped(request_id: int, process: VllmProcess | None) -> None:
    """Make vLLM's process drop a request, and wait until the request is dropped or the process has exited."""
    if process is not None:
        with contextlib.suppress(VllmError):
            await process.call("abort", request_id)


def _sent_media(request: EngineRequest) -> list[Any] | None:
    """Return the media of a request in the format of service.Submission; None if the request has no media."""
    if request.media is None:
        return None
    template = tokens_from_bytes(request.media.template).tolist()
    return [template, [[item.kind, item.digest, item.data] for item in request.media.items]]


def _capabilities(started: Mapping[str, Any]) -> frozenset[Capability]:
    """Return the capabilities of vLLM with the loaded model. started: the result of VllmService.describe()."""
    if started["task"] is not None:
        adapters = {Capability.ADAPTERS} if started["has_adapters"] else frozenset()
        return POOLING_CAPABILITIES | {POOLING[started["task"]]} | adapters
    lacks = frozenset() if started["forces_tokens"] else WITHOUT_FORCED_TOKENS
    if started["speculates"]:
        lacks |= WITH_SPECULATION_LACKS
    has = {
        Capability.ADAPTERS: started["has_adapters"],
        Capability.MEDIA: started["takes_media"],
        Capability.KV_TRANSFER: started["transfers_kv"],
    }
    return (CAPABILITIES | {capability for capability, is_there in has.items() if is_there}) - lacks


def _pairs(top: list[list[list[Any]]] | None) -> Any:
    """Convert the most likely tokens in a message from lists to (id, log-probability) tuples. Return None for None."""
    return None if top is None else [[(token, value) for token, value in row] for row in top]
