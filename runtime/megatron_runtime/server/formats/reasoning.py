"""Formats and parsers of reasoning, the part of an answer in which the model thinks.

A parser reads the text of an answer in parts of any size. The result does not depend on how the text is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_runtime.protocol.answer_formats import REASONING_FORMATS
from megatron_runtime.requests.sampling_params import MAX_MARKER_TOKENS
from megatron_runtime.server.formats.harmony import HarmonyParser
from megatron_runtime.server.formats.parser import Event, Reasoning, Text, overlap
from megatron_runtime.tokenization import Tokenizer

_PROMPT_TOKENS = 16
"""Number of tokens at the end of a prompt in which the opening of the reasoning is searched for."""


class AnswerParser(Protocol):
    """A parser that splits the answer of one choice into reasoning, text and tool calls."""

    def feed(self, text: str) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes."""
        ...

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    opening: text before the reasoning. The model writes this text, or the chat template puts it at the end of the
             prompt. Empty: each answer begins with the reasoning itself.
    closing: text after the reasoning, before the answer itself.
    markers: special tokens of the vocabulary that the parser needs as text.
    ending:  text that the engine inserts to end the reasoning when its token budget is used up. The text ends with
             `closing`. Empty: the engine inserts only `closing`.
    message: texts before and after each reasoning message, for formats in which reasoning messages also precede tool
             calls.
    """

    opening: str
    closing: str
    markers: tuple[str, ...]
    ending: str = ""
    message: tuple[str, str] = ("", "")


_TAGS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "command_a": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "hunyuan_v3": ("<think:opensource>", "</think:opensource>"),
    "solar": ("<|think|>", "<|end|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
}
"""Opening and closing markers of the formats that enclose the reasoning between two markers."""
_FORMATS: Mapping[str, ReasoningFormat] = {
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    "gpt_oss": ReasoningFormat(
        "",
        "<|channel|>final<|message|>",
        HarmonyParser.MARKERS,
        ending="<|end|><|start|>assistant<|channel|>final<|message|>",
        message=("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    "kimi_k3": ReasoningFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>", "<|sep|>", "<|close|>")),
    "muse": ReasoningFormat("to=self<|message|>", "<|eom|>", ("<|message|>", "<|eom|>")),
    **{name: ReasoningFormat(*tags, tags) for name, tags in _TAGS.items()},
}
FORMATS: Mapping[str, ReasoningFormat] = {name: _FORMATS[name] for name in REASONING_FORMATS}
"""The formats, by the names that `--reasoning-parser` accepts."""
_HARMONY = FORMATS["gpt_oss"]


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How the answers to one prompt mark their reasoning, as tokens.

    opening, closing, ending: tokens of the ReasoningFormat fields with the same names.
    is_open:          whether the answer begins within the reasoning.
    continues:        whether the answer continues a message of the prompt.
    message:          tokens before and after a reasoning message.
    """

    format: ReasoningFormat
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    is_open: bool
    continues: bool = False
    ending: tuple[int, ...] = ()
    message: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of(
        cls,
        format_: ReasoningFormat,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        continues: bool = False,
        is_thought: bool = False,
    ) -> ReasoningUse:
        """Return how the answers to a prompt mark their reasoning.

        prompt:     tokens of the prompt.
        continues:  whether the answer continues the last message of the prompt.
        is_thought: whether the continued message ends within its reasoning.
        """

        def encoded(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special=False))

        opening = format_.opening
        before, after = format_.message
        end = tokenizer.decode(prompt[-_PROMPT_TOKENS:], skip_special=False).rstrip()
        return cls(
            format_,
            encoded(opening),
            encoded(format_.closing),
            is_open=is_thought if continues else end.endswith(opening.rstrip()),
            continues=continues,
            ending=encoded(format_.ending or format_.closing),
            message=(encoded(before), encoded(after)),
        )

    def parameter(self, budget: int | None, *, has_tools: bool) -> dict[str, Any] | None:
        """Return the sampling parameter `reasoning`. Returns None if the engine cannot end the reasoning of the answer.

        This is the case if the reasoning is already over, or if a marker is too long.

        budget:    maximum number of reasoning tokens; None: no limit.
        has_tools: whether the answer can be a tool call. In the format of gpt-oss, a tool call is a separate message
                   after a reasoning message.
        """
        markers = {"opening": self.opening, "closing": self.closing, "ending": self.ending}
        is_open = self.is_open
        if has_tools and self.message[1]:
            markers = {"opening": self.message[0], "closing": self.message[1]}
            is_open = self.continues
        is_over = self.continues and not self.is_open
        if is_over or max(map(len, markers.values())) > MAX_MARKER_TOKENS:
            return None
        tokens = {name: list(marker) for name, marker in markers.items() if marker}
        return {**tokens, "is_open": is_open, "budget": budget}

    def count(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens in an answer that belong to its reasoning, including the markers."""
        if not self.is_open and (self.continues or tuple(tokens[: len(self.opening)]) != self.opening):
            return 0
        size = len(self.closing)
        ends = (at + size for at in range(len(tokens) - size + 1) if tuple(tokens[at : at + size]) == self.closing)
        return next(ends, len(tokens))

    def parser(self, calls: AnswerParser | None) -> AnswerParser:
        """Return a parser for one choice.

        calls: parser for the text after the reasoning; None: this text contains no tool calls.
        """
        if self.format is _HARMONY:
            harmony = calls if isinstance(calls, HarmonyParser) else HarmonyParser({})
            if self.continues:  # the prompt contains the header of the message
                harmony.feed("<|channel|>analysis<|message|>" if self.is_open else _HARMONY.closing)
            return harmony if calls in (None, harmony) else _Sequence(harmony, calls)
        if isinstance(calls, HarmonyParser):
            return calls
        reasoning = TaggedReasoningParser(self.format, is_open=self.is_open, is_answer=self.continues)
        return reasoning if calls is None else _Sequence(reasoning, calls)


class TaggedReasoningParser:
    """Parses answers that can begin with reasoning between two markers. Text follows the reasoning.

    White space around the reasoning is dropped.

    is_open:   whether the prompt ends within the reasoning.
    is_answer: whether the answer contains no reasoning, because the prompt already contains the end of the reasoning.
               Ignored if `is_open`.
    """

    def __init__(self, format_: ReasoningFormat, *, is_open: bool, is_answer: bool = False) -> None:
        self._opening, self._closing = format_.opening, format_.closing
        self._read: Callable[[], list[Event]] = (
            self._continue if is_open else self._answer if is_answer else self._begin
        )
        self._has_reasoning = False
        self._spaces: list[str] = []  # white space before the buffer, dropped unless more text follows
        self._buffer = ""

    def feed(self, text: str) -> list[Event]:
        """Parse the next part of the answer, and return the events that it completes."""
        self._buffer += text
        return self._read()

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events. An answer that ends within its reasoning has no text."""
        rest, self._buffer = "".join(self._spaces) + self._buffer, ""
        if self._read == self._continue:
            reasoning = rest.rstrip()
            return [Reasoning(reasoning)] if reasoning else []
        return [Text(rest)] if self._read == self._begin and rest else []

    def _begin(self) -> list[Event]:
        """Return the events of the text so far.

        Return [] until it is certain whether the answer begins with reasoning.
        """
        text = self._buffer.lstrip()
        if len(text) < len(self._buffer):
            self._spaces.append(self._buffer[: len(self._buffer) - len(text)])
            self._buffer = text
        if text.startswith(self._opening):
            self._spaces.clear()
            self._buffer = text[len(self._opening) :]
            return self._enter(self._continue)
        return [] if self._opening.startswith(text) else self._enter(self._answer)

    def _continue(self) -> list[Event]:
        """Return the events of the reasoning so far.

        Hold back a suffix that can be the beginning of the closing marker, and the white space before this suffix.
        """
        end = self._buffer.find(self._closing)
        is_closed = end >= 0
        if not is_closed:
            end = len(self._buffer) - overlap(self._buffer, self._closing)
        read = self._buffer[:end]
        if not self._has_reasoning:
            read = read.lstrip()
        reasoning = read.rstrip()
        self._buffer = self._buffer[end + len(self._closing) if is_closed else end :]
        events: list[Event] = []
        if reasoning:
            self._has_reasoning = True
            events.append(Reasoning("".join([*self._spaces, reasoning])))
            self._spaces.clear()
        if len(reasoning) < len(read):
            self._spaces.append(read[len(reasoning) :])
        if is_closed:
            self._spaces.clear()
            events += self._enter(self._leave)
        return events

    def _leave(self) -> list[Event]:
        """Drop white space after the reasoning, and return the events of the remaining text."""
        self._buffer = self._buffer.lstrip()
        return self._enter(self._answer) if self._buffer else []

    def _answer(self) -> list[Event]:
        text, self._buffer = "".join(self._spaces) + self._buffer, ""
        self._spaces.clear()
        return [Text(text)] if text else []

    def _enter(self, read: Callable[[], list[Event]]) -> list[Event]:
        self._read = read
        return read()


class _Sequence:
    """A parser that runs two parsers in sequence. The second parser parses the text in the events of the first."""

    def __init__(self, first: AnswerParser, second: AnswerParser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._parsed(self._first.feed(text))

    def finish(self) -> list[Event]:
        return [*self._parsed(self._first.finish()), *self._second.finish()]

    def _parsed(self, events: Sequence[Event]) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            parsed += self._second.feed(event.text) if isinstance(event, Text) else [event]
        return parsed
