"""A progress bar is shown while weights are read, on a terminal only."""

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


def test_a_terminal_shows_a_bar_up_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    source = model_in_memory(random_model(LLAMA))
    WeightStore(source, torch.float32).load()
    shown = sys.stderr.getvalue()
    assert "loading the weights" in shown
    assert "100%" in shown


def test_nothing_is_written_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    checkpoint = model_in_memory(random_model(LLAMA)).checkpoint
    with with_progress(checkpoint, what="loading") as shown:
        assert shown is checkpoint
    WeightStore(model_in_memory(random_model(LLAMA)), torch.float32).load()
    assert sys.stderr.getvalue() == ""
