"""The command line in the environments where people start it: each command works, or ends with one line.

The matrix runs every cheap command in every environment, and the serving commands in those that concern them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import httpx
import psutil
import pytest
from eventually import LONG_SECONDS
from soak import SOAK, size
from threaded_server import serving

from megatron_runtime.process.environment import UnusableProxyError, http_client

MODEL = "builtin:smollm2-135m"
CLOSED_PORT = "127.0.0.1:9"


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """An OpenAI server on loopback that offers one model and answers `ok`. Returns its URL."""
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, content_type: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._reply("application/json", b'{"data": [{"id": "model"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._reply("text/event-stream", b'data: {"choices": [{"text": "ok"}]}\n\ndata: [DONE]\n\n')

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def _run(
    *arguments: str,
    environment: dict[str, str | None],
    redirect: str = "",
    input: bytes = b"",
    module: str = "megatron_runtime.cli",
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment. redirect: of the shell, such as `>&-`. None removes a variable."""
    variables = {**os.environ, **environment}
    command = f'exec "$@" {redirect}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, "-P", "-m", module, *arguments],
        env={name: value for name, value in variables.items() if value is not None},
        input=input,
        capture_output=True,
        timeout=LONG_SECONDS,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def _must_be_readable(done: subprocess.CompletedProcess[str]) -> None:
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert len(errors) == 1, done.stderr
        assert done.stderr.rstrip().splitlines()[-1] == errors[0]


ENVIRONMENTS: dict[str, tuple[dict[str, str | None], str]] = {
    "home that cannot be created": ({"HOME": "/dev/null/home", "XDG_CACHE_HOME": None}, ""),
    "home in a read-only file system": ({"HOME": "/proc/home", "XDG_CACHE_HOME": None}, ""),
    "no home": ({"HOME": None, "XDG_CACHE_HOME": None}, ""),
    "offline": ({"HF_HUB_OFFLINE": "1"}, ""),
    "no color": ({"NO_COLOR": "1", "TERM": "dumb"}, ""),
    "no terminal type": ({"TERM": None, "LANG": "C", "LC_ALL": "C"}, ""),
    "closed output": ({}, ">&-"),
    "closed output and errors": ({}, ">&- 2>&-"),
    "closed input": ({}, "<&-"),
    "SOCKS proxy": ({"ALL_PROXY": f"socks5://{CLOSED_PORT}", "all_proxy": f"socks5://{CLOSED_PORT}"}, ""),
    "HTTP proxy": ({"HTTP_PROXY": f"http://{CLOSED_PORT}", "http_proxy": f"http://{CLOSED_PORT}"}, ""),
    "proxy of an unknown kind": (
        {"HTTP_PROXY": f"gopher://{CLOSED_PORT}", "http_proxy": f"gopher://{CLOSED_PORT}"},
        "",
    ),
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "Say ok."),
    "status": ("status",),
}


@pytest.mark.parametrize(
    ("name", "command"),
    size([*zip(ENVIRONMENTS, cycle(COMMANDS), strict=False)], soak=[*product(ENVIRONMENTS, COMMANDS)]),
)
def test_commands_work_in_every_environment(name: str, command: str, api: str) -> None:
    """A server on loopback answers whatever the proxy variables are; no command needs a home that can be written."""
    environment, redirect = ENVIRONMENTS[name]
    done = _run(*COMMANDS[command], environment={**environment, "MEGATRON_URL": api}, redirect=redirect)
    _must_be_readable(done)
    assert done.returncode == 0, done.stderr
    if name == "no color":
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.skipif(not SOAK, reason="starts a server in each environment: run by make soak")
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_model_is_served_in_every_environment(name: str, tmp_path: Path) -> None:
    """Or the command ends with one line, as where compiled kernels have no folder."""
    environment, redirect = ENVIRONMENTS[name]
    serve = [sys.executable, "-P", "-m", "megatron_runtime.cli", "serve", MODEL, "--port", "0"]
    command = ["/bin/sh", "-c", f'exec "$@" 2> {tmp_path}/errors {redirect}', "sh", *serve]
    variables = {**os.environ, **environment}
    process = subprocess.Popen(command, env={key: value for key, value in variables.items() if value is not None})
    url = ""
    until = time.monotonic() + LONG_SECONDS
    while process.poll() is None and not url and time.monotonic() < until:
        listening = [link for link in psutil.Process(process.pid).net_connections() if link.status == "LISTEN"]
        if listening:
            url = f"http://127.0.0.1:{listening[0].laddr.port}"
            with contextlib.suppress(httpx.TransportError):
                if http_client(httpx.Client, url).get(f"{url}/readyz").status_code == 200:
                    break
            url = ""
        time.sleep(0.2)
    process.terminate()
    status = process.wait(LONG_SECONDS)
    errors = (tmp_path / "errors").read_text() if "2>&-" not in redirect else ""
    assert "Traceback" not in errors, errors
    assert (url and status == 0) or "Error: " in errors, errors


EXTRAS = {
    *("aiohttp", "fastapi", "gguf", "httpx", "httpx2", "huggingface_hub", "kopf", "kubernetes", "llguidance"),
    *("obstore", "psutil", "safetensors", "starlette", "tokenizers", "torch", "transformers", "triton", "uvicorn"),
}
"""Modules of optional dependencies."""
BASE_INSTALLATION = f"""import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(EXTRAS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
"""
NEEDS_EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "runtime": ("megatron_runtime.cli", ("serve", "fetch", "generate", "bench")),
    "dashboard": ("megatron_operator.cli", ("run",)),
}


@pytest.mark.parametrize("extra", NEEDS_EXTRAS)
def test_a_base_installation_names_what_a_command_needs(extra: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BASE_INSTALLATION)
    module, commands = NEEDS_EXTRAS[extra]
    arguments = {
        "serve": (MODEL,),
        "fetch": ("org/name", str(tmp_path / "model")),
        "generate": ("Say ok.",),
        "bench": ("engine",),
    }
    for command in commands:
        done = _run(command, *arguments.get(command, ()), environment={"PYTHONPATH": str(tmp_path)}, module=module)
        _must_be_readable(done)
        assert done.returncode == 1
        assert f"pip install 'megatron-inference[{extra}]'" in done.stderr


INPUTS = {
    "byte order mark and CRLF": (b"\xef\xbb\xbfSay\r\nok.\r\n", None),
    "not UTF-8": (b"Say \xff\xfe ok.", "the text is not UTF-8: convert it"),
    "a NUL": (b"Say\0ok.", None),
    "nothing": (b"", None),
}
LOCALES = ("C", "de_DE.ISO-8859-1")


@pytest.mark.parametrize(
    ("name", "locale"), size([*zip(INPUTS, cycle(LOCALES), strict=False)], soak=[*product(INPUTS, LOCALES)])
)
def test_input_of_other_programs_is_read(name: str, locale: str, api: str) -> None:
    text, error = INPUTS[name]
    done = _run("generate", "-", environment={"LC_ALL": locale, "MEGATRON_URL": api}, input=text)
    _must_be_readable(done)
    if error is None:
        assert (done.returncode, done.stdout) == (0, "ok\n")
    else:
        assert done.returncode == 1
        assert error in done.stderr


def test_no_proxy_exempts_a_host_from_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:canary@proxy.example:1080")
    monkeypatch.setenv("NO_PROXY", "hub.example,.internal.example")
    for url in ("https://hub.example", "http://a.internal.example:8000", "http://[::1]:8000", "http://localhost"):
        http_client(httpx.Client, url).close()
    with pytest.raises(UnusableProxyError, match=r"ALL_PROXY.*cannot be used for other\.example.*NO_PROXY") as caught:
        http_client(httpx.Client, "https://other.example")
    assert "canary" not in str(caught.value)


BROKEN_CONNECTION = """import socket
import sys

import click
from megatron_operator.terminal import ReadableGroup
from megatron_runtime.cli.options import LazyGroup



@click.command()
def send():
    here, there = socket.socketpair()
    there.close()
    here.send(b"a request")


@click.command()
def show():
    while True:
        click.echo("a line")


if sys.argv[1] == "runtime":
    sys.modules["program.commands"] = sys.modules["__main__"]
    main = LazyGroup(commands={"send": ("commands", ""), "show": ("commands", "")}, package="program")
else:
    main = ReadableGroup(commands=[send, show])
main(sys.argv[2:])
"""


@pytest.mark.parametrize("group", ["runtime", "operator"])
def test_a_closed_connection_is_reported_and_a_closed_output_is_not(group: str) -> None:
    """Click itself exits in silence in both cases."""
    command = [sys.executable, "-c", BROKEN_CONNECTION, group]
    sent = subprocess.run([*command, "send"], capture_output=True, text=True, timeout=LONG_SECONDS)
    assert (sent.returncode, sent.stderr) == (1, "Error: [Errno 32] Broken pipe\n")
    with subprocess.Popen([*command, "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as showing:
        assert showing.stdout is not None
        assert showing.stderr is not None
        assert showing.stdout.readline() == "a line\n"
        showing.stdout.close()
        assert (showing.wait(LONG_SECONDS), showing.stderr.read()) == (1, "")
