"""Every name of vLLM that the backend uses is in each supported version: classes, fields, parameters, metrics.

The backend's tests run on `fake`, so it has each name. It has nothing else that is public.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_runtime.protocol.vllm_arguments import ALLOWED, FIELDS, LOADS_CODE

from .conftest import FAKE
from .interfaces import RECORDED, interface_of, name_of, names_used, parameters_of

VERSIONS = json.loads(RECORDED.read_text())


ROOT = Path(__file__).parents[3]


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_each_supported_minor_version_is_recorded() -> None:
    from megatron_runtime.backends.vllm.arguments import SUPPORTED

    (_, first), (_, end) = SUPPORTED
    assert [minor(version) for version in VERSIONS] == [(0, number) for number in range(first, end)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_backend_uses_is_in_this_version(version: str) -> None:
    from megatron_runtime.backends.vllm.arguments import V2_INTERFACE
    from megatron_runtime.backends.vllm.service import STATS

    recorded, used = VERSIONS[version], interface_of(FAKE)
    has_v2 = minor(version) >= (0, 31)
    for name in sorted({*used, *(f"{module}.{name}" for module, name in names_used())} - {"metrics"}):
        if name.startswith(V2_INTERFACE):
            assert (name in recorded) == has_v2, name
        if name.startswith(V2_INTERFACE) and not has_v2:
            continue
        assert name in recorded, f"vLLM {version} has no {name}: record it"
        theirs = {name_of(member): member for member in recorded[name]}
        for member in used.get(name, ()):
            assert name_of(member) in theirs, f"vLLM {version} has no {name}.{name_of(member)}"
            check_parameters(f"{name}.{name_of(member)}", parameters_of(member), parameters_of(theirs[name_of(member)]))
    assert {f"vllm:{metric.removesuffix('_total')}" for metric in STATS} <= {*recorded["metrics"]}
    for runner in ("gpu_model_runner", "gpu.model_runner"):
        [method] = recorded[f"vllm.v1.worker.{runner}.GPUModelRunner"]
        assert "weights_path" in parameters_of(method) or "**" in parameters_of(method)


def check_parameters(method: str, ours: list[str], theirs: list[str]) -> None:
    """Each parameter has its name in vLLM; those before `*` also their place, as they may be given without a name."""
    by_place = ours[: ours.index("*")] if "*" in ours else ours
    assert theirs[: len(by_place)] == by_place or not by_place, f"{method}{theirs}"
    assert {*ours} - {"*"} <= {*theirs}, f"{method}{theirs}"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arguments_that_a_resource_may_set_are_in_this_version(version: str) -> None:
    theirs = VERSIONS[version]["vllm.engine.arg_utils.AsyncEngineArgs"]
    assert {*ALLOWED, *LOADS_CODE, *FIELDS} <= {*theirs}


def test_each_difference_of_a_gpu_names_its_tests_or_says_that_it_was_not_run() -> None:
    from megatron_runtime.backends.vllm.arguments import NOT_RUN, ON_A_GPU

    for difference, shown in ON_A_GPU.items():
        assert shown, difference
        for test in shown:
            path, _, name = test.partition("::")
            assert test == NOT_RUN or f"def {name}(" in (ROOT / path).read_text(), f"{difference}: {test}"
