"""Interleaves the logs of the pods of a resource, for `kubectl megatron logs`."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_kubectl.proxy import ClusterError, rejection
from megatron_kubectl.resource_client import WATCH_SECONDS, ResourceClient
from megatron_kubectl.resource_view import Object, label
from megatron_operator.cluster.kinds import POD
from megatron_operator.resource.names import (
    COORDINATOR,
    ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_INSTANCE,
    SERVER,
    STANDBY,
)

COMPONENTS = (COORDINATOR, SERVER, ENGINE)
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """One line of a log. at: time at which the kubelet received the line, in RFC 3339 format."""

    at: str
    pod: str
    text: str


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of a resource's pods.

    component: None means all components.
    engine:    name of an engine; None means all engines.
    """

    resource: str
    component: str | None = None
    engine: str | None = None

    def has(self, pod: Mapping[str, Any]) -> bool:
        component = _component(pod)
        if component not in COMPONENTS or self.component not in (None, component):
            return False
        return self.engine in (None, label(pod, LABEL_ENGINE))


def _component(pod: Mapping[str, Any]) -> str:
    component = label(pod, LABEL_COMPONENT)
    return COORDINATOR if component == STANDBY else component


def _states(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the status of the pod's main container. Yields nothing if the pod does not report this status.

    The main container has the name of the component.
    """
    for state in (pod.get("status") or {}).get("containerStatuses") or ():
        if state["name"] == _component(pod):
            yield state


def selected_pods(client: ResourceClient, selection: Selection) -> list[Object]:
    """Return the selected pods, sorted by name.

    Raises:
        ClusterError: no pod matches the selection; the message names the existing pods.
    """
    known = client.pods(selection.resource)
    matching = sorted(filter(selection.has, known), key=lambda pod: str(pod["metadata"]["name"]))
    if not matching:
        client.get(selection.resource)
        names = ", ".join(sorted(pod["metadata"]["name"] for pod in known)) or "none"
        wanted = f"engine {selection.engine}" if selection.engine else selection.component or "any component"
        raise ClusterError(f"{client.namespace}/{selection.resource}: no pod of {wanted}; its pods: {names}")
    return matching


def read_log(
    client: ResourceClient, pod: Mapping[str, Any], *, follow: bool, tail: int | None, previous: bool
) -> Iterator[Line]:
    """Yield the lines of the main container's log. Raises ClusterError.

    follow:   continue with new lines until the container ends.
    tail:     number of lines from the end of the log; None means all lines.
    previous: read the log of the container's previous instance.
    """
    name = pod["metadata"]["name"]
    query = {
        "container": _component(pod),
        "timestamps": "true",
        "tailLines": tail,
        "follow": "true" if follow else None,
        "previous": "true" if previous else None,
    }
    path = POD.path(client.namespace, name, subresource="log")
    with client.api.open("GET", path, query=query, seconds=None if follow else 60) as answer:
        if answer.status != 200:
            raise rejection(answer.status, answer.read(), about=f"log of pod {name}")
        for raw in answer:
            at, _, text = raw.decode(errors="replace").rstrip("\n").partition(" ")
            yield Line(at, name, text)


def merged(
    client: ResourceClient, pods: Sequence[Mapping[str, Any]], *, tail: int | None, previous: bool, errors: list[str]
) -> Iterator[Line]:
    """Yield the existing lines of all logs in chronological order.

    For each log that cannot be read, append an error to `errors`.
    """

    def lines(pod: Mapping[str, Any]) -> Iterator[Line]:
        try:
            yield from read_log(client, pod, follow=False, tail=tail, previous=previous)
        except ClusterError as error:
            errors.append(str(error))

    # There is one open connection per pod, and no log is kept in memory.
    yield from heapq.merge(*map(lines, pods), key=lambda line: line.at)


class LogFollower:
    """A follower of the logs of the selected pods, including containers that start later."""

    def __init__(self, client: ResourceClient, selection: Selection, *, tail: int | None) -> None:
        self._client = client
        self._selection = selection
        self._tail = tail
        self._lines: queue.Queue[Line | ClusterError] = queue.Queue(maxsize=10_000)
        self._followed: set[str] = set()

    def lines(self) -> Iterator[Line]:
        """Yield lines as they arrive. The generator never ends. Raises ClusterError."""
        threading.Thread(target=self._guard, args=(self._watch,), daemon=True).start()
        while True:
            line = self._lines.get()
            if isinstance(line, ClusterError):
                raise line
            yield line

    def _guard(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except ClusterError as error:
            self._lines.put(error)

    def _watch(self) -> None:
        """Find the selected containers, and follow each of them once. This method never returns.

        For a container that already runs, begin with the last lines of its log. For a container that starts later,
        begin with the first line.
        """
        path = POD.path(self._client.namespace)
        selector = f"{LABEL_INSTANCE}={self._selection.resource}"
        tail = self._tail
        while True:
            page = self._client.api.request("GET", path, query={"labelSelector": selector}, about="pods")
            for pod in page["items"]:
                self._take(pod, tail)
            tail = None
            version = page["metadata"]["resourceVersion"]
            begun = time.monotonic()
            for event in self._client.watch(path, version=version, seconds=WATCH_SECONDS, labelSelector=selector):
                if event["type"] in ("ADDED", "MODIFIED"):
                    self._take(event["object"], None)
                elif event["type"] == "ERROR":
                    break
            if time.monotonic() - begun < RETRY_SECONDS:
                time.sleep(RETRY_SECONDS)

    def _take(self, pod: Object, tail: int | None) -> None:
        if not self._selection.has(pod):
            return
        for state in _states(pod):
            container = state.get("containerID")
            if container and container not in self._followed:
                self._followed.add(container)
                threading.Thread(target=self._guard, args=(self._read, pod, tail), daemon=True).start()

    def _read(self, pod: Object, tail: int | None) -> None:
        try:
            for line in read_log(self._client, pod, follow=True, tail=tail, previous=False):
                self._lines.put(line)
        except ClusterError as error:
            if error.code in (401, 403):
                raise
            # The container has ended. If another container replaces it, the watch follows the new container.
