"""The operator as a process that a test can kill, with its metrics page and log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from eventually import LONG_SECONDS, eventually
from machine import scaled
from warm_python import PLATFORM, WarmProcess

from megatron_runtime.cli.processes import free_ports


class OperatorProcess:
    """`megatron-operator run` for one namespace, which also contains its Lease and admin key."""

    def __init__(
        self,
        *,
        kubeconfig: Path,
        namespace: str,
        coordinator_port: int,
        log: Path,
        arguments: tuple[str, ...] = (),
        pod: str = "operator-0",
        everywhere: bool = False,
        program: tuple[str, ...] = ("-m", "megatron_operator.cli"),
        warm: bool = True,
        sources: Sequence[Path] = (),
    ) -> None:
        """
        pod:     the pod's name, which identifies the holder of the Lease: a restarted pod leads at once.
        program: the script or module that Python runs.
        warm:    fork it from a process that has imported the modules, whose memory counts as its own.
        sources: folders of another version's packages, which a new interpreter imports instead of the current ones.
        """
        self._environment = {**os.environ, "POD_NAME": pod, "POD_UID": f"{pod}-uid"}
        if sources:
            self._environment["PYTHONPATH"] = os.pathsep.join(map(str, sources))
        (self.health_port,) = free_ports(1)
        self.log = log
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._warm = warm and not sources
        self._is_kept = False
        self._log_begin = 0
        """Offset in the log at which the current process begins."""
        self._command = [
            *(*program, "run"),
            *("--kubeconfig", str(kubeconfig)),
            *(() if everywhere else ("--namespace", namespace)),
            *("--operator-namespace", namespace),
            *("--coordinator-address", f"127.0.0.1:{coordinator_port}"),
            *("--lease-seconds", "30"),
            *("--health-port", str(self.health_port)),
            *arguments,
        ]

    async def start(self, *, phase: str = "leading") -> None:
        """Start, and wait until it reports this phase on /healthz."""
        self.spawn()
        await self.reaches(phase)

    def spawn(self) -> None:
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0
        if self._warm:
            self._process = WarmProcess(*self._command, environment=self._environment, log=self.log, modules=PLATFORM)
            return
        with self.log.open("ab") as log:
            command = [sys.executable, *self._command]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    @contextlib.asynccontextmanager
    async def kept_running(self) -> AsyncIterator[None]:
        """Restart the process whenever it exits, as a kubelet does."""
        self._is_kept = True

        async def keep() -> None:
            while True:
                if not self.running:
                    self.spawn()
                await asyncio.sleep(0.2)

        keeper = asyncio.create_task(keep())
        try:
            yield
        finally:
            self._is_kept = False
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def reaches(self, phase: str, *, seconds: float = 120) -> None:
        async def reached() -> bool:
            assert self._is_kept or self.running, f"the operator exited:\n{self.log.read_text()[-3000:]}"
            return await self._phase() == phase

        await eventually(reached, seconds=seconds, what=f"the operator is {phase}")

    async def beats(self, condition: Callable[[dict[str, Any]], bool], *, seconds: float = 120) -> None:
        """Wait until the answer of /healthz meets the condition."""

        async def met() -> bool:
            return condition(json.loads(await self._get("/healthz")))

        await eventually(met, seconds=seconds, what="/healthz meets the condition")

    async def logs(self, message: str, *, seconds: float = 120, **fields: Any) -> dict[str, Any]:
        """Return the first log line with this message and these fields."""
        async with asyncio.timeout(scaled(seconds)):
            while True:
                for line in self.lines(message):
                    if all(line.get(key) == value for key, value in fields.items()):
                        return line
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=LONG_SECONDS)

    def freeze(self) -> None:
        """Send SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def ends(self) -> int:
        """Wait until it exits by itself, and return the exit status."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, LONG_SECONDS)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def writes(self) -> dict[str, float]:
        """Return the number of writes to the API server so far, by "verb kind"."""
        page = await self._get("/metrics")
        found = {}
        for line in page.splitlines():
            if line.startswith("megatron_operator_api_writes_total{"):
                labels, value = line.removeprefix("megatron_operator_api_writes_total").rsplit(" ", 1)
                pairs = dict(part.split("=") for part in labels.strip("{}").split(","))
                found[f"{pairs['verb']} {pairs['kind']}".replace('"', "")] = float(value)
        return found

    def rss_mib(self, *, peak: bool = False) -> float:
        """Return its resident memory, or the most that it has had."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:" if peak else "VmRSS:"))
        return int(line.split()[1]) / 1024

    def cpu_seconds(self) -> float:
        """Return the CPU time that it has used: user and system."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def decided(self) -> int:
        """Return the number of resources that it has decided about."""
        return (await self._get("/metrics")).count("megatron_operator_resource_state{")

    async def passes(self) -> int:
        """Return the number of reconcile passes so far."""
        page = await self._get("/metrics")
        lines = [line for line in page.splitlines() if line.startswith("megatron_operator_reconcile_passes_total{")]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))

    async def passed(self, count: int) -> None:
        """Wait until it has made `count` reconcile passes in total."""

        async def enough() -> bool:
            return await self.passes() >= count

        await eventually(enough, what=f"{count} passes")

    def lines(self, message: str) -> list[dict[str, Any]]:
        """Return the log lines of the current process with this message."""
        complete = self.log.read_bytes()[self._log_begin :].rpartition(b"\n")[0]
        found = [json.loads(line) for line in complete.splitlines() if line.startswith(b"{")]
        return [line for line in found if line["msg"] == message]

    async def _phase(self) -> str:
        try:
            beat = json.loads(await self._get("/healthz"))
        except (OSError, ValueError):
            return "starting"
        return str(beat["phase"])

    async def _get(self, path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.health_port)
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), LONG_SECONDS)
        writer.close()
        return answer.decode().split("\r\n\r\n", 1)[1]
