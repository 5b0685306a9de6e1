"""The programs run as any user of group 0 without an entry in /etc/passwd, as OpenShift starts containers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from eventually import eventually

from megatron_kernels.cpu.build import library
from megatron_runtime.cli.processes import free_ports

ROOT = Path(__file__).parents[3]
USER = 1_000_660_000
MODEL = "builtin:smollm2-135m"


def is_readable_for_all(path: Path) -> bool:
    return all(each.stat().st_mode & stat.S_IXOTH for each in (path, *path.parents))


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None or not is_readable_for_all(ROOT),
    reason="needs root and setpriv to change the user, and a checkout that every user may read",
)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home that every user may write, as /tmp in a pod, with the compiled kernels of this machine, as in an image."""
    folder = Path("/tmp", f"any-user-{os.getpid()}-{tmp_path_factory.getbasetemp().name}")
    kernels = folder / ".cache" / "megatron"
    kernels.mkdir(parents=True)
    built = library()
    if built.parent != ROOT / "kernels" / "megatron_kernels" / "cpu":
        shutil.copy(built, kernels)
    for path in (folder, folder / ".cache", kernels):
        path.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def running(*command: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    program = Path(sys.executable).with_name(command[0])
    as_user = ["setpriv", f"--reuid={USER}", "--regid=0", "--clear-groups", program, *command[1:]]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(as_user, env=environment, cwd="/tmp", stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def owners_of_caches(home: Path) -> set[int]:
    """Return the owners of the stamps that the processes write into their caches."""
    return {path.stat().st_uid for path in home.rglob("*.verified")}


async def test_a_model_is_served(home: Path) -> None:
    """Coordinator, engine and server, as processes of the user."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1"
    with running("megatron", "serve", MODEL, "--port", str(port), home=home) as process:
        async with httpx.AsyncClient(timeout=60) as client:

            async def serves() -> bool:
                assert process.poll() is None, (home / "log").read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get(f"{url}/models")).status_code == 200
                return False

            await eventually(serves, seconds=60, what="the model is served")
            request = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
            answer = await client.post(f"{url}/completions", json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    assert owners_of_caches(home) == {USER}


def test_the_operator_renders(home: Path) -> None:
    sample = ROOT / "manifests" / "samples" / "cpu-demo.yaml"
    with running("megatron-operator", "render", "-f", str(sample), home=home) as process:
        assert process.wait() == 0, (home / "log").read_text()[-3000:]
