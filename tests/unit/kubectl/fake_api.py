"""A fake API server: lists, watches, patches, pod logs and metrics pages of resources in memory, over HTTP.

The status of each resource comes from the operator's own decisions (`in_memory_cluster`), so an action passes through
the same steps as in a cluster. A test can deny requests, break watches and hold the confirmation of ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from in_memory_cluster import Cluster

from megatron_operator.resource.names import ANNOTATION_RESTARTED, API_VERSION, GROUP, KIND, PLURAL, VERSION

PASS_SECONDS = 0.15
LOG_LINE_SECONDS = 0.3
RESOURCES = f"/apis/{GROUP}/{VERSION}"
PODS = "/api/v1"
TTFT_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.25, 0.5)
ITL_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04)


class FakeApi:
    """Serves `clusters`, one resource each in the namespace `default`.

    denied: parts of paths that are answered with 403, each with the verbs GET or PATCH, as `GET /pods`.
    holds:  only one rank confirms an operation.
    """

    def __init__(self, *clusters: Cluster) -> None:
        self.clusters = {each.name: each for each in clusters}
        self.denied: set[str] = set()
        self.blocked: set[str] = set()
        """Parts of paths of the proxy whose pods the API server does not reach."""
        self.holds = False
        self.expired: Counter[str] = Counter()
        """Requests that are answered with 401, by method."""
        self.suffix = ""
        """Ends texts of resources, Events and logs."""
        self.reads_bodies = asyncio.Event()
        """Unless it is set, the server does not ask for the body of a patch."""
        self.reads_bodies.set()
        self.unread = 0
        """Patches whose bodies it has not asked for, and whose clients wait."""
        self.authors: list[str] = []
        """fieldManager of each patch."""
        self.watches = 0
        """Watches that were opened."""
        self.url = ""
        self.load = 1.0
        """Requests per second and engine that the metrics pages report."""
        self.values: dict[str, str] = {}
        """Values of metrics of engines, in place of those under the load."""
        self._begun = time.monotonic()
        self._log: list[tuple[int, str, str, dict[str, Any]]] = []
        """Version, collection, kind of change and object."""
        self._stored: dict[str, dict[str, dict[str, Any]]] = {"resources": {}, "pods": {}, "events": {}}
        self._changed = asyncio.Condition()
        self._open: list[web.Request] = []
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None
        begun = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=12)
        for cluster in clusters:
            cluster.now = begun
            cluster.settle()

    async def start(self) -> None:
        await self._publish()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=self._ask_for_body)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._task = asyncio.create_task(self._operate())

    async def stop(self) -> None:
        assert self._task is not None
        assert self._runner is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.cut_watches()
        await self._runner.cleanup()

    def cut_watches(self) -> None:
        """Abort the connection of every open watch."""
        for request in self._open:
            if request.transport is not None:
                request.transport.abort()

    async def delete(self, name: str) -> None:
        del self.clusters[name]
        await self._publish()

    async def _operate(self) -> None:
        """Make passes of the operator, and advance the clusters and the load."""
        while True:
            for cluster in self.clusters.values():
                cluster.tick(finish=not self.holds)
                if self.holds:
                    _confirm_one(cluster)
                cluster.step()
            await self._publish()
            await asyncio.sleep(PASS_SECONDS)

    # --- objects ------------------------------------------------------------------------------------------------

    def _objects(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield collection, name and object of all objects."""
        for cluster in self.clusters.values():
            metadata = {"name": cluster.name, "namespace": "default", "uid": "u", "generation": cluster.generation}
            if cluster.restarted_at:
                metadata["annotations"] = {ANNOTATION_RESTARTED: cluster.restarted_at}
            body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata}
            status = copy.deepcopy(cluster.status)
            if self.suffix:
                status["model"] = f"{status['model']}{self.suffix}"
                status.setdefault("plan", {})["waitingOn"] = f"pods{self.suffix}"
            yield "resources", cluster.name, {**body, "spec": cluster.spec, "status": status}
            for name, pod in cluster.pods.items():
                containers = [{"name": each["name"]} for each in pod["spec"]["containers"]]
                states = []
                for state in pod["status"].get("containerStatuses", ()):
                    states.append({"image": "i", "imageID": "i", "ready": False, **state})
                if not states and pod["status"].get("phase") == "Running":
                    main = {"name": containers[0]["name"], "containerID": f"fake://{name}", "state": {"running": {}}}
                    states = [{"image": "i", "imageID": "i", "ready": True, "restartCount": 0, **main}]
                status = {**pod["status"], "containerStatuses": states}
                named = {"name": name, "namespace": "default", "labels": pod["metadata"]["labels"]}
                spec = {"nodeName": "node-a", "containers": containers}
                yield "pods", name, {"kind": "Pod", "metadata": named, "spec": spec, "status": status}
            for number, event in enumerate(cluster.events):
                at = (cluster.now - timedelta(seconds=len(cluster.events) - number)).isoformat()
                name = f"{cluster.name}.{number}"
                yield (
                    "events",
                    name,
                    {
                        "metadata": {"name": name, "namespace": "default"},
                        "involvedObject": {"kind": KIND, "name": cluster.name},
                        "type": event.type,
                        "reason": event.reason,
                        "message": f"{event.message}{self.suffix}",
                        "eventTime": at,
                    },
                )

    async def _publish(self) -> None:
        """Record what has changed since the last call, for the watches."""
        now: dict[str, dict[str, dict[str, Any]]] = {"resources": {}, "pods": {}, "events": {}}
        for collection, name, found in self._objects():
            known = self._stored[collection].get(name)
            if collection == "events" and known is not None:
                now[collection][name] = known
                continue
            bare = None if known is None else {**known, "metadata": {**known["metadata"]}}
            if bare is not None:
                bare["metadata"].pop("resourceVersion")
            if found == bare:
                assert known is not None
                now[collection][name] = known
                continue
            stored = copy.deepcopy(found)
            self._append(collection, "ADDED" if known is None else "MODIFIED", stored)
            now[collection][name] = stored
        for collection, known in self._stored.items():
            for name in set(known) - set(now[collection]):
                self._append(collection, "DELETED", copy.deepcopy(known[name]))
        self._stored = now
        async with self._changed:
            self._changed.notify_all()

    def _append(self, collection: str, change: str, stored: dict[str, Any]) -> None:
        version = len(self._log) + 1
        stored["metadata"]["resourceVersion"] = str(version)
        self._log.append((version, collection, change, stored))

    # --- requests -----------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if self.expired[request.method]:
            self.expired[request.method] -= 1
            return web.json_response(_status(401, "Unauthorized", "Unauthorized"), status=401)
        for each in self.denied:
            verb, _, part = each.partition(" ")
            if request.method == verb and part in path:
                message = f'User "jane" cannot {verb.lower()} {path}'
                return web.json_response(_status(403, "Forbidden", message), status=403)
        if any(part in path for part in self.blocked):
            message = "error trying to reach service: dial tcp 10.0.0.9:8080: i/o timeout"
            return web.json_response(_status(503, "ServiceUnavailable", message), status=503)
        if path.endswith("/leases"):
            return web.json_response({"items": [_lease()], "metadata": {"resourceVersion": "1"}})
        if path.endswith("/proxy/metrics"):
            return web.Response(text=self.metrics_page(path.split("/")[-3].removesuffix(":8080")))
        if path.endswith("/log"):
            return await self._follow_log(request, path.split("/")[-2])
        parts = path.split("/")
        collection = {PLURAL: "resources", "pods": "pods", "events": "events"}
        if parts[-1] in collection:
            return await self._collection(request, collection[parts[-1]])
        name = parts[-1]
        if name not in self.clusters:
            return web.json_response(_status(404, "NotFound", f'{PLURAL} "{name}" not found'), status=404)
        if request.method == "PATCH":
            await self._patch(self.clusters[name], request)
        return web.json_response(self._stored["resources"][name])

    async def _ask_for_body(self, request: web.Request) -> None:
        self.unread += 1
        while not (self.reads_bodies.is_set() or request.transport is None or request.transport.is_closing()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.reads_bodies.wait(), 0.01)
        self.unread -= 1
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _patch(self, cluster: Cluster, request: web.Request) -> None:
        body = await request.json()
        assert request.headers["Content-Type"] == "application/merge-patch+json"
        self.authors.append(request.query["fieldManager"])
        if "spec" in body:
            cluster.patch(**body["spec"])
        else:
            cluster.restarted_at = body["metadata"]["annotations"][ANNOTATION_RESTARTED]
        await self._publish()

    async def _collection(self, request: web.Request, collection: str) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request, collection)
        items = [] if "/namespaces/other/" in request.path else list(self._stored[collection].values())
        items = [each for each in items if _selected(each, request.query)]
        return web.json_response({"items": items, "metadata": {"resourceVersion": str(len(self._log))}})

    async def _watch(self, request: web.Request, collection: str) -> web.StreamResponse:
        self.watches += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._open.append(request)
        version = int(request.query["resourceVersion"])
        seconds = request.query.get("timeoutSeconds")
        try:
            async with asyncio.timeout(None if seconds is None else float(seconds)):
                while True:
                    for found, of, change, stored in self._log[version:]:
                        version = found
                        if of == collection and _selected(stored, request.query):
                            await response.write(json.dumps({"type": change, "object": stored}).encode() + b"\n")
                    async with self._changed:
                        await self._changed.wait()
        except TimeoutError:
            return response
        finally:
            self._open.remove(request)

    async def _follow_log(self, request: web.Request, pod: str) -> web.StreamResponse:
        container = request.query["container"]
        response = web.StreamResponse()
        await response.prepare(request)
        if request.query.get("follow") != "true":
            # Lines of different pods alternate in time.
            for number in range(int(request.query.get("tailLines", 3))):
                at = f"2026-01-01T00:00:0{number}.{sum(pod.encode()):06}Z"
                await response.write(f"{at} line {number} of {pod} {container}\x1b[2J{self.suffix}\n".encode())
            return response
        stamped = request.query.get("timestamps") == "true"
        for number in range(10_000):
            line = {"level": "info", "msg": f"line {number} of {pod} {container}{self.suffix}"}
            at = b"2026-01-01T00:00:00.5Z " if stamped else b""
            await response.write(at + json.dumps(line, ensure_ascii=False).encode() + b"\n")
            await asyncio.sleep(LOG_LINE_SECONDS)
        return response

    # --- metrics ------------------------------------------------------------------------------------------------

    def metrics_page(self, pod: str) -> str:
        """Return the metrics page of a pod under the load so far."""
        seconds = time.monotonic() - self._begun
        requests = self.load * seconds
        wave = 1 + 0.3 * math.sin(seconds)
        if "-coordinator" in pod:
            return "# TYPE megatron_coordinator_queued_requests gauge\nmegatron_coordinator_queued_requests 3\n"
        if "-server" in pod:
            ttft = _histogram("megatron_time_to_first_token_seconds", TTFT_BOUNDS, requests, peak=0.05)
            return ttft + _histogram("megatron_inter_token_latency_seconds", ITL_BOUNDS, 100 * requests, peak=0.008)
        values = {
            "megatron_num_requests_running": ("gauge", 4),
            "megatron_num_requests_waiting": ("gauge", 2),
            "megatron_queued_prompt_tokens": ("gauge", 30_000 if "engine-0" in pod else 500),
            "megatron_kv_cache_usage_perc": ("gauge", min(0.99, 0.42 * wave)),
            "megatron_prefix_cache_hits_total": ("counter", 300 * requests),
            "megatron_prefix_cache_queries_total": ("counter", 400 * requests),
            "megatron_generation_tokens_total": ("counter", 120 * self.load * (seconds + 0.2 * wave)),
            "megatron_generation_epoch": ("gauge", 7),
        }
        lines = (
            f"# TYPE {name.removesuffix('_total')} {kind}\n{name} {self.values.get(name, value)}\n"
            for name, (kind, value) in values.items()
        )
        return "".join(lines)


def _confirm_one(cluster: Cluster) -> None:
    """Let one rank confirm the open operation."""
    coordinator = cluster.coordinator
    if coordinator is not None and coordinator.open is not None:
        key = coordinator.open.operation_id
        report = coordinator.operations[key]
        coordinator.operations[key] = replace(report, confirmed_ranks=1, total_ranks=len(coordinator.engines))


def _histogram(name: str, bounds: tuple[float, ...], count: float, *, peak: float) -> str:
    """Return a histogram of `count` observations of which 60 % are at most `peak`, 90 % at most twice as much."""
    shares = [
        0.0 if bound < peak / 2 else 0.6 if bound < 2 * peak else 0.9 if bound < 4 * peak else 1 for bound in bounds
    ]
    lines = [
        f'{name}_bucket{{le="{bound}",model_name="m"}} {share * count}'
        for bound, share in zip((*bounds, "+Inf"), (*shares, 1), strict=True)
    ]
    return "\n".join([f"# TYPE {name} histogram", *lines, f'{name}_count{{model_name="m"}} {count}', ""])


def _selected(item: dict[str, Any], query: Any) -> bool:
    """Apply the field and label selectors that the dashboard uses."""
    for condition in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = condition.partition("=")
        first, _, last = path.partition(".")
        if item[first][last] != value:
            return False
    for condition in filter(None, query.get("labelSelector", "").split(",")):
        label, _, value = condition.partition("=")
        if item["metadata"]["labels"].get(label) != value:
            return False
    return True


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def _lease() -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    annotations = {"inference.megatron.dev/term": "1"}
    return {
        "metadata": {"name": "op", "namespace": "system", "annotations": annotations},
        "spec": {"holderIdentity": "op-0", "renewTime": now, "leaseDurationSeconds": 600},
    }
