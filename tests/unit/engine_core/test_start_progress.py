"""A starting engine reports its stage, bytes, and what is left, on the port of its probes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.engine import worker
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process import progress
from megatron_runtime.process.progress import Stage, StartProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_bytes_rate_and_the_time_left_are_those_of_the_current_stage() -> None:
    clock = Clock()
    start = StartProgress(clock)
    assert start.page() is None
    start.report(Stage.DOWNLOAD, 100, 1000)
    assert start.page() == {"stage": "Download", "bytes": 100, "totalBytes": 1000, "bytesPerSecond": 0}
    clock.now += 2
    start.report(Stage.DOWNLOAD, 400, 1000)
    expected = {"stage": "Download", "bytes": 400, "totalBytes": 1000, "bytesPerSecond": 150, "secondsLeft": 4}
    assert start.page() == expected
    start.report(Stage.COMPILE)
    assert start.page() == {"stage": "Compile"}
    start.report(Stage.CAPTURE, 10, 100)
    clock.now += 3
    start.report(Stage.CAPTURE, 40, 100)
    assert start.page() == {"stage": "Capture", "secondsLeft": 6}, "graphs are not bytes"


def test_another_process_gets_each_stage_and_then_a_report_each_second() -> None:
    clock, sent = Clock(), []
    start = StartProgress(clock)
    start.forward = lambda *report: sent.append(report)
    for done in range(5):
        start.report(Stage.VERIFY, done, 9)
    clock.now += 1
    start.report(Stage.VERIFY, 7, 9)
    start.report(Stage.LOAD, 0, 9)
    assert sent == [(Stage.VERIFY, 0, 9), (Stage.VERIFY, 7, 9), (Stage.LOAD, 0, 9)]


def test_probes_answer_while_the_backend_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download, or vLLM's imports, block the engine for minutes."""
    (port,) = free_ports(1)
    monkeypatch.setattr(worker, "PROGRESS", start := StartProgress())
    pages: dict[str, Any] = {}

    def make_backend(settings: EngineSettings) -> Any:
        start.report(Stage.DOWNLOAD, 1, 4)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress") as answer:
            pages["progress"] = json.load(answer)
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz")
        pages["ready"] = json.load(error.value)
        raise ValueError("no backend is needed here")

    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model="hf:org/name", health_port=port)
    with pytest.raises(ValueError, match="no backend is needed"):
        worker.run(settings, make_backend)
    assert pages["progress"] == {"stage": "Download", "bytes": 1, "totalBytes": 4, "bytesPerSecond": 0}
    assert pages["ready"] == {"ready": False, "missing": ["model hf:org/name"]}
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/progress")


def test_a_port_in_use_ends_the_engine_with_the_remedy() -> None:
    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", health_port=(port := free_ports(1)[0]))

    server = worker.HealthServer(missing=list, port=port)
    stop = worker.serve_on_thread(server)
    try:
        with pytest.raises(OSError, match="choose another --health-port"):
            worker.run(settings, lambda settings: pytest.fail("the port is in use"))
    finally:
        stop()


def test_a_load_reports_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from random_checkpoint import LLAMA, random_model

    from megatron_runtime.backends.native.weight_store import WeightStore
    from megatron_runtime.checkpoints import checkpoint
    from megatron_runtime.checkpoints.in_memory import model_in_memory

    monkeypatch.setattr(checkpoint, "PROGRESS", start := progress.StartProgress())
    WeightStore(model_in_memory(random_model(LLAMA)), torch.float32).load()
    page = start.page()
    assert page is not None
    assert (page["stage"], page["bytes"]) == ("Load", page["totalBytes"])
