"""What the server asks of whatever generates tokens. `InferenceClient` satisfies it, and so does an in-process one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from megatron_runtime.protocol.messages import ControlAck
from megatron_runtime.requests.sampling_params import SamplingParams


class TokenStream(Protocol):
    """Partial answers, then one final: `{"partial": {"new_tokens": […]}}` … `{"final": reply}`."""

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]: ...

    async def aclose(self) -> None:
        """Abort the request if it is still open."""


class Backend(Protocol):
    """Generates tokens for tokenized prompts.

    A reply is a map with `status`, `finish_reason`, `generated_tokens`, `generated_text` (only where a stop text was
    matched), `prompt_length`, `generated_length`, `num_cached_tokens` and, when FAILED, `error`.
    Refusals are raised as RequestRejectedError.
    """

    @property
    def connected(self) -> bool:
        """Whether requests submitted now reach a coordinator."""

    def add_request(
        self, prompt: list[int], sampling_params: SamplingParams, *, tenant: str = ""
    ) -> asyncio.Future[Any]:
        """Submit; the future gives the reply map. Cancelling it aborts the request.

        tenant: whose share of the engines the request counts against; empty: that of all without one.
        """

    def add_request_streaming(
        self, prompt: list[int], sampling_params: SamplingParams, *, tenant: str = ""
    ) -> TokenStream:
        """Submit; the stream gives tokens as they are generated."""

    def start_cuda_profiler(self) -> asyncio.Future[ControlAck]:
        """Begin the profiled range of every engine. Fails with ControlRefusedError or CoordinatorUnreachableError."""

    def stop_cuda_profiler(self) -> asyncio.Future[ControlAck]:
        """End it, in the same way."""
