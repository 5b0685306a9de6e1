"""Conversion: atomic, with one tensor in memory at a time, including configuration and tokenizer."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from random_checkpoint import LLAMA, random_tensors, write_model
from safetensors.torch import load_file

from megatron_runtime.checkpoints import convert as conversion
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.convert import DestinationError, convert, new_directory
from megatron_runtime.checkpoints.safetensors import write_safetensors
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli import main
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.tensors import TensorKind
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

BUILTIN = "builtin:smollm2-135m"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", LLAMA, random_tensors(LLAMA))


def test_large_models_are_written_as_several_files_with_an_index(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(kinds, tmp_path, read=tensors.__getitem__, written=lambda count: None, file_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in found)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert {file.name for file in files} == set(index["weight_map"].values())


@pytest.mark.parametrize("to", ["safetensors", "torch_dist"])
def test_the_weights_are_cast_to_the_given_type(to: str, model: Path, tmp_path: Path) -> None:
    convert(str(model), tmp_path / "out", to=to, dtype="bfloat16")  # type: ignore[arg-type]
    checkpoint = open_checkpoint(resolve(str(tmp_path / "out")))
    for name, tensor in random_tensors(LLAMA).items():
        assert torch.equal(checkpoint.read(name), tensor.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_unknown_fields_of_the_configuration_are_kept(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "trained_by": "a team"}))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    convert(str(model), tmp_path / "megatron", to="torch_dist")
    convert(str(tmp_path / "megatron"), tmp_path / "back", to="safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["trained_by"] == "a team"
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == "{}"
    assert open_checkpoint(resolve(str(tmp_path / "back"))).config.eos_token_ids == (2, 5)


def test_numbers_that_are_not_finite_become_null_in_the_copied_configuration(model: Path, tmp_path: Path) -> None:
    """A field that the model needs is rejected by name instead."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    convert(str(model), tmp_path / "out", to="safetensors")
    text = (tmp_path / "out" / "config.json").read_text()
    assert "Infinity" not in text
    assert json.loads(text)["time_step_limit"] == [0.0, None]
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": float("nan")}))
    with pytest.raises(UnsupportedModelError, match="rms_norm_eps nan: want a number above zero"):
        convert(str(model), tmp_path / "other", to="safetensors")


def test_progress_ends_at_the_total(model: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    convert(str(model), tmp_path / "out", to="torch_dist", progress=lambda done, total: told.append((done, total)))
    size = sum(tensor.nbytes for tensor in random_tensors(LLAMA).values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_failure_leaves_no_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(conversion, "write_text_files", full)
    with pytest.raises(OSError, match="no space left"):
        convert(str(model), tmp_path / "out", to="safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_directory_with_files_is_not_changed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(DestinationError, match="is not empty"):
        convert(str(model), tmp_path / "out", to="safetensors")
    convert(str(model), tmp_path / "out", to="safetensors", replace=True)
    assert not (tmp_path / "out" / "mine").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_model_with_an_unknown_tensor_is_rejected_before_a_directory_is_created(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA) | {"model.layers.0.extra.weight": torch.zeros(2)}
    model = write_model(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(UnsupportedModelError, match="extra"):
        convert(str(model), tmp_path / "out", to="torch_dist")
    assert not (tmp_path / "out").exists()


_KILLED = """
import os, sys, time
from pathlib import Path
from megatron_runtime.checkpoints.convert import new_directory
with new_directory(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


def test_the_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    writer = subprocess.Popen([sys.executable, "-c", _KILLED, str(target)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(DestinationError, match="another process is writing"), new_directory(target):
            pass
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    assert (tmp_path / ".out.partial" / "half").exists()
    assert not target.exists()
    with new_directory(target) as partial:
        assert not list(partial.iterdir())
        (partial / "whole").write_text("whole")
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


_MEASURED = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from megatron_runtime.checkpoints import convert as conversion
conversion._sync = lambda directory: None
from megatron_runtime.checkpoints.convert import convert
def there_and_back(model):
    convert(model, Path(f"{model}-megatron"), to="torch_dist")
    convert(f"{model}-megatron", Path(f"{model}-back"), to="safetensors")
small, large = sys.argv[1:]
there_and_back(small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
there_and_back(large)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_below_that_of_a_few_tensors(model: Path, tmp_path: Path) -> None:
    """A model of 88 MB in tensors of at most 4 MB."""
    config = replace(LLAMA, hidden_size=512, intermediate_size=2048, num_layers=6, num_heads=8, head_dim=64)
    large = write_model(tmp_path / "large", config, random_tensors(config))
    assert (large / "model.safetensors").stat().st_size > 80 << 20
    measured = [sys.executable, "-c", _MEASURED, str(model), str(large)]
    grown = subprocess.run(measured, capture_output=True, text=True, check=True).stdout
    assert int(grown) << 10 < 40 << 20


def test_a_gguf_model_keeps_its_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    source = resolve(BUILTIN)
    conversion.write_text_files(
        open_checkpoint(source).config, source, tmp_path, write_gguf_tokenizer=write_gguf_tokenizer
    )
    ours, theirs = load_tokenizer(str(tmp_path)), load_tokenizer(BUILTIN)
    chat = [{"role": "user", "content": "Grüße 12 → <|im_end|>"}]
    assert ours.encode_chat(chat) == theirs.encode_chat(chat)
    assert ours.decode(ours.encode("a 1234 b")) == "a 1234 b"
    assert (ours.bos_id, set(ours.eos_ids), ours.special_ids) == (
        theirs.bos_id,
        set(theirs.eos_ids),
        theirs.special_ids,
    )


def test_the_command_prints_the_result(model: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(model), str(tmp_path / "out"), "--to", "torch_dist", "--dtype", "float16"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "holds the model as torch_dist" in result.output
    checkpoint = open_checkpoint(resolve(str(tmp_path / "out")))
    assert {kind.dtype for kind in checkpoint.kinds.values()} == {torch.float16}


def test_the_command_names_the_error(tmp_path: Path, model: Path) -> None:
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "torch_dist"])
    assert result.exit_code == 1
    assert "does not exist: give" in result.output
    (tmp_path / "out").write_text("")
    result = CliRunner().invoke(main, ["convert", str(model), str(tmp_path / "out"), "--to", "torch_dist"])
    assert result.exit_code == 2
    assert "is a file" in result.output


def test_a_directory_is_restored_if_a_process_was_killed_while_it_replaced_it(tmp_path: Path) -> None:
    target = tmp_path / "model"
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "file").write_text("old")
    with pytest.raises(DestinationError, match="is not empty"), new_directory(target):
        pass
    assert (target / "file").read_text() == "old"
    with new_directory(target, replace=True) as partial:
        (partial / "file").write_text("new")
    assert (target / "file").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
