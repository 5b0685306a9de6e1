"""A fake kubelet for many resources: a real coordinator for each in this process, and scripted engines as pods.

Coordinator and server pods are Ready as soon as they exist. An engine pod is Ready when its scripted engine has
registered, one engine for all pods of a StatefulSet. Check pods succeed. Coordinators listen on Unix sockets in a
folder. A test starts them without keys, or with `secure` each starts with its pod and the keys of the Secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from control_link import ControlLink
from coordinator_tables import check_tables
from scripted_engine import ScriptedEngine

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import SECRET
from megatron_operator.resource.names import (
    CHECK,
    COORDINATOR,
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
from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.transport.security import PeerKeys

from .fake_kubelet import FakeKubelet, PodState, label_of, write_keys

TIMING = Timing(heartbeat=20.0, recovery=0.0, suspect=60.0, dead=120.0, client_dead=120.0, key_check=3600.0)
"""Long enough that a loaded machine loses no engine, and that hundreds of idle coordinators cost no measurable time."""


class InProcessFleet(FakeKubelet):
    """Runs pods in this process."""

    def __init__(self, api: KubeApi, *, namespace: str, folder: Path) -> None:
        self.breaks: Callable[[Mapping[str, Any]], bool] = lambda pod: False
        """Returns whether the engine crashes in this pod."""
        self.secure = False
        super().__init__(api, namespace=namespace, folder=folder)
        self._coordinators: dict[str, Coordinator] = {}
        self._engines: dict[str, ScriptedEngine] = {}

    @property
    def address_template(self) -> str:
        """The value of --coordinator-address."""
        return f"ipc://{self._folder}/{{name}}.sock"

    async def stop(self) -> None:
        await super().stop()
        for engine in self._engines.values():
            engine.close()
        for coordinator in self._coordinators.values():
            check_tables(coordinator.core)
            coordinator.stop()

    def coordinator(self, name: str, *, keys: Path | None = None) -> Coordinator:
        """Start the coordinator of a resource. It runs until stop(), whatever happens to its pod."""
        ports = {"client_port": 0, "engine_port": 0, "admin_port": 0}
        made = Coordinator(CoordinatorSettings(listen="127.0.0.1", **ports, timing=TIMING, keys_dir=keys))
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

    async def run_pods(self, pods: Mapping[str, Mapping[str, Any]]) -> None:
        engines = {uid: pod for uid, pod in pods.items() if label_of(pod, LABEL_COMPONENT) == ENGINE}
        serving = {uid: pod for uid, pod in engines.items() if not _leaving(pod) and not self.breaks(pod)}
        for pod in pods.values() if self.secure else ():
            name = label_of(pod, LABEL_INSTANCE)
            if label_of(pod, LABEL_COMPONENT) == COORDINATOR and name not in self._coordinators:
                secret = await self._api.get(SECRET, self._namespace, f"{name}-keys")
                assert secret is not None, f"a pod of {name} was made before its keys"
                write_keys(secret, self._keys(name))
                self.coordinator(name, keys=self._keys(name))
        for uid in [uid for uid in self._engines if uid not in serving]:
            self._engines.pop(uid).leave()
        for uid, pod in serving.items():
            coordinator = self._coordinators.get(label_of(pod, LABEL_INSTANCE))
            if coordinator is not None and uid not in self._engines and label_of(pod, LABEL_POD_INDEX) == "0":
                self._engines[uid] = await ScriptedEngine(
                    coordinator.transport.addresses[Role.ENGINE],
                    name=label_of(pod, LABEL_ENGINE),
                    revision=label_of(pod, LABEL_REVISION),
                    heartbeat_seconds=TIMING.heartbeat,
                    keys=PeerKeys.load(self._keys(label_of(pod, LABEL_INSTANCE)), Role.ENGINE) if self.secure else None,
                    log_prob=-0.5,  # a canary requests them
                ).start()

    def _keys(self, name: str) -> Path:
        return self._folder / f"{name}-keys"

    async def state(self, pod: Mapping[str, Any]) -> PodState | None:
        component = label_of(pod, LABEL_COMPONENT)
        if _leaving(pod):
            return None
        if component == CHECK:
            return PodState(exit_code=0)
        if component == ENGINE and self.breaks(pod):
            return PodState(ready=False, waiting="CrashLoopBackOff")
        return PodState(ready=component != ENGINE or label_of(pod, LABEL_INSTANCE) in self._coordinators)


def _leaving(pod: Mapping[str, Any]) -> bool:
    return pod["metadata"].get("deletionTimestamp") is not None
