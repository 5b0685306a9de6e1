"""`--config FILE`: options from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron_runtime.cli import main, serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which `megatron serve` would start its processes."""
    calls: list[Any] = []

    async def record(options: Any) -> None:
        calls.append(options)

    monkeypatch.setattr(serve, "_serve", record)
    return calls


def test_the_command_line_has_precedence_over_the_file(tmp_path: Path, served: list[Any]) -> None:
    file = tmp_path / "megatron.toml"
    file.write_text(
        'model = "org/name"\nport = 8001\nmax-requests = 7\nprefix-caching = false\nkv-cache-memory = "2Gi"\n'
        'adapter = ["a=hf:org/a", "b=hf:org/b"]\nvllm-arguments = {quantization = "fp8"}\nbackend = "vllm"\n'
    )
    result = CliRunner().invoke(main, ["serve", "--config", str(file), "--port", "9"])
    assert result.exit_code == 0, result.output
    (options,) = served
    assert (options.model, options.port, options.max_requests) == ("hf:org/name", 9, 7)
    assert (options.prefix_caching, options.kv_cache_memory) == (False, 2 << 30)
    assert [adapter.name for adapter in options.adapters.adapters] == ["a", "b"]
    assert options.vllm_arguments["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 8000", "prot = 8000: no such option; use port."),
        ("port = 70000", "port = 70000: 70000 is not in the range"),
        ('prefix-caching = "no"', "prefix-caching = 'no': use true or false."),
        ("adapter = true", "adapter = True: use a text, or a list, [...]."),
        ("port = [1]", "port = [1]: use one value"),
        ("port", "is not TOML"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["run", "builtin:smollm2-135m"]])
def test_a_mistake_names_file_key_value_and_remedy(
    command: list[str], text: str, words: str, tmp_path: Path, served: list[Any]
) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    result = CliRunner().invoke(main, [*command, "--config", str(file)])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert str(file) in result.output
    assert served == []
