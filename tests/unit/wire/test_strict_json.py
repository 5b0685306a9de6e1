"""JSON has no NaN and no Infinity, in either direction, and the linter keeps the modules that write them out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.protocol import strict_json
from megatron_runtime.server.json_text import JsonResponse, from_json, to_json

ROOT = Path(__file__).parents[3]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
)
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def strict(text: str | bytes) -> Any:
    """Parse as RFC 8259 has it. Raises AssertionError."""

    def reject(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=reject)


def without(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without(each) for key, each in value.items()}
    return [without(each) for each in value] if isinstance(value, list) else value


@given(VALUES)
def test_written_numbers_that_are_not_finite_become_null(value: Any) -> None:
    expected = without(value)
    assert strict(strict_json.dumps(value)) == expected
    assert strict(strict_json.dumps(value, indent=2)) == expected
    assert strict(to_json(value)) == expected
    assert strict(JsonResponse(value).body) == expected
    assert strict_json.loads(strict_json.dumps(value)) == expected
    assert strict_json.finite(value) == expected
    if json.dumps(value).isascii() and expected == value:
        assert strict_json.dumps(value, sort_keys=True, separators=(",", ":")) == json.dumps(
            value, sort_keys=True, separators=(",", ":")
        )


def test_keys_and_tuples_are_written_as_json_has_them() -> None:
    assert strict_json.dumps({math.inf: (1, math.nan), 2.5: True}) == '{"null": [1, null], "2.5": true}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.dumps(math.nan, allow_nan=False)


@pytest.mark.parametrize("number", NOT_FINITE)
@pytest.mark.parametrize("where", ["{}", '{{"a": [{}]}}'])
def test_read_numbers_that_are_not_finite_are_an_error(number: str, where: str) -> None:
    text = where.format(number)
    for read in (strict_json.loads, from_json):
        with pytest.raises(ValueError, match=r"give a finite number|expected value|invalid number"):
            read(text)
    with pytest.raises(ValueError, match="give a finite number"):
        strict_json.loads(text.encode())
    strict_json.loads_python(text)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_a_number_beyond_a_float_is_an_error(number: str) -> None:
    with pytest.raises(ValueError, match="is too large: give one of at most"):
        strict_json.loads(f"[{number}]")


@pytest.mark.parametrize(
    "line",
    [
        "import json",
        "from aiohttp import web\n\nweb.json_response({})",
        "from json import dumps",
        "from pydantic_core import to_json",
        "from pydantic_core import from_json",
        "from starlette.responses import JSONResponse",
        "from fastapi.responses import JSONResponse",
        "import click\n\nclick.FloatRange(0)",
    ],
)
@pytest.mark.parametrize("package", ["operator/megatron_operator", "runtime/megatron_runtime/server", "bench"])
def test_the_linter_rejects_what_writes_or_reads_them(line: str, package: str) -> None:
    command = [Path(sys.executable).with_name("ruff"), "check", "--select", "TID251", "--no-cache"]
    done = subprocess.run(
        [*command, "--stdin-filename", f"{package}/new_module.py", "-"],
        input=f"{line}\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "TID251" in done.stdout
