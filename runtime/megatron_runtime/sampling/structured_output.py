"""Structured output: answers that match a JSON schema, regular expression, grammar or list of texts.

Before every token, the grammar (llguidance) determines the set of allowed tokens. The tokens so far determine the
grammar's state, so a request that moves to another engine continues with the same constraints.

Grammars are hostile input. Four measures protect other requests from a grammar: limits on its text (grammar_limits), a
trial process that compiles it first and may crash (grammar_compiler), a separate thread pool for masks, and a limit of
CPU time for each answer. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from megatron_runtime.process.fair_lanes import FairThreads
from megatron_runtime.process.sacrificial_process import ProcessLostError
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_compiler import (
    ENGINE_STACK_BYTES,
    InvalidGrammarError,
    VocabularyTable,
    compile_grammar,
    trial_process,
    try_grammar,
)
from megatron_runtime.sampling.grammar_limits import check_structure

MASK_SECONDS = 1.0
MASK_SECONDS_PER_TOKEN = 0.01
"""Limits of CPU seconds for the masks of an answer, as a fixed part and a part per token.

Usual grammars take 0.1 ms per token.
"""

_MASK_THREADS = 2
_KEPT = 64
_KEPT_BYTES = 256 << 20
"""Limits of the cache of compiled grammars: the number of grammars, and their total memory in bytes."""
_REJECTED = 1024
_REJECTED_SECONDS = 300.0
"""Limits of the cache of rejected grammars: the number of entries, and the seconds for which an entry is valid."""

Mask = npt.NDArray[np.uint32]


class Vocabulary(Protocol):
    """The properties of a tokenizer that grammars need."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, id_: int) -> bytes: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class GrammarState:
    """The state of one answer in its grammar. Only one thread uses it. Another thread computes the next token's mask.

    No method raises an error. If the grammar fails, only its answer fails.

    masks:   runs a function in another thread, and returns a future.
    failure: why the grammar has failed; None if it has not failed. A grammar fails if it exceeds a limit, if a forced
             token does not match, or if the matcher raises an error.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        *,
        generated: Sequence[int] = (),
        masks: Callable[[Callable[[], Mask | None]], Future[Mask | None]],
    ) -> None:
        self.failure: str | None = None
        self._matcher = matcher  # used only by the thread that computes the mask, until it is done
        self._words = -(-vocab_size // 32)
        self._masks = masks
        self._tokens = 0
        self._seconds = 0.0
        self._stopped = False
        self._fresh = False
        self._mask: Future[Mask | None] = Future()
        for token in generated:
            self._consume(int(token))
        self._mask.set_result(self._compute())

    def accept(self, token: int) -> None:
        """Consume the next token of the answer, and start to compute the mask of the token after it."""
        wait([self._mask])
        self._consume(token)
        if not self.is_complete:
            self._fresh = True
            self._mask = self._masks(self._compute)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the mask of the next token. Return whether the mask has been computed."""
        return not wait([self._mask], timeout=seconds).not_done

    def is_fresh(self) -> bool:
        """Return whether this is the first call since the computation of the current mask began."""
        was_fresh, self._fresh = self._fresh, False
        return was_fresh

    @property
    def is_ready(self) -> bool:
        """Whether allowed() returns immediately."""
        return self._mask.done()

    def allowed(self) -> Mask | None:
        """Return the mask, uint32 [ceil(V / 32)], with a set bit for each allowed token.

        Return None if all tokens are allowed.

        If the mask is not computed yet, this method waits for it.
        """
        try:
            return self._mask.result()
        except RuntimeError as error:  # no thread can be started, or the engine is shutting down
            self.failure = f"its mask cannot be computed: {error}"
            return None

    @property
    def is_complete(self) -> bool:
        """Whether the answer is a complete match of the grammar, or the grammar has failed."""
        return self._stopped or self.failure is not None

    def _consume(self, token: int) -> None:
        if self.is_complete:
            return
        started = time.thread_time()
        with self._failing():
            self._matcher.consume_token(token)
            self._tokens += 1
            self._update(time.thread_time() - started)

    def _compute(self) -> Mask | None:
        if self.is_complete:
            return None
        started = time.thread_time()
        mask = None
        with self._failing():
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
            self._update(time.thread_time() - started)
        return None if self.failure is not None else mask

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Return a context manager that catches errors and panics of the matcher, and sets `failure` instead."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.failure = f"the matcher raised {type(error).__name__}: {_first_line(str(error))}"

    def _update(self, seconds: float) -> None:
        """Record that the matcher has worked for `seconds` of CPU time, and check whether it failed or stopped."""
        self._seconds += seconds
        if self._matcher.is_error():
            self.failure = self._matcher.get_error().strip()
        elif self._seconds > (granted := MASK_SECONDS + MASK_SECONDS_PER_TOKEN * self._tokens):
            self.failure = (
                f"it took {self._seconds:.1f} s of CPU time for {self._tokens} tokens, at most {granted:.1f} s are "
                "granted: use a grammar with fewer ambiguities"
            )
        self._stopped = bool(self._matcher.is_stopped())


class GrammarCompiler:
    """The component that compiles grammars, one at a time, and creates the GrammarState of each answer. Thread-safe.

    vocabulary: vocabulary of the model's tokenizer.
    vocab_size: number of logits per token, which can be greater than the tokenizer's vocabulary.
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
        self._masks = FairThreads(_MASK_THREADS, "grammar-mask")
        self._compiler = _thread_with_stack(ENGINE_STACK_BYTES)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[llguidance.LLMatcher, int]] = OrderedDict()
        self._rejected: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Cause of a rejection, and the time.monotonic() until which the rejection is valid.

        A rejection expires, because the trial process may have died for a reason other than the grammar.
        """

    def begin(self, structure: Mapping[str, Any], generated: Sequence[int] = (), *, tenant: str = "") -> GrammarState:
        """Compile a grammar, and return its state after the tokens `generated`.

        structure: as in SamplingParams.structured_output. Its field `after` is ignored.
        tenant:    tenant of the request; masks are computed round robin over tenants.

        Raises:
            InvalidSamplingParamsError: `structure` is not valid, or exceeds a limit.
            ProcessStartError: the child process that compiles grammars cannot be started.
        """
        check_structure(structure)
        key = _key(structure)
        matcher = self._known(structure, key) or self._compiler.submit(self._compile, structure, key).result()
        masks = partial(self._masks.submit, tenant)
        return GrammarState(matcher, self._vocab_size, generated=generated, masks=masks)

    def is_known(self, structure: Mapping[str, Any]) -> bool:
        """Return whether begin() would compile no grammar, because the result is cached or `structure` is invalid."""
        try:
            key = _key(structure)
        except (RecursionError, TypeError, ValueError):  # check_structure() rejects it
            return True
        with self._lock:
            return key in self._compiled or self._rejection(key) is not None

    def close(self) -> None:
        """Stop the trial process and the threads. A begin() that is in progress raises an error."""
        self._process.close()
        self._masks.close()
        self._compiler.shutdown(wait=False)

    def _known(self, structure: Mapping[str, Any], key: bytes) -> llguidance.LLMatcher | None:
        with self._lock:
            reason = self._rejection(key)
            if reason is not None:
                raise _invalid(structure, reason)
            if key not in self._compiled:
                return None
            self._compiled.move_to_end(key)
            return self._compiled[key][0].deep_copy()

    def _compile(self, structure: Mapping[str, Any], key: bytes) -> llguidance.LLMatcher:
        known = self._known(structure, key)  # another request may have compiled it meanwhile
        if known is not None:
            return known
        try:
            size, compiled = try_grammar(self._process, structure)
            matcher = compile_grammar(self._tokenizer, compiled)
        except (ProcessLostError, InvalidGrammarError) as error:
            reason = str(error)
            if isinstance(error, ProcessLostError):
                reason = f"it is too complex: {error} while it was compiled; use fewer or simpler parts"
            with self._lock:
                self._rejected[key] = _first_line(reason), time.monotonic() + _REJECTED_SECONDS
                while len(self._rejected) > _REJECTED:
                    self._rejected.popitem(last=False)
            raise _invalid(structure, reason) from error
        with self._lock:
            self._compiled[key] = matcher, size
            kept = sum(size for _, size in self._compiled.values())
            while len(self._compiled) > _KEPT or (kept > _KEPT_BYTES and len(self._compiled) > 1):
                kept -= self._compiled.popitem(last=False)[1][1]
            return matcher.deep_copy()

    def _rejection(self, key: bytes) -> str | None:
        reason, until = self._rejected.get(key, (None, 0.0))
        return reason if time.monotonic() < until else None


def _thread_with_stack(stack_bytes: int) -> ThreadPoolExecutor:
    """Return a thread pool with a single thread, whose stack has `stack_bytes`."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
    before = threading.stack_size(stack_bytes)
    try:
        pool.submit(str)  # start the thread while the stack size is set
    finally:
        threading.stack_size(before)
    return pool


def _key(structure: Mapping[str, Any]) -> bytes:
    """Return the cache key of a structure.

    The key depends on the order of properties, because an answer has the properties in this order.
    """
    value = None if structure["type"] == "json_object" else structure.get("value")
    return hashlib.sha256(json.dumps([structure["type"], value]).encode()).digest()


def _first_line(reason: str) -> str:
    """Return the first line of the compiler's message. The other lines quote the whole grammar."""
    return next(iter(reason.strip().splitlines()), "it is not valid")[:500]


def _invalid(structure: Mapping[str, Any], reason: str) -> InvalidSamplingParamsError:
    kind = structure["type"]
    return InvalidSamplingParamsError("structured_output", kind, f"a valid {kind}: {_first_line(reason)}")
