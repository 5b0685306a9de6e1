"""The configuration of an in-process engine that names none."""

from __future__ import annotations

import pytest

from megatron_runtime.in_process import builder
from megatron_runtime.requests.config import InferenceConfig


@pytest.mark.parametrize("available", [None, 1 << 30, 1 << 50])
def test_the_default_kv_cache_fits_the_container(monkeypatch: pytest.MonkeyPatch, available: int | None) -> None:
    monkeypatch.setattr(builder, "available_bytes", lambda: available)
    expected = InferenceConfig().buffer_size_gb
    if available == 1 << 30:
        expected = builder.DEFAULT_MEMORY_SHARE
    assert builder.default_config().buffer_size_gb == expected
