"""The progress of a download reaches the status, and nothing is written while it does not change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from eventually import eventually
from in_memory_cluster import Cluster

from megatron_operator.controller import observe
from megatron_operator.controller.observe import read_loading, read_progress
from megatron_operator.decision.world import Loading, PodView

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator

SPEC = {
    "replicas": 2,
    "model": {
        "source": {"huggingFace": {"repo": "org/name", "revision": "1"}},
        "cache": {"persistentVolumeClaim": "models"},
    },
}
POD = PodView("demo-engine-0-0", "1", "engine", fetching_at="127.0.0.1")


@contextmanager
def pod_that_answers(answer: list[bytes]) -> Iterator[int]:
    """Yield the port of a server that sends answer[0]; 503 while it is empty."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200 if answer[0] else 503)
            self.send_header("content-length", str(len(answer[0])))
            self.end_headers()
            self.wfile.write(answer[0])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def counts(done: Any, size: Any = 1000, rate: Any = 50) -> bytes:
    return json.dumps({"bytes": done, "totalBytes": size, "bytesPerSecond": rate}).encode()


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b"null", b"\xff", counts("1"), counts(-1), counts(True), counts(1, 1 << 61), b"[" * 5000],
)
def test_a_wrong_answer_of_a_pod_is_no_progress(answer: bytes) -> None:
    with pod_that_answers([answer]) as port:
        assert read_progress(POD, port=port) is None


def test_a_pod_that_cannot_be_reached_has_no_progress() -> None:
    with pod_that_answers([b""]) as port:
        pass
    assert read_progress(POD, port=port) is None


LOADING = PodView("demo-engine-0-0", "1", "engine", loading_at="127.0.0.1")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"stage": "Load", "bytes": 3, "totalBytes": 9, "secondsLeft": 2}, Loading("demo-engine-0-0", "Load", 3, 9, 2)),
        ({"stage": "Compile"}, Loading("demo-engine-0-0", "Compile")),
        ({"stage": "Capture", "secondsLeft": -1, "bytes": True}, Loading("demo-engine-0-0", "Capture")),
        ({"stage": "Dance"}, None),
        ({"stage": ["Load"]}, None),
        ([], None),
    ],
    ids=str,
)
def test_the_stage_of_an_engine_is_read_from_its_pod(answer: Any, expected: Loading | None) -> None:
    with pod_that_answers([json.dumps(answer).encode()]) as port:
        assert read_loading(LOADING, port=port) == expected


async def test_the_stage_of_the_first_engine_is_in_the_status_until_one_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster({"replicas": 2, "model": {"source": {"builtin": "smollm2-135m"}}}, security=False)
    statuses: list[Any] = []
    api = InMemoryApi(cluster, on_status=statuses.append)
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=1)
    while "demo-engine-1-0" not in cluster.pods:
        await task.run_once()
        cluster.tick()
        watch.show()

    def show(version: int, *, ready: bool) -> None:
        for name in ("demo-engine-0-0", "demo-engine-1-0"):
            cluster.pods[name]["status"] = {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "containerStatuses": [{"name": "engine", "restartCount": 0, "state": {"running": {}}}],
            }
            cluster.pods[name]["metadata"]["resourceVersion"] = str(version)
        watch.show()

    show(1000, ready=False)
    monkeypatch.setattr(observe, "DOWNLOAD_SECONDS", 0.0)
    answer = [json.dumps({"stage": "Load", "bytes": 3, "totalBytes": 9, "secondsLeft": 2}).encode()]
    with pod_that_answers(answer) as port:
        monkeypatch.setattr(observe, "read_loading", partial(read_loading, port=port))

        async def has_stage() -> bool:
            await task.run_once()
            watch.show()
            return "loading" in cluster.status

        await eventually(has_stage, what="the stage is in the status")
        expected = {"pod": "demo-engine-0-0", "stage": "Load", "bytes": 3, "totalBytes": 9, "secondsLeft": 2}
        assert cluster.status["loading"] == expected
        written = len(statuses)
        for _ in range(3):
            await task.run_once()
            watch.show()
        assert len(statuses) == written, "nothing is written while nothing changes"
        show(1001, ready=True)
        for _ in range(3):
            await task.run_once()
            watch.show()
        assert "loading" not in cluster.status


async def test_the_progress_is_in_the_status_until_the_download_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, answer = Cluster(SPEC, security=False), [counts(200)]
    statuses: list[Any] = []
    api = InMemoryApi(cluster, on_status=statuses.append)
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=1)
    while "demo-engine-1-0" not in cluster.pods:
        await task.run_once()
        cluster.tick()
        watch.show()
    running = {"name": "fetch", "restartCount": 0, "state": {"running": {}}}
    for name in ("demo-engine-0-0", "demo-engine-1-0"):
        status = {"phase": "Pending", "podIP": "127.0.0.1", "initContainerStatuses": [running]}
        cluster.pods[name]["status"] = status
        cluster.pods[name]["metadata"]["resourceVersion"] = "1000"
    watch.show()
    monkeypatch.setattr(observe, "DOWNLOAD_SECONDS", 0.0)
    with pod_that_answers(answer) as port:
        monkeypatch.setattr(observe, "read_progress", partial(read_progress, port=port))
        for _ in range(3):
            await task.run_once()
            watch.show()
        wanted = {"pod": "demo-engine-0-0", "bytes": 200, "totalBytes": 1000, "bytesPerSecond": 50, "secondsLeft": 16}
        assert cluster.status["download"] == wanted
        written = len(statuses)
        assert written > 0
        for _ in range(3):
            await task.run_once()
            watch.show()
        assert len(statuses) == written, "nothing is written while nothing changes"
        answer[0] = counts(700)
        await task.run_once()
        watch.show()
        assert cluster.status["download"] == wanted | {"bytes": 700, "secondsLeft": 6}
        for name in ("demo-engine-0-0", "demo-engine-1-0"):
            cluster.pods[name]["status"] = {"phase": "Running", "podIP": "127.0.0.1"}
            cluster.pods[name]["metadata"]["resourceVersion"] = "1001"
        watch.show()
        for _ in range(3):
            await task.run_once()
            watch.show()
        assert "download" not in cluster.status
