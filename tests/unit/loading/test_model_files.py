"""Files of a model are read only inside its directory, for any links and names in it."""

import ast
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gguf import GGUFWriter
from random_checkpoint import LLAMA, random_tensors, write_model

import megatron_runtime
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.model_files import (
    MAX_METADATA_BYTES,
    ModelDirectory,
    ModelFile,
    ModelFileError,
    UnsafeNameError,
    parse_json,
    require_safe_name,
)
from megatron_runtime.checkpoints.safetensors import INDEX_FILE, SafetensorsCheckpoint, write_safetensors
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.tokenization.loader import TokenizerLoadError, load_tokenizer

COMMIT = "c0ffee" * 6 + "cafe"
REJECTIONS = (ModelFileError, TokenizerLoadError)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one model in each format, with every file that may be beside its weights."""
    root = tmp_path_factory.mktemp("models")
    transformers = write_model(root / "safetensors", LLAMA, random_tensors(LLAMA))
    kinds = SafetensorsCheckpoint(transformers).kinds
    held = random_tensors(LLAMA)
    (transformers / "model.safetensors").unlink()
    write_safetensors(kinds, transformers, read=held.__getitem__, written=lambda count: None, file_bytes=20_000)
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(transformers / "tokenizer.json"))
    (transformers / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    (transformers / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (transformers / "chat_template.jinja").write_text("{{ messages[0].content }}")
    convert(str(transformers), root / "megatron", to="torch_dist")
    (root / "gguf").mkdir()
    writer = GGUFWriter(root / "gguf" / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return {"safetensors": transformers, "megatron": root / "megatron", "gguf": root / "gguf"}


def read_everything(model: Path, scratch: Path) -> Any:
    """Read every file of a model that the runtime reads. Of a GGUF file, which is a single file, return the name."""
    source = resolve(str(model))
    if source.format == "GGUF":
        return source.location.name
    checkpoint = open_checkpoint(source)
    values = {name: checkpoint.read(name).clone() for name in checkpoint.kinds}
    tokenizer = load_tokenizer(str(model))
    shutil.rmtree(scratch, ignore_errors=True)
    convert(str(model), scratch, to="safetensors")
    template = tokenizer.chat_template
    return (
        {name: tuple(tensor.flatten().tolist()) for name, tensor in values.items()},
        checkpoint.config,
        tokenizer.eos_ids,
        None if template is None else template.source,
        sorted(path.name for path in scratch.iterdir()),
    )


def files_of(model: Path) -> Iterator[Path]:
    for path in sorted(model.rglob("*")):
        # Megatron-LM's own, which nothing here reads.
        if path.is_file() and path.name != "metadata.json":
            yield path.relative_to(model)


@pytest.mark.parametrize("name", ["safetensors", "megatron", "gguf"])
def test_no_file_may_be_a_link_to_another_directory(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Each file in turn is moved outside with valid content: a reader that follows the link would succeed."""
    model = tmp_path / "model"
    read = []
    for file in files_of(models[name]):
        # config.json beside the checkpoint is believed before common.pt.
        without_config = file.name == "common.pt"
        shutil.copytree(models[name], model)
        if without_config:
            (model / "config.json").unlink()
        outside = tmp_path / "outside" / file
        outside.parent.mkdir(parents=True, exist_ok=True)
        (model / file).rename(outside)
        (model / file).symlink_to(outside)
        with pytest.raises(REJECTIONS, match=r"is a link to .*outside of the model directory .*put the file itself"):
            read_everything(model, tmp_path / "scratch")
        read.append(file.name)
        shutil.rmtree(model)
    assert len(read) >= {"safetensors": 9, "megatron": 9, "gguf": 1}[name], read


def test_a_directory_below_may_not_be_a_link_to_another(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["megatron"], tmp_path / "model")
    (tmp_path / "model" / "release").rename(tmp_path / "elsewhere")
    (tmp_path / "model" / "release").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelFileError, match="outside of the model directory"):
        resolve(str(tmp_path / "model"))


def test_the_layout_of_a_kubernetes_volume_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    plain = read_everything(models["safetensors"], tmp_path / "scratch")
    volume = tmp_path / "volume"
    shutil.copytree(models["safetensors"], volume / "..2026_11_23_20_00_00.1")
    (volume / "..data").symlink_to("..2026_11_23_20_00_00.1")
    for file in files_of(models["safetensors"]):
        (volume / file).symlink_to(Path("..data", file))
    assert read_everything(volume, tmp_path / "scratch") == plain


def test_the_layout_of_a_hub_cache_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    plain = read_everything(models["safetensors"], tmp_path / "scratch")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(files_of(models["safetensors"])):
        blob = f"{number:040x}"
        shutil.copyfile(models["safetensors"] / file, repository / "blobs" / blob)
        (snapshot / file).symlink_to(Path("../../blobs", blob))
    assert read_everything(snapshot, tmp_path / "scratch") == plain


def test_contents_that_repositories_of_a_hub_cache_share_are_read(tmp_path: Path) -> None:
    """Those of files that were transferred by Xet."""
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / COMMIT
    shared = tmp_path / "blobs" / "ab" / ("ab" * 32)
    for directory in (blobs, snapshot, shared.parent):
        directory.mkdir(parents=True)
    shared.write_text("{}")
    (blobs / ("c" * 64)).symlink_to(Path("../../blobs/ab", shared.name))
    (snapshot / "config.json").symlink_to(Path("../../blobs", "c" * 64))
    file = ModelDirectory(snapshot).file("config.json")
    assert file is not None
    assert file.read_text() == "{}"
    shared.rename(shared.with_name("secret"))
    (blobs / ("c" * 64)).unlink()
    (blobs / ("c" * 64)).symlink_to("../../blobs/ab/secret")
    with pytest.raises(ModelFileError, match="outside of the model directory"):
        ModelDirectory(snapshot).file("config.json")


@pytest.mark.parametrize("target", ["../../blobs/secret", "../../refs/main", f"../{'d' * 40}/config.json"])
def test_a_snapshot_links_to_blobs_only(target: str, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(target)
    outside = snapshot / target
    outside.parent.mkdir(parents=True, exist_ok=True)
    outside.write_text("{}")
    with pytest.raises(ModelFileError, match="outside of the model directory"):
        ModelDirectory(snapshot).file("config.json")


def test_blobs_that_are_a_link_themselves_are_outside(tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / ("a" * 40)).write_text("{}")
    (tmp_path / "cache" / "blobs").symlink_to(tmp_path / "secrets")
    (snapshot / "config.json").symlink_to(f"../../blobs/{'a' * 40}")
    with pytest.raises(ModelFileError, match="outside of the model directory"):
        ModelDirectory(snapshot).file("config.json")


def test_the_directory_itself_may_be_a_link(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(models["safetensors"])
    assert read_everything(tmp_path / "current", tmp_path / "a") == read_everything(
        models["safetensors"], tmp_path / "b"
    )


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../outside.safetensors", "a/../../outside.safetensors", "", "a\0b", 7]
)
def test_an_index_names_files_inside_only(name: object, models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["safetensors"], model)
    shutil.copyfile(next(model.glob("*.safetensors")), tmp_path / "outside.safetensors")
    index = json.loads((model / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (model / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"file name|weight_map") as rejected:
        open_checkpoint(resolve(str(model)))
    assert "\0" not in str(rejected.value)


def test_irregular_files_are_rejected_without_blocking(tmp_path: Path) -> None:
    """Reading a FIFO would wait for a writer, and /dev/zero would never end."""
    (tmp_path / "model").mkdir()
    fifo = tmp_path / "model" / "config.json"
    os.mkfifo(fifo)
    with pytest.raises(ModelFileError, match="not a regular file"):
        ModelDirectory(tmp_path / "model").file("config.json")
    # Named by itself, too.
    for open_it in (ModelFile(fifo).open, ModelFile(fifo).status, ModelFile(Path("/dev/zero")).open):
        with pytest.raises(ModelFileError, match="not a regular file"):
            open_it()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "model" / "socket"))
        with pytest.raises(ModelFileError, match="not a regular file"):
            ModelDirectory(tmp_path / "model").file("socket")


def test_dangling_links_are_treated_as_missing_files(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("absent")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    directory = ModelDirectory(tmp_path)
    assert [directory.file(name) for name in ("absent", "broken", "folder")] == [None] * 3
    with pytest.raises((ModelFileError, OSError)):
        directory.file("loop")
    # The error does not depend on whether the file outside exists.
    (tmp_path / "outside").symlink_to("/nonexistent/file")
    with pytest.raises(ModelFileError, match="outside of the model directory"):
        directory.file("outside")


def test_a_link_that_changes_after_it_was_checked_is_not_followed(tmp_path: Path) -> None:
    """The directory of the file is replaced between the check and the opening."""
    model, outside = tmp_path / "model", tmp_path / "outside"
    (model / "sub").mkdir(parents=True)
    outside.mkdir()
    for place in (model / "sub", outside):
        (place / "config.json").write_text("{}")
    found = ModelDirectory(model).file("sub/config.json")
    assert found is not None

    class Swapping(type(found)):  # type: ignore[misc]
        def _target(self) -> str:
            target = super()._target()
            (model / "sub").rename(model / "old")
            (model / "sub").symlink_to(outside)
            return target

    with pytest.raises(ModelFileError, match="outside of the model directory"):
        Swapping(found.path, found.root).open()


def test_metadata_files_have_a_size_limit(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_METADATA_BYTES + 1)
    with pytest.raises(ModelFileError, match=f"has {MAX_METADATA_BYTES + 1} bytes: at most {MAX_METADATA_BYTES}"):
        ModelFile(tmp_path / "config.json").read_json()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_invalid_json_is_rejected_by_name(data: bytes) -> None:
    with pytest.raises(ModelFileError, match="it "):
        parse_json(data, where="it")


def test_numbers_as_python_writes_them_are_read() -> None:
    """transformers writes them, for example as an upper limit in config.json."""
    assert parse_json(b'{"time_step_limit": [0.0, Infinity]}', where="it") == {"time_step_limit": [0.0, math.inf]}


def test_json_of_many_elements_is_rejected_before_it_is_parsed() -> None:
    with pytest.raises(ModelFileError, match="JSON elements"):
        parse_json(b"[" + b"[]," * (1 << 20) + b"[]]", where="it")


@pytest.mark.parametrize("name", ["a", "a/b.json", "..data/file", "a..b", "é/文.json", "a b/c\N{IDEOGRAPHIC SPACE}d"])
def test_safe_names_are_accepted(name: str) -> None:
    assert require_safe_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "..",
        "a/..",
        "../a",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "a\0",
        "a\nb",
        "a\x1b[2J",
        "a\N{RIGHT-TO-LEFT OVERRIDE}nosj",
        "\ud800",
        "x" * 256,
        "/".join(["x" * 200] * 6),
        None,
        1,
    ],
)
def test_unsafe_names_are_rejected(name: object) -> None:
    with pytest.raises(UnsafeNameError, match="the file name") as rejected:
        require_safe_name(name)
    assert str(rejected.value).isprintable()


READERS = [
    path
    for folder in ("checkpoints", "tokenization")
    for path in sorted((Path(megatron_runtime.__file__).parent / folder).rglob("*.py"))
    # What opens model files for the others, and what works on files of its own: the cache, packages, what is written.
    if path.name not in ("model_files.py", "convert.py", "builtin.py") and path.parent.name != "remote"
]
AROUND = {"glob", "rglob", "iterdir", "exists", "from_file", "copyfile", "copytree", "memmap", "fromfile", "safe_open"}
ON_REFERENCES = {"source.py", "loader.py", "adapters.py"}
"""These modules check whether the path that the caller named is a file or a directory."""


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.name)
def test_readers_open_files_only_through_model_files(path: Path) -> None:
    """Ways to find or open a file other than ModelDirectory and ModelFile follow links to any place."""
    forbidden = AROUND | (set() if path.name in ON_REFERENCES else {"is_file", "is_dir"})
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = {call.attr for call in calls if isinstance(call, ast.Attribute)} & forbidden
    named |= {call.id for call in calls if isinstance(call, ast.Name)} & {"open"}
    # The only file that may be there is the one that was just written.
    assert named <= ({"exists"} if path.name == "convert.py" else set()), f"use ModelDirectory instead of {named}"
