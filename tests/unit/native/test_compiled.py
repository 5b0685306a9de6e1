"""The cache of the compiled function."""

from pathlib import Path

import pytest

from megatron_kernels.cpu import compiled


@pytest.mark.skipif(not compiled.is_supported(), reason="needs AVX2 and Linux")
def test_a_cached_function_is_also_stored_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image build has the cache of an earlier build, and the container does not."""
    compiled.entry()  # loads the function, so the files below are not loaded
    beside, cache = places = [tmp_path / "package" / "native.o", tmp_path / "cache" / "native.o"]
    cache.parent.mkdir()
    cache.write_bytes(b"machine code")
    monkeypatch.setattr(compiled, "_paths", lambda: places)
    compiled.keep()
    assert beside.read_bytes() == b"machine code"
