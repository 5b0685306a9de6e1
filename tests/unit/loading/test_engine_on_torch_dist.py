"""The engine on a Megatron-Core checkpoint: equal weights, equal answers, updates from and to other formats."""

from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import LLAMA, random_tensors, write_model

from megatron_runtime.backends.native.build import build_native
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.checkpoint import UnusableWeightsError
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one model in both formats, and another model of the same sizes."""
    directory = tmp_path_factory.mktemp("models")
    for name, seed in (("one", 0), ("other", 1)):
        write_model(directory / name, LLAMA, random_tensors(LLAMA, seed=seed))
        convert(str(directory / name), directory / f"{name}-megatron", to="torch_dist")
    return directory


def executor_of(model: Path) -> CpuExecutor:
    executor = CpuExecutor(resolve(str(model)), dtype="float32", kv_cache_memory=1 << 20, threads=1)
    executor.load()
    return executor


def answer(executor: CpuExecutor) -> list[int]:
    engine = EngineCore(executor, InferenceConfig(max_requests=2, max_sequence_length=128))
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, termination_id=IGNORE_EOS)
    engine.add_request(EngineRequest(1, np.arange(3, 9, dtype=np.int32), np.array([], np.int32), params))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.new_tokens
    engine.check_integrity()
    return tokens


def test_both_formats_give_equal_answers_and_digests(models: Path) -> None:
    ours, theirs = executor_of(models / "one-megatron"), executor_of(models / "one")
    assert answer(ours) == answer(theirs)
    assert ours.digest == theirs.digest != ""


@pytest.mark.parametrize(("before", "after"), [("one-megatron", "other"), ("one", "other-megatron")])
def test_weights_are_updated_from_one_format_to_the_other(before: str, after: str, models: Path) -> None:
    executor = executor_of(models / before)
    executor.stage_weights(str(models / after))
    executor.swap_weights()
    assert answer(executor) == answer(executor_of(models / "other"))


def test_weights_that_differ_from_the_released_ones_are_rejected(models: Path, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.symlink_to(models / "one-megatron")
    executor = executor_of(held)
    executor.release_weights()
    held.unlink()
    held.symlink_to(models / "other-megatron")
    with pytest.raises(UnusableWeightsError, match="digest"):
        executor.load()


def test_the_requested_format_must_be_that_of_the_files(models: Path) -> None:
    common = {"coordinator": "tcp://127.0.0.1:1", "name": "e", "kv_cache_memory": 1 << 20}
    build_native(EngineSettings(model=str(models / "one-megatron"), model_format="TorchDist", **common))
    with pytest.raises(ValueError, match=r"format=TorchDist: .* is SafeTensors: use Auto or SafeTensors"):
        build_native(EngineSettings(model=str(models / "one"), model_format="TorchDist", **common))
