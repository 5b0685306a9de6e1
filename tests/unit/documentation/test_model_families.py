"""The page of models lists the families that the code has."""

from pathlib import Path

import pytest

from megatron_runtime.models.families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models-and-formats.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_a_row_with_its_class_and_gguf_architecture(name: str) -> None:
    family = FAMILIES[name]
    (row,) = (line for line in PAGE.read_text().splitlines() if f"| `{family.architecture}` |" in line)
    assert family.gguf_architecture is None or f"`{family.gguf_architecture}`" in row
