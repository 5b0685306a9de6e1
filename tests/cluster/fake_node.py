"""A fake kubelet: it runs the operator's pods of one namespace as processes on this machine, with an echo engine.

A coordinator pod is a real coordinator on loopback. An engine pod is a real engine process with the echo executor and
the keys of the real Secret. A server pod has no process and is only marked Ready. A pod is Ready when its process
reports ready; its process ends when the pod is deleted. A check pod runs `megatron engine --check`, and ends with it.
Command lines are those of the rendered containers, with local
addresses, ports and paths. It does not schedule, pull images, restart processes or enforce limits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import scaled
from warm_python import PLATFORM, WarmProcess

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.kinds import POD, SECRET
from megatron_operator.controller.watches import CHILD_SELECTOR
from megatron_operator.resource.names import CHECK, COORDINATOR, ENGINE, LABEL_COMPONENT, LABEL_ENGINE, LABEL_INSTANCE
from megatron_runtime.cli.processes import free_ports

LOOK_SECONDS = 0.15
ECHO_MODEL = "builtin:echo"
"""The model of the resources here. It does not exist: an engine with the echo backend reads no model."""


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
    """One pod and its process; server pods have none."""

    pod: Mapping[str, Any]
    process: WarmProcess | None
    health_port: int
    ready: bool | None = None

    @property
    def component(self) -> str:
        return label_of(self.pod, LABEL_COMPONENT)

    @property
    def engine(self) -> str:
        return label_of(self.pod, LABEL_ENGINE)

    @property
    def instance(self) -> str:
        return label_of(self.pod, LABEL_INSTANCE)


class FakeNode:
    """Runs the operator's pods in one namespace until stop()."""

    def __init__(self, api: KubeApi, *, namespace: str, folder: Path, ports: Ports) -> None:
        self.ports = ports
        self.containers: dict[str, Container] = {}
        self.start_engines = True
        """False: engine pods stay Pending, as when no node has capacity."""
        self.engine_arguments: tuple[str, ...] = ()
        """Appended to the arguments of engines that start from now on."""
        self._api = api
        self._namespace = namespace
        self._folder = folder
        self._cut_off: list[Container] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._play())

    async def stop(self) -> None:
        """End all processes. Raises the error that has ended the node, if any."""
        try:
            if self._task is not None:
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._task
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

    async def _play(self) -> None:
        while True:
            with contextlib.suppress(KubeApiError):
                await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        found = await self._api.list(POD, self._namespace, selector=CHILD_SELECTOR)
        pods = {pod["metadata"]["uid"]: pod for pod in found}
        for uid in [uid for uid in self.containers if uid not in pods]:
            container = self.containers.pop(uid)
            if container not in self._cut_off:
                _end(container, signal.SIGTERM)
        for uid, pod in pods.items():
            if uid not in self.containers and self._may_start(pod):
                self.containers[uid] = await self._start(pod)
        for instance in {container.instance for container in self.containers.values()}:
            # A kubelet updates mounted Secrets.
            await self._keys(instance)
        for container in self.containers.values():
            if container.component == CHECK:
                await self._report_check(container)
                continue
            ready = await self._is_ready(container)
            if ready != container.ready:
                await report_pod(self._api, container.pod, ready=ready)
                container.ready = ready

    def _may_start(self, pod: Mapping[str, Any]) -> bool:
        component = label_of(pod, LABEL_COMPONENT)
        if component == COORDINATOR:
            # All coordinators use the same ports: the previous one must have exited.
            return all(container.component != COORDINATOR for container in self.containers.values())
        return self.start_engines or component != ENGINE

    async def _start(self, pod: Mapping[str, Any]) -> Container:
        container = Container(pod, None, _free_port())
        if container.component in (CHECK, COORDINATOR, ENGINE):
            name = ENGINE if container.component == CHECK else container.component
            spec = next(entry for entry in pod["spec"]["containers"] if entry["name"] == name)
            keys = await self._keys(container.instance)
            arguments = self._localize(spec["args"], container.health_port, keys)
            container.process = self._spawn(pod["metadata"]["name"], arguments)
        return container

    def _spawn(self, name: str, arguments: list[str]) -> WarmProcess:
        log = self._folder / f"{name}.log"
        return WarmProcess("-m", "megatron_runtime.cli", *arguments, environment=os.environ, log=log, modules=PLATFORM)

    def _localize(self, arguments: list[str], health_port: int, keys: Path) -> list[str]:
        ports = self.ports
        local = {
            "--listen": "127.0.0.1",
            "--client-port": str(ports.client),
            "--engine-port": str(ports.engine),
            "--admin-port": str(ports.admin),
            "--health-port": str(health_port),
            "--coordinator": f"tcp://127.0.0.1:{ports.engine}",
            "--keys-dir": str(keys),
            "--kv-cache-memory": "1Mi",
            "--threads": "1",
        }
        found = list(arguments)
        for index, argument in enumerate(found[:-1]):
            if argument in local:
                found[index + 1] = local[argument]
        if found[0] != ENGINE or ("--check" in found and ECHO_MODEL not in found):
            return found
        return [*found, "--backend", "echo", *self.engine_arguments]

    async def _report_check(self, container: Container) -> None:
        code = container.process.poll() if container.process is not None else None
        if code is None or container.ready is not None:
            return
        log = self._folder / f"{container.pod['metadata']['name']}.log"
        await report_end(self._api, container.pod, code=code, message=log.read_text())
        container.ready = False

    def keys_folder(self, instance: str) -> Path:
        """Return the folder with a resource's keys, for its processes and for the test's client."""
        return self._folder / f"{instance}-keys"

    async def _keys(self, instance: str) -> Path:
        folder = self.keys_folder(instance)
        secret = await self._api.get(SECRET, self._namespace, f"{instance}-keys")
        if secret is None:
            assert folder.exists(), f"a pod of {instance} was made before its keys"
            return folder
        folder.mkdir(exist_ok=True)
        for entry, text in secret["data"].items():
            path, content = folder / entry, base64.b64decode(text)
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        return folder

    async def _is_ready(self, container: Container) -> bool:
        if container.process is None:
            return True
        if container.process.poll() is not None:
            return False
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


def label_of(pod: Mapping[str, Any], label: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(label, ""))


async def report_pod(api: KubeApi, pod: Mapping[str, Any], *, ready: bool, waiting: str = "") -> None:
    """Write the status of a pod, as its kubelet does. waiting: the reason for which its crashed container waits."""
    container: dict[str, Any] = {"name": label_of(pod, LABEL_COMPONENT), "image": "fake", "imageID": "fake"}
    if waiting:
        crash = {"exitCode": 3, "reason": "Error", "message": "cannot start", "containerID": "fake://1"}
        container |= {"restartCount": 3, "state": {"waiting": {"reason": waiting}}, "lastState": {"terminated": crash}}
    else:
        container |= {"restartCount": 0, "state": {"running": {"startedAt": None}}}
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{**container, "ready": ready}],
    }
    await _write_status(api, pod, status)


async def report_end(api: KubeApi, pod: Mapping[str, Any], *, code: int, message: str = "") -> None:
    """Write the status of a pod whose only container has ended. message: its log or termination message."""
    name = pod["spec"]["containers"][0]["name"]
    reason = "Error" if code else "Completed"
    ended = {"exitCode": code, "reason": reason, "message": message[-2000:], "containerID": "fake://1"}
    container = {"name": name, "image": "fake", "imageID": "fake", "restartCount": 0, "ready": False}
    status = {
        "phase": "Failed" if code else "Succeeded",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    await _write_status(api, pod, status)


async def _write_status(api: KubeApi, pod: Mapping[str, Any], status: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    await api.request(
        "PATCH",
        POD.path(metadata["namespace"], metadata["name"], subresource="status"),
        body={"metadata": {"uid": metadata["uid"]}, "status": status},
        content_type="application/merge-patch+json",
    )


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
