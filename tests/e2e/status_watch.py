"""Compares what the status of a resource claims with what its processes answer, while the resource is disturbed.

The API server's watches deliver every status, pod and Event. Each pod's health port is probed every 0.2 s. A claim of
the status that contradicts the probes is a false claim; `StatusWatch` measures for how long each one lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from machine import scaled
from soak import size

from localcluster.kubectl import RESOURCE, Kubectl
from megatron_operator.resource.names import (
    COORDINATOR,
    ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_REVISION,
    SERVER,
    STANDBY,
)

LOOK_SECONDS = 0.2
PROBE_SECONDS = 1.0
FALSE_SECONDS = size(60.0, soak=5.0)
"""The longest time for which a status may be false. `make test` also runs on machines where others compute: there it
only shows that a status is corrected."""
HEALTH_PORT = 8080
WATCH_SECONDS = 7200
REPORTED = {"RUNNING", "PAUSED", "SUSPENDED"}
"""States in which an engine serves or can serve."""
LOSSES = {"Unresponsive", "Lost"}


class Probe(Enum):
    """Answer of a pod's `/readyz`."""

    READY = "ready"
    NOT_READY = "not ready"
    CLOSED = "the connection is refused"
    SILENT = "no answer"


@dataclass(frozen=True)
class Pod:
    """A pod and its last probe. leaving: it is being deleted."""

    component: str
    engine: str
    revision: str
    leaving: bool
    probe: Probe


def false_claims(status: Mapping[str, Any], pods: list[Pod], *, generates: bool = False) -> set[str]:
    """Return the claims of a status that contradict the pods.

    An engine that has no coordinator to register with is not ready, and counts as before.

    generates: tokens arrived since the last look.
    """
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}

    def claimed(kind: str) -> str:
        return str(conditions.get(kind, {}).get("status", "Unknown"))

    engines = [pod for pod in pods if pod.component == ENGINE]
    registered = {Probe.READY} if _answers(pods, COORDINATOR) else {Probe.READY, Probe.NOT_READY}
    answering = {pod.engine for pod in engines if pod.probe in registered}
    whole = answering - {pod.engine for pod in engines if pod.leaving or pod.probe not in registered}
    silent = {pod.engine for pod in engines if pod.probe is Probe.SILENT and not pod.leaving}
    coordinators = [pod.probe for pod in pods if pod.component == COORDINATOR and not pod.leaving]
    states = {entry["name"]: entry["state"] for entry in status.get("engines") or ()}
    state, counted = status.get("state"), status.get("readyReplicas", 0)
    updated = {engine for engine in answering if _revisions(engines, engine) == {status.get("revision")}}
    serving = claimed("Ready") == "True" and state not in ("Paused", "Suspended", "Stopped")
    found = {
        "state Running, and no engine answers": state == "Running" and not answering,
        "Ready, and no engine answers": serving and not answering,
        "Ready, and no server answers": serving and not _answers(pods, SERVER),
        "readyReplicas counts an engine that does not answer": counted > len(answering),
        "readyReplicas omits an engine that is ready": state == "Running" and counted < len(whole),
        "updatedReplicas counts an engine of another revision": status.get("updatedReplicas", 0)
        > len(updated | {engine.engine for engine in engines if engine.probe is not Probe.READY}),
        "EnginesReady, and an engine does not answer": claimed("EnginesReady") == "True"
        and len(answering) < int(status["ready"].partition("/")[2]),
        "CoordinatorReady, and no coordinator answers": claimed("CoordinatorReady") == "True"
        and not _answers(pods, COORDINATOR),
        "CoordinatorReady is False, and the coordinator answers": claimed("CoordinatorReady") == "False"
        and conditions["CoordinatorReady"]["reason"] != "CoordinatorRecovering"
        and Probe.READY in coordinators,
        "nothing is wrong, and an engine is silent": claimed("Degraded") == "False" and bool(silent),
        "an engine that does not answer has the state that it reported": any(
            states[name] in REPORTED for name in states.keys() - answering
        ),
        "a loss of an engine that is ready": any(states.get(name) in LOSSES for name in whole),
        f"state {state}, and tokens are generated": state in ("Paused", "Suspended", "Stopped") and generates,
    }
    return {claim for claim, is_false in found.items() if is_false}


def _answers(pods: list[Pod], component: str) -> bool:
    return any(pod.component == component and pod.probe is Probe.READY for pod in pods)


def _revisions(pods: list[Pod], engine: str) -> set[str]:
    return {pod.revision for pod in pods if pod.engine == engine and not pod.leaving}


@dataclass
class Record:
    """What the status claimed during one disturbance.

    longest:  longest time in seconds for which each false claim lasted.
    warnings: Warning Events about the resource, as "reason: message".
    degraded: reasons of the condition Degraded while it was True.
    """

    longest: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    degraded: dict[str, str] = field(default_factory=dict)

    def cells(self) -> str:
        """Return the cells of a row: longest false claim in seconds, reasons of Degraded."""
        return f"{max(self.longest.values(), default=0.0):.1f} s | {', '.join(sorted(self.degraded)) or '-'} |"

    def faults(self, *, degraded: frozenset[str] | None, absent_seconds: float = 0.0) -> list[str]:
        """Return the claims that were false for too long, and unexpected errors.

        degraded:       the expected reasons; None: any.
        absent_seconds: the longest time without an operator that leads.
        """
        limit = scaled(FALSE_SECONDS + absent_seconds)
        found = [f"false for {seconds:.1f} s: {claim}" for claim, seconds in self.longest.items() if seconds > limit]
        if degraded is not None:
            found += [f"Degraded: {reason}: {text}" for reason, text in self.degraded.items() if reason not in degraded]
            found += [warning for warning in self.warnings if warning.partition(":")[0] not in degraded]
        return found


def heading(table: str) -> str:
    """Return the heading of a Markdown table with the columns of `Record.cells`."""
    names, rule = table.splitlines()
    return f"{names} longest false claim | Degraded |\n{rule}---|---|"


class StatusWatch:
    """Watches one resource, its pods and its Events. Use as a context manager.

    last_token: returns the time, on the monotonic clock, when the client received its last token.
    """

    def __init__(self, kube: Kubectl, name: str, *, last_token: Callable[[], float] = lambda: 0.0) -> None:
        self._kube, self._name, self._last_token = kube, name, last_token
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._pods: dict[str, dict[str, Any]] = {}
        self._probes: dict[str, Probe] = {}
        self._since: dict[str, float] = {}
        self._record = Record()
        self._watches: dict[str, subprocess.Popen[str]] = {}
        self._events: set[tuple[str, str]] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def __enter__(self) -> StatusWatch:
        namespaced = f"namespaces/{self._kube.namespace}"
        group = f"/apis/inference.megatron.dev/v1beta1/{namespaced}/{RESOURCE.partition('.')[0]}"
        self._watch(f"{group}?fieldSelector=metadata.name%3D{self._name}", self._take_resource)
        self._watch(
            f"/api/v1/{namespaced}/pods?labelSelector=app.kubernetes.io%2Finstance%3D{self._name}", self._take_pod
        )
        self._watch(f"/api/v1/{namespaced}/events?fieldSelector=involvedObject.name%3D{self._name}", self._take_event)
        self._start(lambda: asyncio.run(self._look()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for watch in self._watches.values():
            watch.terminate()
        for thread in self._threads:
            thread.join(scaled(10))

    @contextlib.contextmanager
    def during(self) -> Iterator[Record]:
        """Record what happens in the block."""
        with self._lock:
            record = self._record = Record()
            self._since = dict.fromkeys(self._since, time.monotonic())
        yield record
        assert all(thread.is_alive() for thread in self._threads), "a watch has failed"
        with self._lock:
            assert self._status, "no status was received"
            self._record = Record()

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _watch(self, path: str, take: Callable[[str, dict[str, Any]], None]) -> None:
        # Version 0 is any version that the API server has cached. Without it, the API server would first wait until its
        # cache is as new as etcd, which on an idle cluster takes longer than the timeout of this wait.
        options = f"watch=1&resourceVersion=0&timeoutSeconds={WATCH_SECONDS}"
        command = self._kube.command("get", "--raw", f"{path}&{options}")

        def read() -> None:
            # The API server ends a watch with an error while it catches up with its store.
            while not self._stop.is_set():
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._kube.environment) as watch:
                    self._watches[path] = watch
                    assert watch.stdout is not None
                    for line in watch.stdout:
                        if self._stop.is_set():  # the line may be cut
                            break
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        with self._lock:
                            take(event["type"], event["object"])
                    watch.terminate()
                self._stop.wait(LOOK_SECONDS)

        self._start(read)

    def _take_resource(self, _: str, resource: dict[str, Any]) -> None:
        self._status = resource.get("status") or {}
        for entry in self._status.get("conditions") or ():
            if entry["type"] == "Degraded" and entry["status"] == "True":
                self._record.degraded[entry["reason"]] = entry["message"]

    def _take_pod(self, kind: str, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        if kind == "DELETED" or pod["status"].get("phase") in ("Succeeded", "Failed"):
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = pod

    def _take_event(self, kind: str, event: dict[str, Any]) -> None:
        version = (event["metadata"]["uid"], event["metadata"]["resourceVersion"])
        about_resource = event["type"] == "Warning" and event["involvedObject"]["kind"] == "MegatronInference"
        if kind != "DELETED" and about_resource and version not in self._events:
            self._events.add(version)
            self._record.warnings.append(f"{event['reason']}: {event['message']}")

    async def _look(self) -> None:
        probing: set[str] = set()
        tasks: set[asyncio.Task[None]] = set()

        async def probe(uid: str, address: str) -> None:
            self._probes[uid] = await _probed(address)
            probing.discard(uid)

        while not self._stop.is_set():
            with self._lock:
                addresses = {uid: pod["status"].get("podIP") for uid, pod in self._pods.items()}
                self._judge()
            for uid, address in addresses.items():
                if address and uid not in probing:
                    probing.add(uid)
                    tasks.add(task := asyncio.create_task(probe(uid, address)))
                    task.add_done_callback(tasks.discard)
            await asyncio.sleep(LOOK_SECONDS)

    def _judge(self) -> None:
        now = time.monotonic()
        pods = [_pod(pod, self._probes.get(uid, Probe.CLOSED)) for uid, pod in self._pods.items()]
        claims = false_claims(self._status, pods, generates=now - self._last_token() < LOOK_SECONDS)
        self._since = {claim: self._since.get(claim, now) for claim in claims}
        for claim, since in self._since.items():
            self._record.longest[claim] = max(self._record.longest.get(claim, 0.0), now - since)


def _pod(pod: Mapping[str, Any], probe: Probe) -> Pod:
    """A standby counts as a coordinator: either of the two may be the active one."""
    labels = pod["metadata"]["labels"]
    component = labels.get(LABEL_COMPONENT, "")
    return Pod(
        component=COORDINATOR if component == STANDBY else component,
        engine=labels.get(LABEL_ENGINE, ""),
        revision=labels.get(LABEL_REVISION, ""),
        leaving="deletionTimestamp" in pod["metadata"],
        probe=probe,
    )


async def _probed(address: str) -> Probe:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(address, HEALTH_PORT)
            try:
                writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
                status = (await reader.readline()).split()
            finally:
                writer.close()
    except TimeoutError:
        return Probe.SILENT
    except OSError:
        return Probe.CLOSED
    if len(status) < 2:
        return Probe.CLOSED
    return Probe.READY if status[1] == b"200" else Probe.NOT_READY
