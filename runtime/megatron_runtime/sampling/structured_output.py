"""Answers that must match a JSON schema, a regular expression, a grammar or a list of texts, by llguidance. No torch.

Before every token, a grammar gives the set of allowed tokens. Its state follows from the tokens so far, so a request
that moved to another engine continues under the same constraints.

Grammars are hostile input. Four bounds keep a grammar from harming other requests: limits on its text
(grammar_limits), a process that compiles it first and may crash (grammar_compiler), masks computed on threads of their
own, and a limit of CPU time for each answer.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from megatron_runtime.process.sacrificial_process import ProcessLostError
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_compiler import (
    InvalidGrammarError,
    VocabularyTable,
    compile_on_large_stack,
    trial_process,
    try_grammar,
)
from megatron_runtime.sampling.grammar_limits import check_structure

MASK_SECONDS = 1.0
MASK_SECONDS_PER_TOKEN = 0.01
"""CPU time that the masks of an answer may take: a fixed part, and a part per token. Usual grammars take 0.1 ms per
token."""

_MASK_THREADS = 2

_KEPT = 64
_KEPT_BYTES = 256 << 20
"""Limits of the cache of compiled grammars: their number, and their memory in all."""

_REJECTED = 1024
_REJECTED_SECONDS = 300.0
"""Limits of the cache of rejected grammars, by hash: their number, and the seconds that an entry is valid."""

Mask = npt.NDArray[np.uint32]


class Vocabulary(Protocol):
    """The properties of a tokenizer that a grammar needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id_: int) -> bytes: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class GrammarState:
    """The state of one answer in its grammar. One thread uses it; another computes the mask of the next token.

    masks: threads that compute masks.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, *, generated: Sequence[int] = (), masks: Executor
    ) -> None:
        self._matcher = matcher  # used only by the thread that computes a mask, until the mask is there
        self._words = -(-vocab_size // 32)
        self._masks = masks
        self._tokens = 0
        self._seconds = 0.0
        self._stopped = False
        self._fresh = False
        self._failure: str | None = None
        self._mask: Future[Mask | None] = Future()
        for token in generated:
            self._consume(int(token))
        self._mask.set_result(self._compute())

    def accept(self, token: int) -> None:
        """Consume the next token of the answer, and start to compute the mask of the token after it."""
        wait([self._mask])
        if self.is_complete:
            return
        self._consume(token)
        if not self.is_complete:
            self._fresh = True
            self._mask = self._masks.submit(self._compute)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the mask of the next token. Returns whether it is there."""
        return not wait([self._mask], timeout=seconds).not_done

    def is_fresh(self) -> bool:
        """Whether this is the first call since the computation of the current mask began."""
        was_fresh, self._fresh = self._fresh, False
        return was_fresh

    @property
    def is_ready(self) -> bool:
        """Whether allowed() returns at once."""
        return self._mask.done()

    def allowed(self) -> Mask | None:
        """A bit for each allowed token, uint32 [ceil(V / 32)]; None if all tokens are allowed. Waits for the mask."""
        return self._mask.result()

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and is complete, or the grammar failed."""
        return self._stopped or self._failure is not None

    @property
    def failure(self) -> str | None:
        """Why the grammar failed: it exceeded a limit, or a forced token does not match it."""
        return self._failure

    def _consume(self, token: int) -> None:
        if self.is_complete:
            return
        started = time.thread_time()
        self._matcher.consume_token(token)
        self._tokens += 1
        self._note(time.thread_time() - started)

    def _compute(self) -> Mask | None:
        if self.is_complete:
            return None
        started = time.thread_time()
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self._note(time.thread_time() - started)
        return None if self._failure is not None else mask[: self._words]

    def _note(self, seconds: float) -> None:
        self._seconds += seconds
        if self._matcher.is_error():
            self._failure = self._matcher.get_error().strip()
        elif self._seconds > (granted := MASK_SECONDS + MASK_SECONDS_PER_TOKEN * self._tokens):
            self._failure = (
                f"it took {self._seconds:.1f} s of CPU time for {self._tokens} tokens, at most {granted:.1f} s are "
                "granted: use a grammar with fewer ambiguities"
            )
        self._stopped = bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Creates the grammar state of a request. Thread-safe; grammars are compiled one at a time.

    vocabulary: of the model's tokenizer.
    vocab_size: width of the model's logits, which may be padded beyond the tokenizer's vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, *, vocab_size: int) -> None:
        if not vocabulary.eos_ids:
            raise ValueError("structured output needs a tokenizer with an end-of-sequence token")
        self._vocab_size = vocab_size
        table = VocabularyTable(
            tokens=[vocabulary.token_bytes(id_) for id_ in range(vocabulary.vocab_size)],
            special_token_ids=sorted(vocabulary.special_ids),
            eos_token_ids=list(vocabulary.eos_ids),
            vocab_size=vocab_size,
            encode=lambda text: vocabulary.encode(text, add_special=False),
        )
        self._tokenizer = table.tokenizer()
        self._process = trial_process(table)
        self._masks = ThreadPoolExecutor(_MASK_THREADS, thread_name_prefix="grammar-mask")
        self._compiling = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[llguidance.LLMatcher, int]] = OrderedDict()
        self._rejected: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """The cause, and the end of its validity by time.monotonic(): the process may have ended for another cause."""

    @property
    def process_id(self) -> int | None:
        """Id of the process that tries grammars; None while there is none."""
        return self._process.pid

    def begin(self, structure: Mapping[str, Any], generated: Sequence[int] = ()) -> GrammarState:
        """The grammar state of an answer after the tokens `generated`.

        structure: as in SamplingParams.structured_output.

        Raises:
            InvalidSamplingParamsError: the description is not valid, or exceeds a limit.
            ProcessStartError: the process that tries grammars cannot be started.
        """
        check_structure(structure)
        key = _key(structure)
        matcher = self._known(structure, key)
        if matcher is None:
            with self._compiling:
                matcher = self._known(structure, key) or self._compile(structure, key)
        return GrammarState(matcher, self._vocab_size, generated=generated, masks=self._masks)

    def is_known(self, structure: Mapping[str, Any]) -> bool:
        """Whether begin() returns, or raises, without compiling."""
        try:
            key = _key(structure)
        except (RecursionError, TypeError, ValueError):  # check_structure() rejects it
            return True
        with self._lock:
            return key in self._compiled or self._rejection(key) is not None

    def close(self) -> None:
        """End the process and the threads. A begin() in progress raises."""
        self._process.close()
        self._masks.shutdown(wait=False)

    def _known(self, structure: Mapping[str, Any], key: bytes) -> llguidance.LLMatcher | None:
        with self._lock:
            reason = self._rejection(key)
            if reason is not None:
                raise _invalid(structure, reason)
            found = self._compiled.get(key)
            if found is None:
                return None
            self._compiled.move_to_end(key)
            return found[0].deep_copy()

    def _compile(self, structure: Mapping[str, Any], key: bytes) -> llguidance.LLMatcher:
        try:
            size = try_grammar(self._process, structure)
            matcher = compile_on_large_stack(self._tokenizer, structure)
        except ProcessLostError as lost:
            reason = f"it is too complex: {lost} while it was compiled; use fewer or simpler parts"
            self._reject(key, reason)
            raise _invalid(structure, reason) from lost
        except InvalidGrammarError as error:
            self._reject(key, str(error))
            raise _invalid(structure, str(error)) from error
        with self._lock:
            self._compiled[key] = matcher, size
            kept = sum(size for _, size in self._compiled.values())
            while len(self._compiled) > _KEPT or (kept > _KEPT_BYTES and len(self._compiled) > 1):
                kept -= self._compiled.popitem(last=False)[1][1]
            return matcher.deep_copy()

    def _rejection(self, key: bytes) -> str | None:
        reason, until = self._rejected.get(key, (None, 0.0))
        return reason if time.monotonic() < until else None

    def _reject(self, key: bytes, reason: str) -> None:
        with self._lock:
            self._rejected[key] = _first_line(reason), time.monotonic() + _REJECTED_SECONDS
            while len(self._rejected) > _REJECTED:
                self._rejected.popitem(last=False)


def _key(structure: Mapping[str, Any]) -> bytes:
    """The order of a JSON schema's properties is part of the key, because it is the order in the answer."""
    value = None if structure["type"] == "json_object" else structure.get("value")
    return hashlib.sha256(json.dumps([structure["type"], value]).encode()).digest()


def _first_line(reason: str) -> str:
    """The compiler quotes the whole grammar in further lines."""
    return next(iter(reason.strip().splitlines()), "it is not valid")[:500]


def _invalid(structure: Mapping[str, Any], reason: str) -> InvalidSamplingParamsError:
    kind = structure["type"]
    return InvalidSamplingParamsError("structured_output", kind, f"a valid {kind}: {_first_line(reason)}")
