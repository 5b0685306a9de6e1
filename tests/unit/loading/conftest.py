"""Tests of checkpoints compute with one thread."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread  # the fixture
from random_checkpoint import CONFIGS, random_tensors, write_model

from megatron_runtime.checkpoints.convert import convert


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in the format torch_dist, which no test may change."""
    directory = tmp_path_factory.mktemp("megatron")
    model = write_model(directory / "hf", CONFIGS["llama"], random_tensors(CONFIGS["llama"]))
    convert(str(model), directory / "megatron", to="torch_dist")
    return directory / "megatron"


@pytest.fixture
def release(original: Path, tmp_path: Path) -> Path:
    """The folder of the tensors in a copy of it."""
    shutil.copytree(original, tmp_path / "megatron")
    return tmp_path / "megatron" / "release"
