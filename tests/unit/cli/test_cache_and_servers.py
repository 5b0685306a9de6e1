"""`megatron list`, `rm` and `status`: a cache as huggingface_hub writes it, and real servers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import echo_serve
import httpx
import psutil
import pytest
from click.testing import CliRunner, Result
from eventually import LONG_SECONDS
from fake_hub import use_hub

from megatron_runtime.checkpoints.remote.files import MANIFEST_FILE
from megatron_runtime.cli import main
from megatron_runtime.cli.servers import Server, listed, running_servers

MODEL, OBJECTS = "hf:org/small", "s3://bucket/models/one"


def megatron(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def _repository(path: Path, file: str, *, size: int) -> None:
    commit = "c" * 40
    blob = path / "blobs" / "d"
    link = path / "snapshots" / commit / file
    blob.parent.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    blob.write_bytes(bytes(size))
    link.symlink_to(Path("..", "..", "blobs", "d"))
    os.utime(blob, (1_700_000_000, 1_600_000_000))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model of a hub and one of an object store."""
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "hf")
    monkeypatch.delenv("MEGATRON_MODEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _repository(tmp_path / "hf/hub/models--org--small", "model.safetensors", size=3 << 20)
    _repository(tmp_path / "hf/megatron-objects/s3--x", "m.gguf", size=2048)
    (tmp_path / "hf/hub/datasets--org--rows").mkdir()
    own = tmp_path / "hf/megatron-objects/s3--x/.megatron/c"
    own.mkdir(parents=True)
    (own / ".megatron-lock").touch()
    (own / MANIFEST_FILE).write_text(json.dumps({"repository": OBJECTS, "commit": "c" * 40, "files": {}}))
    return tmp_path / "hf"


def test_list_shows_name_size_format_and_last_use() -> None:
    lines = [line.split() for line in megatron("list").stdout.splitlines()]
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000)).split()
    assert lines[0] == ["MODEL", "SIZE", "FORMAT", "LAST", "USED"]
    assert lines[1] == [MODEL, "3", "MiB", "SafeTensors", *used]
    assert lines[2][:1] + lines[2][3:4] == [OBJECTS, "GGUF"]
    models = json.loads(megatron("list", "-o", "json").stdout)
    assert models[0].items() >= {"reference": MODEL, "size": 3 << 20, "format": "SafeTensors", "used": 1.7e9}.items()
    assert [model["reference"] for model in models] == [MODEL, OBJECTS]


def test_rm_asks_and_removes_one_model(cache: Path) -> None:
    declined = megatron("rm", "org/small", stdin="n\n")
    assert declined.exit_code == 1
    assert "3 MiB" in declined.output
    assert (cache / "hub/models--org--small").is_dir()
    assert megatron("rm", "org/small", stdin="y\n").exit_code == 0
    assert not (cache / "hub/models--org--small").exists()
    assert megatron("rm", OBJECTS, "--yes").exit_code == 0
    assert json.loads(megatron("list", "-o", "json").stdout) == []
    again = megatron("rm", "org/small", "--yes")
    assert (again.exit_code, again.stderr) == (
        1,
        "Error: hf:org/small is not in the local cache: see 'megatron list'\n",
    )
    assert "leave @REVISION out" in megatron("rm", "org/small@v1", "--yes").stderr


def test_rm_frees_the_contents_that_only_this_model_uses(cache: Path) -> None:
    """The library keeps contents that were transferred by Xet once for all repositories."""
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    hashes = {"small": "ab" * 32, "other": "cd" * 32}
    other = cache / "hub/models--org--other"
    _repository(other, "model.safetensors", size=1 << 20)
    for name, xet_hash in hashes.items():
        blob = cache / f"hub/models--org--{name}/blobs/d"
        size = blob.stat().st_size
        assert publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash=xet_hash, cache_dir=cache / "hub", expected_size=size, replace_existing=False
        )
    assert [line.split()[1] for line in megatron("list").stdout.splitlines()[1:3]] == ["1", "3"]
    assert megatron("rm", "org/small", "--yes").exit_code == 0
    assert not (cache / "hub/models--org--small").exists()
    assert [path.name for path in (cache / "hub/blobs").rglob("??" * 32)] == [hashes["other"]]
    assert (other / "snapshots" / ("c" * 40) / "model.safetensors").stat().st_size == 1 << 20


def test_rm_leaves_a_model_that_a_server_uses_or_a_command_fetches(cache: Path) -> None:
    server = Server(
        pid=os.getpid(),
        url="http://127.0.0.1:8000",
        model=f"{MODEL}@v2",
        name="small",
        engines=1,
        coordinator="tcp://127.0.0.1:1",
        started=time.time(),
    )
    with listed(server):
        result = megatron("rm", "org/small", "--yes")
    assert result.exit_code == 1
    assert f"in use by the server at http://127.0.0.1:8000 (process {os.getpid()}): stop that one" in result.stderr
    with (cache / "megatron-objects/s3--x/.megatron/c/.megatron-lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = megatron("rm", OBJECTS, "--yes")
    assert result.exit_code == 1
    assert "is being fetched" in result.stderr
    assert len(json.loads(megatron("list", "-o", "json").stdout)) == 2


def test_models_of_the_cache_complete() -> None:
    result = CliRunner().invoke(
        main,
        prog_name="megatron",
        env={"_MEGATRON_COMPLETE": "bash_complete", "COMP_WORDS": "megatron rm org/", "COMP_CWORD": "2"},
    )
    assert result.stdout.split() == ["plain,org/small"]


@pytest.fixture
async def server(cache: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--engines", "2"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while b"ready in" not in (line := await process.stdout.readline()):
        assert line, "it ended before it was ready"
    yield process
    if process.returncode is None:
        process.terminate()
    await process.communicate()


async def test_status_shows_servers_and_engines_until_they_end(server: asyncio.subprocess.Process) -> None:
    (shown,) = json.loads((await asyncio.to_thread(megatron, "status", "-o", "json")).stdout)
    assert (shown["pid"], shown["model"], shown["name"]) == (server.pid, "builtin:smollm2-135m", "smollm2-135m")
    assert shown["engines"] == [
        {"name": f"engine-{index}", "state": "RUNNING", "serving": True, "ranks": 1, "requests": 0}
        for index in range(2)
    ]
    header, line = (await asyncio.to_thread(megatron, "status")).stdout.splitlines()
    assert header.split() == ["ADDRESS", "MODEL", "PID", "AGE", "ENGINES"]
    assert line.startswith(f"{shown['url']}   smollm2-135m   {server.pid} ")
    assert line.endswith("engine-0 RUNNING, engine-1 RUNNING")
    server.send_signal(signal.SIGKILL)
    await server.wait()
    assert running_servers() == []
    result = await asyncio.to_thread(megatron, "status")
    assert "no server runs: start one with 'megatron serve MODEL'" in result.stderr


async def test_a_server_starts_where_it_cannot_be_listed(cache: Path) -> None:
    (cache.parent / "cache").mkdir()
    (cache.parent / "cache" / "megatron").touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while b"ready in" not in (line := await process.stdout.readline()):
        assert line, "it ended before it was ready"
    process.terminate()
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert b"'megatron status' does not show this server" in errors


async def test_sigterm_to_all_processes_drains_as_to_the_parent(cache: Path) -> None:
    """A service manager such as systemd sends it to every process of the group at once."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, echo_serve.PROGRAM, "serve", "--port", "0"),
        *("--kv-cache-memory", "16Mi", "--engines", "2", "--drain-seconds", str(LONG_SECONDS)),
        env={**os.environ, "ECHO_STEP_SECONDS": "0.05"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while b"ready in" not in (line := await process.stdout.readline()):
        assert line, "it ended before it was ready"
    (server,) = running_servers()
    body = {"prompt": "Hello", "max_tokens": 40, "stream": True, "ignore_eos": True}
    tree = psutil.Process(process.pid)
    lines: list[str] = []
    async with (
        httpx.AsyncClient(timeout=LONG_SECONDS) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        async for text in answer.aiter_lines():
            if text and not lines:
                for member in [*tree.children(recursive=True), tree]:
                    member.send_signal(signal.SIGTERM)
            lines += [text] if text else []
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 40
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert errors.decode().splitlines()[-1] == "megatron: stopping (Ctrl-C again to end at once)"
