"""Answers that must match a JSON schema, a regular expression, a grammar or a list of texts, by llguidance. No torch.

A grammar becomes, before every token, the set of tokens that may come next. Its state follows from the tokens so far,
so that a request that moved to another engine continues with the same constraints.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling_params import InvalidSamplingParamsError

MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest description of a structure, as JSON or text."""

_LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Bounds of a hostile grammar: about 0.3 s in begin(), some 10 ms for each token."""

_JSON = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""A small model may go on with blanks for ever where JSON lets it."""

_KEPT = 64
"""Compiled grammars kept for the next request that asks for the same."""


class Vocabulary(Protocol):
    """What a grammar must know of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id_: int) -> bytes: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._failure: str | None = None

    def accept(self, token: int) -> None:
        """Take in the next token of the answer. One that does not match makes the answer unconstrained from there on;
        only a forced token of another engine's grammar can."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """A bit for each token that may come next, uint32 [ceil(V / 32)]; None when any may."""
        if self._matcher.is_error():
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        return None if self._matcher.is_error() else mask[: self._words]

    @property
    def is_complete(self) -> bool:
        """The answer matches and nothing may follow it, or the grammar ran into its limits."""
        return bool(self._matcher.is_stopped())

    @property
    def failure(self) -> str | None:
        """Why the grammar gave up; None while it works."""
        return self._matcher.get_error() if self._matcher.is_error() else None


@dataclass(frozen=True)
class _Wrapper:
    """A vocabulary as llguidance reads it."""

    eos_token_id: int
    bos_token_id: int | None
    tokens: list[bytes]
    special_token_ids: list[int]
    encode: Any

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        ids: list[int] = self.encode(decoded, add_special=False)
        return ids


class GrammarCompiler:
    """Makes the grammar state of a request. Not thread-safe.

    vocabulary: of the model's tokenizer.
    vocab_size: width of the model's logits, which may be padded beyond the tokenizer's vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, *, vocab_size: int) -> None:
        if not vocabulary.eos_ids:
            raise ValueError("structured output needs a tokenizer with an end-of-sequence token")
        self._vocab_size = vocab_size
        wrapper = _Wrapper(
            vocabulary.eos_ids[0],
            None,
            [vocabulary.token_bytes(id_) for id_ in range(vocabulary.vocab_size)],
            sorted(vocabulary.special_ids),
            vocabulary.encode,
        )
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(wrapper), n_vocab=vocab_size, eos_token=list(vocabulary.eos_ids)
        )
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def begin(self, structure: Mapping[str, Any], generated: Sequence[int] = ()) -> GrammarState:
        """The state of an answer that has `generated` so far.

        structure: as in SamplingParams.structured_output.

        Raises:
            InvalidSamplingParamsError: it is no valid description, or a larger one than is allowed.
        """
        try:
            key = json.dumps(structure, sort_keys=True)
        except (RecursionError, TypeError) as error:
            raise _invalid(structure, f"it cannot be written as JSON: {error}") from error
        if len(key.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidSamplingParamsError(
                "structured_output", key[:80] + "…", f"at most {MAX_GRAMMAR_BYTES} bytes of description"
            )
        matcher = self._compiled.get(key)
        if matcher is None:
            matcher = self._compiled[key] = self._compile(structure)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        state = GrammarState(matcher.deep_copy(), self._vocab_size)
        for token in generated:
            state.accept(int(token))
        return state

    def _compile(self, structure: Mapping[str, Any]) -> llguidance.LLMatcher:
        try:
            grammar = _grammar(structure)
        except ValueError as error:
            raise _invalid(structure, str(error)) from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(structure, matcher.get_error())
        return matcher


def _grammar(structure: Mapping[str, Any]) -> str:
    value = structure.get("value")
    match structure["type"]:
        case "json_object":
            return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(dict(value or {}), overrides=_JSON)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(str(value))
        case "choice":
            alternatives = " | ".join(json.dumps(text) for text in value or ())
            return llguidance.LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case _:
            return llguidance.LLMatcher.grammar_from_lark(str(value))


def _invalid(structure: Mapping[str, Any], reason: str) -> InvalidSamplingParamsError:
    first = next(iter(reason.strip().splitlines()), "it is not valid")
    return InvalidSamplingParamsError("structured_output", structure["type"], f"a valid {structure['type']}: {first}")
