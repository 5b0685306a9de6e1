"""The files of a LoRA adapter: complete, of the right kind, from a directory or a hub."""

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub, use_hub

from megatron_runtime.checkpoints.adapters import AdapterSourceError, adapter_directory
from megatron_runtime.checkpoints.model_files import ModelFileError

FILES = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 8}).encode(),
    "adapter_model.safetensors": bytes(16),
}


def _write(directory: Path, **changes: bytes | None) -> str:
    for name, content in {**FILES, **changes}.items():
        if content is not None:
            (directory / name).write_bytes(content)
    return str(directory)


def test_a_directory_with_configuration_and_weights_is_an_adapter(tmp_path: Path) -> None:
    assert adapter_directory(_write(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adapter_config.json": None}, "there is no adapter_config.json: save"),
        ({"adapter_model.safetensors": None, "adapter_model.bin": b"pickle"}, "there is no adapter_model.safetensors"),
        ({"adapter_config.json": b'{"peft_type": "PREFIX_TUNING"}'}, "peft_type 'PREFIX_TUNING': only LORA"),
        ({"adapter_config.json": b"{}"}, "peft_type None: only LORA"),
    ],
)
def test_other_directories_are_rejected(tmp_path: Path, changes: dict[str, bytes | None], problem: str) -> None:
    with pytest.raises(AdapterSourceError, match=problem):
        adapter_directory(_write(tmp_path, **changes))


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterSourceError, match="the directory does not exist: name one that every engine can read"):
        adapter_directory(str(tmp_path / "none"))


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(FILES["adapter_config.json"])
    directory = tmp_path / "adapter"
    directory.mkdir()
    _write(directory, **{"adapter_config.json": None})
    (directory / "adapter_config.json").symlink_to(secret)
    with pytest.raises(ModelFileError, match="adapter_config"):
        adapter_directory(str(directory))


def test_a_repository_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(dict(FILES), repository="org/sql").running() as hub:
        use_hub(monkeypatch, hub.url, tmp_path)
        source = f"hf:org/sql@{hub.commit}"
        directory = adapter_directory(source)
        assert (directory / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
        requests = len(hub.requests)
        assert adapter_directory(source) == directory
        assert len(hub.requests) == requests == 2
