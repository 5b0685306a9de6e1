"""The process in which vLLM runs. Messages of process.py control its AsyncLLM.

This module uses only vLLM's public interface.

The engine starts it as `python -m megatron_runtime.backends.vllm.service DESCRIPTOR`. DESCRIPTOR is the file descriptor
of the socket to the engine. The engine keeps a copy of every request of this process, so the process can be killed at
any time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
import vllm
from prometheus_client import REGISTRY, generate_latest
from pydantic import ValidationError
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megatron_runtime.backends.vllm.arguments import engine_arguments, logits_processor_of, sleep_level, transfers_kv
from megatron_runtime.backends.vllm.cache_events import MergedCaches, endpoint_of, follow_cache_events
from megatron_runtime.backends.vllm.channel import Channel, frame, receive
from megatron_runtime.backends.vllm.media import Item, MediaReader, takes_media
from megatron_runtime.backends.vllm.models import (
    MANIFEST_FILE,
    eos_ids,
    model_directory,
    require_same_tensors,
    weights_bytes,
    weights_digest,
)
from megatron_runtime.backends.vllm.parameters import log_probs, must_force, stop_token, to_vllm
from megatron_runtime.backends.vllm.process import STARTED, settings_of
from megatron_runtime.backends.vllm.published import CopyPort
from megatron_runtime.backends.vllm.published import receive as receive_published
from megatron_runtime.checkpoints.remote import REMOTE_PREFIXES
from megatron_runtime.checkpoints.source import require_format, resolve
from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.progress import PROGRESS, Stage
from megatron_runtime.protocol.published_weights import WeightsUnavailableError
from megatron_runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.backends.vllm.pooling import Pooling

POOLING_INTERFACE = "vllm.entrypoints.pooling.scoring"
"""A module that vLLM has since 0.32. Older versions have other names for classes that read texts of pooling models."""
HEALTH_SECONDS = 1.0
"""Seconds between two health checks of an idle vLLM."""
ABORT_SECONDS, HEALTH_STEP_SECONDS = 30.0, 0.1
"""Seconds to check vLLM's health after vLLM has aborted a request, and seconds between two checks.

vLLM waits 5 s for the other ranks before it reports the loss.
"""
METRICS_SECONDS = 10.0
"""Seconds between two reports of vLLM's metrics to the engine."""
GRACE_SECONDS = 5.0
"""Seconds for vLLM's processes to remove their shared memory after the engine has exited.

After that, they are killed.
"""

STATS = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "num_preemptions_total": "preemptions",
    "prefix_cache_queries_total": "prefix_cache_queries",
    "prefix_cache_hits_total": "prefix_cache_hits",
}
"""Map from the name of vLLM's metric to the field of BackendStats."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for generated text, as the engine sends it to vLLM's process.

    params:     SamplingParams.serialize().
    bad_words:  token sequences of the sampling parameter `bad_words`; None if it is not set.
    adapter:    key of a loaded LoRA adapter; empty for the base model.
    generated:  tokens of the answer that an engine has already generated.
    stop_ids:   ids of the tokens that end the answer.
    max_tokens: number of answer tokens at which the request ends, including `generated`.
    media:      the prompt with one placeholder per image, audio or video, and these media; None if it has no media.
    kv:         vLLM's `kv_transfer_params` of a request that exports or imports KV; None for other requests.
    """

    request_id: int
    params: dict[str, Any]
    bad_words: list[list[int]] | None
    adapter: str
    prompt: list[int]
    generated: list[int]
    stop_ids: list[int]
    max_tokens: int
    media: tuple[list[int], list[Item]] | None = None
    kv: dict[str, Any] | None = None


class VllmService:
    """The service whose methods the engine calls by name, with positional arguments. All methods run on one event loop.

    directory: directory of the model's files.
    """

    def __init__(self, settings: EngineSettings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._calls: set[asyncio.Task[None]] = set()
        self._llm: AsyncLLM | None = None
        self._media: MediaReader | None = None
        self._sockets = tempfile.TemporaryDirectory(prefix="megatron-vllm-")
        self._endpoint = f"ipc://{self._sockets.name}/inproc-cache-events"
        self._arguments = engine_arguments(settings, directory, cache_events=self._endpoint)
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._outputs: list[Any] = []
        """Entries to send at the end of this iteration of the event loop."""
        self._background: list[asyncio.Task[None]] = []
        self._copies = CopyPort(settings)
        self._adapters: dict[str, LoRARequest] = {}
        self._pooling: Pooling | None = None
        """The loaded pooling model; None if the model generates text."""

    def _config(self) -> VllmConfig:
        """Create vLLM's configuration from the settings. Raises vLLM's errors."""
        return _config_of(self._arguments)

    def describe(self) -> dict[str, Any]:
        """Return properties of the model and of vLLM's configuration, by name. Raises vLLM's errors."""
        config = _settled_config(self._arguments, self._settings)
        model, cache = config.model_config, config.cache_config
        return {
            "directory": str(self._directory),
            "vocab_size": model.get_vocab_size(),
            "eos_ids": eos_ids(self._directory),
            "max_sequence_length": model.max_model_len,
            "max_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_requests": config.scheduler_config.max_num_seqs * self._settings.parallel.data,
            "block_size_tokens": cache.block_size if cache.enable_prefix_caching else 0,
            "ranks": config.parallel_config.world_size * self._settings.parallel.data,
            "can_sleep": model.enable_sleep_mode,
            "has_adapters": config.lora_config is not None,
            "speculates": config.speculative_config is not None,
            "forces_tokens": bool(self._arguments.logits_processors),
            "takes_media": takes_media(model),
            "transfers_kv": transfers_kv(self._settings) and cache.enable_prefix_caching,
            "task": _task_of(config),
        }

    async def serve(self, end: socket.socket) -> None:
        """Handle calls until the engine closes the connection. Calls of different methods can overlap."""
        ended = asyncio.Event()
        self._channel = channel = await Channel.open(end, self._received, ended.set)
        loop = asyncio.get_running_loop()

        def forward(*report: Any) -> None:  # called on any thread
            loop.call_soon_threadsafe(channel.send, ["progress", *report])

        PROGRESS.forward = forward
        await ended.wait()

    def _received(self, call: list[Any]) -> None:
        number, method, arguments = call
        if method not in METHODS:
            raise ValueError(f"method {method!r}: want one of {', '.join(METHODS)}")
        task = asyncio.create_task(self._handle(number, method, arguments))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _handle(self, number: int, method: str, arguments: list[Any]) -> None:
        result, error = None, None
        try:
            result = await getattr(self, method)(*arguments)
        except Exception as failure:
            error = _described(failure)
        if number != STARTED:
            self._channel.send([number, result, error])

    # --- memory and weights -------------------------------------------------------------------------------------

    async def load(self, nixl: tuple[str, int] | None) -> tuple[int, int, int, str]:
        """Load vLLM in the paused state.

        nixl: host and port at which NIXL listens; None without KV transfer.

        Return the maximum number of tokens, prompt plus answer, that fits into the KV cache; the configured size of
        each rank's cache in bytes, 0 if vLLM measures the size; the number of blocks of the cache; and the text
        KVConnector.layout.
        """
        if nixl is not None:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], port = nixl
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        config = await asyncio.to_thread(self._config)
        PROGRESS.report(Stage.LOAD, 0, weights_bytes(Path(self._arguments.model)))
        llm = await asyncio.to_thread(AsyncLLM.from_vllm_config, config)
        self._llm = llm
        if takes_media(config.model_config):
            self._media = MediaReader(llm.renderer)
        self._background.append(asyncio.create_task(self._watch_health(llm)))
        self._background.append(asyncio.create_task(self._report_metrics()))
        if config.cache_config.enable_prefix_caching:
            self._follow_caches(config.cache_config.block_size)
        if _task_of(config) is not None:
            from megatron_runtime.backends.vllm.pooling import Pooling

            supported = await llm.get_supported_tasks()
            self._pooling = await asyncio.to_thread(Pooling, llm, config, supported)
        await llm.pause_generation(mode="keep", clear_cache=False)
        gc.collect()
        gc.freeze()  # a garbage collection over the objects of all imports would stall every stream
        cache = config.cache_config
        ranks = config.parallel_config.world_size
        numbers = f"{config.model_config.dtype} {cache.cache_dtype} {cache.block_size}"
        layout = f"vLLM {vllm.__version__} {numbers} {ranks} ranks"
        length, cache_bytes = config.model_config.max_model_len, cache.kv_cache_memory_bytes
        return int(length), int(cache_bytes or 0), int(cache.num_gpu_blocks or 0), layout

    def _follow_caches(self, block_size: int) -> None:
        """Start to report the changes of the prefix cache of every data-parallel rank."""
        ranks = self._settings.parallel.data
        merged = MergedCaches(ranks)
        for rank in range(ranks):
            deliver = self._report_cache if ranks == 1 else partial(self._report_merged, merged, rank)
            media = None if self._media is None else self._media.names
            following = follow_cache_events(endpoint_of(self._endpoint, rank), block_size, deliver, media=media)
            self._background.append(asyncio.create_task(following))

    async def run_workers(self) -> None:
        """Run the ranks of a pod other than the engine's first pod, like `vllm serve --headless`."""
        config = await asyncio.to_thread(self._config)
        executor = await asyncio.to_thread(MultiprocExecutor, config, monitor_workers=False)
        await asyncio.to_thread(executor.start_worker_monitor, inline=True)  # returns when a rank has ended
        os._exit(1)

    async def shutdown(self) -> None:
        await self.abort(*self._requests)  # otherwise vLLM would end their answers
        for task in self._background:
            task.cancel()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        await asyncio.to_thread(self._copies.close)
        self._sockets.cleanup()

    async def digest(self, directory: str) -> str:
        """Return the digest of the weights in `directory`."""
        return await asyncio.to_thread(weights_digest, Path(directory))

    async def stage(self, source: str, current: str, received: str) -> tuple[str, str]:
        """Read new weights of the same model, and return their directory and digest.

        current:  directory of the weights in use.
        received: directory for the weights of a trainer; empty for other weights.

        Raises ValueError if the new tensors do not match the tensors in `current` (see require_same_tensors()).
        """
        if received:
            directory, keys_dir = Path(received), self._settings.keys_dir
            places = {"model": self._directory, "current": Path(current)}
            if not (directory / MANIFEST_FILE).exists():  # otherwise they are in use
                await asyncio.to_thread(receive_published, source, directory, keys_dir=keys_dir, **places)
        else:
            directory = await asyncio.to_thread(model_directory, source)
            await asyncio.to_thread(require_same_tensors, directory, Path(current))
        return str(directory), await asyncio.to_thread(weights_digest, directory)

    async def use_weights(self, directory: str) -> str:
        """Use the weights in `directory` for the next step or load. No step may run during the call.

        Return the address at which other engines get these weights; empty if no trainer published them.
        """
        self._arguments.model = directory
        if self._llm is not None:
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
            await self.reset_prefix_cache()
        return await asyncio.to_thread(self._copies.offer, Path(directory))

    async def reset_prefix_cache(self) -> None:
        if self._llm is not None:
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def sleep(self) -> None:
        """Release GPU memory, at the level that sleep_level() returns."""
        await self.abort(*self._requests)
        assert self._llm is not None
        level = sleep_level(self._settings)
        if level == 2:  # the layers that hold adapters are dropped with the weights
            for name in list(self._adapters):
                await self.unload_adapter(name)
        await self._llm.sleep(level=level, mode="keep")

    async def wake_up(self) -> None:
        """Undo sleep(). vLLM must have no requests. After a sleep of level 2, no adapter is loaded."""
        assert self._llm is not None
        if sleep_level(self._settings) == 2:
            await self._llm.wake_up(tags=["weights"])
            await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": self._arguments.model})
            await self._llm.wake_up(tags=["kv_cache"])
        else:
            await self._llm.wake_up()
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def set_adapters(self, adapters: dict[str, str]) -> None:
        """Load and unload LoRA adapters, until exactly `adapters` are loaded. adapters: directories by key."""
        for name in self._adapters.keys() - adapters.keys():
            await self.unload_adapter(name)
        for name, directory in adapters.items():
            if name not in self._adapters:
                await self.load_adapter(name, directory)

    async def load_adapter(self, name: str, directory: str) -> None:
        assert self._llm is not None
        used = {adapter.lora_int_id for adapter in self._adapters.values()}
        free = next(number for number in range(1, len(used) + 2) if number not in used)
        adapter = LoRARequest(name, free, directory)
        await self._llm.add_lora(adapter)
        self._adapters[name] = adapter

    async def unload_adapter(self, name: str) -> None:
        adapter = self._adapters.pop(name, None)
        if adapter is not None and self._llm is not None:
            await self._llm.remove_lora(adapter.lora_int_id)

    # --- requests -----------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        assert self._llm is not None
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def unpause(self) -> None:
        assert self._llm is not None
        await self._llm.resume_generation()

    async def submit(self, *fields: Any) -> None:
        """Run or continue a request. fields: fields of Submission."""
        request = Submission(*fields)
        self._requests[request.request_id] = asyncio.create_task(self._run(request))

    async def pool(self, *fields: Any) -> None:
        """Run a request of a pooling model. fields: fields of PoolingSubmission."""
        self._requests[fields[0]] = asyncio.create_task(self._pool(fields))

    async def abort(self, *request_ids: int) -> None:
        """Remove requests. After the reply, no output of these requests is sent."""
        tasks = [task for request_id in request_ids if (task := self._requests.pop(request_id, None)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._flush()

    async def _run(self, request: Submission) -> None:
        try:
            await self._generate(request, SamplingParams.deserialize(request.params))
        except EngineDeadError:
            os._exit(1)  # the cause is in the log
        except ValueError as error:
            self._report([request.request_id, "rejected", str(error)])
        except Exception as error:
            self._report([request.request_id, "failed", f"{type(error).__name__}: {error}"])
        finally:
            self._requests.pop(request.request_id, None)

    async def _pool(self, fields: tuple[Any, ...]) -> None:
        from megatron_runtime.backends.vllm.pooling import PoolingRejectedError, PoolingSubmission

        request, pooling = PoolingSubmission(*fields), self._pooling
        try:
            assert pooling is not None, "the model is loaded"
            lora = self._adapters[request.adapter] if request.adapter else None
            self._report(await pooling.run(request, lora))
        except EngineDeadError:
            os._exit(1)  # the cause is in the log
        except ValueError as error:
            field = error.field if isinstance(error, PoolingRejectedError) else ""
            self._report([request.request_id, "rejected", str(error), field])
        except Exception as error:
            self._report([request.request_id, "failed", f"{type(error).__name__}: {error}"])
        finally:
            self._requests.pop(request.request_id, None)

    async def _generate(self, request: Submission, params: SamplingParams) -> None:
        assert self._llm is not None
        generated = request.generated
        skipped = len(generated) if must_force(params) else 0
        # vLLM reads an input that is not rendered in another thread, which takes milliseconds if the CPUs are busy.
        tokens: Any = tokens_input(request.prompt + generated[skipped:])
        if request.media is not None:
            assert self._media is not None
            tokens = await self._media.engine_input(*request.media, tokens["prompt_token_ids"])
        if params.cache_salt:
            tokens["cache_salt"] = params.cache_salt
        stream = self._llm.generate(
            tokens,
            to_vllm(
                params,
                bad_words=request.bad_words or (),
                stop_ids=request.stop_ids,
                max_tokens=request.max_tokens,
                generated=generated,
                kv=request.kv,
            ),
            str(request.request_id),
            lora_request=self._adapters[request.adapter] if request.adapter else None,
            priority=params.priority,
        )
        async for output in stream:
            if output.outputs[0].finish_reason == "abort":
                await self._require_health()
            new = len(output.outputs[0].token_ids)
            if new > skipped or output.finished:
                self._report(_entry(request, params, output, skipped=min(skipped, new)))
            skipped = max(0, skipped - new)

    async def _require_health(self) -> None:
        """Check vLLM's health for ABORT_SECONDS. Raise EngineDeadError if vLLM has stopped.

        Called after vLLM has aborted a request, because vLLM aborts its requests if a rank is lost. After the error,
        another engine can continue the request.
        """
        assert self._llm is not None
        for _ in range(round(ABORT_SECONDS / HEALTH_STEP_SECONDS)):
            await self._llm.check_health()
            await asyncio.sleep(HEALTH_STEP_SECONDS)

    # --- reports ------------------------------------------------------------------------------------------------

    def _report(self, entry: list[Any]) -> None:
        """Queue the output of a request. All outputs of a step are sent together."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(entry)

    def _flush(self) -> None:
        if self._outputs:
            ready, self._outputs = self._outputs, []
            self._channel.send(["outputs", ready])

    def _report_cache(self, events: CacheEvents) -> None:
        self._channel.send(["cache", events.stored, events.evicted, events.cleared])

    def _report_merged(self, merged: MergedCaches, rank: int, events: CacheEvents) -> None:
        if changes := merged.merge(rank, events):
            self._report_cache(changes)

    async def _report_metrics(self) -> None:
        while True:
            values = dict.fromkeys(STATS.values(), 0.0)
            for family in REGISTRY.collect():
                for sample in family.samples:
                    field = STATS.get(sample.name.removeprefix("vllm:"))
                    if field is not None:
                        values[field] += sample.value
            values["kv_usage"] /= self._settings.parallel.data  # the sum over ranks of the usage of each rank's cache
            text = b"".join(line for line in generate_latest().splitlines(True) if b"vllm:" in line)
            self._channel.send(["metrics", values, text])
            await asyncio.sleep(METRICS_SECONDS)

    async def _watch_health(self, llm: AsyncLLM) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await llm.check_health()
            except EngineDeadError:
                os._exit(1)


def _entry(request: Submission, params: SamplingParams, found: RequestOutput, *, skipped: int) -> list[Any]:
    """Return the message that reports the new tokens of a request to the engine.

    The message omits the first `skipped` tokens, which were forced.
    """
    completion = found.outputs[0]
    tokens = list(completion.token_ids)[skipped:]
    chosen, top, prompt_chosen, prompt_top = None, None, None, None
    if params.wants_log_probs and tokens:
        details = list(completion.logprobs or ())[-len(tokens) :]
        chosen, top = log_probs(tokens, details, top=params.top_n_logprobs)
    if found.prompt_logprobs and params.wants_prompt_log_probs:  # empty after the first output
        prompt_chosen, prompt_top = log_probs(request.prompt[1:], found.prompt_logprobs[1:], top=params.top_n_logprobs)
    return [
        request.request_id,
        tokens,
        completion.finish_reason,
        stop_token(completion),
        found.num_cached_tokens or 0,
        chosen,
        top,
        prompt_chosen,
        prompt_top,
        found.kv_transfer_params if request.kv else None,
    ]


def _config_of(arguments: AsyncEngineArgs) -> VllmConfig:
    arguments = copy(arguments)  # the call changes them
    try:
        return arguments.create_engine_config(headless=arguments.node_rank > 0)
    except NotImplementedError as error:  # such as MTP with a model that has no layers for it
        raise ValueError(
            f"vLLM {vllm.__version__} does not support its arguments with this model: {error}: change or remove the "
            "argument"
        ) from error


def _settled_config(arguments: AsyncEngineArgs, settings: EngineSettings) -> VllmConfig:
    """Set the options of `arguments` that depend on the model, and return the resulting configuration.

    For a pooling model, no logits processor is set. vLLM decides whether the model uses chunked prefill and prefix
    caching; the settings can only disable these features.
    """
    config = _config_of(arguments)
    if config.model_config.runner_type != "pooling":
        return _register_logits_processor(arguments, config)
    arguments.enable_chunked_prefill = None if settings.chunked_prefill else False
    arguments.enable_prefix_caching = None if settings.prefix_caching else False
    if settings.max_tokens is None:
        arguments.max_num_batched_tokens = None
    has_prefixes = _config_of(arguments).cache_config.enable_prefix_caching
    arguments.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=has_prefixes, endpoint=arguments.kv_events_config.endpoint
    )
    return _config_of(arguments)


def _register_logits_processor(arguments: AsyncEngineArgs, config: VllmConfig | None = None) -> VllmConfig:
    """Set the logits processor for the model runner that vLLM selects, and return the resulting configuration.

    config: configuration of the arguments without a logits processor; None builds it here.
    """
    config = config or _config_of(arguments)
    logits_processor = logits_processor_of(config)
    if logits_processor is None:
        return config
    arguments.logits_processors = [logits_processor]
    return _config_of(arguments)


def _task_of(config: VllmConfig) -> str | None:
    """Return the task of a pooling model; None if the model generates text.

    Raises ValueError for a task that is not supported.
    """
    if config.model_config.runner_type != "pooling":
        return None
    if find_spec(POOLING_INTERFACE.rpartition(".")[0]) is None or find_spec(POOLING_INTERFACE) is None:
        raise ValueError(f"vLLM {vllm.__version__} cannot serve pooling models here: install vLLM 0.32 or newer")
    from megatron_runtime.backends.vllm.pooling import task_of

    return task_of(config)


def check(settings: EngineSettings) -> None:
    """Check arguments and model without loading the weights. Raises the errors of vLLM and engine_arguments()."""
    source = resolve(settings.model)
    require_format(source, settings.model_format, model=settings.model)
    with ExitStack() as drafts:

        def draft_directory(model: str) -> Path:
            if model.startswith(REMOTE_PREFIXES):
                # The HTTP client takes a tenth of a second to import.
                from megatron_runtime.checkpoints.remote.metadata import metadata_directory

                return drafts.enter_context(metadata_directory(model))
            return resolve(model).path

        arguments = engine_arguments(
            settings, source.path, cache_events="ipc:///unused", draft_directory=draft_directory
        )
        if source.format != "SafeTensors":
            return  # the first engine converts the model vLLM for GPUs, on a machine without one
        if current_platform.is_unspecified():  # vLLM for GPUs, on a machine without one
            arguments.create_model_config()
        else:
            _task_of(_settled_config(arguments, settings))


METHODS = (
    *("load", "shutdown", "digest", "stage", "use_weights", "reset_prefix_cache", "sleep", "wake_up"),
    *("set_adapters", "load_adapter", "unload_adapter", "pause", "unpause", "submit", "pool", "abort", "run_workers"),
)


def _described(error: Exception) -> list[str]:
    if isinstance(error, ValidationError):
        problems = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        return ["rejected", f"vLLM {vllm.__version__} rejects its arguments: {problems}"]
    if isinstance(error, WeightsUnavailableError):
        return ["unavailable", str(error)]
    kind = "rejected" if isinstance(error, ValueError | OSError) else "failed"
    return [kind, str(error) if kind == "rejected" else f"{type(error).__name__}: {error}"]


def _end_with_engine(end: socket.socket) -> None:
    """Kill all processes of this process group when the engine has exited, because they do not detect its exit."""
    poll = select.poll()
    poll.register(end, select.POLLRDHUP)
    poll.poll()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    setup, checks_only = receive(end)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the child processes get the signal too and handle it
    # The thread has its own descriptor. The event loop closes `end`, and another file could get its number meanwhile.
    threading.Thread(target=_end_with_engine, args=(end.dup(),), daemon=True).start()
    service, started, error = None, {}, None
    try:
        settings = settings_of(setup)
        PROGRESS.forward = lambda *report: end.sendall(frame(["progress", *report]))
        if checks_only:
            check(settings)
        else:
            service = VllmService(settings, model_directory(settings.model, wanted_format=settings.model_format))
            started = service.describe()
    except Exception as failure:
        service, error = None, _described(failure)
    end.sendall(frame([STARTED, started, error]))
    if service is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(service.serve(end))


if __name__ == "__main__":
    main()
