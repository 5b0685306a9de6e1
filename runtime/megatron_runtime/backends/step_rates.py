"""Estimates how fast an engine computes prompts and reads its KV cache, from the durations of steps.

This module does not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

HALF_LIFE = 256
"""Number of records after which the weight of a record is halved."""
MIN_RECORDS = 16
"""Minimum number of records before rates are reported."""
MAX_SUMMED = 64
"""Maximum number of messages whose sums OutputRates records together."""
_MAX_CONDITION = 1e6
"""Condition number of the scaled equations above which the steps are too similar to separate their costs."""


class StepCosts(NamedTuple):
    """The cost of a step in seconds.

    The cost is `step`, plus `prompt` per prompt token, plus `held` per KV cache token that the step reads.
    """

    step: float
    prompt: float
    held: float


class StepRates:
    """Estimates StepCosts from recorded steps by least squares. Older steps count less.

    If the estimate of a cost is not positive, rates() uses the last positive estimate of this cost.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 4))
        """Weighted sums over records of (steps, prompt tokens, held tokens) times (steps, prompt tokens, held tokens,
        seconds).
        """
        self._num_records = 0
        self._prompt: float | None = None
        self._held: float | None = None

    def observe(self, *, prompt_tokens: int, held_tokens: int, seconds: float, steps: int = 1) -> None:
        """Record a step, or the sums of several steps.

        held_tokens: number of KV cache tokens of the requests in the step.
        seconds:     duration of the step.
        """
        row = np.array((steps, prompt_tokens, held_tokens, seconds))
        self._products *= 0.5 ** (1 / HALF_LIFE)
        self._products += row[:3, None] * row
        self._num_records += 1

    def costs(self) -> StepCosts | None:
        """Return the costs; None if there are too few records, or if the recorded steps are too similar."""
        products = self._products.copy()  # another thread may add a step
        scale = np.sqrt(np.diag(products))
        if self._num_records < MIN_RECORDS or not scale.all():
            return None
        scaled = products[:, :3] / np.outer(scale, scale)
        if np.linalg.cond(scaled) > _MAX_CONDITION:
            return None
        return StepCosts(*(np.linalg.solve(scaled, products[:, 3] / scale) / scale).tolist())

    def rates(self) -> tuple[float | None, float | None]:
        """Return (prompt tokens per second, KV cache tokens that a step reads per second).

        A rate is None if the recorded steps do not determine it.
        """
        costs = self.costs()
        if costs is not None:
            self._prompt = costs.prompt if costs.prompt > 0 else self._prompt
            self._held = costs.held if costs.held > 0 else self._held
        return self._prompt and 1 / self._prompt, self._held and 1 / self._held


class OutputRates:
    """Estimates the rates of an engine that reports only outputs, from the times at which they arrive.

    The outputs of a step arrive in one message. A step that computes a part of a prompt, but not its end, sends nothing
    for this prompt. Therefore messages are added up until no prompt is in progress, or up to MAX_SUMMED messages.
    """

    def __init__(self) -> None:
        self._steps = StepRates()
        self.rates = self._steps.rates
        self.stop()

    def stop(self) -> None:
        """Discard the messages that are not recorded as steps yet, because the engine is interrupted."""
        self._since: float | None = None
        """Time at which the engine began to compute the next message; None if the engine was idle or interrupted."""
        self._messages = self._prompt_tokens = self._held_tokens = 0
        self._seconds = 0.0

    def begin(self, now: float) -> None:
        """Note that the engine has work. now: time in seconds."""
        if self._since is None:
            self._since = now

    def output(self, *, prompt_tokens: int, held_tokens: int) -> None:
        """Add the output of one request to the current message.

        prompt_tokens: uncached tokens of the prompt if it is the first output of a request, otherwise 0.
        held_tokens:   number of tokens of the request's prompt and answer.
        """
        self._prompt_tokens += prompt_tokens
        self._held_tokens += held_tokens

    def arrived(self, now: float, *, has_prompts: bool, has_work: bool) -> None:
        """Record the arrival of a message, which contains all outputs that were added since the last call.

        has_prompts: whether a request waits for its first output.
        has_work:    whether a request has not ended.
        """
        if self._since is None:
            self.stop()
        else:
            self._messages += 1
            self._seconds += now - self._since
            if not has_prompts or self._messages == MAX_SUMMED:
                self._steps.observe(
                    steps=self._messages,
                    prompt_tokens=self._prompt_tokens,
                    held_tokens=self._held_tokens,
                    seconds=self._seconds,
                )
                self.stop()
        self._since = now if has_work else None
