"""The LoRA adapters of one engine: the list of adapters that requests may name, and the adapters that the backend has
loaded.

A list is set in two phases. The first phase loads the new adapters. In the second phase, requests may name them. An
adapter that is no longer in the list is unloaded when the last request that uses it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from megatron_runtime.engine.backend import Capability, EngineBackend, RankResults
from megatron_runtime.protocol.adapters import Adapter, AdapterList

logger = logging.getLogger(__name__)


class AdapterSet:
    """The adapters of one engine. Use it only on the event loop, and make one change of the list at a time.

    current:  the list in use, from which requests can name adapters.
    errors:   by name, the error of each adapter of `current` that could not be loaded.
    rejected: by name, the error of each adapter of the last list passed to stage() that could not be loaded.
    """

    def __init__(self, backend: EngineBackend) -> None:
        self.current = AdapterList()
        self.errors: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self._backend = backend
        self._loaded: set[Adapter] = set()
        self._staged = AdapterList()
        self._in_use: Counter[Adapter] = Counter()
        self._changing = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()

    # --- the list -----------------------------------------------------------------------------------------------

    async def stage(self, wanted: AdapterList) -> RankResults:
        """Load the adapters of `wanted` that are not loaded yet, and return the result of each rank.

        Requests can name the new adapters only after commit().

        If an adapter cannot be loaded, the other adapters that this call loaded are unloaded. `rejected` then has the
        cause for each adapter that cannot be loaded.
        """
        self.rejected = {}
        if wanted.adapters:
            self._backend.info.require("SET_ADAPTERS", Capability.ADAPTERS)
        self._staged = wanted
        causes: dict[int, list[str]] = {}
        for adapter in wanted.adapters:
            results = await self._load(adapter)
            if results.failed:
                self.rejected[adapter.name] = f"adapter {adapter.name!r} from {adapter.source}: {results.error}"
            for rank in results.failed:
                causes.setdefault(rank, []).append(self.rejected[adapter.name])
        if causes:
            await self.discard()
        return RankResults(self._backend.info.ranks, {rank: "; ".join(found) for rank, found in causes.items()})

    async def commit(self) -> None:
        """Let requests name the adapters of the staged list, and only these."""
        await self._replace(self._staged, {})

    async def discard(self) -> None:
        """Unload the adapters that stage() has loaded for a list that will not be committed."""
        self._staged = self.current
        await self._unload_unused()

    async def adopt(self, wanted: AdapterList) -> bool:
        """Load the coordinator's list and let requests name it immediately, without a commit. Return whether the list
        changed.

        If an adapter cannot be loaded, `errors` has the cause, and the engine serves the base model and the other
        adapters.
        """
        if wanted == self.current:
            return False
        self._staged = wanted
        errors = {}
        for adapter in wanted.adapters:
            error = (await self._load(adapter)).error
            if error is not None:
                logger.error("adapter %s from %s is not loaded: %s", adapter.name, adapter.source, error)
                errors[adapter.name] = error
        await self._replace(wanted, errors)
        return True

    async def _replace(self, wanted: AdapterList, errors: dict[str, str]) -> None:
        self.current = self._staged = wanted
        self.errors = errors
        await self._unload_unused()

    # --- requests -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> Adapter | None:
        """Return the adapter that a new request names, and keep this adapter loaded until end().

        Returns None if the current list of adapters has no loaded adapter with this name.

        Raises UnsupportedVerbError if the backend does not support adapters.
        """
        self._backend.info.require("a request for an adapter", Capability.ADAPTERS)
        adapter = self.current.find(name)
        if adapter is None or adapter not in self._loaded:
            return None
        self._in_use[adapter] += 1
        return adapter

    def end(self, adapter: Adapter) -> None:
        """Record that a request that uses `adapter` has ended."""
        self._in_use[adapter] -= 1
        if not self._in_use[adapter]:
            del self._in_use[adapter]
            if not self._is_needed(adapter):
                task = asyncio.create_task(self._unload_unused())
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    # --- the backend --------------------------------------------------------------------------------------------

    def _is_needed(self, adapter: Adapter) -> bool:
        return adapter in self.current.adapters or adapter in self._staged.adapters or adapter in self._in_use

    async def _load(self, adapter: Adapter) -> RankResults:
        async with self._changing:
            if adapter in self._loaded:
                return RankResults(self._backend.info.ranks)
            try:
                self._backend.info.require("an adapter", Capability.ADAPTERS)
                results = await self._backend.load_adapter(adapter.key, adapter.source)
            except Exception as error:
                return RankResults.of_failure(error, ranks=self._backend.info.ranks)
            if not results.failed:
                self._loaded.add(adapter)
            return results

    async def _unload_unused(self) -> None:
        """Unload the adapters that are in neither the current nor the staged list, and that no request uses.

        A failure is only logged, because no request can name these adapters.
        """
        async with self._changing:
            for adapter in [adapter for adapter in self._loaded if not self._is_needed(adapter)]:
                self._loaded.discard(adapter)
                try:
                    error = (await self._backend.unload_adapter(adapter.key)).error
                except Exception as failure:
                    error = str(failure)
                if error is not None:
                    logger.error("adapter %s from %s is not unloaded: %s", adapter.name, adapter.source, error)
