"""The KVConnector of vLLM engines, whose NixlConnector moves KV blocks between vLLM processes.

An export is a request of one token with `do_remote_decode`. vLLM keeps its blocks, and its output has parameters that
name them. An import is a request of one token with these parameters, after which the blocks are in the prefix cache.
This module imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.kv_transfer import ExportedBlocks, KVConnector, TransferEndedError
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import MalformedMessageError, UnpackLimits, pack, tokens_from_bytes, unpack
from megatron_runtime.protocol.messages import tokens_to_bytes
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

LEASE_SECONDS = 45
"""Time after which vLLM frees an export that no engine has read. vLLM completes a pause only when no export is left.

An import after this time would read the blocks of other requests, and vLLM would not detect it. The coordinator begins
an import within 10 s, and the import is given up after CONNECTOR_SECONDS. The rest allows for late messages: an engine
that is late by 10 s is removed.
"""
MAX_EXPORTED_SHARE = 4
"""Exports may hold one part in MAX_EXPORTED_SHARE of the KV cache."""
EXPORT: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
_HANDLE = UnpackLimits(elements=1 << 20, containers=1 << 12, depth=6, frame_bytes=limits.MAX_HANDLE_BYTES)


class VllmKVConnector(KVConnector):
    """The imports of one engine, and the limit of its exports.

    submit:   submits a request with vLLM's `kv_transfer_params`. imported() or end() is called with the result.
    adapters: the keys of the adapters that the engine has loaded now.
    """

    layout = ""
    block_bytes = 0

    def __init__(
        self,
        submit: Callable[[EngineRequest, Mapping[str, Any]], None],
        block_size: int,
        *,
        adapters: Container[str],
    ) -> None:
        self.weights = ""
        """As in ExportedBlocks, for the weights in use."""
        self.address: tuple[str, int] | None = None
        """Host and port at which vLLM listens for importing engines; None before listen()."""
        self._submit = submit
        self._block_size = block_size
        self._adapters = adapters
        self._num_blocks = 0
        self._imports: dict[int, asyncio.Future[int]] = {}
        self._exports: dict[int, tuple[int, float]] = {}
        """Number of blocks of each export, and the time at which its lease ends."""

    def listen(self, host: str, port: int) -> str:
        with socket.create_server((host, port)) as server:  # vLLM itself would wait forever for a port in use
            self.address = host, server.getsockname()[1]
        return f"tcp://{host}:{self.address[1]}"

    def loaded(self, *, layout: str, num_blocks: int, cache_bytes: int) -> None:
        """Note the sizes of the loaded KV cache. cache_bytes: bytes of the caches of all ranks."""
        self.layout, self._num_blocks = layout, num_blocks
        self.block_bytes = max(1, cache_bytes // max(1, num_blocks))

    # --- exports --------------------------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> EngineRequest:
        """Return the request of one token for a request with `prefill_only`.

        Raises TransferEndedError if the exports would hold too large a part of the cache.
        """
        now = time.monotonic()
        self._exports = {number: export for number, export in self._exports.items() if export[1] > now}
        length = len(request.prompt_tokens) + len(request.generated_tokens)
        blocks = -(-length // self._block_size)
        held = sum(number for number, _ in self._exports.values())
        if (held + blocks) * MAX_EXPORTED_SHARE > self._num_blocks:
            raise TransferEndedError(
                f"exports hold {held} blocks of {self._num_blocks}, and the prompt has {blocks}: raise the KV cache "
                "(--kv-cache-memory)"
            )
        self._exports[request.request_id] = blocks, math.inf
        return _of_one_token(request)

    def exported(self, request: EngineRequest, parameters: Mapping[str, Any]) -> ExportedBlocks:
        """Return the export of a finished request. parameters: `kv_transfer_params` of vLLM's output."""
        tokens = np.concatenate((request.prompt_tokens, request.generated_tokens))
        blocks = -(-len(tokens) // self._block_size)
        self._exports[request.request_id] = blocks, time.monotonic() + LEASE_SECONDS
        salt, adapter = request.sampling_params.cache_salt or "", request.adapter
        digests = block_digests(tokens, self._block_size, salt=salt.encode(), adapter=adapter)
        # vLLM would report this number as the cached tokens of the import, which imported() needs.
        handed = {name: value for name, value in parameters.items() if name != "remote_prefill_cached_tokens"}
        handle = pack([handed, tokens_to_bytes(tokens.tolist()), salt, adapter])
        return ExportedBlocks(digests[: limits.MAX_TRANSFER_BLOCKS], self.weights, handle)

    # --- imports --------------------------------------------------------------------------------------------------

    async def receive(self, transfer: int, weights: str, handle: bytes) -> int:
        if weights != self.weights:
            raise TransferEndedError(f"the blocks are of the weights {weights!r}, this engine has {self.weights!r}")
        parameters, tokens, salt, adapter = _read(handle)
        if adapter and adapter not in self._adapters:
            raise TransferEndedError(f"the blocks are of the adapter {adapter}, which this engine has not loaded")
        nothing, params = np.array([], dtype=np.int32), SamplingParams(cache_salt=salt or None)
        request = _of_one_token(EngineRequest(transfer, tokens, nothing, params, adapter=adapter))
        done = self._imports[transfer] = asyncio.get_running_loop().create_future()
        try:
            self._submit(request, parameters)
            blocks = await done // self._block_size
        finally:
            del self._imports[transfer]
        if not blocks:
            raise TransferEndedError("vLLM could not read the blocks, and has computed the prompt")
        return blocks * self.block_bytes

    def imported(self, transfer: int, num_tokens: int) -> None:
        """End an import. num_tokens: number of prompt tokens that vLLM has not computed."""
        if (done := self._imports.get(transfer)) is not None and not done.done():
            done.set_result(num_tokens)

    def end(self, transfer: int, error: str) -> None:
        """End the import or export with this id, if there is one, for the reason `error`."""
        self._exports.pop(transfer, None)
        if (done := self._imports.get(transfer)) is not None and not done.done():
            done.set_exception(TransferEndedError(error))


def _of_one_token(request: EngineRequest) -> EngineRequest:
    """Return a request with the prompt and the tokens of `request` that generates one token, which is dropped."""
    params = SamplingParams(
        temperature=0.0,
        cache_salt=request.sampling_params.cache_salt,
        priority=request.sampling_params.priority,
        num_tokens_to_generate=len(request.generated_tokens) + 1,
        termination_id=IGNORE_EOS,
    )
    return replace(request, sampling_params=params)


def _read(handle: bytes) -> tuple[dict[str, Any], npt.NDArray[Any], str, str]:
    """Return vLLM's parameters, the tokens, the salt and the adapter's key in the handle of an export.

    Raises TransferEndedError for a handle that this module has not written.
    """
    try:
        items = unpack(handle, _HANDLE)
        parameters, tokens, salt, adapter = items
        if [type(item) for item in items] != [dict, bytes, str, str] or len(tokens) % 4:
            raise TypeError
        return parameters, tokens_from_bytes(tokens), salt, adapter
    except (MalformedMessageError, TypeError, ValueError) as error:
        raise TransferEndedError("the export has no handle of a vLLM engine of this release") from error
