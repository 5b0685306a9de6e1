"""The installed vLLM takes the arguments of published recipes for large models. No model is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.backends.vllm.arguments import engine_arguments
from megatron_runtime.engine.settings import EngineSettings

RECIPES = Path(__file__).parents[1] / "unit" / "vllm" / "recipes"
"""Their names and classes are checked against every supported version without vLLM."""


def built(arguments: Mapping[str, Any]) -> Any:
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", model="/model", vllm_arguments=arguments
    )
    return engine_arguments(
        settings, Path("/model"), cache_events="ipc:///unused", draft_directory=lambda reference: Path("/draft")
    )


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.json")), ids=lambda path: path.stem)
def test_the_types_of_a_recipe_are_those_of_the_installed_version(recipe: Path) -> None:
    arguments = json.loads(recipe.read_text())
    taken = built(arguments)
    for name, value in arguments.items():
        if not isinstance(value, dict):
            assert getattr(taken, name) == value
        with pytest.raises(ValueError, match=rf"vLLM argument {name} is .*: (give|use|set)"):
            built({**arguments, name: [[]]})
