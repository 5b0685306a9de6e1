"""AsyncStream: order, ends, and who is told when the reader leaves."""

import asyncio
import threading

import pytest

from megatron_runtime.async_stream import AsyncStream


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


async def test_a_reader_that_waits_is_woken(stream) -> None:
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


async def test_a_closed_stream_raises_nothing_that_came_before(stream) -> None:
    stream.put(1)
    stream.finish(LookupError("x"))
    await stream.aclose()
    assert await read(stream) == []


async def test_who_puts_when_the_readers_loop_has_ended_is_not_disturbed() -> None:
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


async def test_a_generator_closed_midway_cancels_and_says_so(stream, cancelled) -> None:
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
