"""A fake kubelet: it watches pods and writes their status. It does not schedule, pull images or enforce limits.

Subclasses run the pods: `fake_node.py` as processes, `in_process_fleet.py` in the test process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.kinds import CHILD_SELECTOR, POD
from megatron_operator.cluster.watching import stream

LOOK_SECONDS = 0.15
WATCH_SECONDS = 30
AT_ONCE = 16
"""Statuses that are written at once."""


@dataclass(frozen=True, kw_only=True)
class PodState:
    """What a kubelet reports of a pod with one container.

    waiting:   reason for which its crashed container waits.
    exit_code: of a pod that has ended; None: it runs.
    message:   its log or termination message.
    restarts:  number of times that its container was restarted after SIGKILL.
    """

    ready: bool = True
    waiting: str = ""
    exit_code: int | None = None
    message: str = ""
    restarts: int = 0


class FakeKubelet(ABC):
    """Plays the operator's pods in one namespace from start() to stop()."""

    def __init__(self, api: KubeApi, *, namespace: str, folder: Path) -> None:
        self._api, self._namespace, self._folder = api, namespace, folder
        self._pods: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, PodState] = {}
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    async def run_pods(self, pods: Mapping[str, Mapping[str, Any]]) -> None:
        """Start and end what runs in the pods. pods: by UID."""

    @abstractmethod
    async def state(self, pod: Mapping[str, Any]) -> PodState | None:
        """Return the state of a pod; None: there is nothing to report."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Raises the error that has ended it, if any."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._play())

    async def _watch(self) -> None:
        """Keep `_pods` up to date. Lists of many pods again and again would load the API server."""
        path, selector = POD.path(self._namespace), {"labelSelector": CHILD_SELECTOR}
        while True:
            with contextlib.suppress(KubeApiError):
                page = await self._api.request("GET", path, query=selector)
                self._pods = {uid_of(pod): pod for pod in page["items"]}
                version = page["metadata"]["resourceVersion"]
                query = {**selector, "watch": "true", "resourceVersion": version, "timeoutSeconds": WATCH_SECONDS}
                async with stream(self._api, path, query=query, silence_seconds=2 * WATCH_SECONDS) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        if event["type"] == "DELETED":
                            self._pods.pop(uid_of(event["object"]), None)
                        else:
                            self._pods[uid_of(event["object"])] = event["object"]
            await asyncio.sleep(LOOK_SECONDS)

    async def _play(self) -> None:
        while True:
            with contextlib.suppress(KubeApiError):
                pods = dict(self._pods)
                await self.run_pods(pods)
                changed = []
                for pod in pods.values():
                    now = await self.state(pod)
                    if now is not None and now != self._reported.get(uid_of(pod)):
                        changed.append((pod, now))
                for first in range(0, len(changed), AT_ONCE):
                    await asyncio.gather(*(self._report(*entry) for entry in changed[first : first + AT_ONCE]))
            await asyncio.sleep(LOOK_SECONDS)

    async def _report(self, pod: Mapping[str, Any], now: PodState) -> None:
        metadata, uid = pod["metadata"], uid_of(pod)
        with contextlib.suppress(KubeApiError):
            await self._api.request(
                "PATCH",
                POD.path(metadata["namespace"], metadata["name"], subresource="status"),
                body={"metadata": {"uid": uid}, "status": status_of(pod, now)},
                content_type="application/merge-patch+json",
            )
            self._reported[uid] = now


def status_of(pod: Mapping[str, Any], now: PodState) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": pod["spec"]["containers"][0]["name"],
        "image": "fake",
        "imageID": "fake",
        "restartCount": now.restarts,
        "ready": now.ready,
        "state": {"running": {"startedAt": None}},
    }
    phase = "Running"
    if now.exit_code is not None:
        phase, reason = ("Failed", "Error") if now.exit_code else ("Succeeded", "Completed")
        ended = {"exitCode": now.exit_code, "reason": reason, "message": now.message[-2000:]}
        container |= {"ready": False, "state": {"terminated": {**ended, "containerID": "fake://1"}}}
    elif now.waiting:
        crash = {"exitCode": 3, "reason": "Error", "message": "cannot start", "containerID": "fake://1"}
        container |= {
            "restartCount": 3,
            "state": {"waiting": {"reason": now.waiting}},
            "lastState": {"terminated": crash},
        }
    elif now.restarts:
        killed = {"exitCode": 137, "reason": "Error", "containerID": f"fake://{now.restarts}"}
        container["lastState"] = {"terminated": killed}
    ready = {"type": "Ready", "status": str(bool(container["ready"]))}
    return {"phase": phase, "conditions": [ready], "containerStatuses": [container]}


def write_keys(secret: Mapping[str, Any], folder: Path) -> None:
    """Write the entries of a Secret that have changed to a folder, as a kubelet mounts it."""
    folder.mkdir(exist_ok=True)
    for entry, text in secret["data"].items():
        path, content = folder / entry, base64.b64decode(text)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def uid_of(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def label_of(pod: Mapping[str, Any], label: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(label, ""))
