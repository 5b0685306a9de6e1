"""Converts the prompts of a generate() call to token ids, and the reply maps of an engine or a client to answers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

import torch

from megatron_runtime.backends.text import ModelText
from megatron_runtime.client.pending import failed_reply
from megatron_runtime.engine.output_stage import error_map
from megatron_runtime.in_process.streams import GenerationChunk, ReadChunk
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron_runtime.requests.sampling_params import SamplingParams

Prompt: TypeAlias = str | list[int]

MAX_TOKEN = (1 << 31) - 1
"""Largest token id that a message can carry."""


class PromptBatch:
    """The prompts of one generate() call, and their answers in the same order.

    sampling_params: one object for all prompts, or one object for each; may be Megatron-Core's class.
    text: converts tokens to text and text to tokens; None for an engine whose tokens have no text.
    sent:    indices of the prompts that are sent to the engine. Each other prompt cannot be converted to token ids, and
             has an error as its answer.
    tokens:  token ids of each prompt; empty if a prompt cannot be converted.
    replies: reply maps by prompt index. Errors of prompts that cannot be converted are in this map from the beginning.

    Raises InvalidSamplingParamsError if a sampling parameter is invalid.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        text: ModelText | None,
    ) -> None:
        if isinstance(sampling_params, Sequence):
            if len(sampling_params) != len(prompts):
                raise ValueError(
                    f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: want one, or one for each"
                )
            self.params = list(map(_validated, sampling_params))
        else:
            self.params = [_validated(sampling_params or SamplingParams())] * len(prompts)
        self._text = text
        self._prompts = prompts
        self.tokens: list[list[int]] = []
        self.replies: dict[int, dict[str, Any]] = {}
        for number, (prompt, params) in enumerate(zip(prompts, self.params, strict=True)):
            try:
                self.tokens.append(token_ids(prompt, params, text))
            except (ValueError, TypeError) as error:
                self.tokens.append([])
                self.fail(number, ErrorCode.INVALID_REQUEST, error)
        self.sent = [number for number in range(len(prompts)) if number not in self.replies]

    def fail(self, number: int, code: ErrorCode, error: Exception | str) -> None:
        """Store an error as the answer to the prompt with index `number`."""
        self.replies[number] = {**failed_reply(error_map(code, error)), "request_id": number}

    def answer(self, number: int) -> DynamicInferenceRequest:
        """Return the finished request of the prompt with index `number`, with its texts.

        If the prompt was given as tokens, its text is also set.
        """
        request = DynamicInferenceRequestRecord.from_reply(self.replies[number]).merge()
        prompt, params, text = self._prompts[number], self.params[number], self._text
        request.sampling_params = copy.copy(params)  # a copy, because the caller may reuse the object
        request.prompt_tokens = self.tokens[number]
        request.prompt = prompt if isinstance(prompt, str) else None
        for name in ("policy_staleness", "kv_cache_staleness"):
            if (staleness := getattr(request, name)) is not None:
                setattr(request, name, torch.from_numpy(staleness))
        if request.routing_indices is not None:
            request.routing_indices = torch.as_tensor(request.routing_indices).long()
        if text is None:
            return request
        if request.prompt is None:
            request.prompt = text.detokenize(request.prompt_tokens)
        if request.generated_text is None:
            tokens = request.generated_tokens
            ended_by_token = isinstance(request.stop_reason, int) and tokens[-1:] == [request.stop_reason]
            request.generated_text = text.tokenizer.answer_text(
                tokens,
                after=request.prompt_tokens,
                stop_token=tokens[-1] if ended_by_token else None,
                keeps_end=params.detokenize_stop_sequence,
            )
        if params.return_segments:
            detokenizer = text.detokenizer(after=request.prompt_tokens)
            segments = [detokenizer.feed([token]) for token in request.generated_tokens]
            request.generated_segments = [*segments[:-1], segments[-1] + detokenizer.finish()] if segments else []
        return request

    def answers(self) -> list[DynamicInferenceRequest]:
        return [self.answer(number) for number in range(len(self._prompts))]

    def chunk_reader(self) -> ReadChunk:
        """Return a function that converts the items of a stream to chunks. Call the function with the items in order.

        This batch must have exactly one prompt.
        """
        detokenizer = self._text.detokenizer(after=self.tokens[0]) if self._text is not None else None
        length = count = 0  # number of characters and of tokens in the chunks so far

        def read(item: dict[str, Any]) -> GenerationChunk:
            nonlocal length, count
            if "partial" in item:
                frame = item["partial"]
                tokens: list[int] = frame["new_tokens"]
                new_text = detokenizer.feed(tokens) if detokenizer is not None else ""
                length += len(new_text)
                count += len(tokens)
                return GenerationChunk(new_text, tokens, frame.get("new_log_probs"))
            self.replies[0] = item["final"]
            request = self.answer(0)
            rest, log_probs = request.generated_tokens[count:], request.generated_log_probs
            rest_log_probs = log_probs[-len(rest) :] if log_probs and rest else None
            return GenerationChunk((request.generated_text or "")[length:], rest, rest_log_probs, request)

        return read


def _validated(params: Any) -> SamplingParams:
    """Return the validated sampling parameters, as an object of this project's class.

    The parameters are validated again because their owner may have changed them after construction.
    """
    own = SamplingParams.of(params)
    own.validate()
    return own


def token_ids(prompt: Any, params: SamplingParams, text: ModelText | None) -> list[int]:
    """Return the token ids of a prompt, which is a text or a list of token ids.

    Raises:
        TypeError, ValueError: the prompt is neither a text nor a list of token ids, or its text is not valid Unicode.
        RuntimeError: the prompt is text, but the engine's tokens have no text.
    """
    if isinstance(prompt, str):
        if text is None:
            raise RuntimeError("the tokens of this engine have no text: pass a prompt of token ids")
        return text.tokenize_prompt(prompt, params.add_BOS)
    if isinstance(prompt, bytes | bytearray | Mapping):
        raise TypeError(f"prompt is {type(prompt).__name__}: want str or list[int]")
    try:
        tokens = list(prompt)
    except TypeError:
        raise TypeError(f"prompt is {type(prompt).__name__}: want str or list[int]") from None
    if not set(map(type, tokens)) <= {int}:
        for place, token in enumerate(tokens):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise TypeError(f"prompt[{place}] is {token!r:.80}: want a token id, which is an integer")
            tokens[place] = index(token)
    if tokens and not 0 <= min(tokens) <= max(tokens) <= MAX_TOKEN:
        bad = next(token for token in tokens if not 0 <= token <= MAX_TOKEN)
        raise ValueError(f"prompt has the token id {bad}: want 0 to {MAX_TOKEN}, and less than the vocabulary's size")
    return tokens
