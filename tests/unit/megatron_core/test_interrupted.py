"""A call that is left, cancelled, interrupted or killed: the next call answers or raises, and nothing is left behind.

The table `WAYS` has every way to end a call early, for each of the four calls. Each runs on one object per mode.
"""

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from eventually import LONG_SECONDS
from own_children import own_children
from soak import repeated, size

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import CoordinatorFailedError
from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.engines.dynamic_engine import CallsClosedError, EngineFailedError
from megatron_runtime.megatron_core.inference_client import UnavailableError
from megatron_runtime.megatron_core.inference_request import Status
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.tokenization.chat_template import end_idle_renderers

DIRECT, COORDINATOR = "direct", "coordinator"
MODES = pytest.mark.parametrize("mode", [DIRECT, COORDINATOR], scope="module")
LONG = SamplingParams(temperature=0.0, num_tokens_to_generate=240)
SHORT = SamplingParams(temperature=0.0, num_tokens_to_generate=2)
PROMPT = "The capital of France is"
MANY = [[number + 1, 2] for number in range(200)]
"""With long answers, several seconds of work."""


class OnPurposeError(Exception):
    pass


class Things:
    """What this process holds besides memory: descriptors, threads, children and shared memory."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = {thread for thread in threading.enumerate() if thread.name != "megatron-pages"}
        self.children = own_children(recursive=True)
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.shared = set(os.listdir("/dev/shm"))

    def assert_no_more(self, before: "Things") -> None:
        for thread in self.threads - before.threads:
            thread.join(LONG_SECONDS)  # it may be at its last instruction
            assert not thread.is_alive(), thread
        assert self.children <= before.children
        assert self.descriptors <= before.descriptors
        assert {name for name in self.shared if f"{os.getpid()}" in name} <= before.shared


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def in_time(call: Callable[[], Any]) -> Any:
    """Return the result of a call that must not hang."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(call).result(LONG_SECONDS)
    finally:
        thread.shutdown(wait=False)


def open_requests(llm: MegatronLLM) -> bool:
    if llm._coord_runtime is None:
        return llm.engine.core.has_work
    client = llm._coord_runtime.client
    return bool(client.streams or client.completion_futures) or llm.engine.core.has_work


@pytest.fixture(scope="module")
def common(tiny_model: Any, tokenizer: Any) -> dict[str, Any]:
    config = InferenceConfig(max_sequence_length=256, buffer_size_gb=0.02, max_requests=32)
    options = {"model": tiny_model, "tokenizer": tokenizer, "inference_config": config}
    options |= {"dtype": "float32", "threads": 1}
    with MegatronLLM(**options, use_coordinator=True) as first:  # what stays after the first object, stays anyway
        first.generate(PROMPT, LONG)
    return options


@pytest.fixture(scope="module")
def llm(mode: str, common: dict[str, Any]) -> Iterator[MegatronAsyncLLM]:
    """The object of all cells of a mode. After the last one, nothing of it may be left."""
    before = Things()
    llm = MegatronAsyncLLM(**common, use_coordinator=mode == COORDINATOR, allow_direct_mode=True)
    yield llm
    asyncio.run(llm.shutdown())
    llm.engine.core.check_integrity()
    del llm
    Things().assert_no_more(before)


class Blocking:
    """The calls of MegatronLLM on the object of a MegatronAsyncLLM."""

    def __init__(self, llm: MegatronAsyncLLM) -> None:
        self.generate = partial(MegatronLLM.generate, llm)
        self.generate_stream = partial(MegatronLLM.generate_stream, llm)


# --- ways to end a call early: each returns when the call has been left ---


@contextlib.contextmanager
def alarm(error: type[BaseException]) -> Iterator[None]:
    """Raise `error` in this thread, while it waits."""

    def handle(_number: int, _frame: object) -> None:
        raise error

    previous = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(error):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def generate_interrupted(llm: Blocking, error: type[BaseException]) -> None:
    with alarm(error):
        llm.generate(MANY, LONG)


def generate_abandoned(llm: Blocking) -> None:
    threading.Thread(target=llm.generate, args=(MANY[:8], LONG), daemon=True).start()


def stream_broken(llm: Blocking) -> None:
    for _ in llm.generate_stream(PROMPT, LONG):
        break


def stream_abandoned(llm: Blocking) -> Any:
    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    return stream


def stream_cancelled(llm: Blocking) -> None:
    """Closed by another thread, while this one reads."""
    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    closing = threading.Thread(target=stream.close)
    closing.start()
    for _ in stream:
        pass
    closing.join()
    assert list(stream) == []


def stream_interrupted(llm: Blocking) -> None:
    stream = llm.generate_stream(PROMPT, LONG)
    with alarm(TimeoutError):
        while True:  # from one stream to the next: one may end earlier
            for _ in stream:
                pass
            stream = llm.generate_stream(PROMPT, LONG)


def stream_collected(llm: Blocking) -> None:
    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()


def stream_raised(llm: Blocking) -> None:
    try:
        for _ in llm.generate_stream(PROMPT, LONG):
            raise OnPurposeError
    except OnPurposeError:
        pass


async def agenerate_cancelled(llm: MegatronAsyncLLM) -> None:
    task = asyncio.create_task(llm.generate(MANY, LONG))
    await asyncio.to_thread(wait_until, partial(open_requests, llm), "the requests are open")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def agenerate_timed_out(llm: MegatronAsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.generate(MANY, LONG), 0.05)


async def agenerate_abandoned(llm: MegatronAsyncLLM) -> Any:
    task = asyncio.create_task(llm.generate(MANY, LONG))
    await asyncio.sleep(0.01)
    return task


async def agenerate_raised(llm: MegatronAsyncLLM) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise OnPurposeError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(llm.generate(MANY, LONG))
            group.create_task(fail())


async def astream_broken(llm: MegatronAsyncLLM) -> None:
    async for _ in llm.generate_stream(PROMPT, LONG):
        break


async def astream_abandoned(llm: MegatronAsyncLLM) -> Any:
    stream = llm.generate_stream(PROMPT, LONG)
    await anext(stream)
    return stream


async def read(llm: MegatronAsyncLLM) -> None:
    while True:
        async for _ in llm.generate_stream(PROMPT, LONG):
            pass


async def astream_cancelled(llm: MegatronAsyncLLM) -> None:
    task = asyncio.create_task(read(llm))
    await asyncio.to_thread(wait_until, partial(open_requests, llm), "the stream is open")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def astream_timed_out(llm: MegatronAsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(llm), 0.05)


async def astream_collected(llm: MegatronAsyncLLM) -> None:
    stream = llm.generate_stream(PROMPT, LONG)
    await anext(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()


async def astream_raised(llm: MegatronAsyncLLM) -> None:
    try:
        async for _ in llm.generate_stream(PROMPT, LONG):
            raise OnPurposeError
    except OnPurposeError:
        pass


WAYS: dict[str, Callable[..., Any]] = {
    "generate: cancel": partial(generate_interrupted, error=KeyboardInterrupt),
    "generate: time-out": partial(generate_interrupted, error=TimeoutError),
    "generate: exception": partial(generate_interrupted, error=OnPurposeError),
    "generate: abandon": generate_abandoned,
    "stream: break": stream_broken,
    "stream: abandon": stream_abandoned,
    "stream: cancel": stream_cancelled,
    "stream: time-out": stream_interrupted,
    "stream: garbage collection": stream_collected,
    "stream: exception": stream_raised,
    "async generate: cancel": agenerate_cancelled,
    "async generate: time-out": agenerate_timed_out,
    "async generate: abandon": agenerate_abandoned,
    "async generate: exception": agenerate_raised,
    "async stream: break": astream_broken,
    "async stream: abandon": astream_abandoned,
    "async stream: cancel": astream_cancelled,
    "async stream: time-out": astream_timed_out,
    "async stream: garbage collection": astream_collected,
    "async stream: exception": astream_raised,
}


def leave(way: str, llm: MegatronAsyncLLM) -> Any:
    """Leave a call. Return what still refers to it."""
    return asyncio.run(WAYS[way](llm)) if way.startswith("async") else WAYS[way](Blocking(llm))


@MODES
@pytest.mark.parametrize("way", WAYS)
@repeated(soak=10)
def test_the_next_call_answers(llm: MegatronAsyncLLM, way: str, seed: int) -> None:
    left = leave(way, llm)
    blocking = Blocking(llm)
    assert (
        in_time(partial(blocking.generate, [seed, 2], SamplingParams(num_tokens_to_generate=2))).generated_length == 2
    )
    assert len(in_time(lambda: list(blocking.generate_stream(PROMPT, SamplingParams(num_tokens_to_generate=2))))) == 2
    assert asyncio.run(llm.generate([seed, 3], SamplingParams(num_tokens_to_generate=2))).generated_length == 2
    del left
    wait_until(lambda: not open_requests(llm), "the request has left the engine")


@MODES
def test_streams_and_calls_interleave(llm: MegatronAsyncLLM, greedy: Any) -> None:
    blocking = Blocking(llm)
    expected = [blocking.generate([number, 2], greedy(20)).generated_tokens for number in range(3)]
    streams = [blocking.generate_stream([number, 2], greedy(20)) for number in range(3)]
    received = [next(stream).token_ids for stream in streams]
    assert blocking.generate([1, 2], greedy(20)).generated_tokens == expected[1]
    for tokens, stream in zip(received, streams, strict=True):
        tokens += [token for chunk in stream for token in chunk.token_ids]
        assert asyncio.run(llm.generate([2, 2], greedy(20))).generated_tokens == expected[2]
    assert received == expected


BAD_PROMPTS: list[Any] = [1.5, None, b"x", {"a": 1}, {1.5}, [1.5], ["a"], [True], [[1]], [-1], [1 << 31], [1 << 80]]
BAD_PROMPTS += [[10**6], [], [1] * 300, "\ud800", "", "long " * 300]


@MODES
def test_bad_prompts_fail_alone(llm: MegatronAsyncLLM, greedy: Any) -> None:
    """Each has an error, and the prompts around it are answered."""
    for good in (PROMPT, [5, 6]):
        prompts = [good, *(prompt for bad in BAD_PROMPTS for prompt in (bad, good))]
        for answers in (Blocking(llm).generate(prompts, greedy(2)), asyncio.run(llm.generate(prompts, greedy(2)))):
            failed = [answer for answer in answers if answer.status is not Status.COMPLETED]
            assert failed == answers[1::2], "those between the good ones"
            assert all(answer.status is Status.FAILED and answer.error["message"] for answer in failed)


@MODES
def test_one_bad_prompt_is_one_failed_answer(llm: MegatronAsyncLLM, greedy: Any) -> None:
    for bad in BAD_PROMPTS:
        is_one_prompt = isinstance(bad, list) and bad and not isinstance(bad[0], float | str | list | bool)
        if isinstance(bad, str) or is_one_prompt:
            *_, last = Blocking(llm).generate_stream(bad, greedy(2))
            assert last.request.status is Status.FAILED, bad
            assert Blocking(llm).generate(bad, greedy(2)).status is Status.FAILED, bad


@MODES
def test_a_killed_compiler_of_grammars_is_replaced(llm: MegatronAsyncLLM, greedy: Any) -> None:
    def answer(choice: str) -> Any:
        structured = {"type": "choice", "value": [choice]}
        return Blocking(llm).generate(PROMPT, greedy(12, structured_output=structured))

    before = Things().children
    assert answer("Paris").generated_text == "Paris"
    (compiler,) = Things().children - before
    os.kill(compiler, signal.SIGKILL)
    first = answer("Rome")  # it may meet the process that is about to die
    assert first.generated_text == "Rome" or "killed by signal SIGKILL" in first.error["message"], first.error
    last = answer("Oslo")
    assert last.generated_text == "Oslo", last.error


# --- objects of their own ---


@pytest.fixture
def build(common: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Construct objects. After their shutdown nothing of them may be left."""
    before = Things()
    made: list[Any] = []

    def construct(cls: Any = MegatronLLM, **more: Any) -> Any:
        made.append(cls(**{**common, **more}))
        return made[-1]

    yield construct
    while made:
        MegatronLLM.shutdown(made.pop())
    Things().assert_no_more(before)


def failures_of(calls: dict[str, Callable[[], Any]], then: Callable[[], object]) -> dict[str, BaseException | None]:
    """Begin all calls on threads, call `then`, and return the exception of each."""
    with ThreadPoolExecutor(len(calls)) as threads:
        running = {name: threads.submit(call) for name, call in calls.items()}
        then()
        return {name: future.exception(LONG_SECONDS) for name, future in running.items()}


def every_call(llm: Any) -> dict[str, Callable[[], Any]]:
    async def astream() -> None:
        async for _ in MegatronAsyncLLM.generate_stream(llm, PROMPT, LONG):
            pass

    return {
        "generate": lambda: MegatronLLM.generate(llm, MANY, LONG),
        "stream": lambda: list(MegatronLLM.generate_stream(llm, PROMPT, LONG)),
        "async generate": lambda: asyncio.run(MegatronAsyncLLM.generate(llm, MANY, LONG)),
        "async stream": lambda: asyncio.run(astream()),
        "wait_for_shutdown": lambda: MegatronLLM.wait_for_shutdown(llm),
    }


def paused(llm: Any) -> Callable[[], None]:
    """Pause, so that no call ends earlier. Return a function that waits until all are open."""
    llm.pause()
    client = llm._coord_runtime.client
    return lambda: wait_until(lambda: len(client.streams) == 2 and len(client.completion_futures) > 1, "all are open")


def test_a_killed_coordinator_fails_every_call_with_the_cause(build: Any) -> None:
    llm = build(use_coordinator=True)
    all_open, coordinator = paused(llm), llm.engine.coordinator

    def kill() -> None:
        all_open()
        coordinator.process.kill()

    failures = failures_of(every_call(llm), kill)
    later = {name: in_time(partial(failure_of, call)) for name, call in every_call(llm).items()}
    verb = in_time(partial(failure_of, llm.unpause))
    for name, error in {**failures, **{f"later {name}": one for name, one in later.items()}, "verb": verb}.items():
        assert isinstance(error, CoordinatorFailedError), (name, error)
        assert f"process {coordinator.pid}, ended with signal SIGKILL" in str(error)
        assert "construct the object again" in str(error)
    in_time(llm.shutdown)
    assert build(use_coordinator=True).generate(PROMPT, SHORT).generated_length == 2


def failure_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_a_killed_coordinator_fails_requests_over_http(build: Any) -> None:
    llm = build(use_coordinator=True)
    llm.serve(ServeConfig(host="127.0.0.1", port=0, frontend_replicas=1), blocking=False)
    llm.pause()
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 4}

    def ask() -> int:
        return httpx.post(f"{llm.url}/v1/completions", json=body, timeout=LONG_SECONDS).status_code

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        wait_until(lambda: bool(llm._front_end._client._open), "the request is open")
        llm.engine.coordinator.process.kill()
        assert asked.result(LONG_SECONDS) == 503
    with contextlib.suppress(httpx.TransportError):  # the server ends, too
        assert ask() >= 500
    with pytest.raises(CoordinatorFailedError):
        in_time(llm.wait_for_shutdown)


def kill_all(pids: set[int]) -> list[psutil.Process]:
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.kill()
    return processes


def test_killed_replicas_and_renderers_fail_no_later_request(build: Any) -> None:
    """The listening socket is shared, so this process answers; it starts another renderer of chat templates."""
    end_idle_renderers()
    before = Things().children  # of other tests
    llm = build(use_coordinator=True, tokenizer="builtin:smollm2-135m")
    llm.serve(ServeConfig(host="127.0.0.1", port=0, frontend_replicas=2), blocking=False)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

    def ask() -> int:
        return httpx.post(f"{llm.url}/v1/chat/completions", json=body, timeout=LONG_SECONDS).status_code

    assert ask() == 200
    killed = Things().children - before - {llm.engine.coordinator.pid}
    assert len(killed) >= 2, "a replica and a renderer"
    psutil.wait_procs(kill_all(killed), timeout=LONG_SECONDS)
    assert [ask() for _ in range(4)] == [200] * 4
    assert llm.generate(PROMPT, SHORT).generated_length == 2


def test_an_interrupted_shutdown_leaves_nothing(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(use_coordinator=True)
    monkeypatch.setattr(llm._coord_runtime.lifecycle, "confirmed", lambda _signal: asyncio.Event().wait())
    with alarm(KeyboardInterrupt):
        llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down: create a new one"):
        llm.generate(PROMPT)


def test_the_last_lines_of_a_coordinator_are_in_the_error(build: Any, capfd: pytest.CaptureFixture[str]) -> None:
    llm = build(use_coordinator=True)
    os.kill(llm.engine.coordinator.pid, signal.SIGABRT)  # of faulthandler or not, it ends
    how = llm.engine.coordinator.ended.result(LONG_SECONDS)
    assert "signal SIGABRT" in how
    with pytest.raises(CoordinatorFailedError, match="signal SIGABRT"):
        in_time(lambda: llm.generate(PROMPT))


def test_an_engine_that_fails_ends_the_calls_of_a_coordinator(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build(use_coordinator=True)
    all_open = paused(llm)

    def fail(_plan: object) -> None:
        raise OnPurposeError("a kernel failed")

    def fail_steps() -> None:
        all_open()
        monkeypatch.setattr(llm.engine.core.executor, "execute", fail)
        with contextlib.suppress(EngineFailedError):  # the verb may be confirmed first
            llm.unpause()

    failures = failures_of(every_call(llm), fail_steps)
    failures["later"] = in_time(partial(failure_of, lambda: llm.generate(PROMPT)))
    for name, error in failures.items():
        assert "a kernel failed" in str(error), (name, error)
    monkeypatch.undo()


def test_a_failed_step_fails_the_direct_calls_and_no_later_one(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    calls = every_call(llm)
    del calls["wait_for_shutdown"]
    step = llm.engine.core.executor.execute

    def fail(plan: Any) -> Any:
        if len(plan.query_lengths) > 3 and threading.current_thread().name == "engine":
            monkeypatch.setattr(llm.engine.core.executor, "execute", step)
            raise OnPurposeError("a kernel failed")
        return step(plan)

    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    monkeypatch.setattr(llm.engine.core.executor, "execute", fail)
    assert isinstance(in_time(partial(failure_of, calls["generate"])), OnPurposeError)
    assert isinstance(in_time(partial(failure_of, lambda: list(stream))), OnPurposeError | type(None))
    assert in_time(lambda: llm.generate(PROMPT, SHORT)).generated_length == 2
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("use_coordinator", [False, True], ids=[DIRECT, COORDINATOR])
def test_an_unused_object_is_released(common: dict[str, Any], use_coordinator: bool) -> None:
    before = Things()
    llm = MegatronLLM(**common, use_coordinator=use_coordinator)
    assert llm.generate(PROMPT, SHORT).generated_length == 2
    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    engine = weakref.ref(llm.engine)
    del llm
    assert sum(len(chunk.token_ids) for chunk in stream) > 10, "the stream keeps the object in use"
    del stream
    Things().assert_no_more(before)  # and nothing needed a shutdown
    assert engine() is None


@pytest.mark.parametrize("use_coordinator", [False, True], ids=[DIRECT, COORDINATOR])
def test_a_closed_object_says_what_to_do(build: Any, use_coordinator: bool) -> None:
    llm = build(use_coordinator=use_coordinator)
    stream, unread = llm.generate_stream(PROMPT, LONG), llm.generate_stream(PROMPT, LONG)
    next(stream)
    if use_coordinator:
        llm.pause()
    llm.shutdown()
    error = in_time(partial(failure_of, lambda: list(stream)))
    if use_coordinator or error is not None:  # a direct stream may have ended before
        assert isinstance(error, UnavailableError | CallsClosedError), error
        assert "shut down" in str(error) or "stopped" in str(error)
    stream.close()
    if use_coordinator:
        for call in (lambda: llm.generate(PROMPT), lambda: next(unread), llm.pause, lambda: llm.serve(blocking=False)):
            with pytest.raises(RuntimeError, match="has been shut down: create a new one"):
                call()
    else:
        assert llm.generate(PROMPT, SHORT).generated_length == 2
        assert next(unread).token_ids
        unread.close()


@pytest.mark.parametrize("use_coordinator", [False, True], ids=[DIRECT, COORDINATOR])
def test_a_forked_process_gets_an_error(build: Any, use_coordinator: bool) -> None:
    llm = build(use_coordinator=use_coordinator)
    llm.generate(PROMPT, SHORT)
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child == 0:
        calls = (lambda: llm.generate(PROMPT), lambda: next(llm.generate_stream(PROMPT)), llm.shutdown)
        errors = [str(failure_of(call)) for call in calls[: 3 if use_coordinator else 2]]
        os._exit(0 if all("forked" in error for error in errors) else 1)
    wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0), "the forked process raised and exited")
    assert llm.generate(PROMPT, SHORT).generated_length == 2


def test_reset_and_serving_do_not_wait_for_an_open_stream(build: Any) -> None:
    llm = build()
    stream = llm.generate_stream(PROMPT, LONG)
    next(stream)
    with pytest.raises(RuntimeError, match="are open: close them first"):
        llm.engine.suspend()
    with pytest.raises(RuntimeError, match="are open: close them first"):
        asyncio.run(llm.engine.start_listening_to_data_parallel_coordinator())
    in_time(llm.engine.reset)
    with pytest.raises(CallsClosedError, match="reset"):
        for _ in stream:
            pass
    assert llm.generate(PROMPT, SHORT).generated_length == 2


@pytest.mark.parametrize("max_queued", [None, 4], ids=["its default", "a short queue"])
def test_a_list_is_fed_as_fast_as_it_is_served(
    build: Any, monkeypatch: pytest.MonkeyPatch, greedy: Any, max_queued: int | None
) -> None:
    if max_queued is not None:
        settings = partial(CoordinatorSettings, max_queued=max_queued)
        monkeypatch.setattr("megatron_runtime.in_process.builder.CoordinatorSettings", settings)
    config = InferenceConfig(max_sequence_length=256, buffer_size_gb=0.02, max_requests=8)
    llm = build(use_coordinator=True, inference_config=config)
    maximum = 0
    client = llm._coord_runtime.client.native
    submit = client._submit

    def counted(request: Any) -> None:
        nonlocal maximum
        submit(request)
        maximum = max(maximum, len(client._open))

    client._submit = counted
    prompts = [[number % 1000 + 1, 2] for number in range(size(100, soak=12_000))]
    answers = llm.generate(prompts, greedy(1))
    assert [answer.prompt_tokens for answer in answers] == prompts
    assert {answer.status for answer in answers} == {Status.COMPLETED}
    assert maximum <= 16, "twice as many as the engine runs at once"

    async def one_by_one() -> list[Any]:
        return await asyncio.gather(*(MegatronAsyncLLM.generate(llm, prompt, greedy(1)) for prompt in prompts))

    assert [answer.prompt_tokens for answer in asyncio.run(one_by_one())] == prompts


def test_a_full_queue_of_others_is_an_error(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One place, which another client has: no request of this one is open."""
    from megatron_runtime.megatron_core.inference_client import InferenceClient, QueueFullError

    settings = partial(CoordinatorSettings, max_queued=1)
    monkeypatch.setattr("megatron_runtime.in_process.builder.CoordinatorSettings", settings)
    llm = build(use_coordinator=True)
    llm.pause()

    async def fill_and_ask() -> None:
        other = InferenceClient(llm._coord_runtime.coord_addr)
        await other.start()
        waiting = other.add_request([1, 2], LONG)
        await other.status()
        with pytest.raises(QueueFullError):
            await asyncio.wait_for(MegatronAsyncLLM.generate(llm, [[1], [2]], LONG), LONG_SECONDS)
        waiting.cancel()
        other.stop()

    asyncio.run(fill_and_ask())
