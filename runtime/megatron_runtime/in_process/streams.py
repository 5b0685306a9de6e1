"""The iterators over the chunks of one answer. generate_stream() returns such an iterator.

The caller may abandon or cancel the iteration at any point.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeAlias

from megatron_runtime.requests.async_stream import AnyStream, AsyncStream, BlockingStream
from megatron_runtime.requests.request import DynamicInferenceRequest


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A part of an answer.

    The concatenated texts and tokens of all chunks are the text and the tokens of the answer.

    log_probs: log-probabilities of the tokens, if they were requested.
    request:   in the last chunk, the whole request; a failed request has status FAILED.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    request: DynamicInferenceRequest | None = None


ReadChunk: TypeAlias = Callable[[dict[str, Any]], GenerationChunk]
"""Converts an item of a request's stream to a chunk."""


class _Chunks(Generic[AnyStream]):
    """The stream of one request. The request is submitted when the first chunk is read."""

    def __init__(self) -> None:
        self._stream: AnyStream | None = None
        self._read: ReadChunk | None = None
        self._is_closed = False

    def _abort(self) -> bool:
        """Abort the request. Return whether the request was open.

        The garbage collector may run this method at any point in any thread, so it takes no lock and does not wait.
        """
        was_open = not self._is_closed and self._stream is not None and not self._stream.finished
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()
        return was_open

    def __del__(self) -> None:
        self._abort()


class ChunkIterator(_Chunks[BlockingStream], Iterator[GenerationChunk]):
    """A blocking iterator over the chunks. The first next() submits the request.

    The request is aborted by close(), by an exception in next(), such as KeyboardInterrupt, and when the iterator is
    garbage-collected. close() may be called from any thread.

    begin:  submits the request and returns its stream.
    settle: waits until an abort has taken effect.
    """

    def __init__(self, begin: Callable[[], tuple[BlockingStream, ReadChunk]], settle: Callable[[], object]) -> None:
        super().__init__()
        self._begin = begin
        self._settle = settle

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        if self._is_closed:
            raise StopIteration
        try:
            if self._stream is None or self._read is None:
                self._stream, self._read = self._begin()
            return self._read(next(self._stream))
        except StopIteration:
            self._is_closed = True
            raise
        except BaseException:
            self._abort()
            raise

    def close(self) -> None:
        """Abort the request if it is open, and wait until the engine has dropped it. This method is idempotent."""
        if self._abort():
            self._settle()


class AsyncChunkIterator(_Chunks[AsyncStream], AsyncIterator[GenerationChunk]):
    """An asynchronous iterator over the chunks. Cancelling the task that awaits a chunk aborts the request."""

    def __init__(
        self,
        begin: Callable[[], Awaitable[tuple[AsyncStream, ReadChunk]]],
        settle: Callable[[], Awaitable[object]],
    ) -> None:
        super().__init__()
        self._begin = begin
        self._settle = settle

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            if self._stream is None or self._read is None:
                self._stream, self._read = await self._begin()
            return self._read(await anext(self._stream))
        except StopAsyncIteration:
            self._is_closed = True
            raise
        except BaseException:
            self._abort()
            raise

    async def aclose(self) -> None:
        """Abort the request if it is open, and wait until the engine has dropped it. This method is idempotent."""
        if self._abort():
            await self._settle()
