"""Fixtures of the tests with real clients: two servers that record requests, and the environments of the clients.

Everything runs in a network namespace that has only a loopback interface: a client that tries to reach another server
fails, and its test shows it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from machine import scaled
from run_record import used

from .environments import ENVIRONMENTS, HERE, version
from .shapes import shape

MODEL = "smollm2-135m"
URL = "SERVER_URL"
"""Variable of the programs that run in the environment of a client: the base URL of the server, without /v1."""
REFRESH = "REFRESH_SHAPES"
"""Variable: write the shapes of requests instead of comparing them."""
CLIENT_SECONDS = 120
UNREACHABLE = ("192.0.2.1", 9)
"""An address for documentation, to which no machine has a route in an empty network namespace."""


@dataclass(frozen=True)
class Exchange:
    """A request that a server has answered. body: its JSON. answer: text."""

    method: str
    path: str
    body: Any
    status: int
    answer: str

    @property
    def text(self) -> str:
        return json.dumps(self.body, ensure_ascii=False)


@dataclass
class Server:
    """A server, and what the client of the current test sends to it.

    url:   without /v1.
    begin: lines of the record that are of earlier tests.
    """

    url: str
    record: Path
    script: Path
    begin: int = 0

    def answers(self, script: dict[str, str]) -> None:
        """Set the answers of the engine by texts: it writes that of the text which the prompt has last."""
        self.script.write_text(json.dumps(script))

    def exchanges(self, *, maximum: int, rejection: str = "") -> list[Exchange]:
        """Return the exchanges of this test, at most `most`.

        rejection: text of the errors that the client expects. Every other request succeeded.
        """
        lines = self.record.read_text().splitlines()[self.begin :]
        exchanges = [Exchange(**json.loads(line)) for line in lines]
        failed = [each for each in exchanges if each.status != 200]
        unexpected = [each for each in failed if not rejection or rejection not in each.answer]
        assert not unexpected, [f"{each.method} {each.path}: {each.status} {each.answer}" for each in unexpected]
        assert bool(failed) == bool(rejection), "the client no longer asks for what the server rejects"
        assert len(exchanges) <= maximum, [f"{each.method} {each.path}" for each in exchanges]
        return exchanges

    def check_shapes(self, client: str, exchanges: list[Exchange]) -> None:
        """Compare the shapes of the client's requests with those of the repository, or write them."""
        paths: dict[str, list[Any]] = {}
        for exchange in exchanges:
            paths.setdefault(f"{exchange.method} {exchange.path}", []).append(exchange.body)
        found = {path: shape(paths[path]) for path in sorted(paths)}
        file = HERE / "shapes" / f"{client}.json"
        if REFRESH in os.environ:
            file.write_text(json.dumps(found, indent=1) + "\n")
        assert found == json.loads(file.read_text()), (
            f"{client} sends other requests than in {file}: see whether the server serves them, and run "
            f"`python tests/clients/environments.py refresh {client}`"
        )


@pytest.fixture(scope="session", autouse=True)
def only_loopback() -> None:
    """The clients must reach no other machine."""
    with socket.socket() as connection:
        number = connection.connect_ex(UNREACHABLE)
    if number != errno.ENETUNREACH and URL not in os.environ:
        pytest.fail("these tests need a network namespace with loopback only: run `make test-clients`")


def call(name: str, **arguments: Any) -> str:
    """Return how SmolLM2 writes a call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def _serving(directory: Path, *options: str, script: bool) -> Iterator[Server]:
    record, script_file = directory / "record.jsonl", directory / "script.json"
    record.touch()
    script_file.write_text("{}")
    variables = {"RECORD_FILE": str(record)} | ({"SCRIPT_FILE": str(script_file)} if script else {})
    command = [sys.executable, str(HERE / "recording_serve.py"), "serve", f"builtin:{MODEL}", "--port", "0", *options]
    environment = {**os.environ, **variables, "PYTHONPATH": str(HERE.parent / "support")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.search(r"ready in .* at (http://\S+)/v1", line):
                break
        else:
            raise AssertionError("the server ended before it was ready")
        yield Server(ready[1], record, script_file)
        process.terminate()
        process.stdout.read()


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--max-sequence-length", "200000", "--kv-cache-memory", "16Mi", "--max-tokens", "8192")
    with _serving(tmp_path_factory.mktemp("scripted"), *options, script=True) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _serving(tmp_path_factory.mktemp("smollm2"), script=False) as server:
        yield server


def _begin(server: Server) -> Server:
    server.begin = len(server.record.read_text().splitlines())
    server.answers({})
    return server


@pytest.fixture
def server(scripted: Server) -> Server:
    """A server whose engine writes what the test says."""
    return _begin(scripted)


@pytest.fixture
def model_server(smollm2: Server) -> Server:
    """A server with SmolLM2."""
    return _begin(smollm2)


@dataclass
class Client:
    """The environment of a client. home: its HOME. variables: additional variables of its environment."""

    name: str
    home: Path
    work: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, seconds: float = CLIENT_SECONDS, **variables: str) -> str:
        """Run a command of the client in its working directory. Return its output; it must succeed in time."""
        directory = ENVIRONMENTS / self.name
        path = [directory / "bin", directory / "node_modules" / ".bin", "/usr/local/bin", "/usr/bin", "/bin"]
        environment = {
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "MEGATRON_TIME_SCALE": os.environ["MEGATRON_TIME_SCALE"],
            **self.variables,
            **variables,
        }
        process = subprocess.Popen(
            command,
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(scaled(seconds), lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.start()
        output, _ = process.communicate()
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
        return output


@pytest.fixture
def client(tmp_path: Path) -> Callable[[str], Client]:
    """Return the environment of a client by its name, with an empty HOME and an empty working directory."""

    def of(name: str) -> Client:
        used("client", f"{name} {version(name)}")
        client = Client(name, home=tmp_path / "home", work=tmp_path / "work")
        client.home.mkdir()
        client.work.mkdir()
        return client

    return of
