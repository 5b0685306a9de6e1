"""AsyncStream: order, end, and cancellation by the reader."""

import asyncio
import threading
from typing import Any

import pytest

from megatron_runtime.client.pending import merge_partials
from megatron_runtime.requests.async_stream import MAX_UNREAD_ITEMS, AsyncStream


@pytest.fixture
def cancelled() -> list[int]:
    return []


@pytest.fixture
def stream(cancelled) -> AsyncStream:
    return AsyncStream(7, cancelled.append)


async def read(stream) -> list:
    return [item async for item in stream]


async def test_items_come_in_order_and_then_the_end(stream, cancelled) -> None:
    stream.put(1)
    stream.put(2)
    stream.finish()
    stream.finish(ValueError("late"))
    stream.put(3)
    assert stream.finished
    assert await read(stream) == [1, 2]
    assert await read(stream) == []
    assert cancelled == []


async def test_put_wakes_a_waiting_reader(stream) -> None:
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.put("a")
    await asyncio.sleep(0)
    stream.finish("not an exception")
    assert await task == ["a"]


@pytest.mark.parametrize("error", [LookupError("x"), LookupError])
async def test_an_exception_comes_after_the_items(stream, error) -> None:
    stream.put(1)
    stream.finish(error)
    assert await anext(stream) == 1
    with pytest.raises(LookupError):
        await anext(stream)
    assert await read(stream) == []


async def test_closing_cancels_once_drops_the_rest_and_wakes_the_reader(stream, cancelled) -> None:
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    await stream.aclose()
    assert await task == []
    assert cancelled == [7]
    assert await read(stream) == []


async def test_a_closed_stream_drops_an_earlier_exception(stream) -> None:
    stream.put(1)
    stream.finish(LookupError("x"))
    await stream.aclose()
    assert await read(stream) == []


async def test_put_after_the_end_of_the_readers_loop_is_ignored() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    stream = AsyncStream(0, print, loop=ended)
    stream.put(1)
    stream.finish()
    assert not stream.finished


async def test_closing_a_finished_stream_cancels_nothing(stream, cancelled) -> None:
    stream.put(1)
    stream.finish()
    await stream.aclose()
    assert cancelled == []


async def test_closing_a_generator_early_cancels_the_request_and_raises(stream, cancelled) -> None:
    generator = stream.generator()
    stream.put(1)
    assert await anext(generator) == 1
    with pytest.raises(asyncio.CancelledError):
        await generator.aclose()
    assert cancelled == [7]


async def test_a_generator_read_to_its_end_cancels_nothing(stream, cancelled) -> None:
    stream.put(1)
    stream.finish()
    assert [item async for item in stream.generator()] == [1]
    assert cancelled == []


async def test_with_a_loop_other_threads_may_put() -> None:
    stream = AsyncStream(0, print, loop=asyncio.get_running_loop())

    def produce() -> None:
        for number in range(100):
            stream.put(number)
        stream.finish()

    thread = threading.Thread(target=produce)
    thread.start()
    assert await read(stream) == list(range(100))
    thread.join()


async def test_a_cancel_callback_without_arguments_is_called_without_the_id() -> None:
    calls: list[str] = []
    await AsyncStream(7, lambda: calls.append("cancelled")).aclose()
    assert calls == ["cancelled"]


def frame_of(number: int, *, has_log_probs: bool = False, **details: Any) -> dict[str, Any]:
    own = {"new_log_probs": [-float(number)], "new_top_n_logprobs": [[[number, -1.0]]]} if has_log_probs else {}
    return {"partial": {"request_id": 7, "new_tokens": [number], **own, **details}}


async def test_partials_that_a_reader_is_late_for_take_the_memory_of_their_tokens(cancelled: list[Any]) -> None:
    """Nothing is lost or reordered, and what cannot be merged stays as it is: other details, the answer."""
    stream = AsyncStream(7, cancelled.append, merge=merge_partials)
    stream.put(frame_of(0, prompt_log_probs=[-1.0]))
    for number in range(1, 5000):
        stream.put(frame_of(number, has_log_probs=number >= 1000))
    assert len(stream._items) <= MAX_UNREAD_ITEMS + 1
    stream.put({"final": {"status": "COMPLETED"}})
    stream.finish()
    *partials, final = [item async for item in stream]
    frames = [item["partial"] for item in partials]
    assert [token for frame in frames for token in frame["new_tokens"]] == list(range(5000))
    assert frames[0] == {"request_id": 7, "new_tokens": [0], "prompt_log_probs": [-1.0]}
    with_log_probs = [frame for frame in frames if "new_log_probs" in frame]
    assert [value for frame in with_log_probs for value in frame["new_log_probs"]] == [
        -float(n) for n in range(1000, 5000)
    ]
    assert all(len(frame["new_log_probs"]) == len(frame["new_top_n_logprobs"]) for frame in with_log_probs)
    assert final == {"final": {"status": "COMPLETED"}}
