"""Restricts the tokens of an answer with several parts, first by a budget for reasoning and then by a grammar.

Imports neither torch nor llguidance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.answer_parts import AnswerPart, AnswerParts
from megatron_runtime.sampling.batch import AnswerState, bits_of

BeginGrammar: TypeAlias = Callable[[Mapping[str, Any], Sequence[int]], Future[AnswerState]]
"""Starts to compile a grammar and returns immediately. The arguments are as in GrammarCompiler.begin()."""


class AnswerGuide:
    """The AnswerState of an answer with several parts. Not thread-safe.

    The grammar of tool calls is compiled only when the answer begins a tool call. Only this request waits for the
    compilation. If the grammar is not available or fails, any token is allowed, and the client receives the
    unconstrained output of the model.

    parts:   determines the current part of the answer; it has read all tokens so far.
    rest:    tokens of the current part so far. The grammar of this part must accept them.
    grammar: state of the grammar of a structured output after `rest`; None without a structured output.
    begin:   function that starts to compile the grammar of tool calls; None if the engine does not support grammars.
    """

    def __init__(
        self,
        parts: AnswerParts,
        *,
        rest: Sequence[int] = (),
        grammar: AnswerState | None = None,
        begin: BeginGrammar | None = None,
    ) -> None:
        self._parts = parts
        self._grammar = grammar
        self._begin = begin
        self._begun: Future[AnswerState] | None = None
        self._begin_calls(rest)

    @property
    def failure(self) -> str | None:
        """The reason why the grammar failed; None if it did not fail, or if the grammar is optional."""
        return None if self._parts.is_best_effort or self._grammar is None else self._grammar.failure

    @property
    def is_complete(self) -> bool:
        grammar = self._current()
        return grammar is not None and grammar.is_complete

    @property
    def is_ready(self) -> bool:
        grammar = self._current()
        return self._begun is None and (grammar is None or grammar.is_ready)

    def is_fresh(self) -> bool:
        """Return whether this is the first call since the computation of the current mask began.

        Return False if no grammar applies. Also return False while the grammar is compiled, so that steps do not wait
        for the compilation.
        """
        grammar = self._current()
        return grammar is not None and grammar.is_fresh()

    def wait(self, seconds: float) -> bool:
        if self._begun is not None:
            wait([self._begun], timeout=seconds)
            return self.is_ready
        grammar = self._current()
        return grammar is None or grammar.wait(seconds)

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        if (forced := self._parts.forced) is not None:
            return bits_of([forced])
        grammar = self._current()
        return None if grammar is None else grammar.allowed()

    def accept(self, token: int) -> None:
        parts = self._parts
        if parts.part is not AnswerPart.STRUCTURE:
            parts.feed(token)
            self._begin_calls([token][parts.free - parts.tokens + 1 :])
        elif (grammar := self._current()) is not None:
            grammar.accept(token)

    def _begin_calls(self, tokens: Sequence[int]) -> None:
        """Start to compile the grammar of tool calls if the answer has begun its tool calls.

        tokens: tokens of the tool calls so far.
        """
        structure = self._parts.structure
        if structure is None or not self._parts.is_best_effort:
            return
        if self._begin is None:
            self._parts.give_up()
        else:
            self._begun = self._begin(structure, tokens)

    def _current(self) -> AnswerState | None:
        """Return the grammar state for the next token.

        Returns None if no grammar applies, or if the grammar is not compiled yet.
        """
        if self._begun is not None and self._begun.done():
            begun, self._begun = self._begun, None
            if not begun.cancelled() and begun.exception() is None:
                self._grammar = begun.result()
        grammar = self._grammar
        if grammar is None or self._parts.part is not AnswerPart.STRUCTURE:
            return None
        return None if self._parts.is_best_effort and grammar.failure is not None else grammar
