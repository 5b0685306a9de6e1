"""Megatron-Core checkpoints: written here, written by torch, and read in parts by any rank."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eventually import LONG_SECONDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_checkpoint import CONFIGS, TORCH_DIST_CONFIGS, assert_equal_weights, random_tensors, write_model
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import StoredModel, resolve
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.models.weights import load_weights

SAVER = Path(__file__).with_name("megatron_saver.py")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def read_all(model: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(resolve(str(model)))
    return {name: checkpoint.read(name) for name in checkpoint.kinds}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CASE/hf and CASE/iter_0000012 for each case: saved by two processes with torch's own writer."""
    directory = tmp_path_factory.mktemp("trainings")
    jobs = []
    for case, layers in (("qwen2", "stacked"), ("qwen3_moe", "stacked"), ("llama, tied, scaled", "numbered")):
        model = write_model(directory / case / "hf", CONFIGS[case], random_tensors(CONFIGS[case], dtype=torch.bfloat16))
        jobs += [str(model), str(directory / case / "iter_0000012"), layers]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SAVER), "2", str(directory / "store"), *jobs]
    saved = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LONG_SECONDS)
    assert saved.returncode == 0, saved.stderr
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", TORCH_DIST_CONFIGS)
def test_converting_there_and_back_returns_the_same_bits(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = CONFIGS[case]
    tensors = random_tensors(config, dtype=dtype)
    model = write_model(tmp_path / "hf", config, tensors)
    convert(str(model), tmp_path / "megatron", to="torch_dist")
    source = resolve(str(tmp_path / "megatron"))
    assert source == StoredModel("TorchDist", tmp_path / "megatron" / "release")
    assert open_checkpoint(source).config == config
    convert(source, tmp_path / "back", to="safetensors")
    assert same_bits(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    assert open_checkpoint(resolve(str(tmp_path / "back"))).config == config


@pytest.fixture(scope="module")
def qwen(trainings: Path) -> Path:
    return trainings / "qwen2" / "hf"


@pytest.fixture(scope="module")
def saved_by_two(trainings: Path) -> Path:
    return trainings / "qwen2" / "iter_0000012"


@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_a_checkpoint_saved_by_two_ranks_is_the_model(case: str, trainings: Path) -> None:
    """Tensor and expert ranks, padded vocabulary, split gate and up, optimizer state and objects beside."""
    checkpoint = open_checkpoint(resolve(str(trainings / case / "iter_0000012")))
    wanted = load_file(trainings / case / "hf" / "model.safetensors")
    assert same_bits({name: checkpoint.read(name) for name in checkpoint.kinds}, wanted)
    # The configuration is that of its arguments.
    for field in ("family", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "rope_theta", "qkv_bias", "moe"):
        assert getattr(checkpoint.config, field) == getattr(CONFIGS[case], field)


def test_the_newest_checkpoint_of_a_training_is_used(trainings: Path) -> None:
    (trainings / "qwen2" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert resolve(str(trainings / "qwen2")) == StoredModel("TorchDist", trainings / "qwen2" / "iter_0000012")


def test_layers_may_be_numbered(trainings: Path) -> None:
    saved = trainings / "llama, tied, scaled" / "iter_0000012"
    model = saved.parent / "hf"
    (saved / "config.json").write_text((model / "config.json").read_text())
    assert same_bits(read_all(saved), load_file(model / "model.safetensors"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part_of_any_tensor_can_be_read(saved_by_two: Path, qwen: Path, data: st.DataObject) -> None:
    checkpoint = open_checkpoint(resolve(str(saved_by_two)))
    name = data.draw(st.sampled_from(sorted(checkpoint.kinds)))
    part = []
    for extent in checkpoint.kinds[name].shape[: data.draw(st.integers(0, 2))]:
        start = data.draw(st.integers(0, extent - 1))
        part.append(slice(start, data.draw(st.integers(start + 1, extent))))
    whole = open_checkpoint(resolve(str(qwen))).read(name)
    assert torch.equal(checkpoint.read(name, tuple(part)), whole[tuple(part)])


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("qwen2", ParallelSizes(tensor=2)),
        ("llama", ParallelSizes(tensor=2, pipeline=3)),
        ("qwen3_moe", ParallelSizes(tensor=2, expert=2)),
    ],
)
def test_each_rank_reads_the_same_part_as_from_safetensors(case: str, sizes: ParallelSizes, tmp_path: Path) -> None:
    """The checkpoint is saved by one rank and loaded by several."""
    config = CONFIGS[case]
    model = write_model(tmp_path / "hf", config, random_tensors(config))
    convert(str(model), tmp_path / "megatron", to="torch_dist")
    for rank in range(sizes.world):
        loaded = [
            load_weights(open_checkpoint(resolve(str(place))), torch.float32, shard=sizes.shard(rank))
            for place in (model, tmp_path / "megatron")
        ]
        assert_equal_weights(*loaded)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_two(qwen: Path, saved_by_two: Path) -> None:
    for sizes in (ParallelSizes(), ParallelSizes(tensor=2)):
        for rank in range(sizes.world):
            loaded = [
                load_weights(open_checkpoint(resolve(str(place))), torch.float32, shard=sizes.shard(rank))
                for place in (qwen, saved_by_two)
            ]
            assert_equal_weights(*loaded)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_written_checkpoint(qwen: Path, tmp_path: Path) -> None:
    """Megatron-LM reads checkpoints with this reader of torch."""
    convert(str(qwen), tmp_path / "megatron", to="torch_dist")
    tensors = load_file(qwen / "model.safetensors")
    release = tmp_path / "megatron" / "release"
    fc1 = torch.cat([tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    state = {
        "decoder.layers.mlp.linear_fc1.weight": torch.zeros(3, *fc1.shape, dtype=torch.bfloat16),
        "embedding.word_embeddings.weight": torch.zeros(150, 32, dtype=torch.bfloat16),
    }
    dcp.load(state, checkpoint_id=release, no_dist=True)
    assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"][1], fc1)
    assert torch.equal(state["embedding.word_embeddings.weight"], tensors["model.embed_tokens.weight"])
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        common = torch.load(io.BytesIO((release / "common.pt").read_bytes()), weights_only=True)
    assert common["checkpoint_version"] == 3.0
    assert common["args"].num_query_groups == 2
