"""From a request to an open one, or why an engine cannot take it. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.engine.engine_request import EngineRequest, OpenRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.errors import BlockOverflowError, MaxSequenceLengthOverflowError, TokenOverflowError
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import IGNORE_EOS, InvalidSamplingParamsError, SamplingParams


class Admission:
    """What one engine takes.

    longest: tokens of prompt and answer that its memory has room for.
    limit:   the same, of its model and configuration; at least `longest`.
    """

    def __init__(self, config: InferenceConfig, executor: Executor, *, longest: int, limit: int) -> None:
        self._config = config
        self._executor = executor
        self._longest = longest
        self._limit = limit

    def open(self, request: EngineRequest, *, arrival: int, now: float, epoch: int) -> OpenRequest:
        """`request` as the engine keeps it. Raises the errors of DynamicInferenceEngine.add_request()."""
        params = request.sampling_params
        tokens = np.concatenate([request.prompt_tokens, request.generated_tokens]).astype(np.int32)
        self._check(request, tokens)
        return OpenRequest(
            request,
            tokens=tokens,
            max_total_tokens=self._max_total_tokens(params, len(request.prompt_tokens)),
            stop_ids=self._stop_ids(params),
            rank=(params.priority, 0, arrival),
            digests=self._digests(request),
            reads_cache=self._config.enable_prefix_caching and not params.wants_prompt_log_probs,
            deadline=None if request.deadline_seconds is None else now + request.deadline_seconds,
            arrived=now,
            policy_epoch=[(0, epoch)],
            kv_cache_epoch=[(0, epoch)],
        )

    def _check(self, request: EngineRequest, tokens: npt.NDArray[np.int32]) -> None:
        prompt, params, vocabulary = len(request.prompt_tokens), request.sampling_params, self._executor.vocab_size
        if prompt == 0:
            raise ValueError("prompt is empty: give at least one token")
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"prompt has a token outside the vocabulary of {vocabulary}")
        params.check_vocabulary(vocabulary)
        if params.structured_output is not None and request.grammar is None:
            raise InvalidSamplingParamsError(
                "structured_output", params.structured_output["type"], "an engine whose model has a tokenizer"
            )
        total = params.num_tokens_total
        if total is not None and total <= prompt:
            raise InvalidSamplingParamsError("num_tokens_total", total, f"more than the prompt's {prompt} tokens")
        if prompt >= self._longest:
            message = (
                f"This model's maximum context length was exceeded. The prompt has {prompt} tokens; prompt and answer "
                f"together may have {self._longest}: shorten the prompt"
            )
            if self._longest < self._limit:
                raise BlockOverflowError(request.request_id, message + " or give the engine more kv_cache_memory")
            raise MaxSequenceLengthOverflowError(request.request_id, message)
        if not self._config.enable_chunked_prefill and prompt > self._config.step_tokens:
            raise TokenOverflowError(
                request.request_id,
                f"the prompt has {prompt} tokens, a step takes {self._config.step_tokens}: shorten the prompt, raise "
                "max_tokens or enable chunked prefill",
            )

    def _max_total_tokens(self, params: SamplingParams, prompt: int) -> int:
        if params.num_tokens_total is not None:
            return min(self._longest, params.num_tokens_total)
        if params.num_tokens_to_generate is not None:
            return min(self._longest, prompt + params.num_tokens_to_generate)
        return self._longest

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = set(params.stop_token_ids or ())
        if params.termination_id is None:
            stop_ids.update(self._executor.eos_ids)
        elif params.termination_id != IGNORE_EOS:
            stop_ids.add(params.termination_id)
        return frozenset(token for token in stop_ids if 0 <= token < self._executor.vocab_size)

    def _digests(self, request: EngineRequest) -> list[bytes]:
        if not self._config.enable_prefix_caching:
            return []
        salt = (request.sampling_params.cache_salt or "").encode()
        return block_digests(request.prompt_tokens, self._config.block_size_tokens, salt=salt)


def refuse_what_is_not_done(config: InferenceConfig) -> None:
    """Raise InvalidConfigError for the first field that asks for what this engine does not do."""
    config.require_default("num_speculative_tokens", because="this engine generates one token a step")
    config.require_default("unified_memory_level", because="this engine keeps its KV cache in one kind of memory")
    config.require_default("paused_buffer_size_gb", because="this engine preempts requests instead of pausing them")
    config.require_default("static_kv_memory_pointers", because="this engine gives the KV cache's addresses back")
    config.require_default("sampling_backend", because="this engine samples with its own code")
    config.require_default("async_sched_mode", because="this engine plans a step when the last one has ended")
