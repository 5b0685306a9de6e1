"""A fake kubelet for the scale test: every pod is Ready as soon as it exists, with a minimal coordinator per resource.
Check pods succeed.

Coordinators listen on Unix sockets in a folder, one for each resource. They report settled engines and confirm every
verb at once. No engine exists, so that the cost of this fake does not show in the measured figures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from aiohttp import ClientError
from kubernetes.aio.client import ApiClient, ApiException, Configuration, CoreV1Api
from kubernetes.aio.watch import Watch

from megatron_operator.cluster.api import KubeApi
from megatron_operator.resource.names import CHECK, LABEL_COMPONENT
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.lifecycle import TRANSITIONS, CoordinatorState, EngineState
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    ControlMessage,
    EngineStatus,
    Hello,
    HelloAck,
    Operation,
    Status,
    StatusReply,
    decode,
)
from megatron_runtime.transport.event_socket import EventSocket

from .fake_node import label_of, report_end, report_pod

LOOK_SECONDS = 0.5
AT_ONCE = 16


class FleetCoordinator:
    """The coordinator of one resource, all of whose engines serve."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, name: str, engines: int) -> None:
        self.state = CoordinatorState.RUNNING
        self._engine_state = EngineState.RUNNING
        self._names = [f"{name}-engine-{index}" for index in range(engines)]
        self._operations: dict[str, Operation] = {}
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)
        self._socket = EventSocket(socket, self._receive)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        message = decode(frames[1:])
        answer: ControlMessage | None = None
        if isinstance(message, Hello):
            answer = HelloAck(incarnation=1, state=self.state)
        elif isinstance(message, Status):
            answer = self._status()
        elif isinstance(message, Control):
            answer = self._execute(message)
        if answer is not None:
            self._socket.send([frames[0], *answer.to_frames()])

    def _status(self) -> StatusReply:
        engines = [EngineStatus(name=name, state=self._engine_state, serving=True) for name in self._names]
        return StatusReply(incarnation=1, state=self.state, engines=engines, operations=list(self._operations.values()))

    def _execute(self, control: Control) -> ControlAck:
        header, count = Header(control.kind), len(self._names)
        transition = TRANSITIONS[header]
        self.state, self._engine_state = transition.coordinator_after, transition.lands_in
        operation_id = control.operation_id or ""
        self._operations[operation_id] = Operation(
            operation_id=operation_id, signal=header, phase="Confirmed", ranks=count, total_ranks=count
        )
        return ControlAck(operation_id=operation_id, ok=True, state=self.state, ranks=count, total_ranks=count)


class ReadyPods:
    """Reports every pod of a namespace as Ready until stop()."""

    def __init__(self, configuration: Configuration, *, namespace: str, folder: Path) -> None:
        self._configuration, self._namespace, self._folder = configuration, namespace, folder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._coordinators: list[FleetCoordinator] = []
        self._reports: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def address_template(self) -> str:
        """The value of --coordinator-address."""
        return f"ipc://{self._folder}/{{name}}.sock"

    def start(self) -> None:
        self._task = asyncio.create_task(self._play())

    async def stop(self) -> None:
        tasks = {*self._reports, *([self._task] if self._task is not None else ())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coordinator in self._coordinators:
            coordinator.close()
        self._context.term()

    def coordinator(self, name: str, *, engines: int) -> FleetCoordinator:
        address = self.address_template.format(name=name)
        made = FleetCoordinator(self._context, address, name=name, engines=engines)
        self._coordinators.append(made)
        return made

    async def _play(self) -> None:
        """Watch the pods, as a kubelet does: listing a thousand pods again and again would load the API server."""
        async with KubeApi(self._configuration) as api, ApiClient(self._configuration) as client:
            limit = asyncio.Semaphore(AT_ONCE)
            pods = CoreV1Api(client).list_namespaced_pod
            while True:
                watch = Watch(return_type="object")
                with contextlib.suppress(ApiException, ClientError):
                    async for event in watch.stream(pods, self._namespace, field_selector="status.phase=Pending"):
                        if event["type"] == "ADDED":
                            report = asyncio.create_task(self._report(api, limit, event["object"]))
                            self._reports.add(report)
                            report.add_done_callback(self._reports.discard)
                await asyncio.sleep(LOOK_SECONDS)

    async def _report(self, api: KubeApi, limit: asyncio.Semaphore, pod: Mapping[str, Any]) -> None:
        async with limit:
            if label_of(pod, LABEL_COMPONENT) == CHECK:
                await report_end(api, pod, code=0)
            else:
                await report_pod(api, pod, ready=True)
