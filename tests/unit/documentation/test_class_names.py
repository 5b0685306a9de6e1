"""A public class has a name of its own: within the runtime, within the operator and within the kernels."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

LATER: dict[str, frozenset[str]] = {
    "runtime": frozenset(
        {
            "EngineFailedError",  # client, engines
            "RequestRejectedError",  # client, requests
            "Router",  # coordinator, transport
            "Service",  # in_process, server
            "Status",  # protocol, requests (Megatron-Core's name)
            "Tokenizer",  # coordinator, tokenization
        }
    ),
    "operator": frozenset({"Canary", "Change"}),
    "kernels": frozenset(),
}
"""Names that still exist twice. Remove a name together with its second class."""


def public_classes(package: Path) -> dict[str, list[str]]:
    """Return the files that define each public class of a package at the top level of a module."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    return places


@pytest.mark.parametrize("package", LATER)
def test_no_public_class_name_exists_twice(package: str) -> None:
    places = public_classes(ROOT / package)
    assert len(places) > 10, "the package has classes"
    twice = {name: files for name, files in places.items() if len(files) > 1 and name not in LATER[package]}
    assert twice == {}
