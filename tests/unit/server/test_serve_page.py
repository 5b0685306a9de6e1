"""docs/serve.md tells every field, every parser and every metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.server.openai.schema import ChatRequest, CompletionRequest
from megatron_runtime.server.tools import PARSERS

PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_every_field_is_documented(request_type: Any) -> None:
    missing = [name for name in request_type.model_fields if f"`{name}`" not in PAGE and f"`{name}." not in PAGE]
    # structured_outputs is told with its members.
    assert [name for name in missing if name != "structured_outputs"] == []


def test_every_parser_is_documented() -> None:
    assert all(f"| `{name}` |" in PAGE for name in PARSERS)


async def test_every_metric_is_documented(running: Any) -> None:
    await running.chat(stream=True)
    lines = (await running.http.get("/metrics")).text.splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE megatron_")}
    told = {name for name in names if f"{name.removeprefix('megatron_').removesuffix('_total')}" in PAGE}
    assert names - told - {name for name in names if name.endswith("_created")} == set()
