"""Reads the data that the dashboard shows about a resource, and updates the data by watches.

A `ResourceObserver` exists while a page shows its resource, and for 15 minutes afterwards. If a page returns to the
resource within this time, its charts have no gap.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

from megatron_kubectl.resource_view import is_settled, label, summary
from megatron_kubectl.samples import (
    INTERVAL_SECONDS,
    MAX_SAMPLES,
    UNREACHABLE,
    WINDOW_SECONDS,
    PodMetrics,
    Sample,
    metrics_key,
    parse_page,
    sample_pods,
)
from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.kinds import POD, RESOURCE, ObjectKind
from megatron_operator.cluster.read import problem_of_operators
from megatron_operator.cluster.watching import stream, watch
from megatron_operator.explain import causes
from megatron_operator.resource.names import KIND, LABEL_COMPONENT, LABEL_INSTANCE, PORT_HEALTH
from megatron_operator.terminal import as_yaml

CORE_EVENT = ObjectKind("Event", "", "v1", "events")
"""The kind of Events in the core API. The ClusterRoles view, edit and admin allow reading Events only through this
API.
"""
EXPLAIN_SECONDS = 0.3
"""Minimum seconds between two computations of the explanation."""
METRICS_TIMEOUT_SECONDS = 5.0
MAX_PAGE_BYTES = 4 << 20
"""Maximum number of bytes of a metrics page that are read."""


def detail(resource: Mapping[str, Any]) -> Object:
    """Return the data of one resource for its page. The field `specText` is the spec as YAML, for the editor."""
    spec = dict(resource.get("spec") or {})
    return {
        **summary(resource),
        "generation": resource["metadata"].get("generation"),
        "settled": is_settled(resource),
        "replicas": spec.get("replicas", 1),
        "status": resource.get("status") or {},
        "specText": as_yaml([spec]),
    }


def _event(event: Mapping[str, Any]) -> Object:
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("eventTime") or event.get("lastTimestamp")
    return {
        "at": at or event["metadata"].get("creationTimestamp"),
        "type": event.get("type", "Normal"),
        "reason": event.get("reason", ""),
        "note": event.get("message", ""),
        "count": series.get("count") or event.get("count") or 1,
    }


def _pod(pod: Mapping[str, Any]) -> Object:
    containers = [entry["name"] for entry in (pod.get("spec") or {}).get("containers") or ()]
    status = pod.get("status") or {}
    return {
        "name": pod["metadata"]["name"],
        "component": label(pod, LABEL_COMPONENT),
        "phase": status.get("phase", ""),
        "containers": containers,
    }


class ResourceObserver:
    """An observer of one resource, which keeps the data for the resource's page up to date.

    parts:  the shown data, by part: resource, events, pods and explain.
    errors: reasons why data cannot be read, by part. In addition to the parts above, `metrics` can have an error.
    """

    def __init__(self, api: KubeApi, namespace: str, name: str, *, interval: float = INTERVAL_SECONDS) -> None:
        self.namespace, self.name = namespace, name
        self.parts: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.sampled = 0
        """Total number of samples."""
        self.viewers = 0
        self.left = time.monotonic()
        """Time when the last viewer disconnected."""
        self._api = api
        self._interval = interval
        self._resource: Object | None = None
        self._pods: dict[str, Object] = {}
        self._changed = asyncio.Condition()
        self._explainable = asyncio.Event()
        self._pods_known = asyncio.Event()
        self._before: dict[str, PodMetrics] = {}
        self._before_at = 0.0
        own = f"metadata.name={name}"
        about = f"involvedObject.kind={KIND},involvedObject.name={name}"
        selector = f"{LABEL_INSTANCE}={name}"
        self._tasks = [
            asyncio.create_task(each)
            for each in (
                self._follow("resource", RESOURCE.path(namespace), {"fieldSelector": own}, self._show_resource),
                self._follow("events", CORE_EVENT.path(namespace), {"fieldSelector": about}, self._show_events),
                self._follow("pods", POD.path(namespace), {"labelSelector": selector}, self._show_pods),
                self._explain(),
                self._sample(),
            )
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_unused(self) -> bool:
        return not self.viewers and time.monotonic() - self.left > WINDOW_SECONDS

    def has_pod(self, pod: str) -> bool:
        return pod in self._pods

    async def frames(self) -> AsyncGenerator[Object]:
        """Yield each part of the page's data as `{"part": ..., "value": ...}`. When a part changes, yield it again.

        The generator never ends.
        """
        self.viewers += 1
        sent: dict[str, Any] = {"samples": 0}
        try:
            while True:
                for part, value in {**self.parts, "errors": dict(self.errors)}.items():
                    if part not in sent or sent[part] != value:
                        sent[part] = value
                        yield {"part": part, "value": value}
                fresh = min(self.sampled - sent["samples"], len(self.samples))
                if fresh:
                    sent["samples"] = self.sampled
                    yield {"part": "samples", "value": [each.as_json() for each in list(self.samples)[-fresh:]]}
                async with self._changed:
                    await self._changed.wait_for(lambda: self._differs(sent))
        finally:
            self.viewers -= 1
            self.left = time.monotonic()

    def _differs(self, sent: Mapping[str, Any]) -> bool:
        if self.sampled != sent["samples"] or self.errors != sent["errors"]:
            return True
        return any(part not in sent or sent[part] != value for part, value in self.parts.items())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _follow(
        self, part: str, path: str, query: Mapping[str, Any], show: Callable[[dict[str, Object]], None]
    ) -> None:
        objects: dict[str, Object] = {}
        async for change in watch(self._api, path, query):
            if change.error is not None:
                self.errors[part] = str(change.error)
            else:
                self.errors.pop(part, None)
                if change.kind == "set":
                    objects = {}
                for each in change.objects:
                    if change.kind == "delete":
                        objects.pop(each["metadata"]["name"], None)
                    else:
                        objects[each["metadata"]["name"]] = each
                show(objects)
            await self._notify()

    def _show_resource(self, objects: dict[str, Object]) -> None:
        self._resource = objects.get(self.name)
        self.parts["resource"] = None if self._resource is None else detail(self._resource)
        self._explainable.set()

    def _show_events(self, objects: dict[str, Object]) -> None:
        self.parts["events"] = sorted(map(_event, objects.values()), key=lambda event: str(event["at"]))

    def _show_pods(self, objects: dict[str, Object]) -> None:
        self._pods = dict(objects)
        order = sorted(objects.values(), key=lambda pod: (label(pod, LABEL_COMPONENT), pod["metadata"]["name"]))
        self.parts["pods"] = [_pod(pod) for pod in order]
        self._pods_known.set()
        self._explainable.set()

    async def _explain(self) -> None:
        while True:
            await self._explainable.wait()
            self._explainable.clear()
            resource = self._resource
            if resource is not None:
                try:
                    problem = await problem_of_operators(self._api, self.namespace)
                    self.parts["explain"] = causes(resource, list(self._pods.values()), problem)
                    self.errors.pop("explain", None)
                except KubeApiError as error:
                    self.errors["explain"] = str(error)
                await self._notify()
            await asyncio.sleep(EXPLAIN_SECONDS)

    async def _sample(self) -> None:
        await self._pods_known.wait()
        while True:
            begun = time.monotonic()
            await self._take_sample()
            await asyncio.sleep(max(0.0, self._interval - (time.monotonic() - begun)))

    async def _take_sample(self) -> None:
        """Read the metrics of all running pods through the API server, and append a sample to the charts' data."""
        wanted = {name: pod for name, pod in self._pods.items() if (pod.get("status") or {}).get("phase") == "Running"}
        pods = {name: key for name, pod in wanted.items() if (key := metrics_key(pod)) is not None}
        pages: dict[str, PodMetrics] = {}
        errors: list[str] = []

        async def read(pod: str) -> None:
            try:
                pages[pod] = await self._metrics(pod)
            except KubeApiError as error:
                errors.append(f"{pod}: {error}" + (f"; {UNREACHABLE}" if error.code == 0 or error.code >= 500 else ""))
            except ValueError as error:
                errors.append(f"{pod}: {error}")

        at, now = time.time(), time.monotonic()
        await asyncio.gather(*map(read, pods))
        if errors:
            self.errors["metrics"] = min(errors)
        else:
            self.errors.pop("metrics", None)
        if pages:
            seconds = now - self._before_at
            taken, self._before = sample_pods(at=at, seconds=seconds, before=self._before, pods=pods, pages=pages)
            self._before_at = now
            self.samples.append(taken)
            self.sampled += 1
        await self._notify()

    async def _metrics(self, pod: str) -> PodMetrics:
        path = POD.path(self.namespace, f"{pod}:{PORT_HEALTH}", subresource="proxy/metrics")
        text = b""
        async with stream(self._api, path, query={}, silence_seconds=METRICS_TIMEOUT_SECONDS) as answer:
            while len(text) < MAX_PAGE_BYTES and (chunk := await answer.content.readany()):
                text += chunk
        return parse_page(text.decode())


class Observers:
    """The observers of all resources that a page shows or has shown within the last 15 minutes."""

    def __init__(self, api: KubeApi, *, interval: float = INTERVAL_SECONDS) -> None:
        self._api = api
        self._interval = interval
        self._found: dict[tuple[str, str], ResourceObserver] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, namespace: str, name: str) -> ResourceObserver:
        """Return the observer of a resource, whether or not the resource exists."""
        for key in [key for key, each in self._found.items() if each.is_unused]:
            self._later(self._found.pop(key).close())
        if (namespace, name) not in self._found:
            self._found[namespace, name] = ResourceObserver(self._api, namespace, name, interval=self._interval)
        return self._found[namespace, name]

    def _later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._found.values()), *self._closing)
        self._found.clear()
