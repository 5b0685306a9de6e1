"""A bar on a terminal while weights are read, and silence elsewhere."""

import io
import sys

import pytest
import torch
from random_checkpoint import LLAMA, random_model

from megatron_runtime.backends.native.weight_store import WeightStore
from megatron_runtime.checkpoints.checkpoint import with_progress
from megatron_runtime.checkpoints.in_memory import model_in_memory


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    source = model_in_memory(random_model(LLAMA))
    WeightStore(source, torch.float32).load()
    shown = sys.stderr.getvalue()
    assert "loading the weights" in shown
    assert "100%" in shown


def test_elsewhere_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    checkpoint = model_in_memory(random_model(LLAMA)).checkpoint
    with with_progress(checkpoint, what="loading") as shown:
        assert shown is checkpoint
    WeightStore(model_in_memory(random_model(LLAMA)), torch.float32).load()
    assert sys.stderr.getvalue() == ""
