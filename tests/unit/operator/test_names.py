"""A public class has one name in the packages of the operator, and shares it with a class of the runtime only where
both are the same thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
SAME_THING = {"Operation", "RoutingPolicy"}
"""An operation by its id, and the routing policies, which the coordinator and the resource both have."""


def _classes(*packages: str) -> dict[str, list[str]]:
    """Return the files of each public class, by its name."""
    files: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files[node.name].append(str(path.relative_to(ROOT)))
    return files


OPERATOR = _classes("operator/megatron_operator", "operator/megatron_kubectl")


def test_no_public_class_name_exists_twice_in_the_operator() -> None:
    assert {name: files for name, files in OPERATOR.items() if len(files) > 1} == {}


def test_operator_and_runtime_share_a_name_only_for_the_same_thing() -> None:
    assert OPERATOR.keys() & _classes("runtime/megatron_runtime").keys() <= SAME_THING
