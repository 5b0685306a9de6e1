"""`megatron serve` beside other users of the machine: what they can connect to, and what a directory can execute. No
compiler starts: the kernels are installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import echo_serve
import psutil
import pytest
from eventually import LONG_SECONDS
from hostile_directory import HostileDirectory
from tokenizers import Tokenizer, models, pre_tokenizers

_LISTENS = 0x10000
"""The flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""
OTHER_USER = 65534
MEGATRON = (str(Path(sys.executable).with_name("megatron")),)


@asynccontextmanager
async def serve(directory: Path, *options: str, program: Sequence[str] = MEGATRON) -> AsyncIterator[tuple[int, str]]:
    """Run `megatron serve` in a directory. Yield its process id and URL."""
    process = await asyncio.create_subprocess_exec(
        *(*program, "serve", "--port", "0", *options),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(LONG_SECONDS):
            while (ready := re.search(rb"ready in \S+ s: \S+ at (http://\S+)/v1", said)) is None:
                line = await process.stdout.readline()
                assert line, said.decode()
                said += line
        yield process.pid, ready[1].decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.communicate()
    assert process.returncode == 0


def processes(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def internet_listeners(pid: int) -> set[int]:
    """The ports of all TCP listeners and UDP sockets of a process and its descendants."""
    found = set()
    for process in processes(pid):
        for connection in process.net_connections(kind="inet"):
            if connection.type == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.port)
    return found


def unix_listeners(pid: int) -> set[str]:
    """The paths of their listening Unix sockets; one in the abstract namespace, open to all users, begins with @."""
    inodes = set()
    for process in processes(pid):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split()
        if inode in inodes and int(flags, 16) & _LISTENS:
            found.add(path[0] if path else "@")
    return found


def as_another_user(path: str) -> int:
    """Connect to a Unix socket as a user without permissions. Return the error number, 0 for a connection."""
    code = "import socket, sys; sys.exit(socket.socket(socket.AF_UNIX).connect_ex(sys.argv[1]))"
    return subprocess.run(
        [os.path.realpath(sys.executable), "-I", "-c", code, path], user=OTHER_USER, cwd="/"
    ).returncode


def check_listeners(pid: int, url: str) -> set[str]:
    """Check that other users can connect to the HTTP server only. Return the names of the Unix sockets."""
    assert internet_listeners(pid) == {int(url.rsplit(":", 1)[1])}
    paths = unix_listeners(pid)
    for path in paths:
        assert Path(path).name.startswith(("rank-", "tensor-")) or stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        folder = Path(path).parent.stat()
        assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (os.geteuid(), 0o700), path
        if os.geteuid() == 0:
            assert as_another_user(path) == 13, path
    return {Path(path).name for path in paths}


@pytest.fixture
def hostile(tmp_path: Path) -> HostileDirectory:
    return HostileDirectory(tmp_path)


def write_model_to(folder: Path, model: str) -> None:
    """Copy a model, and add a tokenizer."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    vocabulary = {letter: index for index, letter in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "h"}))


async def test_two_engines_open_the_http_port_only_and_import_nothing_from_the_directory(
    hostile: HostileDirectory,
) -> None:
    (hostile.path / "keys").write_text("secret\n")
    options = ("--kv-cache-memory", "16Mi", "--engines", "2", "--api-keys-file", "keys")
    async with serve(hostile.path, *options, program=(sys.executable, echo_serve.PROGRAM)) as (pid, url):
        assert check_listeners(pid, url) == {"client", "engine", "admin"}
        assert "secret" not in str([process.cmdline() for process in processes(pid)])
    assert hostile.imported == []


@pytest.mark.timeout(280)
async def test_an_engine_of_ranks_opens_no_port_imports_nothing_from_the_directory_and_compiles_nothing(
    hostile: HostileDirectory, llama: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler in the first folder of PATH leaves a file if a process starts it."""
    compilers, started = tmp_path / "compilers", tmp_path / "started"
    compilers.mkdir()
    for name in ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc"):
        (compilers / name).write_text(f"#!/bin/sh\necho {name} >> {started}\nexit 1\n")
        (compilers / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{compilers}:/usr/bin:/bin")
    write_model_to(hostile.path, llama(4, 2))
    options = ("--backend", "native", "--dtype", "float32", "--threads", "1", "--kv-cache-memory", "4Mi")
    async with serve(hostile.path, str(hostile.path), *options, "--tensor-parallel", "2") as (pid, url):
        names = check_listeners(pid, url)
        assert {"client", "engine", "admin", "rank-0", "rank-1"} <= names
        request = {"model": "model", "prompt": "a b c", "max_tokens": 4}
        reply = await asyncio.to_thread(_post, f"{url}/v1/completions", request)
        assert reply["usage"]["completion_tokens"] > 0
        assert {rank.environ().get("RANK") for rank in processes(pid)} >= {"0", "1"}
    assert hostile.imported == []
    assert not started.exists(), started.read_text()


def _post(url: str, body: dict[str, object]) -> dict[str, dict[str, int]]:
    import httpx

    answer = httpx.post(url, json=body, timeout=LONG_SECONDS, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, int]] = answer.json()
    return found
