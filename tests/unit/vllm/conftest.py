"""VllmBackend on the package `fake/vllm`, with a listener that collects what it reports."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eventually import LONG_SECONDS, eventually
from random_checkpoint import write_speaking_model

from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.sampling_params import SamplingParams

from . import warm_popen

FAKE = Path(__file__).with_name("fake")


def _forget() -> None:
    for name in [
        name for name in sys.modules if name == "vllm" or name.startswith(("vllm.", "megatron_runtime.backends.vllm"))
    ]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Install the fake package in this process and its children, which are forked. Return the fake's log."""
    _forget()
    log = tmp_path / "vllm.log"
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.syspath_prepend(str(FAKE))
    from megatron_runtime.backends.vllm import process
    from megatron_runtime.sampling import grammar_compiler

    monkeypatch.setattr(process, "subprocess", warm_popen)
    monkeypatch.setattr(grammar_compiler, "COMPILE_SECONDS", LONG_SECONDS)  # an answer of calls is free after that
    yield log
    _forget()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="session")
def other_weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other values."""
    directory = shutil.copytree(model, tmp_path_factory.mktemp("other") / "model")
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return directory


@dataclass
class Listener:
    """Implements BackendListener."""

    outputs: list[RequestOutput] = field(default_factory=list)
    events: list[CacheEvents] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    leaves: bool = False

    def on_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        self.outputs += outputs

    def on_cache_events(self, events: CacheEvents) -> None:
        self.events.append(events)

    def on_failure(self, cause: BaseException) -> None:
        self.failures.append(cause)

    def on_leave(self) -> None:
        self.leaves = True

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs if output.request_id == request_id for token in output.new_tokens]

    def last(self, request_id: int) -> RequestOutput | None:
        found = [output for output in self.outputs if output.request_id == request_id and output.finish_reason]
        assert len(found) <= 1, "a request ended twice"
        return found[0] if found else None

    async def end_of(self, *request_ids: int) -> list[RequestOutput]:
        async def ended() -> bool:
            return all(self.last(request_id) for request_id in request_ids)

        await eventually(ended, what=f"requests {request_ids} end", look_seconds=0.005)
        return [self.last(request_id) for request_id in request_ids]


@dataclass
class Running:
    backend: Any
    listener: Listener

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        *,
        generated: Iterable[int] = (),
        deadline: float | None = None,
        adapter: str = "",
        sequences: list[tuple[int, ...]] | None = None,
        **params: Any,
    ) -> None:
        self.backend.submit(
            EngineRequest(
                request_id,
                np.array(prompt, dtype=np.int32),
                np.array(list(generated), dtype=np.int32),
                SamplingParams(**{"temperature": 0.0, "termination_id": -1, **params}),
                deadline_seconds=deadline,
                adapter=adapter,
                bad_words=sequences,
            )
        )

    async def until(self, count: int, request_id: int) -> None:
        async def reached() -> bool:
            return len(self.listener.tokens(request_id)) >= count

        await eventually(reached, what=f"request {request_id} has {count} tokens", look_seconds=0.005)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(model: Path) -> AsyncIterator[Start]:
    started: list[Running] = []

    async def make(**settings: Any) -> Running:
        from megatron_runtime.backends.vllm.backend import VllmBackend

        chosen = {"model": str(model), "prefix_caching": False, "max_sequence_length": 256, **settings}
        running = Running(
            VllmBackend(EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", **chosen)),
            Listener(),
        )
        await running.backend.start(running.listener)
        started.append(running)
        return running

    yield make
    for running in started:
        await running.backend.stop()


@pytest.fixture
async def running(start: Start) -> Running:
    """An engine that serves."""
    running = await start()
    await running.backend.load()
    assert not (await running.backend.unpause()).failed
    return running


def lines(log: Path, line: str) -> int:
    """Return how often the fake has logged `line`."""
    return logged(log).count(line)


def logged(log: Path) -> list[str]:
    """Return the lines that the fake has logged."""
    return log.read_text().splitlines() if log.exists() else []


def answer(prompt: list[int], count: int, weights: int) -> list[int]:
    """Return the first tokens of the fake engine's answer."""
    from vllm.v1.engine.async_llm import next_token

    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, weights))
    return context[len(prompt) :]


def weights_of(directory: Path) -> int:
    return (directory / "model.safetensors").read_bytes()[-1]


def adapter_of(directory: Path, *, size: int) -> Path:
    """Write an adapter that adds `size` to the weights of the fake."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (directory / "adapter_model.safetensors").write_bytes(bytes(size))
    return directory
