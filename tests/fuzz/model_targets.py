"""Targets that read model files: GGUF, safetensors, Megatron checkpoints, configurations."""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.gguf_metadata import read_gguf_header
from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import ModelFile, ModelFileError
from megatron_runtime.checkpoints.safe_unpickler import UnsafePickleError, read_pickle
from megatron_runtime.checkpoints.safetensors import INDEX_FILE, SafetensorsCheckpoint, read_config
from megatron_runtime.checkpoints.torch_dist import configuration, saved_files
from megatron_runtime.checkpoints.torch_dist.checkpoint import TorchDistCheckpoint
from megatron_runtime.checkpoints.torch_dist.configuration import config_json_of
from megatron_runtime.checkpoints.torch_dist.saved_files import find_tensor
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.models.tensors import Checkpoint, tensor_shapes
from megatron_runtime.models.weights import require_fitting
from tests.fuzz.harness import CORPUS, Target
from tests.fuzz.strategies import LARGE_NUMBERS, mutated, mutated_json

MODEL = CORPUS.parent / "model"
"""A model of two layers and its Megatron checkpoint. The input replaces one of their files."""
_LOADING = (UnsupportedModelError, ModelFileError)

_CODES = [code for name in pickle.__all__ if isinstance(code := getattr(pickle, name), bytes) and len(code) == 1]

_TRUSTED = {**saved_files._TRUSTED_IN_INDEX, **configuration._TRUSTED}


def _read_all(checkpoint: Checkpoint) -> None:
    require_fitting(checkpoint)
    for name in checkpoint.kinds:
        checkpoint.read(name)


def _gguf(data: bytes) -> None:
    path = Path("model.gguf")
    path.write_bytes(data)
    read_gguf_header(path, vocabulary=True)
    _read_all(GGUFCheckpoint(path))


@cache
def _copied(name: str) -> Path:
    """Return a copy of the model in the current directory."""
    if not Path(name).exists():
        shutil.copytree(MODEL / name, name)
    return Path(name)


def _safetensors(data: bytes) -> None:
    directory = _copied("transformers")
    (directory / INDEX_FILE).unlink(missing_ok=True)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    (directory / "model.safetensors").write_bytes(data)
    _read_all(SafetensorsCheckpoint(directory))


def _safetensors_inputs(corpus: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Generate files with changed bytes, and files with a changed JSON header."""
    headers = [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in corpus]
    body = corpus[0][-2048:]
    of_headers = mutated_json(headers).map(lambda header: struct.pack("<Q", len(header)) + header + body)
    return st.one_of(mutated(corpus), of_headers)


def _index(data: bytes) -> None:
    directory = _copied("transformers")
    (directory / INDEX_FILE).write_bytes(data)
    _read_all(SafetensorsCheckpoint(directory))


def _use(config: ModelConfig) -> None:
    """Use a configuration as the loader does before it reads tensors."""
    tensor_shapes(config)


def _config(data: bytes) -> None:
    Path("config.json").write_bytes(data)
    _use(read_config(Path()))


def _generation(data: bytes) -> None:
    shutil.copyfile(MODEL / "transformers" / "config.json", "config.json")
    Path("generation_config.json").write_bytes(data)
    _use(read_config(Path()))


def _checkpoint_index(data: bytes) -> None:
    directory = _copied("megatron")
    (directory / ".metadata").write_bytes(data)
    _read_all(TorchDistCheckpoint(directory))


def _arguments(data: bytes) -> None:
    path = Path("common.pt")
    path.write_bytes(data)
    arguments = configuration.read_arguments(ModelFile(path))
    _use(config_from_hf(config_json_of(arguments, where="common.pt"), ends=(), where="common.pt"))


def _saved_tensor(data: bytes) -> None:
    path = Path("saved")
    path.write_bytes(b"before" + data + b"after")
    file = ModelFile(path)
    find_tensor(file, offset=6, length=len(data)).bytes_in(MappedFile(file))


def _pickle(data: bytes) -> None:
    read_pickle(
        data,
        where="the input",
        trusted=_TRUSTED,
        opaque=lambda module, name: True,
        persistent=lambda pid: None,
    )


def _pickle_inputs(corpus: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Generate changed pickles, and programs of random opcodes that mostly have valid operands."""
    names = [
        f"{module}\n{name}\n".encode() for module, name in {**saved_files._TRUSTED_IN_INDEX, **configuration._TRUSTED}
    ]
    numbers = st.sampled_from(LARGE_NUMBERS)
    piece = st.one_of(
        st.sampled_from(_CODES),
        st.sampled_from((b"(", b")", b"]", b"}", b"\x85", b"\x86", b"t", b"l", b"q\x00", b"h\x00", b"2", b"K\x01")),
        st.sampled_from(names).map(lambda name: pickle.GLOBAL + name),
        st.sampled_from((b"a", b"module", b"x" * 300)).map(lambda text: b"X" + struct.pack("<I", len(text)) + text),
        st.tuples(st.sampled_from((b"r", b"j", b"J", b"B", b"X", b"T", b"\x8b")), numbers).map(
            lambda pair: pair[0] + struct.pack("<I", pair[1] & 0xFFFFFFFF)
        ),
        st.tuples(st.sampled_from((b"\x8d", b"\x8e", b"\x95", b"\x96")), numbers).map(
            lambda pair: pair[0] + struct.pack("<Q", pair[1])
        ),
        st.tuples(st.sampled_from((b"p", b"g", b"I", b"L", b"F")), numbers).map(
            lambda pair: pair[0] + str(pair[1]).encode() + b"\n"
        ),
    )
    repeats = st.sampled_from((1,) * 12 + (3, 5000))
    program = st.lists(st.tuples(piece, repeats), max_size=30).map(
        lambda pieces: b"\x80\x04" + b"".join(code * count for code, count in pieces) + b"."
    )
    return st.one_of(mutated(corpus, _CODES), program)


TARGETS: tuple[Target, ...] = (
    Target(name="gguf", run=_gguf, errors=_LOADING),
    Target(name="safetensors", run=_safetensors, errors=_LOADING, strategy=_safetensors_inputs),
    Target(name="safetensors_index", run=_index, errors=_LOADING, strategy=mutated_json),
    Target(name="config", run=_config, errors=_LOADING, strategy=mutated_json),
    Target(name="generation_config", run=_generation, errors=_LOADING, strategy=mutated_json),
    Target(
        name="torch_dist_index",
        run=_checkpoint_index,
        errors=_LOADING,
        strategy=lambda corpus: mutated(corpus, _CODES),
    ),
    Target(name="torch_dist_arguments", run=_arguments, errors=_LOADING),
    Target(name="torch_dist_tensor", run=_saved_tensor, errors=_LOADING),
    Target(name="pickle", run=_pickle, errors=(UnsafePickleError,), strategy=_pickle_inputs),
)
