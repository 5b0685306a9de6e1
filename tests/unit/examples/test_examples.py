"""Each program of docs/examples runs as a reader would run it."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from eventually import LONG_SECONDS
from random_checkpoint import write_speaking_model
from warm_python import WarmProgram

from megatron_runtime.cli.processes import free_ports

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"

Start = Callable[..., WarmProgram]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[WarmProgram] = []

    def run(name: str, *arguments: str, **environment: str) -> WarmProgram:
        running.append(WarmProgram(EXAMPLES / name, *arguments, environment={"HF_HUB_OFFLINE": "1", **environment}))
        return running[-1]

    yield run
    for program in running:
        program.close()


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_speaking_model(tmp_path_factory.mktemp("speaking")))


@pytest.mark.long
def test_offline_sync(start: Start) -> None:
    output = start("offline_sync.py", "--new-tokens", "4").finish()
    assert "The capital of France is| Paris" in output
    assert len(output.splitlines()) >= 4


def test_concurrent_async(start: Start, small_model: str) -> None:
    output = start("concurrent_async.py", "--model", small_model, "--new-tokens", "4").finish()
    assert output.count("length") + output.count("stop") == 4


def test_openai_server(start: Start, small_model: str) -> None:
    program = start("openai_server.py", "--model", small_model, "--port", "0")
    url = program.stdout.readline().split()[-1]
    body = {"model": Path(small_model).name, "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LONG_SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2
    os.kill(program.pid, signal.SIGTERM)
    program.finish()


def start_ranks(start: Start, name: str, *arguments: str) -> list[WarmProgram]:
    """Start two ranks of a program, with the environment of torchrun."""
    (port,) = free_ports(1)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [start(name, *arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]


@pytest.mark.parametrize("name", ["offline_coordinator.py", "tensor_parallel.py"])
def test_programs_of_two_ranks(start: Start, small_model: str, name: str) -> None:
    first, second = start_ranks(start, name, "--model", small_model, "--new-tokens", "4")
    output = first.finish()
    assert "The capital of France is|" in output
    assert len(output.splitlines()) >= 4
    assert second.finish() == "", "only the primary rank has answers"


def test_offline_coordinator_on_one_process(start: Start, small_model: str) -> None:
    output = start("offline_coordinator.py", "--model", small_model, "--new-tokens", "4").finish()
    assert "Once upon a time|" in output
    assert "removed" not in output, "an orderly shutdown logs what looks like a fault"
