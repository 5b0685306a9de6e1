"""The clients that `make test-clients` runs, each in an environment of its own, build/clients/NAME.

    python tests/clients/environments.py install [NAME ...]   # the versions of versions.json
    python tests/clients/environments.py refresh [NAME ...]   # the newest versions; writes versions.json and shapes/

versions.json has every package of an environment of Python, and the packages of npm that are named here: the others are
their own builds for a platform.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / "build" / "clients"
VERSIONS = HERE / "versions.json"
INSTALLED = "installed.json"
"""File of an environment: the versions that it has."""
PYTHON = "3.12"
"""aider needs an earlier version than 3.13, inference-perf needs this one."""
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout")
"""For clients whose tests run in the environment of the client."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client.

    npm, pypi: the packages to install from the registry. The first one is the client.
    pins:      versions that refresh() keeps, by package.
    """

    npm: tuple[str, ...] = ()
    pypi: tuple[str, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)


CLIENTS = {
    # Newer versions need Node 22.
    "claude-code": Client(npm=("@anthropic-ai/claude-code",), pins={"@anthropic-ai/claude-code": "2.1.197"}),
    "codex": Client(npm=("@openai/codex",)),
    "opencode": Client(npm=("opencode-ai",)),
    "openai": Client(pypi=("openai", *TESTS)),
    "anthropic": Client(pypi=("anthropic", *TESTS)),
    "aider": Client(pypi=("aider-chat",)),
    # Malicious code is reported in 1.82.7 and 1.82.8, and in a later release. This is the last one before them.
    "litellm": Client(pypi=("litellm", *TESTS), pins={"litellm": "1.82.6"}),
    "llm": Client(pypi=("llm",)),
    "lm-eval": Client(pypi=("lm-eval[api]", "transformers")),
    "guidellm": Client(pypi=("guidellm",)),
    "inference-perf": Client(pypi=("inference-perf",)),
    "langchain-llamaindex": Client(pypi=("langchain-openai", "llama-index-llms-openai-like", *TESTS)),
}


def versions() -> dict[str, dict[str, str]]:
    """Return the recorded versions, by client and package."""
    return json.loads(VERSIONS.read_text())


def version(name: str) -> str:
    """Return the recorded version of a client."""
    client = CLIENTS[name]
    return versions()[name][(*client.npm, *client.pypi)[0].partition("[")[0]]


def install(name: str, wanted: Mapping[str, str]) -> None:
    """Install the recorded versions of a client, unless its environment has them."""
    directory = ENVIRONMENTS / name
    stamp = directory / INSTALLED
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return
    client = CLIENTS[name]
    print(f"environment {directory.relative_to(ROOT)}", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    if client.npm:
        _npm_install(directory, [f"{package}@{version}" for package, version in wanted.items()])
    else:
        _uv("venv", "-q", "--python", _python(), str(directory))
        _uv("pip", "install", "-q", "--no-deps", *_in(directory), *map("==".join, wanted.items()))
    stamp.write_text(json.dumps(wanted))


def newest(name: str) -> dict[str, str]:
    """Install the newest versions of a client. Return the versions."""
    client, directory = CLIENTS[name], ENVIRONMENTS / name
    shutil.rmtree(directory, ignore_errors=True)
    if client.npm:
        _npm_install(directory, [f"{package}@{client.pins.get(package, 'latest')}" for package in client.npm])
        files = {package: directory / "node_modules" / package / "package.json" for package in client.npm}
        found = {package: json.loads(file.read_text())["version"] for package, file in files.items()}
    else:
        _uv("venv", "-q", "--python", _python(), str(directory))
        pinned = [f"{package}=={version}" for package, version in client.pins.items()]
        _uv("pip", "install", "-q", *_in(directory), *client.pypi, *pinned)
        lines = _uv("pip", "list", "-q", "--format", "json", *_in(directory))
        found = {package["name"]: package["version"] for package in json.loads(lines)}
    (directory / INSTALLED).write_text(json.dumps(found))
    return found


def refresh(names: Iterable[str]) -> None:
    """Install the newest versions, and write the versions and the shapes of requests."""
    known = versions() if VERSIONS.exists() else {}
    for name in names:
        known[name] = newest(name)
        VERSIONS.write_text(json.dumps({name: known[name] for name in CLIENTS if name in known}, indent=1) + "\n")
        print(name, version(name), flush=True)
    subprocess.run(["make", "test-clients"], cwd=ROOT, env={**os.environ, "REFRESH_SHAPES": "1"}, check=True)


def _npm_install(directory: Path, packages: Iterable[str]) -> None:
    directory.mkdir(parents=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error", *packages]
    subprocess.run([*command, "--prefix", str(directory)], check=True, stdout=subprocess.DEVNULL)


def _python() -> str:
    """Return a Python for all environments: one version, because the recorded packages depend on it."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python"))  # uv does not look there
    return str(of_pyenv[-1]) if of_pyenv else PYTHON


def _in(directory: Path) -> tuple[str, ...]:
    return ("--python", str(directory / "bin" / "python"))


def _uv(*arguments: str) -> str:
    program = shutil.which("uv") or str(ROOT / "build" / "uv" / "bin" / "uv")
    return subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def main(command: str, *names: str) -> None:
    if command == "install":
        for name in names or CLIENTS:
            install(name, versions()[name])
    elif command == "refresh":
        refresh(names or CLIENTS)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
