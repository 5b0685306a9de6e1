"""A fake kubelet that runs the operator's pods of one namespace as processes on this machine, with echo engines.

A coordinator pod is a real coordinator on loopback. An engine pod is an echo engine with the keys of the real Secret. A
server pod is only marked Ready, unless a test has servers run: then it is a real server of SERVED_MODEL. A pod is Ready
when its process reports ready; its process ends when the pod is deleted. A check pod runs `megatron engine --check`,
and ends with it. Command lines are those of the rendered containers, with local addresses, ports and paths. Processes
are not restarted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import echo_engine
from machine import scaled
from warm_python import PLATFORM, WarmProcess

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import RESOURCE, SECRET
from megatron_operator.resource.names import (
    CHECK,
    COORDINATOR,
    ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_INSTANCE,
    SERVER,
)
from megatron_runtime.cli.processes import free_ports

from .fake_kubelet import FakeKubelet, PodState, label_of, uid_of, write_keys

ECHO_MODEL = "builtin:echo"
"""The model of the resources here. It does not exist: an echo engine reads no model."""
SERVED_MODEL = "builtin:smollm2-135m"
"""The model of servers, which need a tokenizer."""
PROBE_SECONDS = 1.5
"""Interval of the probes of a container that is ready. One that is not is probed each time."""
KEYS_SECONDS = 2.0
"""Interval in which mounted Secrets are updated."""


def _free_port() -> int:
    return free_ports(1)[0]


@dataclass
class Ports:
    """The ports of the one coordinator that runs here. They stay the same when it restarts."""

    client: int = field(default_factory=_free_port)
    engine: int = field(default_factory=_free_port)
    admin: int = field(default_factory=_free_port)


@dataclass
class Container:
    """One pod and its process; None: there is none, as in server pods that are only marked Ready."""

    pod: Mapping[str, Any]
    process: WarmProcess | None
    health_port: int
    http_port: int = field(default_factory=_free_port)
    ready: bool | None = None
    probed: float = 0.0
    command: list[str] = field(default_factory=list)

    @property
    def component(self) -> str:
        return label_of(self.pod, LABEL_COMPONENT)

    @property
    def engine(self) -> str:
        return label_of(self.pod, LABEL_ENGINE)

    @property
    def instance(self) -> str:
        return label_of(self.pod, LABEL_INSTANCE)


class FakeNode(FakeKubelet):
    """Runs pods as processes."""

    def __init__(self, api: KubeApi, *, namespace: str, folder: Path, ports: Ports) -> None:
        super().__init__(api, namespace=namespace, folder=folder)
        self.ports = ports
        self.containers: dict[str, Container] = {}
        self.start_engines = True
        """False: engine pods stay Pending, as when no node has capacity."""
        self.engine_program = (echo_engine.PROGRAM,)
        self.coordinator_host = "127.0.0.1"
        """The host at which engines reach the coordinator."""
        self.engine_arguments: tuple[str, ...] = ()
        """Appended to the arguments of engines that start from now on."""
        self.server_program: tuple[str, ...] = ()
        """Runs `megatron`; empty: server pods have no process."""
        self._cut_off: list[Container] = []
        self._keys_updated = 0.0

    async def stop(self) -> None:
        """End all processes."""
        try:
            await super().stop()
        finally:
            for container in (*self.containers.values(), *self._cut_off):
                _end(container, signal.SIGKILL)

    def engine(self, name: str) -> Container:
        return next(container for container in self.containers.values() if container.engine == name)

    def cut_off(self, name: str) -> WarmProcess:
        """Leave the process of an engine running when its pod is deleted, as on a node that is cut off."""
        container = self.engine(name)
        assert container.process is not None
        self._cut_off.append(container)
        return container.process

    async def runs(self, name: str, *, unlike: Mapping[str, Any]) -> bool:
        """Return whether another pod of an engine than this one is ready."""
        uid = unlike["metadata"]["uid"]
        found = (container for container in self.containers.values() if container.engine == name)
        return any(container.ready and container.pod["metadata"]["uid"] != uid for container in found)

    def signal_engine(self, name: str, number: signal.Signals) -> None:
        process = self.engine(name).process
        assert process is not None
        process.send_signal(number)

    async def run_pods(self, pods: Mapping[str, Mapping[str, Any]]) -> None:
        for uid in [uid for uid in self.containers if uid not in pods]:
            container = self.containers.pop(uid)
            if container not in self._cut_off:
                _end(container, signal.SIGTERM)
        for uid, pod in pods.items():
            if uid not in self.containers and self._may_start(pod):
                container = await self._start(pod)
                if container is not None:
                    self.containers[uid] = container
        if time.monotonic() >= self._keys_updated + KEYS_SECONDS:
            self._keys_updated = time.monotonic()
            for instance in {container.instance for container in self.containers.values()}:
                await self._keys(instance)

    async def state(self, pod: Mapping[str, Any]) -> PodState | None:
        container = self.containers.get(uid_of(pod))
        if container is None:
            return None
        if container.component != CHECK:
            container.ready = await self._is_ready(container)
            return PodState(ready=container.ready)
        code = container.process.poll() if container.process is not None else None
        if code is None:
            return None
        return PodState(exit_code=code, message=(self._folder / f"{pod['metadata']['name']}.log").read_text())

    def _may_start(self, pod: Mapping[str, Any]) -> bool:
        component = label_of(pod, LABEL_COMPONENT)
        if component == COORDINATOR:
            # All coordinators use the same ports: the previous one must have exited.
            return all(container.component != COORDINATOR for container in self.containers.values())
        return self.start_engines or component != ENGINE

    async def _start(self, pod: Mapping[str, Any]) -> Container | None:
        """Start the container of a pod. None if its keys are deleted: a kubelet cannot mount them then."""
        container = Container(pod, None, _free_port())
        running = {CHECK, COORDINATOR, ENGINE} | ({SERVER} if self.server_program else set())
        if container.component in running:
            name = ENGINE if container.component == CHECK else container.component
            spec = next(entry for entry in pod["spec"]["containers"] if entry["name"] == name)
            keys = await self._keys(container.instance)
            if keys is None:
                return None
            container.command = self._localize(spec["args"], container, keys)
            container.process = self._spawn(pod["metadata"]["name"], container.command)
        return container

    def _spawn(self, name: str, arguments: list[str]) -> WarmProcess:
        log = self._folder / f"{name}.log"
        return WarmProcess(*arguments, environment=os.environ, log=log, modules=PLATFORM)

    def _localize(self, arguments: list[str], container: Container, keys: Path) -> list[str]:
        ports, serves = self.ports, container.component == SERVER
        local = {
            "--listen": "127.0.0.1",
            "--client-port": str(ports.client),
            "--engine-port": str(ports.engine),
            "--admin-port": str(ports.admin),
            "--health-port": str(container.health_port),
            "--weights-port": "0",
            "--host": "127.0.0.1",
            "--port": str(container.http_port),
            "--kv-port": "0",
            "--coordinator": f"tcp://{self.coordinator_host}:{ports.client if serves else ports.engine}",
            "--keys-dir": str(keys),
            "--kv-cache-memory": "1Mi",
            "--threads": "1",
        } | ({"--model": SERVED_MODEL} if serves else {})
        found = list(arguments)
        for index, argument in enumerate(found[:-1]):
            if argument in local:
                found[index + 1] = local[argument]
        if serves:
            return [*self.server_program, *found]
        if found[0] != ENGINE or ("--check" in found and ECHO_MODEL not in found):
            return ["-m", "megatron_runtime.cli", *found]
        return [*self.engine_program, *found[1:], *self.engine_arguments]

    def keys_folder(self, instance: str) -> Path:
        """Return the folder with a resource's keys, for its processes and for the test's client."""
        return self._folder / f"{instance}-keys"

    async def _keys(self, instance: str) -> Path | None:
        """Write the keys of a resource as they are now. None if they are deleted; running pods keep theirs then."""
        folder = self.keys_folder(instance)
        secret = await self._api.get(SECRET, self._namespace, f"{instance}-keys")
        if secret is None:
            resource = await self._api.get(RESOURCE, self._namespace, instance)
            is_deleted = resource is None or "deletionTimestamp" in resource["metadata"]
            assert is_deleted or folder.exists(), f"a pod of {instance} was made before its keys"
            return None
        write_keys(secret, folder)
        return folder

    async def _is_ready(self, container: Container) -> bool:
        if container.process is None:
            return True
        if container.process.poll() is not None:
            return False
        if container.ready and time.monotonic() < container.probed + PROBE_SECONDS:
            return True
        container.probed = time.monotonic()
        try:
            async with asyncio.timeout(0.5):
                reader, writer = await asyncio.open_connection("127.0.0.1", container.health_port)
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            # A frozen process does not answer; a kubelet would repeat the probe before it reports a failure.
            return bool(container.ready)
        return b" 200 " in answer


def _end(container: Container, number: signal.Signals) -> None:
    process = container.process
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.send_signal(number)
    try:
        process.wait(timeout=scaled(5))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
