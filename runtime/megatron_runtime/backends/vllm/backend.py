"""Runs vLLM's AsyncLLM behind EngineBackend. Only vLLM's public interface is used.

vLLM schedules and computes in a process of its own. This process keeps what a request needs to continue: its prompt
and every token that it received. So requests survive what ends vLLM's process: a suspend gives all of its memory back,
and a resume starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from prometheus_client import REGISTRY
from vllm import TokensPrompt
from vllm.outputs import RequestOutput as VllmOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from megatron_runtime.backends.text import ModelText
from megatron_runtime.backends.vllm.arguments import engine_arguments
from megatron_runtime.backends.vllm.cache_events import follow_cache_events
from megatron_runtime.backends.vllm.models import eos_ids, model_directory, require_same_tensors, weights_digest
from megatron_runtime.backends.vllm.parameters import log_probs, max_total_tokens, must_force, stop_token, to_vllm
from megatron_runtime.engine.backend import (
    BackendInfo,
    BackendListener,
    Capability,
    Detokenizer,
    EngineBackend,
    RankResults,
)
from megatron_runtime.engine.engine_request import (
    BackendStats,
    EngineRequest,
    EpochSpans,
    RequestOutput,
    RequestSummary,
)
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.events import DynamicInferenceEvent
from megatron_runtime.requests.events import DynamicInferenceEventType as Event
from megatron_runtime.requests.sampling_params import IGNORE_EOS

logger = logging.getLogger(__name__)

_END_WITH_PARENT = """
import os, sys
sys.stdin.read()
for pid in map(int, sys.argv[1:]):
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
"""
"""Kills vLLM's processes when this process has ended for any reason: they do not notice that it was killed."""

HEALTH_SECONDS = 1.0
"""How often an idle engine is checked."""

CAPABILITIES = frozenset(Capability) - {Capability.PROFILER, Capability.ADAPTERS}


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request of this engine.

    tokens:     generated so far, by this or another engine.
    max_tokens: length of the answer at which the request ends.
    arrived, first_token: on time.monotonic().
    task:       runs it in vLLM; None while it waits for the engine.
    """

    request: EngineRequest
    tokens: list[int]
    max_tokens: int
    arrived: float
    policy_epoch: EpochSpans
    kv_cache_epoch: EpochSpans
    first_token: float | None = None
    num_cached_tokens: int = 0
    task: asyncio.Task[None] | None = None
    events: list[DynamicInferenceEvent] = field(default_factory=list)

    def note(self, kind: Event) -> None:
        self.events.append(DynamicInferenceEvent(kind))

    def output(self, tokens: list[int]) -> RequestOutput:
        return RequestOutput(
            self.request.request_id, tokens, len(self.request.prompt_tokens), num_cached_tokens=self.num_cached_tokens
        )

    def end(self, output: RequestOutput) -> None:
        """Complete the last output."""
        now = time.monotonic()
        first_token = now if self.first_token is None else self.first_token
        self.note(Event.FAIL if output.finish_reason == "error" else Event.FINISH)
        output.summary = RequestSummary(
            queue_seconds=0.0,  # vLLM does not report it; it is a part of the prefill
            prefill_seconds=first_token - self.arrived,
            decode_seconds=now - first_token,
            policy_epoch=self.policy_epoch,
            kv_cache_epoch=self.kv_cache_epoch,
            events=self.events,
        )

    def set_epoch(self, epoch: int) -> None:
        """Later tokens are sampled with the weights of `epoch`, and all KV is computed again with them."""
        start = len(self.request.prompt_tokens) + len(self.tokens) - 1 if self.tokens else 0
        self.policy_epoch = [*(span for span in self.policy_epoch if span[0] < start), (start, epoch)]
        self.kv_cache_epoch = [(0, epoch)]


class VllmBackend(EngineBackend):
    """Implements EngineBackend. All methods run on one event loop.

    Raises:
        ValueError: a setting, the model or the version of vLLM is not usable; the message names it and the remedy.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._directory = model_directory(settings.model)
        self._sockets = tempfile.TemporaryDirectory(prefix="megatron-vllm-")
        self._endpoint = f"ipc://{self._sockets.name}/cache-events"
        self._arguments = engine_arguments(settings, self._directory, cache_events=self._endpoint)
        config = self._arguments.create_engine_config()
        self._text = ModelText.of_model(settings.model)
        model, cache = config.model_config, config.cache_config
        self.info = BackendInfo(
            name="vllm",
            vocab_size=model.get_vocab_size(),
            eos_ids=eos_ids(self._directory),
            max_sequence_length=model.max_model_len,
            block_size_tokens=cache.block_size if cache.enable_prefix_caching else 0,
            ranks=config.parallel_config.world_size,
            capabilities=CAPABILITIES,
        )
        self._can_sleep = model.enable_sleep_mode
        self._open: dict[int, OpenRequest] = {}
        self._llm: AsyncLLM | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._running = False
        self._epoch = 0
        self._digest = ""
        self._staged: tuple[Path, str, int] | None = None
        self._ready: list[RequestOutput] = []
        """Outputs that wait for the next flush; while the engine is paused, for unpause()."""
        self._flush_scheduled = False
        self._watch: asyncio.Task[None] | None = None
        self._cache_events: asyncio.Task[None] | None = None
        self._failed = False

    # --- start and stop -----------------------------------------------------------------------------------------

    async def start(self, listener: BackendListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    async def load(self) -> None:
        if self._llm is not None:
            return
        digest = await asyncio.to_thread(weights_digest, self._directory)
        if self._digest not in ("", digest):
            raise ValueError(
                f"the weights at {self._directory} have digest {digest[:12]}, the released weights had "
                f"{self._digest[:12]}: restore the files, or update the weights under a new epoch"
            )
        self._digest = digest
        own = set(psutil.Process().children())
        config = await asyncio.to_thread(self._arguments.create_engine_config)  # an update has changed the model
        llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config)
        self._llm = llm
        children = [child.pid for child in psutil.Process().children() if child not in own]
        self._reaper = await asyncio.to_thread(_start_reaper, children)
        self._watch = asyncio.create_task(self._watch_health(llm))
        if self.info.block_size_tokens:
            self._cache_events = asyncio.create_task(
                follow_cache_events(self._endpoint, self._listener.on_cache_events)
            )
        await llm.pause_generation(mode="keep", clear_cache=False)

    async def stop(self, cause: BaseException | None = None) -> None:
        await self._detach(list(self._open.values()))
        await self._end_process()
        await asyncio.to_thread(self._text.close_grammars)
        self._sockets.cleanup()

    async def _end_process(self) -> None:
        """End vLLM's process, which releases all memory of the engine."""
        tasks = [task for task in (self._watch, self._cache_events) if task is not None]
        self._watch = self._cache_events = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        if self._reaper is not None:
            await asyncio.to_thread(self._reaper.communicate)
            self._reaper = None

    async def _watch_health(self, llm: AsyncLLM) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await llm.check_health()
            except Exception as error:
                self._fail(error)
                return

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._listener.on_failure(error)

    def detokenizer(self) -> Detokenizer:
        return self._text.detokenizer()

    def stats(self) -> BackendStats:
        return BackendStats(
            weights_digest=self._digest,
            num_running=int(_metric("num_requests_running")),
            num_waiting=int(_metric("num_requests_waiting")),
            kv_usage=_metric("kv_cache_usage_perc"),
            prompt_tokens=int(_metric("prompt_tokens_total")),
            generation_tokens=int(_metric("generation_tokens_total")),
            preemptions=int(_metric("num_preemptions_total")),
            prefix_cache_queries=int(_metric("prefix_cache_queries_total")),
            prefix_cache_hits=int(_metric("prefix_cache_hits_total")),
        )

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        prompt = len(request.prompt_tokens)
        try:
            total = max_total_tokens(request, limit=self.info.max_sequence_length)
        except ValueError as error:
            self._reject(request, error)
            return
        opened = OpenRequest(
            request,
            tokens=request.generated_tokens.tolist(),
            max_tokens=total - prompt,
            arrived=time.monotonic(),
            policy_epoch=[(0, self._epoch)],
            kv_cache_epoch=[(0, self._epoch)],
        )
        opened.note(Event.ADD_ENGINE)
        self._open[request.request_id] = opened
        if self._running:
            self._attach(opened)

    def abort(self, request_id: int) -> asyncio.Future[object]:
        opened = self._open.pop(request_id, None)
        return asyncio.ensure_future(self._detach([opened] if opened is not None else []))

    def _attach(self, opened: OpenRequest) -> None:
        """Run a request in vLLM, or continue it there after the tokens that it has."""
        opened.task = asyncio.create_task(self._run(opened))

    async def _detach(self, requests: Sequence[OpenRequest]) -> None:
        """Remove requests from vLLM. They keep their tokens."""
        tasks = [opened.task for opened in requests if opened.task is not None]
        for opened in requests:
            opened.task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, opened: OpenRequest) -> None:
        request = opened.request
        seconds = request.deadline_seconds
        remaining = None if seconds is None else opened.arrived + seconds - time.monotonic()
        try:
            async with asyncio.timeout(remaining):
                await self._generate(opened)
        except TimeoutError:
            self._end_with_error(opened, ErrorCode.DEADLINE, f"the deadline of {seconds:g} s passed")
        except EngineDeadError as error:
            self._fail(error)
        except ValueError as error:
            self._end_with_error(opened, ErrorCode.INVALID_REQUEST, error)
        except Exception as error:
            logger.exception("request %d failed", request.request_id)
            self._end_with_error(opened, ErrorCode.ENGINE_FAILED, error)

    async def _generate(self, opened: OpenRequest) -> None:
        request, llm = opened.request, self._llm
        params, generated = request.sampling_params, list(opened.tokens)
        if generated and (reason := self._end_reason(opened)) is not None:
            self._finish(opened, opened.output([]), reason)
            return
        if params.structured_output is not None:
            # Rejects a grammar that is not valid or too expensive, in a process that may crash.
            await asyncio.to_thread(self._text.begin_grammar, params, generated)
        assert llm is not None
        skipped = len(generated) if must_force(params) else 0
        prompt = request.prompt_tokens.tolist() + generated[skipped:]
        tokens = TokensPrompt(prompt_token_ids=prompt)
        if params.cache_salt:
            tokens["cache_salt"] = params.cache_salt
        stream = llm.generate(
            tokens,
            to_vllm(params, max_tokens=opened.max_tokens, generated=generated),
            str(request.request_id),
            priority=params.priority,
        )
        async for output in stream:
            skipped = self._take(opened, output, skipped)

    def _take(self, opened: OpenRequest, found: VllmOutput, skipped: int) -> int:
        """Report the new tokens of a request. Return how many more of its forced tokens are to be skipped."""
        params, completion = opened.request.sampling_params, found.outputs[0]
        tokens = list(completion.token_ids)[skipped:]
        still_skipped = max(0, skipped - len(completion.token_ids))
        if not tokens and completion.finish_reason is None:
            return still_skipped
        opened.num_cached_tokens = found.num_cached_tokens or 0
        if tokens and opened.first_token is None:
            opened.first_token = time.monotonic()
        opened.tokens += tokens
        output = opened.output(tokens)
        if params.wants_log_probs and tokens:
            details = list(completion.logprobs or ())[-len(tokens) :]
            output.new_log_probs, output.new_top_n_logprobs = log_probs(tokens, details, top=params.top_n_logprobs)
        if found.prompt_logprobs and params.wants_prompt_log_probs:  # empty after the first output
            output.prompt_log_probs, output.prompt_top_n_logprobs = log_probs(
                opened.request.prompt_tokens.tolist()[1:], found.prompt_logprobs[1:], top=params.top_n_logprobs
            )
        if completion.finish_reason is None:
            self._report(output)
            return still_skipped
        output.stop_token = stop_token(completion)
        if completion.finish_reason in ("stop", "length"):
            self._finish(opened, output, completion.finish_reason)
        else:
            self._end_with_error(opened, ErrorCode.ENGINE_FAILED, f"vLLM ended it: {completion.finish_reason}")
        return still_skipped

    def _end_reason(self, opened: OpenRequest) -> Literal["stop", "length"] | None:
        """Return why a request that came with generated tokens is complete; None if it is not."""
        params, newest = opened.request.sampling_params, opened.tokens[-1]
        ends = set(params.stop_token_ids or ())
        if params.termination_id is None:
            ends.update(self.info.eos_ids)
        elif params.termination_id != IGNORE_EOS:
            ends.add(params.termination_id)
        if newest in ends and len(opened.tokens) >= params.min_tokens:
            return "stop"
        return "length" if len(opened.tokens) >= opened.max_tokens else None

    def _finish(self, opened: OpenRequest, output: RequestOutput, reason: Literal["stop", "length", "error"]) -> None:
        if self._open.pop(opened.request.request_id, None) is None:
            return
        output.finish_reason = reason
        opened.end(output)
        self._report(output)

    def _end_with_error(self, opened: OpenRequest, code: ErrorCode, error: Exception | str) -> None:
        output = opened.output([])
        output.error, output.error_code = error, code
        self._finish(opened, output, "error")

    def _reject(self, request: EngineRequest, error: Exception) -> None:
        output = RequestOutput(request.request_id, [], len(request.prompt_tokens), finish_reason="error", error=error)
        output.error_code = ErrorCode.INVALID_REQUEST
        self._listener.on_outputs([output])

    def _report(self, output: RequestOutput) -> None:
        """Deliver an output together with all others of the same step. A paused engine delivers none."""
        self._ready.append(output)
        if self._running and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._running and self._ready:
            ready, self._ready = self._ready, []
            self._listener.on_outputs(ready)

    # --- verbs --------------------------------------------------------------------------------------------------

    async def pause(self) -> RankResults:
        return await self._perform(self._pause())

    async def _pause(self) -> None:
        if self._llm is not None:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        self._flush()
        self._running = False

    async def unpause(self) -> RankResults:
        return await self._perform(self._unpause())

    async def _unpause(self) -> None:
        self._running = True
        self._flush()
        for opened in self._open.values():
            if opened.task is None:
                self._attach(opened)
        if self._llm is not None:
            await self._llm.resume_generation()

    async def release_memory(self, tags: Collection[str] | None = None) -> RankResults:
        """Release all memory, whatever the tags: vLLM cannot run a request without either part."""
        return await self._perform(self._release_memory())

    async def _release_memory(self) -> None:
        await self._detach(list(self._open.values()))
        if self._can_sleep and self._llm is not None:
            await self._llm.sleep(level=1, mode="keep")
        else:
            await self._end_process()

    async def restore_memory(self) -> RankResults:
        return await self._perform(self._restore_memory())

    async def _restore_memory(self) -> None:
        if self._llm is None:
            await self.load()
        else:
            await self._llm.wake_up()  # no request is in vLLM, so no step runs
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def stage_weights(self, source: str, epoch: int) -> RankResults:
        return await self._perform(self._stage(source, epoch))

    async def _stage(self, source: str, epoch: int) -> None:
        directory = await asyncio.to_thread(model_directory, source)
        await asyncio.to_thread(require_same_tensors, directory, self._directory)
        self._staged = directory, await asyncio.to_thread(weights_digest, directory), epoch

    async def commit_weights(self) -> RankResults:
        return await self._perform(self._commit())

    async def _commit(self) -> None:
        if self._staged is None:
            raise RuntimeError("commit_weights() without staged weights: stage_weights() first")
        (directory, digest, epoch), self._staged = self._staged, None
        if self._llm is not None:
            was_running = self._running
            await self._pause()
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            await self._set_epoch(epoch)
            if was_running:
                await self._unpause()
        else:
            await self._set_epoch(epoch)
        self._directory, self._digest = directory, digest
        self._arguments.model = str(directory)

    async def discard_weights(self) -> None:
        self._staged = None

    async def adopt_weights(self, source: str, epoch: int) -> None:
        await self._stage(source, epoch)
        await self._commit()

    async def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            await self._set_epoch(epoch)

    async def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for opened in self._open.values():
            opened.set_epoch(epoch)
        if self._llm is not None:
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def _perform(self, work: Coroutine[Any, Any, None]) -> RankResults:
        try:
            await work
        except Exception as error:
            logger.exception("a verb failed")
            return RankResults.of_failure(error, ranks=self.info.ranks)
        return RankResults(self.info.ranks)


def _start_reaper(children: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the process that kills `children` when this process has ended."""
    command = [sys.executable, "-S", "-E", "-c", _END_WITH_PARENT, *map(str, children)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _metric(name: str) -> float:
    """Return a metric of vLLM, summed over its engines; 0 before vLLM reports it."""
    for family in REGISTRY.collect():
        if family.name == f"vllm:{name.removesuffix('_total')}":
            return sum(sample.value for sample in family.samples if sample.name == f"vllm:{name}")
    return 0.0
