"""Notes the device of the tests, for the record of the run."""

from __future__ import annotations

import pytest
import torch
from run_record import used


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    if torch.cuda.is_available():
        used("GPU", torch.cuda.get_device_name())
