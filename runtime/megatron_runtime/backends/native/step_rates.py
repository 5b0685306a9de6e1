"""Estimates how fast an engine computes prompts and reads its KV cache, from the durations of steps.

This module does not import torch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

HALF_LIFE_STEPS = 256
"""Number of steps after which the weight of a step is halved."""
MIN_STEPS = 16
"""Minimum number of steps before rates are reported."""
_MAX_CONDITION = 1e6
"""Condition number of the scaled equations above which the steps are too similar to separate their costs."""


class StepCosts(NamedTuple):
    """The cost of a step in seconds.

    It is `step`, plus `prompt` per prompt token, plus `held` per KV cache token that the step reads.
    """

    step: float
    prompt: float
    held: float


class StepRates:
    """An estimator that fits StepCosts to recorded steps by least squares. Older steps count less.

    If the fit gives no positive value for a cost, the cost keeps its last value. It is None at first.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 4))
        """Weighted sums over steps of (1, prompt tokens, held tokens) times (1, prompt tokens, held tokens,
        seconds).
        """
        self._num_steps = 0
        self._prompt: float | None = None
        self._held: float | None = None

    def observe(self, *, prompt_tokens: int, held_tokens: int, seconds: float) -> None:
        """Record a step that took `seconds`. held_tokens: number of KV cache tokens of the step's requests."""
        row = np.array((1.0, prompt_tokens, held_tokens, seconds))
        self._products *= 0.5 ** (1 / HALF_LIFE_STEPS)
        self._products += row[:3, None] * row
        self._num_steps += 1

    def costs(self) -> StepCosts | None:
        """Return the costs, or None if there are too few recorded steps or if the steps are too similar."""
        products = self._products.copy()  # another thread may add a step
        scale = np.sqrt(np.diag(products))
        if self._num_steps < MIN_STEPS or not scale.all():
            return None
        scaled = products[:, :3] / np.outer(scale, scale)
        if np.linalg.cond(scaled) > _MAX_CONDITION:
            return None
        return StepCosts(*(np.linalg.solve(scaled, products[:, 3] / scale) / scale).tolist())

    def rates(self) -> tuple[float | None, float | None]:
        """Return two rates: prompt tokens computed per second, and KV cache tokens read per second.

        A rate is None if the recorded steps do not determine it.
        """
        costs = self.costs()
        if costs is not None:
            self._prompt = costs.prompt if costs.prompt > 0 else self._prompt
            self._held = costs.held if costs.held > 0 else self._held
        return self._prompt and 1 / self._prompt, self._held and 1 / self._held
