from pathlib import Path

import pytest
from one_thread import one_thread as one_thread  # the fixture
from run_record import used

from megatron_runtime.checkpoints.convert import convert


@pytest.fixture(scope="package")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a directory that transformers reads."""
    directory = tmp_path_factory.mktemp("exported")
    convert("builtin:smollm2-135m", directory)
    used("weights", "SmolLM2-135M")
    return directory
