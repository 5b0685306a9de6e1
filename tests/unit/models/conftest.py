from pathlib import Path

import pytest

from megatron_runtime.loading.export import export_hf


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a directory that transformers reads."""
    directory = tmp_path_factory.mktemp("exported")
    export_hf("builtin:smollm2-135m", directory)
    return directory
