"""Pickles of a checkpoint are read without running any code that they name."""

import io
import os
import pickle
import struct
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.model_files import ModelFile, ModelFileError
from megatron_runtime.checkpoints.safe_unpickler import UnsafePickleError, ordered_dict, read_pickle
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.checkpoints.torch_dist.configuration import read_arguments
from megatron_runtime.models.config import UnsupportedModelError


class Trap:
    """Its pickle creates a directory when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


class Stateful:
    """Its pickle sets the state of an object by a method of its class."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a class of the pickle was used")

    def __getstate__(self) -> Any:
        return {"x": 1}


def test_the_trap_works_if_pickles_are_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").is_dir()


@pytest.mark.parametrize("place", ["the index itself", "what its saver keeps in it"])
def test_an_index_with_a_trap_is_rejected(place: str, release: Path, tmp_path: Path) -> None:
    index = pickle.loads((release / ".metadata").read_bytes())
    trap = Trap(tmp_path / "sprung")
    if place == "the index itself":
        index = trap
    else:
        index.planner_data = trap
    (release / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafePickleError, match=r"\.metadata asks for posix\.mkdir"):
        open_checkpoint(resolve(str(release)))
    assert not (tmp_path / "sprung").exists()


def test_a_trap_among_the_tensors_is_rejected(release: Path, tmp_path: Path) -> None:
    index = pickle.loads((release / ".metadata").read_bytes())
    place = next(place for where, place in index.storage_data.items() if where.fqn.startswith("embedding"))
    tensors = io.BytesIO()
    torch.save(Trap(tmp_path / "sprung"), tensors)
    # Its file is used from its end on, so that the rest of it stays what it was.
    file = release / place.relative_path
    offset = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(tensors.getvalue())
    place.offset, place.length = offset, len(tensors.getvalue())
    (release / ".metadata").write_bytes(pickle.dumps(index))
    checkpoint = open_checkpoint(resolve(str(release)))
    with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
        checkpoint.read("model.embed_tokens.weight")
    assert not (tmp_path / "sprung").exists()


def test_arguments_are_read_beside_objects_of_other_classes(tmp_path: Path) -> None:
    arguments = Namespace(
        num_layers=3,
        norm_epsilon=1e-5,
        load=Path("/x"),
        params_dtype=torch.bfloat16,
        trap=Trap(tmp_path / "sprung"),
        own=Stateful(),
        moe_layer_freq=[1, 0],
    )
    torch.save({"args": arguments, "rng": torch.zeros(2), "more": Stateful()}, tmp_path / "common.pt")
    found = read_arguments(ModelFile(tmp_path / "common.pt"))
    assert found == {"num_layers": 3, "norm_epsilon": 1e-5, "moe_layer_freq": [1, 0]}
    assert not (tmp_path / "sprung").exists()


def test_paths_outside_of_the_checkpoint_are_rejected(release: Path) -> None:
    index = pickle.loads((release / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    (release / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UnsafePickleError, match="outside of its directory"):
        open_checkpoint(resolve(str(release)))


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps(7), b"\x80\x04K\x01K\x02."])
def test_an_invalid_index_is_rejected_by_name(content: bytes, release: Path) -> None:
    (release / ".metadata").write_bytes(content)
    with pytest.raises(UnsafePickleError, match=r"\.metadata"):
        open_checkpoint(resolve(str(release)))


def test_every_truncated_index_is_rejected(release: Path) -> None:
    whole = (release / ".metadata").read_bytes()
    for end in range(0, len(whole) - 1, 997):
        (release / ".metadata").write_bytes(whole[:end])
        with pytest.raises(ModelFileError):
            open_checkpoint(resolve(str(release)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_read_or_rejected_with_a_known_error(
    original: Path, release: Path, data: st.DataObject
) -> None:
    (release.parent / "config.json").unlink(missing_ok=True)
    name = data.draw(st.sampled_from([".metadata", "common.pt", "__0_0.distcp"]))
    whole = (original / "release" / name).read_bytes()
    changed = bytearray(whole)
    # The first tensor is small: its archive is the beginning of the file.
    end = 3000 if name == "__0_0.distcp" else len(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    (release / name).write_bytes(changed)
    try:
        checkpoint = open_checkpoint(resolve(str(release)))
        assert checkpoint.read("model.norm.weight").shape == (32,)
        assert checkpoint.read("model.layers.1.self_attn.k_proj.weight").shape == (16, 32)
    except (ModelFileError, UnsupportedModelError):
        pass
    finally:
        (release / name).write_bytes(whole)


def test_a_compressed_tensor_is_rejected(release: Path) -> None:
    index = pickle.loads((release / ".metadata").read_bytes())
    place = next(place for where, place in index.storage_data.items() if where.fqn.startswith("embedding"))
    file = release / place.relative_path
    held = file.read_bytes()[place.offset : place.offset + place.length]
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(held)) as old,
        zipfile.ZipFile(packed, "w", compression=zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    place.offset, place.length = file.stat().st_size, len(packed.getvalue())
    with file.open("ab") as opened:
        opened.write(packed.getvalue())
    (release / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ModelFileError, match="compressed"):
        open_checkpoint(resolve(str(release))).read("model.embed_tokens.weight")


def test_only_names_given_by_the_caller_are_trusted() -> None:
    data = pickle.dumps(Namespace(a=1))
    with pytest.raises(UnsafePickleError, match=r"argparse\.Namespace"):
        read_pickle(data, where="it", trusted={})
    assert read_pickle(data, where="it", trusted={("argparse", "Namespace"): Namespace}) == Namespace(a=1)


def opcodes(*pieces: bytes) -> bytes:
    return b"\x80\x04" + b"".join(pieces) + b"."


NAMESPACE = b"cargparse\nNamespace\n"


def test_a_pickle_sets_no_attributes_of_classes_and_functions() -> None:
    """The C reader would set __eq__ of the class for the whole process."""
    trusted = {("argparse", "Namespace"): Namespace, ("x", "function"): ordered_dict}
    state = b"N}X\x06\x00\x00\x00__eq__Ns\x86b"
    for target in (NAMESPACE, b"cx\nfunction\n"):
        with pytest.raises(UnsafePickleError, match="no attributes that a pickle may set"):
            read_pickle(opcodes(target, state), where="it", trusted=trusted)
    assert Namespace(a=1) == Namespace(a=1)
    found = read_pickle(opcodes(NAMESPACE, b")\x81", state), where="it", trusted=trusted)
    assert vars(found) == {"__eq__": None}


@pytest.mark.parametrize(
    ("what", "program"),
    [
        ("a bytearray of a terabyte", b"\x96" + struct.pack("<Q", 1 << 40)),
        ("an integer of a gigabyte", b"\x8b" + struct.pack("<I", 1 << 30)),
        ("an extension of this process", b"\x82\x01"),
        ("more arguments than a call takes", b"(" + b"N" * 65 + b"t" + NAMESPACE + b"q\x000h\x00h\x00\x81"),
        ("a memo index beyond its size", b"Np99999999\n"),
        ("a key that was never there", b"h\x07"),
        ("an empty stack", b"a"),
    ],
)
def test_an_opcode_that_allocates_too_much_is_rejected(what: str, program: bytes) -> None:
    trusted = {("argparse", "Namespace"): Namespace}
    with pytest.raises(UnsafePickleError, match="it is damaged or not a supported pickle"):
        read_pickle(opcodes(program), where="it", trusted=trusted)


def test_entries_under_keys_that_could_collide_are_left_out() -> None:
    data = pickle.dumps({"a": 1, 2: 3, (4, 5): 6, 1 << 80: 7, None: 8})
    assert read_pickle(data, where="it", trusted={}) == {"a": 1, 2: 3}


def test_a_memo_index_of_four_billion_costs_nothing() -> None:
    assert read_pickle(opcodes(b"Nr\xf0\xff\xff\xff"), where="it", trusted={}) is None


def test_the_size_of_a_pickle_is_limited(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_runtime.checkpoints.torch_dist.saved_files.MAX_INDEX_BYTES", 100)
    with pytest.raises(ModelFileError, match=r"\.metadata has \d+ bytes: at most 100 are read"):
        open_checkpoint(resolve(str(release)))
    with pytest.raises(ModelFileError, match=r"common\.pt has a pickle of \d+ bytes: at most 100 are read"):
        read_arguments(ModelFile(release / "common.pt"))
