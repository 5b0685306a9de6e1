"""An engine without a model: one task generates a token of every running request at each tick.

It appends a line to the file $FAKE_VLLM_LOG for each step, for each call that changes the engine, and for the end of
each request. A prompt with DEADLY ends the engine at its third step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Gauge

from vllm.config import VllmConfig
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

TICK_SECONDS = 0.005
FORCED, BAD_WORDS = "megatron_forced_tokens", "megatron_bad_words"


def next_token(context: Sequence[int], weights: int = 0) -> int:
    """Return the token after `context`, which depends on all of its tokens and on the weights."""
    return 1000 + (31 * sum(context) + 7 * len(context) + 101 * weights) % 20_000


DEADLY = 666
LOST = 500
"""Weights that were dropped and not loaded again."""
FITTING_LENGTH = 1536
"""Room of the KV cache, if the sequence length is fitted to it."""


def log(line: str) -> None:
    with open(os.environ["FAKE_VLLM_LOG"], "a") as file:
        file.write(line + "\n")


class AsyncLLM:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        if vllm_config._args.max_model_len == -1:
            vllm_config.model_config.max_model_len = FITTING_LENGTH
        self._is_paused_now = False
        self._is_dead = False
        self._asleep: set[str] = set()
        self._weights = self._read_weights(vllm_config._args.model)
        self._adapters: dict[int, int] = {}
        self._imported: set[tuple[str, tuple[int, ...]]] = set()
        self._requests: dict[str, _Request] = {}
        self._task: asyncio.Task[None] | None = None
        Gauge("vllm:num_requests_running", "as vLLM has it", ["engine"]).labels("0").set(0)

    @staticmethod
    def _read_weights(directory: str) -> int:
        return (Path(directory) / "model.safetensors").read_bytes()[-1]

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> AsyncLLM:
        interface = LogitsProcessor if vllm_config.use_v2_model_runner else AdapterLogitsProcessor
        for logits_processor in vllm_config.model_config.logits_processors:
            if not issubclass(logits_processor, interface):
                raise ValueError(
                    f"{logits_processor.__name__} is not a subclass of {interface.__module__}.LogitsProcessor"
                )
            if vllm_config.speculative_config and not vllm_config.use_v2_model_runner:
                raise ValueError("Custom logits processors are not supported when speculative decoding is enabled.")
        if vllm_config._args.kv_cache_memory_bytes is None:
            for percent in (0, 50, 100):
                bar = f"\rLoading safetensors checkpoint shards: {percent:3}% Completed | {percent // 50}/2"
                print(bar, end="", flush=True)
            print("\n(Worker pid=7) INFO 01-01 [gpu_worker.py:760] Available KV cache memory: 12.5 GiB")
            print("(Worker pid=8) INFO 01-01 [gpu_worker.py:760] Available KV cache memory: 12.25 GiB")
            print("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|####", flush=True)
        if captured := os.environ.get("FAKE_VLLM_CAPTURES_UNTIL"):  # a file
            while not os.path.exists(captured):
                time.sleep(0.01)
        return cls(vllm_config)

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        params = sampling_params
        assert "type" in prompt, "vLLM reads a raw prompt in another thread"
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if any(not 0 <= token < self._config.model_config.get_vocab_size() for token in params.stop_token_ids):
            raise ValueError("stop_token_ids contain out-of-vocab token ids")
        if self._config.speculative_config and (params.min_p or params.logit_bias):
            raise ValueError("min_p and logit_bias are not yet supported with speculative decoding.")
        assert not params.extra_args or self._config.model_config.logits_processors, "nothing reads extra_args"
        request = self._requests[request_id] = _Request(prompt["prompt_token_ids"], params)
        self._transfer(request_id, request, lora_request.lora_name if lora_request is not None else "")
        log(f"begin {request_id} {priority} {prompt.get('cache_salt')}")
        if params.structured_outputs is not None:
            log(f"structure {request_id} of {len(request.context)} {params.structured_outputs}")
        request.shift = self._adapters[lora_request.lora_int_id] if lora_request is not None else 0
        try:
            while True:
                output = await request.queue.get()
                if output is None:
                    raise EngineDeadError
                yield output
                if output.finished:
                    return
        finally:
            self._requests.pop(request_id, None)
            log(f"end {request_id}")

    def _transfer(self, request_id: str, request: _Request, adapter: str) -> None:
        """Export or import the KV of a prompt, and note which requests find the imported KV."""
        kv = (request._params.extra_args or {}).get("kv_transfer_params")
        assert kv is None or (self._config._args.kv_transfer_config or {}).get("kv_connector") == "NixlConnector"
        prompt = tuple(request.context)
        if kv is not None and kv.get("do_remote_decode"):
            port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            remote = {"remote_engine_id": f"fake-{port}", "remote_port": port, "remote_block_ids": [[1, 2]]}
            request.exported = {"do_remote_prefill": True, "do_remote_decode": False, **remote}
        elif kv is not None:
            assert kv["do_remote_prefill"]
            log(f"import {request_id} from {kv['remote_engine_id']} {kv['remote_block_ids']}")
            self._imported.add((adapter, prompt))
            request.cached = 0 if kv["remote_engine_id"] == "lost" else len(prompt)
        elif any((adapter, prompt[: len(imported)]) == (name, imported) for name, imported in self._imported):
            log(f"hit {request_id}")

    async def _run(self) -> None:
        while not self._is_dead:
            await asyncio.sleep(TICK_SECONDS)
            if self._requests and not self._is_paused_now:
                log("step")
                for request in list(self._requests.values()):
                    request.step(self._weights + request.shift)
                    self._is_dead |= request.is_deadly
        print("RuntimeError: the fake got the deadly token", flush=True)
        for request in self._requests.values():
            aborted = RequestOutput([CompletionOutput([], None, "abort", None)], True)
            request.queue.put_nowait(aborted if "FAKE_VLLM_ABORTS" in os.environ else None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        log("pause")
        self._is_paused_now = True
        await asyncio.sleep(0.02)

    async def resume_generation(self) -> None:
        log("resume")
        self._is_paused_now = False

    async def sleep(self, *, level: int, mode: str) -> None:
        assert not self._requests, "vLLM keeps no KV of a request while it sleeps"
        assert (self._is_paused_now, mode) == (True, "keep")
        log(f"sleep {level}")
        self._asleep = {"weights", "kv_cache"}
        if level == 2:
            self._weights, self._adapters = LOST, dict.fromkeys(self._adapters, LOST)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        log(f"wake_up {','.join(tags or ['all'])}")
        self._asleep -= {*(tags or self._asleep)}
        if not self._asleep:
            self._is_paused_now = False
        return not self._asleep

    async def check_health(self) -> None:
        if self._is_dead:
            raise EngineDeadError

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        log("reset_prefix_cache")
        return True

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> list[None]:
        assert method == "reload_weights"
        assert self._is_paused_now, "weights are swapped under pause"
        assert "weights" not in self._asleep
        log(method)
        self._weights = self._read_weights(kwargs["weights_path"])
        return [None]

    def shutdown(self) -> None:
        log("shutdown")
        for request in self._requests.values():
            request.queue.put_nowait(RequestOutput([CompletionOutput([], None, "abort", None)], True))
        if self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def add_lora(self, lora_request: Any) -> bool:
        log(f"add_lora {lora_request.lora_name} {lora_request.lora_int_id}")
        self._adapters[lora_request.lora_int_id] = (
            (Path(lora_request.lora_path) / "adapter_model.safetensors").stat().st_size
        )
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        log(f"remove_lora {lora_id}")
        return self._adapters.pop(lora_id, None) is not None


class _Request:
    def __init__(self, prompt: list[int], params: Any) -> None:
        self.queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self.context = list(prompt)
        self._params = params
        self._generated: list[int] = []
        self._prompt_length = len(prompt)
        self.shift = 0
        self.cached = 0
        self.exported: dict[str, Any] | None = None

    @property
    def is_deadly(self) -> bool:
        return DEADLY in self.context[: self._prompt_length] and len(self._generated) == 3

    def step(self, weights: int) -> None:
        params, count = self._params, len(self._generated)
        extra = params.extra_args or {}
        forced = extra.get(FORCED, [])
        token = next_token(self.context, weights)
        while any([*self._generated, token][-len(word) :] == word for word in extra.get(BAD_WORDS, [])):
            token += 1
        token = forced[count] if count < len(forced) else token
        self.context.append(token)
        self._generated.append(token)
        reason, stop = None, None
        ends = set(params.stop_token_ids)
        assert params.ignore_eos, "stop_token_ids has all tokens that end the answer"
        if token in ends and len(self._generated) > params.min_tokens and count >= len(forced):
            reason, stop = "stop", token
        elif len(self._generated) >= params.max_tokens:
            reason = "length"
        found = None
        if params.logprobs is not None:
            found = [
                {
                    token: Logprob(-0.5, 1),
                    **{token + place: Logprob(-1.0 - place, place + 1) for place in range(1, params.logprobs)},
                }
            ]
        output = RequestOutput([CompletionOutput([token], found, reason, stop)], reason is not None)
        output.num_cached_tokens = self.cached
        if output.finished:
            output.kv_transfer_params = self.exported
        if params.prompt_logprobs is not None:
            own = [{token: Logprob(-0.25, 1)} for token in self.context[1 : self._prompt_length]]
            output.prompt_logprobs = [None, *own] if len(self._generated) == 1 else []
        self.queue.put_nowait(output)
