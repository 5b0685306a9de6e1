"""What stands between text and a model: tokenizing, one step with its samples and log-probabilities, detokenizing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.requests.config import LogprobsMode
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.batch import NO_LOG_PROBS, Float32
from megatron_runtime.sampling.log_probs import LogProbs, joined, log_probs
from megatron_runtime.sampling.sampler import apply_edits, filtered_logits, sample

if TYPE_CHECKING:
    import torch

    from megatron_runtime.backends.native.device import ModelRunner
    from megatron_runtime.backends.native.gpt_inference_wrapper import Forwarded
    from megatron_runtime.sampling.structured_output import GrammarCompiler, GrammarState
    from megatron_runtime.tokenization import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

LARGE_VOCABULARY = 100_000
"""Tokens. 50,000 are indexed in 0.3 s, 260,000 in several seconds."""


class TextGenerationController:
    """Megatron-Core `TextGenerationController`, over step plans. Text methods may be called from any thread.

    inference_wrapped_model: None while the weights are given back.
    padded_vocab_size: width of the model's logits, which may exceed the tokenizer's vocabulary; None while unknown.
    tokenizer:     of the model, or what makes it when it is first needed.
    logprobs_mode: "raw_logprobs" of the model's own logits, "processed_logprobs" of what tokens are drawn from.
    """

    def __init__(
        self,
        inference_wrapped_model: ModelRunner | None,
        tokenizer: Tokenizer | Callable[[], Tokenizer],
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self.padded_vocab_size: int | None = None
        self._make_tokenizer = tokenizer
        self._is_raw = logprobs_mode == "raw_logprobs"
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = Lock()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        made = self._make_tokenizer
        return made() if callable(made) else made

    # --- text ---------------------------------------------------------------------------------------------------

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """add_BOS: put the begin-of-sequence token first, whatever the tokenizer does by itself."""
        ids = self.tokenizer.encode(prompt)
        bos = self.tokenizer.bos_id
        return [bos, *ids] if add_BOS and bos is not None and ids[:1] != [bos] else ids

    def detokenize(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(tokens)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return self.tokenizer.detokenizer()

    def begin_grammar(self, params: SamplingParams, generated: Sequence[int] = ()) -> GrammarState | None:
        """Where an answer of `params` stands in its structure after `generated`; None if it has none.

        Raises:
            InvalidSamplingParamsError: the structure is not valid.
        """
        if params.structured_output is None:
            return None
        return self._grammar_compiler().begin(params.structured_output, generated)

    def is_grammar_known(self, params: SamplingParams) -> bool:
        """Whether begin_grammar() returns without compiling."""
        return params.structured_output is None or (
            self._grammars is not None and self._grammars.is_known(params.structured_output)
        )

    def prepare_grammars(self) -> None:
        """Index the vocabulary for grammars now if it is large: that holds the interpreter lock for a second or more,
        which would stall the streams of an engine that serves.
        """
        if self.padded_vocab_size is None or self.padded_vocab_size < LARGE_VOCABULARY:
            return
        try:
            self._grammar_compiler()
        except ValueError as error:  # the model has no tokenizer, or one without an end-of-sequence token
            logger.info("structured output is not available: %s", error)

    def close_grammars(self) -> None:
        """End the process that tries grammars. It starts again when the next grammar needs it."""
        with self._grammar_lock:
            grammars, self._grammars = self._grammars, None
        if grammars is not None:
            grammars.close()

    def _grammar_compiler(self) -> GrammarCompiler:
        with self._grammar_lock:
            if self._grammars is None:
                from megatron_runtime.sampling.structured_output import GrammarCompiler

                vocab_size = self.padded_vocab_size or self.tokenizer.vocab_size
                self._grammars = GrammarCompiler(self.tokenizer, vocab_size=vocab_size)
            return self._grammars

    # --- a step -------------------------------------------------------------------------------------------------

    def generate_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> StepResult:
        """Run the plan, and sample the tokens it asks for."""
        if self.inference_wrapped_model is None:
            raise RuntimeError("the model's weights are not loaded: load() or resume first")
        return self.sample_step(self.inference_wrapped_model.run_one_forward_step(plan, cache_LPXE), plan)

    def sample_step(self, step: Forwarded, plan: StepPlan) -> StepResult:
        """Sample the tokens that `plan` asks for from the forward pass of it."""
        tokens = np.full(len(plan.query_lengths), -1, dtype=np.int32)
        found: dict[int, LogProbs] = {}
        rows = step.sampled_rows
        if len(rows):
            drawn = step.draw()
            if drawn is not None:
                tokens[rows] = drawn
            here = np.arange(len(rows)) if drawn is None else np.flatnonzero(_is_for_the_host(plan, rows))
            if len(here):
                found = self._sample_here(step.sampled_logits(here), rows[here], plan, tokens)
        return StepResult(tokens, found, _of_prompts(step, plan))

    def _sample_here(
        self, logits_NV: Float32, rows: npt.NDArray[np.int64], plan: StepPlan, tokens: npt.NDArray[np.int32]
    ) -> dict[int, LogProbs]:
        """Fill in `tokens` of `rows`; return the log-probabilities they ask for."""
        num_log_probs = plan.sampling.num_log_probs
        wanted = np.flatnonzero(num_log_probs[rows] != NO_LOG_PROBS)
        # Sampling changes logits in place; raw log-probabilities are of what they were before.
        reported = {int(rows[i]): self._reported(logits_NV[i].copy(), plan, int(rows[i])) for i in wanted}
        tokens[rows] = sample(logits_NV, plan.sampling, rows)
        return {
            row: log_probs(logits_V[None], tokens[row : row + 1], top_n=int(num_log_probs[row]))
            for row, logits_V in reported.items()
        }

    def _reported(self, logits_V: Float32, plan: StepPlan, row: int) -> Float32:
        """The logits that the log-probabilities of `row` are made of."""
        if self._is_raw:
            return logits_V
        batch = plan.sampling
        edits = batch.edits.get(row)
        if edits is not None:
            apply_edits(logits_V, edits)
        return filtered_logits(
            logits_V,
            temperature=float(batch.temperature[row]),
            top_k=int(batch.top_k[row]),
            top_p=float(batch.top_p[row]),
            min_p=float(batch.min_p[row]),
        )


def _is_for_the_host(plan: StepPlan, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each of `rows` asks for more than a device draws: edits of its logits, or log-probabilities."""
    is_edited = np.array([int(row) in plan.sampling.edits for row in rows])
    return is_edited | (plan.sampling.num_log_probs[rows] != NO_LOG_PROBS)


def _of_prompts(step: Forwarded, plan: StepPlan) -> dict[int, LogProbs]:
    """Log-probabilities of prompt tokens. They were not drawn: the model's own logits tell how likely they were."""
    parts: dict[int, list[LogProbs]] = {}
    for row, first, logits_NV in step.prompt_logits():
        targets = plan.sampling.prompt_targets[row][first : first + len(logits_NV)]
        top_n = max(0, int(plan.sampling.num_log_probs[row]))
        parts.setdefault(row, []).append(log_probs(logits_NV, targets, top_n=top_n))
    return {row: joined(found) for row, found in parts.items()}
