from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_record import used

from megatron_runtime.checkpoints.convert import convert


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait at barriers are many times slower than one thread on a shared host."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a directory that transformers reads."""
    directory = tmp_path_factory.mktemp("exported")
    convert("builtin:smollm2-135m", directory)
    used("weights", "SmolLM2-135M")
    return directory
