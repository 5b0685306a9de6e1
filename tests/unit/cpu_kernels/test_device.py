"""An engine that is to run on GPUs and finds none ends, with the cause in its termination message."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_speaking_model

from megatron_runtime.backends.native.torch_executor import NoGpuError, torch_device
from megatron_runtime.backends.registry import build_backend
from megatron_runtime.engine import worker
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.logs import write_termination_message

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_only_auto_falls_back_to_the_cpu() -> None:
    assert torch_device("auto", local_rank=0).type == "cpu"
    with pytest.raises(NoGpuError, match=r"torch finds no CUDA device: .*(NVIDIA|CUDA)"):
        torch_device("cuda", local_rank=0)


def test_an_engine_on_gpus_without_a_driver_ends_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(worker, "write_termination_message", partial(write_termination_message, path=log))
    model = write_speaking_model(tmp_path / "model")
    settings = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", model=str(model), device="cuda")
    with pytest.raises(NoGpuError):
        worker.run(settings, build_backend)
    written = json.loads(log.read_text())
    assert written["reason"] == "NoGpu"
    assert "torch finds no CUDA device" in written["message"]
    assert "device plugin" in written["remedy"]
