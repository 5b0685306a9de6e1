"""Calls of generate() and generate_stream() through a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.client.rejection import DeadlineExceededError, QueueFullError, RequestRejectedError
from megatron_runtime.in_process.answers import PromptBatch
from megatron_runtime.in_process.calls import MakeStream
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.async_stream import AnyStream
from megatron_runtime.requests.request import DynamicInferenceRequest

RETRY_SECONDS = 1.0
"""Time until a retry, after a rejection that has no retry time."""


class ClientCalls:
    """The generate() calls of this program through a coordinator.

    The object sends the prompts of the calls and reads the answers. Create it on the client's event loop.

    places: maximum number of prompts that answer() submits at the same time, over all calls.
    raise_failure: raises the error that stopped the coordinator or the last engine, if there is such an error.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        *,
        places: int,
        raise_failure: Callable[[], object],
    ) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._raise_failure = raise_failure
        self._answered = self._submitted = 0
        """Number of answered prompts of answer(), and number of prompts that are now submitted."""
        self._place_count = places
        self._places = asyncio.Semaphore(places)

    def open(self, prompts: PromptBatch, make_stream: MakeStream[AnyStream]) -> AnyStream:
        """Submit the only prompt of a call, and return its stream. May be called on any thread."""
        self._raise_failure()

        def abort(request_id: int) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, which also ends the request
                self._loop.call_soon_threadsafe(self._client.abort_request, request_id)

        return self._client.add_request_to_stream(
            prompts.tokens[0], prompts.params[0], lambda request_id: make_stream(partial(abort, request_id))
        )

    async def answer(self, prompts: PromptBatch) -> list[DynamicInferenceRequest]:
        """Return the answers to the prompts of one generate() call, in the order of the prompts.

        At most `places` prompts of all calls are submitted at the same time. Call this method on the connection's event
        loop.

        Raises RequestRejectedError if the coordinator rejects a request for a reason other than its prompt.
        """
        numbers = iter(prompts.sent)

        async def work() -> None:
            for number in numbers:
                await self._answer_one(prompts, number)

        workers = [asyncio.create_task(work()) for _ in range(min(len(prompts.sent), self._place_count))]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for worker in workers:
                worker.cancel()
            raise
        return prompts.answers()

    async def _answer_one(self, prompts: PromptBatch, number: int) -> None:
        while True:
            async with self._places:  # waiters get a place in the order of arrival, so calls alternate
                self._raise_failure()
                answered = self._answered
                self._submitted += 1
                try:
                    reply = await self._client.add_request(prompts.tokens[number], prompts.params[number])
                    prompts.replies[number] = reply
                    self._answered += 1
                    return
                except (QueueFullError, DeadlineExceededError) as error:
                    # If other prompts have been or will be answered, this prompt can be answered later.
                    if self._answered == answered and (
                        self._submitted == 1 or isinstance(error, DeadlineExceededError)
                    ):
                        raise
                    seconds = error.retry_after_seconds or RETRY_SECONDS
                except RequestRejectedError as error:
                    if error.is_transient:
                        raise
                    prompts.fail(number, ErrorCode(error.code), str(error))
                    return
                finally:
                    self._submitted -= 1
            await asyncio.sleep(seconds)
