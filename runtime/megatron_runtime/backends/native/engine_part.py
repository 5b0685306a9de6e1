"""One rank's part of an engine: what it does at rank 0's orders, which are the methods of Executor by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megatron_runtime.backends.native.executor import Executor, Int64, StepPlan, StepResult


class PartExecutor(Executor, Protocol):
    """An executor that holds a part of a model and runs it together with other ranks."""

    @property
    def has_cache(self) -> bool: ...

    def execute_part(self, plan: StepPlan) -> list[tuple[Int64, StepResult]]:
        """What this rank sampled of `plan`, with the rows of the plan that it is of; most ranks sample nothing."""


class EnginePart:
    """Carries orders out, the same on every rank. Not thread-safe but for `stage_weights`, as Executor says."""

    def __init__(self, executor: PartExecutor) -> None:
        self.executor = executor
        self._loaded: tuple[bool, bool] = (False, False)
        """What the last load() brought: weights, cache."""
        self._kept_pages: Int64 | None = None
        self._orders: dict[str, Callable[[Any], Any]] = {
            "describe": lambda _: self._describe(),
            "load": lambda _: self._load(),
            "unload": lambda _: self._unload(),
            "release_weights": lambda _: executor.release_weights(),
            "release_kv": self._release_kv,
            "use_source": executor.use_source,
            "stage_weights": executor.stage_weights,
            "swap_weights": lambda _: self._swap_weights(),
            "drop_staged": lambda _: executor.drop_staged(),
            "profile": executor.profile,
            "confirm": lambda _: None,
        }

    def perform(self, name: str, argument: Any) -> Any:
        """Do one order; what it returns is the answer."""
        return self._orders[name](argument)

    def _describe(self) -> dict[str, int]:
        """What all ranks have to agree on."""
        executor = self.executor
        return {
            "num_pages": executor.num_pages,
            "page_size": executor.page_size,
            "vocab_size": executor.vocab_size,
            "max_sequence_length": executor.max_sequence_length,
        }

    def _load(self) -> str:
        executor = self.executor
        had_weights, had_cache = executor.has_weights, executor.has_cache
        self._loaded = (False, False)
        executor.load()
        self._loaded = (not had_weights, not had_cache)
        return executor.digest

    def _unload(self) -> None:
        """Undo the last load, which another rank could not do."""
        weights, cache = self._loaded
        self._loaded = (False, False)
        if weights:
            self.executor.release_weights()
        if cache:
            self.executor.release_kv(self._kept_pages)

    def _release_kv(self, keep_pages: Int64 | None) -> None:
        self._kept_pages = keep_pages
        self.executor.release_kv(keep_pages)

    def _swap_weights(self) -> str:
        self.executor.swap_weights()
        return self.executor.digest
