"""A fake kubelet for many resources: a real coordinator for each in this process, and scripted engines as pods.

Coordinator and server pods are Ready as soon as they exist. An engine pod is Ready when its scripted engine has
registered, one engine for all pods of a StatefulSet. Check pods succeed. Coordinators listen on Unix sockets in a
folder, without keys. It starts no processes; `fake_node.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control_link import ControlLink
from coordinator_tables import check_tables
from scripted_engine import ScriptedEngine

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.kinds import POD
from megatron_operator.resource.names import (
    CHECK,
    ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_INSTANCE,
    LABEL_POD_INDEX,
    LABEL_REVISION,
)
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Final, StatusReply, pack, tokens_to_bytes

from .fake_node import label_of, report_end, report_pod

LOOK_SECONDS = 0.2
AT_ONCE = 16
TIMING = Timing(recovery=0.0, suspect=30.0, dead=120.0, client_dead=120.0)
"""Long enough that a loaded machine loses no engine."""


class EngineWithLogProbs(ScriptedEngine):
    """Returns log-probabilities, which a canary requests."""

    def finish(self, number: int) -> None:
        job = self.jobs.pop(number)
        log_probs = [-0.5] * len(job.generated)
        reply = {"status": "COMPLETED", "finish_reason": "length", "prompt_length": len(job.prompt)}
        tokens = tokens_to_bytes(job.generated)
        self.send(Final(number, job.dispatch.uid, tokens, pack({**reply, "generated_log_probs": log_probs})))


class InProcessFleet:
    """Plays the pods of one namespace until stop()."""

    def __init__(self, api: KubeApi, *, namespace: str, folder: Path) -> None:
        self.breaks: Callable[[Mapping[str, Any]], bool] = lambda pod: False
        """Returns whether the engine crashes in this pod."""
        self._api, self._namespace, self._folder = api, namespace, folder
        self._coordinators: dict[str, Coordinator] = {}
        self._engines: dict[str, EngineWithLogProbs] = {}
        self._reported: dict[str, tuple[bool, str]] = {}
        self._player: asyncio.Task[None] | None = None

    @property
    def address_template(self) -> str:
        """The value of --coordinator-address."""
        return f"ipc://{self._folder}/{{name}}.sock"

    def start(self) -> None:
        self._player = asyncio.create_task(self._play())

    async def stop(self) -> None:
        if self._player is not None:
            self._player.cancel()
            await asyncio.gather(self._player, return_exceptions=True)
        for engine in self._engines.values():
            engine.close()
        for coordinator in self._coordinators.values():
            check_tables(coordinator.core)
            coordinator.stop()

    def coordinator(self, name: str) -> Coordinator:
        """Start the coordinator of a resource. It runs until stop(), whatever happens to its pod."""
        made = Coordinator(
            CoordinatorSettings(listen="127.0.0.1", client_port=0, engine_port=0, admin_port=0, timing=TIMING)
        )
        made.start()
        made.transport.router(int(Role.ADMIN)).bind_path(self._folder / f"{name}.sock")
        self._coordinators[name] = made
        return made

    async def ask(self, name: str) -> StatusReply:
        """Return the status of a resource's coordinator."""
        link = ControlLink(self._coordinators[name].transport.addresses[Role.ADMIN], name="test")
        await link.start()
        try:
            return await link.status(timeout_seconds=30)
        finally:
            link.close()

    async def _play(self) -> None:
        while True:
            with contextlib.suppress(KubeApiError):
                await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in await self._api.list(POD, self._namespace)}
        for uid in [uid for uid in self._engines if uid not in pods or _leaving(pods[uid])]:
            self._engines.pop(uid).leave()
        changed = []
        for uid, pod in pods.items():
            if not _leaving(pod) and (now := await self._readiness(uid, pod)) != self._reported.get(uid):
                changed.append((uid, pod, now))
        for start in range(0, len(changed), AT_ONCE):
            await asyncio.gather(*(self._report(*entry) for entry in changed[start : start + AT_ONCE]))

    async def _readiness(self, uid: str, pod: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether the pod is ready, and the reason that its container is waiting."""
        if label_of(pod, LABEL_COMPONENT) != ENGINE:
            return True, ""
        instance = label_of(pod, LABEL_INSTANCE)
        if self.breaks(pod):
            if uid in self._engines:
                self._engines.pop(uid).leave()
            return False, "CrashLoopBackOff"
        if instance not in self._coordinators:
            return False, ""
        if uid not in self._engines and label_of(pod, LABEL_POD_INDEX) == "0":
            address = self._coordinators[instance].transport.addresses[Role.ENGINE]
            name, revision = label_of(pod, LABEL_ENGINE), label_of(pod, LABEL_REVISION)
            engine = EngineWithLogProbs(address, name=name, revision=revision, heartbeat_seconds=1.0)
            self._engines[uid] = engine
            await engine.start()
        return True, ""

    async def _report(self, uid: str, pod: Mapping[str, Any], now: tuple[bool, str]) -> None:
        with contextlib.suppress(KubeApiError):
            if label_of(pod, LABEL_COMPONENT) == CHECK:
                await report_end(self._api, pod, code=0)
            else:
                await report_pod(self._api, pod, ready=now[0], waiting=now[1])
            self._reported[uid] = now


def _leaving(pod: Mapping[str, Any]) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None
