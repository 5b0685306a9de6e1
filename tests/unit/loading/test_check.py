"""`megatron engine --check`: it finds what an engine would reject, without reading weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_hub import FakeHub, use_hub
from huggingface_hub import constants
from random_checkpoint import write_speaking_model
from warm_python import WarmProcess

from megatron_runtime.backends.native.build import build_native, check_native
from megatron_runtime.backends.registry import check_backend
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.remote import download, hub_cache, metadata
from megatron_runtime.checkpoints.remote.files import HubError
from megatron_runtime.checkpoints.safetensors import INDEX_FILE
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli import containers, main
from megatron_runtime.distributed.shard import IndivisibleError, ParallelSizes
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

ENGINE = ("engine", "--coordinator", "h:1", "--name", "e", "--health-port", "off")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub.of(model).running() as running:
        use_hub(monkeypatch, running.url, tmp_path / "home")
        yield running


def settings(model: str | Path, **fields: Any) -> EngineSettings:
    return EngineSettings(coordinator="tcp://h:1", name="e", model=str(model), **{"device": "cpu", **fields})


def run(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of the real command in a process of its own."""
    log = tmp_path / "check.log"
    process = WarmProcess("-m", "megatron_runtime.cli", *ENGINE, *arguments, "--check", environment=os.environ, log=log)
    return process.wait(), log.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 0, "can start"),
        (("--dtype", "float16", "--device", "cuda"), 0, "can start"),
        (("--dtype", "float16", "--device", "cpu"), 0, "can start"),
        (("--dtype", "int8", "--device", "cuda"), 1, "dtype='int8' is not supported on a GPU"),
        (("--dtype", "float8"), 2, "'float8' is not one of"),
        (("--max-sequence-length", "4096"), 1, "max_sequence_length=4096: want 2 to 2048 tokens"),
        (("--tensor-parallel", "2", "--pipeline-parallel", "2"), 0, "can start"),
        (("--tensor-parallel", "3"), 1, "tensor_parallel_size=3 does not divide the model's 4 query heads"),
        (("--format", "GGUF"), 1, "format=GGUF: model"),
    ],
)
def test_the_command_finds_unusable_settings(
    arguments: tuple[str, ...], code: int, words: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "write_termination_message", lambda cause: None)
    result = CliRunner().invoke(main, [*ENGINE, "--model", str(model), *arguments, "--check"])
    assert result.exit_code == code, result.output
    assert words in result.output


def test_the_command_finds_a_missing_directory(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--model", str(tmp_path / "nowhere"))
    assert code == 1
    assert "nowhere' does not exist" in output


def test_the_command_tells_a_missing_repository_from_a_hub_that_does_not_answer(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, "--model", "hf:org/name")[0] == 0
    code, output = run(tmp_path, "--model", "hf:org/nmae")
    assert (code, "repository not found: org/nmae@main" in output) == (1, True)
    hub.token = "secret"
    code, output = run(tmp_path, "--model", "hf:org/name")
    assert (code, "401 Unauthorized" in output) == (1, True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, output = run(tmp_path, "--model", "hf:org/name")
    assert (code, "does not answer for org/name@main" in output) == (os.EX_TEMPFAIL, True)


def test_the_cause_is_the_termination_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[BaseException] = []
    monkeypatch.setattr(containers, "write_termination_message", written.append)
    result = CliRunner().invoke(main, [*ENGINE, "--model", str(tmp_path / "nowhere"), "--check"])
    assert result.exit_code == 1
    assert "does not exist" in str(written[0])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "float16"},
        {"max_sequence_length": 4096},
        {"max_sequence_length": 1},
        {"kv_cache_memory": 1000},
        {"model_format": "TorchDist"},
        {"block_size_tokens": 7},
    ],
    ids=str,
)
def test_the_check_says_what_an_engine_would_say(fields: dict[str, Any], model: Path) -> None:
    def outcome(build: Any) -> str:
        try:
            build(settings(model, **fields))
        except ValueError as error:
            return str(error)
        return "usable"

    assert outcome(check_native) == outcome(build_native)


def test_a_model_of_a_hub_is_checked_without_its_weights(hub: FakeHub) -> None:
    hub.trickling.add(WEIGHTS)  # a download of the weights would need many requests
    check_backend(settings("hf:org/name"))
    assert [path for path, _ in hub.requests].count(WEIGHTS) == 2
    assert not hub_cache().exists()


def test_an_error_names_the_repository_and_not_the_directory_of_its_metadata(hub: FakeHub) -> None:
    del hub.files["config.json"]
    with pytest.raises(ValueError, match=r"model 'hf:org/name' has no config\.json in hf:org/name"):
        check_backend(settings("hf:org/name"))


def test_every_file_of_the_index_must_be_in_the_repository(hub: FakeHub) -> None:
    hub.files["model-1.safetensors"] = hub.files.pop(WEIGHTS)
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    hub.files[INDEX_FILE] = json.dumps({"weight_map": files}).encode()
    with pytest.raises(ValueError, match=r"1 are missing, the first is model-2\.safetensors"):
        check_backend(settings("hf:org/name"))


def test_weights_of_another_size_than_their_header_says_are_found(hub: FakeHub) -> None:
    hub.files[WEIGHTS] = hub.files[WEIGHTS][:-1]
    with pytest.raises(ValueError, match="is cut short"):
        check_backend(settings("hf:org/name"))


def test_parallel_sizes_are_checked_against_the_model_of_a_hub(hub: FakeHub) -> None:
    with pytest.raises(IndivisibleError, match="3 does not divide"):
        check_backend(settings("hf:org/name", parallel=ParallelSizes(tensor=3)))


def test_a_cached_commit_is_checked_without_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hf:org/name@{hub.commit}"
    download.cached_directory(name)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    check_backend(settings(name))
    (download.cached_directory(name) / WEIGHTS).unlink()
    with pytest.raises(OSError, match="does not answer"):
        check_backend(settings(name))


def test_the_header_of_a_gguf_file_is_read_as_far_as_it_goes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolve("builtin:smollm2-135m").path
    hub.files = {"model.gguf": file.read_bytes()}
    monkeypatch.setattr(metadata, "_FIRST_GGUF_BYTES", 1 << 18)
    with metadata.metadata_directory("hf:org/name") as directory:
        sparse = directory / "model.gguf"
        assert sparse.stat().st_size == file.stat().st_size
        assert sparse.stat().st_blocks * 512 < 8 << 20
        check_native(settings(directory))
    assert len(hub.requests) > 2


def test_a_megatron_checkpoint_is_checked_by_its_index(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    convert(str(model), tmp_path / "saved", to="torch_dist", write_gguf_tokenizer=write_gguf_tokenizer)
    hub.files = FakeHub.of(tmp_path / "saved").files
    check_backend(settings("hf:org/name"))
    assert not any(path.endswith(".distcp") for path, _ in hub.requests)


def test_a_damaged_small_file_is_found(hub: FakeHub) -> None:
    hub.damaged["config.json"] = 2
    with pytest.raises(HubError, match=r"config\.json of org/name@"):
        check_backend(settings("hf:org/name"))
