"""One thread for the models of a test process: threads that meet at barriers make a shared machine many times slower.

A conftest.py imports the fixture: `from one_thread import one_thread as one_thread`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch and the executors use one thread. A test of several threads passes their number."""
    from megatron_runtime.backends.native import torch_executor

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_executor, "default_threads", lambda: 1)
        yield
    torch.set_num_threads(before)
