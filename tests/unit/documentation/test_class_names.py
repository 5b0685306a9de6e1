"""A public class has a name of its own within a package; packages share one only where both are the same thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PACKAGES = ("runtime", "operator", "kernels")
MEGATRON_NAMES = frozenset({"Status"})
"""Names that Megatron-Core gives its own classes of the runtime. A message of the protocol may have the same name."""
SAME_THING = frozenset({"Operation", "RoutingPolicy"})
"""Classes of operator and runtime: an operation by its id, and the routing policies of coordinator and resource."""


@cache
def public_classes(package: str) -> dict[str, list[str]]:
    """Return the files that define each public class of a package at the top level of a module."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    return places


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_class_name_exists_twice(package: str) -> None:
    places = public_classes(package)
    assert len(places) > 10, "the package has classes"
    accepted = MEGATRON_NAMES if package == "runtime" else frozenset()
    assert {name: files for name, files in places.items() if len(files) > 1}.keys() == accepted


def test_operator_and_runtime_share_a_name_only_for_the_same_thing() -> None:
    assert public_classes("operator").keys() & public_classes("runtime").keys() == SAME_THING
