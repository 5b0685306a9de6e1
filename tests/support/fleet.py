"""A coordinator, engines and clients as separate processes with keys, which tests kill, freeze and replace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import echo_engine
import httpx
from control_link import ControlLink
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from prometheus_client.parser import text_string_to_metric_families
from warm_python import WarmProcess

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import TRAINER, PeerKeys, generate_key_files

RUNTIME_MODULE = "megatron_runtime.cli"


@dataclass
class Process:
    """One `megatron` process and the port of its probes."""

    process: subprocess.Popen[bytes] | WarmProcess
    health_port: int

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    async def kill(self) -> None:
        self.process.kill()
        await self.ended()

    async def ended(self) -> int:
        """Wait until it exits, and return its exit status."""
        return await asyncio.to_thread(self.process.wait)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def metrics(self) -> dict[str, float]:
        """Return every sample by name; samples with labels as `name{value,…}`."""

        def get() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=LONG_SECONDS) as answer:
                return answer.read().decode()

        samples = {}
        for family in text_string_to_metric_families(await asyncio.to_thread(get)):
            for sample in family.samples:
                labels = "{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""
                samples[sample.name + labels] = sample.value
        return samples


class Fleet:
    """Starts `megatron` subcommands on this machine with CURVE. close() kills the processes that still run.

    warm_coordinators: whether coordinators are forked, as engines are, and not new interpreters, whose start is a part
                       of the time of recovery.
    engines:           the last process of each engine.
    exits:             name and exit status of the engines of keep_running() that have exited.
    """

    def __init__(self, directory: Path, *, warm_coordinators: bool = False) -> None:
        self._warm_coordinators = warm_coordinators
        self.keys_dir = directory / "keys"
        self.keys_dir.mkdir()
        for name, text in {**generate_key_files(), **generate_key_files(roles=(TRAINER,))}.items():
            (self.keys_dir / name).write_text(text)
        self.client_port, self.engine_port, self.admin_port, self._health_port = free_ports(4)
        self.engines: dict[str, Process] = {}
        self.exits: list[tuple[str, int]] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._processes: list[Process] = []
        self._programs: list[asyncio.subprocess.Process] = []
        self._closers = contextlib.ExitStack()

    async def coordinator(self, *arguments: str, host: str = "127.0.0.1", health_port: int = 0) -> Process:
        health_port = health_port or self._health_port
        ports = {"client": self.client_port, "engine": self.engine_port, "admin": self.admin_port}
        options = [item for role, port in ports.items() for item in (f"--{role}-port", str(port))]
        command = [
            "-m",
            RUNTIME_MODULE,
            "coordinator",
            *self._options(health_port),
            "--listen",
            host,
            *options,
            *arguments,
        ]
        return self._start(command, health_port, warm=self._warm_coordinators)

    async def engine(
        self, name: str, *arguments: str, warm: bool = True, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start an echo engine, or `megatron engine` if `arguments` name its backend.

        warm: forked from a process that has imported torch.
        environment: additional variables of a cold process.
        """
        (health_port,) = free_ports(1)
        program = ("-m", RUNTIME_MODULE, "engine") if "--backend" in arguments else (echo_engine.PROGRAM,)
        options = ("--coordinator", f"127.0.0.1:{self.engine_port}", "--name", name)
        command = [*program, *self._options(health_port), *options, *arguments]
        self.engines[name] = self._start(command, health_port, warm=warm, environment=environment)
        return self.engines[name]

    async def serve(self, engines: int, *arguments: str) -> tuple[Process, ControlLink]:
        """Start a coordinator and engines. When they serve, return the coordinator and a control link to it.

        arguments: command line arguments of the engines.
        """
        coordinator = await self.coordinator()
        for number in range(engines):
            await self.engine(f"engine-{number}", *arguments)
        link = await self.admin()
        await until_serving(link, self.engines)
        return coordinator, link

    async def keep_running(self, name: str, *arguments: str) -> None:
        """Start an engine, and start it again each time it exits, as a kubelet does."""
        await self.engine(name, *arguments)
        self._supervisors.append(asyncio.create_task(self._restart(name, arguments)))

    async def _restart(self, name: str, arguments: tuple[str, ...]) -> None:
        while True:
            self.exits.append((name, await self.engines[name].ended()))
            await self.engine(name, *arguments)

    async def server(
        self, *arguments: str, warm: bool = True, environment: Mapping[str, str] | None = None
    ) -> tuple[Process, str]:
        """Start an OpenAI server, and return it and its URL when it is ready. warm, environment: as of engine()."""
        port, health_port = free_ports(2)
        address = ("--coordinator", f"127.0.0.1:{self.client_port}", "--host", "127.0.0.1", "--port", str(port))
        command = ["-m", RUNTIME_MODULE, "server", *self._options(health_port), *address, *arguments]
        process = self._start(command, health_port, warm=warm, environment=environment)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(trust_env=False) as http:

            async def is_ready() -> bool:
                try:
                    return (await http.get(f"{url}/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_ready, what="the server is ready")
        return process, url

    async def engine_program(self, name: str, script: Path) -> Process:
        """Start an engine from another program: `script COORDINATOR NAME HEALTH_PORT KEYS_DIR`."""
        (health_port,) = free_ports(1)
        command = [str(script), f"tcp://127.0.0.1:{self.engine_port}", name, str(health_port), str(self.keys_dir)]
        self.engines[name] = self._start(command, health_port, warm=True)
        return self.engines[name]

    def _options(self, health_port: int) -> tuple[str, ...]:
        return ("--keys-dir", str(self.keys_dir), "--health-port", str(health_port), "--log-level", "error")

    def _start(
        self, command: list[str], health_port: int, *, warm: bool, environment: Mapping[str, str] | None = None
    ) -> Process:
        cold = None if warm else subprocess.Popen([sys.executable, *command], env={**os.environ, **(environment or {})})
        self._processes.append(Process(cold or WarmProcess(*command, environment=os.environ), health_port))
        return self._processes[-1]

    async def run_python(self, script: Path, *arguments: str) -> asyncio.subprocess.Process:
        """Start a Python program whose standard output can be read. close() kills it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), *arguments), stdout=asyncio.subprocess.PIPE
        )
        self._programs.append(process)
        return process

    def keys(self, role: Role) -> PeerKeys:
        return PeerKeys.load(self.keys_dir, role)

    async def client(self) -> InferenceClient:
        client = InferenceClient(self.client_port, deserialize=False, keys=self.keys(Role.CLIENT))
        self._closers.callback(client.stop)
        await client.start(connect_timeout_seconds=LONG_SECONDS)
        return client

    async def admin(self) -> ControlLink:
        link = ControlLink(self.admin_port, keys=self.keys(Role.ADMIN))
        self._closers.callback(link.close)
        await link.start(connect_timeout_seconds=LONG_SECONDS)
        return link

    async def close(self) -> None:
        self._closers.close()
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for process in self._processes:
            process.thaw()
            await process.kill()
        for program in self._programs:
            if program.returncode is None:
                program.kill()
            await program.wait()


async def until_status(
    link: ControlLink, condition: Callable[[StatusReply], bool], *, seconds: float = LONG_SECONDS, what: str
) -> StatusReply:
    """Wait until the coordinator's status meets the condition, and return the status."""
    status: StatusReply | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(TimeoutError):
                    status = await link.status(timeout_seconds=2)
                    if condition(status):
                        return status
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}; status: {status}") from None


async def until_serving(link: ControlLink, names: Iterable[str], *, seconds: float = LONG_SECONDS) -> None:
    wanted = set(names)
    await until_status(
        link,
        lambda status: (
            status.state != "RECOVERING" and {engine.name for engine in status.engines if engine.serving} == wanted
        ),
        seconds=seconds,
        what=f"engines {sorted(wanted)} serve",
    )


async def until_adapter(link: ControlLink, client: InferenceClient, name: str, *, engines: int) -> None:
    """Wait until this number of engines report the adapter, and the client knows it."""
    await until_status(
        link,
        lambda status: (name, engines) in [(entry.name, entry.engines) for entry in status.adapters or ()],
        what=f"{engines} engines have the adapter {name}",
    )

    async def is_known() -> bool:
        return client.adapters.find(name) is not None

    await eventually(is_known, what=f"the client knows the adapter {name}")


@dataclass(eq=False)
class Record:
    """The received frames of one stream. arrivals: time of each frame, monotonic seconds."""

    prompt: list[int]
    length: int
    streamed: list[int] = field(default_factory=list)
    final: dict[str, Any] | None = None
    arrivals: list[float] = field(default_factory=list)

    def longest_gap(self, *, since: float) -> float:
        """Return the longest wait for a frame that arrived after `since`."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)

    def check(self, answer: list[int]) -> None:
        assert self.final is not None, "the stream ended without a final"
        assert self.final["status"] == "COMPLETED", self.final
        assert self.final["generated_tokens"] == answer, "the answer differs from that of an undisturbed run"
        # The final alone contains the last step's tokens.
        assert self.streamed == answer[: len(self.streamed)], "a token was lost, duplicated or reordered"


class Load:
    """Many concurrent streams of several clients, with a count of the received tokens."""

    def __init__(self, clients: list[InferenceClient]) -> None:
        self.records: list[Record] = []
        self.tokens = 0
        self.asked = 0
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._progress: list[tuple[int, asyncio.Event]] = []

    def add(self, prompt: list[int], length: int, *, adapter: str = "", **params: Any) -> None:
        client = self._clients[len(self.records) % len(self._clients)]
        record = Record(prompt, length, arrivals=[time.monotonic()])
        self.records.append(record)
        self.asked += length
        sampling_params = SamplingParams(num_tokens_to_generate=length, **params)
        stream = client.add_request_streaming(prompt, sampling_params, adapter=adapter)
        self._tasks.append(asyncio.create_task(self._follow(record, stream)))

    async def _follow(self, record: Record, stream: Any) -> None:
        async for item in stream:
            record.arrivals.append(time.monotonic())
            if "final" in item:
                record.final = item["final"]
                self._count(record.length - len(record.streamed))
            else:
                new = item["partial"]["new_tokens"]
                record.streamed += new
                self._count(len(new))

    def _count(self, number: int) -> None:
        self.tokens += number
        for wanted, event in self._progress:
            if self.tokens >= wanted:
                event.set()

    async def until(self, tokens: int, *, seconds: float = LONG_SECONDS) -> None:
        """Wait until all streams together have received `tokens` tokens."""
        event = asyncio.Event()
        self._progress.append((tokens, event))
        self._count(0)
        await asyncio.wait_for(event.wait(), seconds)

    async def at_rest(self) -> int:
        """Wait until all generated tokens have arrived, and return their number.

        The engines must be paused, so the coordinator has received their last tokens. It sends them before its answer
        to a request for its status, on the same connection.
        """
        await asyncio.gather(*(client.status(timeout_seconds=LONG_SECONDS) for client in self._clients))
        tokens = -1
        while tokens != self.tokens:
            tokens = self.tokens
            await asyncio.sleep(0.1)  # the streams take what the clients have received
        return tokens

    async def finish(self, *, seconds: float = LONG_SECONDS) -> None:
        """Wait until every stream is complete."""
        done, pending = await asyncio.wait(self._tasks, timeout=seconds)
        for task in pending:
            task.cancel()
        assert not pending, f"{len(pending)} of {len(self._tasks)} streams did not complete within {seconds:g} s"
        for task in done:
            task.result()

    async def check(
        self, *, answer: Callable[[list[int], int], list[int]] = echo_answer, seconds: float = LONG_SECONDS
    ) -> None:
        """Wait until every stream is complete, and check its tokens.

        answer: returns the expected tokens for a prompt and a number of tokens.
        """
        await self.finish(seconds=seconds)
        for record in self.records:
            record.check(answer(record.prompt, record.length))
