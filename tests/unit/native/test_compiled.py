"""Where the compiled function is kept."""

from pathlib import Path

import pytest

from megatron_kernels.cpu import compiled


@pytest.mark.skipif(not compiled.is_supported(), reason="needs AVX2 and Linux")
def test_a_function_found_in_a_cache_is_kept_beside_the_package_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built with the cache of an earlier build, and without it runs."""
    compiled.entry()  # from now on it is in memory: what lies at the places below is not loaded
    beside, cache = places = [tmp_path / "package" / "native.o", tmp_path / "cache" / "native.o"]
    cache.parent.mkdir()
    cache.write_bytes(b"machine code")
    monkeypatch.setattr(compiled, "_paths", lambda: places)
    compiled.keep()
    assert beside.read_bytes() == b"machine code"
