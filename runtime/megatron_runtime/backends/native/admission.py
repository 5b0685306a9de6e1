"""Checks new requests, and creates the engine's record of each request. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import Executor
from megatron_runtime.backends.open_request import BackendRequest
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput, TopLogProbs, too_long
from megatron_runtime.protocol import limits
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.errors import BlockOverflowError, TokenOverflowError
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.sampler import LogProbs

if TYPE_CHECKING:
    from megatron_runtime.sampling.batch import AnswerState


_LONG_VARIANT = "\0long"
"""Suffix of an adapter's key in KV digests of long sequences. Keys of adapters never contain this character."""


@dataclass(slots=True, eq=False, kw_only=True)
class CoreRequest(BackendRequest):
    """The native engine's record of a request.

    tokens:      int32; tokens of prompt and answer. They are stored here only while the request holds no slot.
    is_long:     whether prompt plus answer may become longer than the model's `short_length`.
    rank:        sort key in the queues, (priority, place, arrival); the lowest is first. `place` is the number of open
                 requests of the same tenant and priority that arrived earlier. It is 0 while there is only one tenant.
    digests:     prefix-cache keys of the complete blocks of the prompt.
    uncached:    number of tokens that were not in the prefix cache when the request began to wait.
    reads_cache: whether the request may use the blocks of `digests` from the prefix cache.
    grammar:     state of the answer's grammar after the generated tokens; None for an answer without a grammar.
    """

    tokens: npt.NDArray[np.int32]
    is_long: bool
    rank: tuple[int, int, int]
    digests: list[bytes]
    reads_cache: bool
    grammar: AnswerState | None = None
    slot: int = -1
    uncached: int = 0
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_n_logprobs: list[TopLogProbs] = field(default_factory=list)
    has_reported_prompt: bool = False

    @property
    def priority(self) -> int:
        return self.rank[0]

    @property
    def tenant(self) -> str:
        return self.request.tenant

    def prompt_targets(self, start: int, count: int) -> tuple[int, int] | None:
        """Return the range (first, end) of prompt positions whose log-probabilities a step determines.

        The step computes `count` tokens from position `start` on. `end` is exclusive. Returns None if the range is
        empty, if the request does not want log-probabilities of its prompt, or if an engine has already reported them.
        """
        if not self.params.wants_prompt_log_probs or len(self.request.generated_tokens):
            return None
        if start == 0 and len(self.prompt_log_probs) < self.prompt_length - 1:
            # The prompt is computed again after a preemption.
            self.prompt_log_probs.clear()
            self.prompt_top_n_logprobs.clear()
        first, end = start + 1, min(start + count + 1, self.prompt_length)
        return (first, end) if len(self.prompt_log_probs) == start and first < end else None

    def add_prompt_log_probs(self, found: LogProbs) -> None:
        count = self.params.top_n_logprobs
        self.prompt_log_probs += found.chosen_N.tolist()
        self.prompt_top_n_logprobs += [found.row(line, count) for line in range(len(found.chosen_N))] if count else []

    def report_log_probs(self, found: LogProbs, output: RequestOutput) -> None:
        """Set the log-probabilities of the sampled token in `output`.

        In the first output of the request, also set the log-probabilities of the prompt.
        """
        output.new_log_probs = found.chosen_N.tolist()
        if self.params.top_n_logprobs:
            output.new_top_n_logprobs = [found.row(0, self.params.top_n_logprobs)]
        if self.prompt_log_probs and not self.has_reported_prompt:
            self.has_reported_prompt = True
            output.prompt_log_probs = self.prompt_log_probs
            output.prompt_top_n_logprobs = self.prompt_top_n_logprobs or None


def transferable_blocks(tokens: int, block_size: int) -> int:
    """Return the number of leading prompt blocks that one KV transfer carries for a request of `tokens` tokens.

    RequestSlots.match() never returns blocks after these.
    """
    return min(max(0, tokens - 2) // block_size, limits.MAX_TRANSFER_BLOCKS)


@dataclass(frozen=True, slots=True)
class Admission:
    """A validator of new requests, with the length limits of one engine.

    longest: maximum number of tokens, prompt plus answer, that fit into the engine's KV cache.
    limit:   maximum number of tokens, prompt plus answer, that the model and the configuration allow. It is not less
             than `longest`.
    """

    config: InferenceConfig
    executor: Executor
    longest: int
    limit: int

    def open(
        self, request: EngineRequest, *, grammar: AnswerState | None, arrival: int, now: float, epoch: int
    ) -> CoreRequest:
        """Check `request` and return the engine's record of it. Raises the errors of EngineCore.add_request()."""
        params, config, vocabulary = request.sampling_params, self.config, self.executor.vocab_size
        tokens = np.concatenate([request.prompt_tokens, request.generated_tokens]).astype(np.int32)
        self._check(request, tokens, has_grammar=grammar is not None)
        short_length = self.executor.short_length
        is_long = short_length is not None and request.max_total_tokens(self.longest) > short_length
        digests = []
        if config.enable_prefix_caching:
            salt = (params.cache_salt or "").encode()
            # Long sequences use other rotary frequencies.
            variant = request.adapter + _LONG_VARIANT if is_long else request.adapter
            digests = block_digests(request.prompt_tokens, config.block_size_tokens, salt=salt, adapter=variant)
        if request.prefill_only:
            digests = digests[: transferable_blocks(len(tokens), config.block_size_tokens)]
            tokens = tokens[: len(digests) * config.block_size_tokens]
            if not digests:
                raise ValueError(f"the prompt has no block of {config.block_size_tokens} tokens to keep")
        return CoreRequest.open(
            request,
            longest=self.longest,
            eos_ids=self.executor.eos_ids,
            vocab_size=vocabulary,
            now=now,
            epoch=epoch,
            tokens=tokens,
            is_long=is_long,
            rank=(params.priority, 0, arrival),
            digests=digests,
            reads_cache=config.enable_prefix_caching and not params.wants_prompt_log_probs,
            grammar=grammar,
        )

    def _check(self, request: EngineRequest, tokens: npt.NDArray[np.int32], *, has_grammar: bool) -> None:
        prompt, params, vocabulary = len(request.prompt_tokens), request.sampling_params, self.executor.vocab_size
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocabulary):
            raise ValueError(f"prompt has a token outside the vocabulary of {vocabulary}")
        params.validate()  # a caller in this process may have changed it
        params.check_vocabulary(vocabulary)
        if params.structured_output is not None and not has_grammar:
            remedy = "an engine whose model has a tokenizer"
            raise InvalidSamplingParamsError("structured_output", params.structured_output["type"], remedy)
        if params.bad_words and request.bad_words is None:
            raise InvalidSamplingParamsError("bad_words", params.bad_words, "an engine whose model has a tokenizer")
        if params.do_kv_handoff and not request.keeps_blocks:
            raise InvalidSamplingParamsError("do_kv_handoff", True, "False: only engines with a role keep blocks")
        if self.longest <= prompt and self.longest < self.limit:
            message = too_long(prompt, self.longest) + " or give the engine more kv_cache_memory"
            raise BlockOverflowError(request.request_id, message)
        if not self.config.enable_chunked_prefill and prompt > self.config.step_tokens:
            raise TokenOverflowError(
                request.request_id,
                f"the prompt has {prompt} tokens, a step takes {self.config.step_tokens}: shorten the prompt, raise "
                "max_tokens or enable chunked prefill",
            )
