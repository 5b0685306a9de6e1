"""Two engines on one node share a model cache: the weights are downloaded once, also if the download is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from eventually import LONG_SECONDS, eventually
from object_server import BUCKET, KEYS, FaultyProxy, s3_server, upload
from soak import SOAK

from localcluster import installation
from localcluster.kubectl import Kubectl
from localcluster.progress import Steps
from localcluster.walkthrough import STORY, Chat, reachable

from .conftest import SAMPLE, Platform

USER = 65532
"""The user of the project's containers."""
WEIGHTS = "model.safetensors"
SLOW = 512 << 10
"""Bytes per second of the download until it is killed: the operator reads its progress every 10 s."""
PIECE_BYTES = 1 << 20
"""The unit in which a download writes. A process that is killed loses less than one."""
LOST_BYTES = PIECE_BYTES + (1 << 20)
"""Limit of the bytes that are sent to a process that is killed, and not written: a piece and the buffers of sockets."""


@pytest.fixture
def store(platform: Platform, small_model: Path) -> Iterator[FaultyProxy]:
    """An S3 server with the model, on the address of the first node, which pods reach."""
    host = platform.cluster.settings.nodes[0].ip
    with s3_server() as server, FaultyProxy(server, host=host, rate=SLOW).running() as proxy:
        upload(server, "small", {path.name: path.read_bytes() for path in small_model.iterdir()})
        yield proxy


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory of this machine that containers may write."""
    made = Path(tempfile.mkdtemp(prefix="megatron-cache-"))
    os.chown(made, USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def host_path(platform: Platform, directory: Path) -> Iterator[dict[str, Any]]:
    """A directory of the node that the chart allows for model caches."""
    values = [f"podPolicy.modelCachePaths={{{directory}}}"]
    installation.install_operator(platform.kube, platform.helm, Steps(), values=values)
    yield {"hostPath": str(directory)}
    installation.install_operator(platform.kube, platform.helm, Steps())


@pytest.fixture
def persistent_volume_claim(directory: Path, claim: Callable[..., str]) -> dict[str, Any]:
    return {"persistentVolumeClaim": claim(directory, mode="ReadWriteMany")}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("host_path", marks=pytest.mark.skipif(not SOAK, reason="takes a minute more: run by make soak")),
        "persistent_volume_claim",
    ],
)
async def test_engines_of_a_node_download_once(
    platform: Platform, kube: Kubectl, store: FaultyProxy, small_model: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    cache = request.getfixturevalue(kind)
    size = (small_model / WEIGHTS).stat().st_size
    credentials = KEYS | {"AWS_ENDPOINT_URL": store.url}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}, "stringData": credentials}
    kube.apply(secret)
    kube.apply(resource(platform, cache))
    seen: list[dict[str, Any]] = []

    async def measured() -> bool:
        """Return whether the status has the rate of a download of the weights that is in progress."""
        progress = kube.json("mi", "demo").get("status", {}).get("download")
        if progress and progress not in seen:
            seen.append(progress)
        if not progress or "secondsLeft" not in progress:
            return False
        others = progress["totalBytes"] - size
        return PIECE_BYTES < progress["bytes"] - others < size - PIECE_BYTES

    kube.wait("mi/demo", "jsonpath={.status.download.secondsLeft}")
    await eventually(measured, what="the weights are partly downloaded", look_seconds=1)
    killed, before = seen[-1], len(store.ranges(WEIGHTS))
    assert killed["bytesPerSecond"] > 0
    assert killed["totalBytes"] > size, "the files of the tokenizer count as well"
    process = downloader(killed["pod"])
    process.kill()
    # Until its sockets are closed: the server would fill their buffers as soon as it sends faster.
    process.wait(LONG_SECONDS)
    store.rate = 0
    kube.wait("mi/demo", "jsonpath={.status.ready}=2/2")
    kube.wait("mi/demo", "condition=EnginesReady")

    (fetch,) = kube.json("pod", killed["pod"])["status"]["initContainerStatuses"]
    assert fetch["restartCount"] >= 1
    resumed = [int(part.removeprefix("bytes=").split("-")[0]) for part in store.ranges(WEIGHTS)[before:] if part]
    print(f"\n{kind}: {size} bytes of weights, {store.sent[WEIGHTS]} sent; resumed at {resumed[:1]}; progress {seen}")
    assert resumed, "the download was complete before it was killed"
    assert min(resumed) >= killed["bytes"] - (killed["totalBytes"] - size) > 0
    assert size <= store.sent[WEIGHTS] <= size + LOST_BYTES, "the weights are downloaded once"
    assert "download" not in kube.json("mi", "demo")["status"]
    status = kube.json("mi", "demo")["status"]
    assert Chat(reachable(f"http://{kube.cluster_ip('demo')}"), status["model"]).ask(STORY, max_tokens=4)


def downloader(pod: str) -> psutil.Process:
    """Return the process that downloads in a pod of this machine."""
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "--progress-port" in (process.info["cmdline"] or ()) and process.environ().get("HOSTNAME") == pod
    ]
    return found


def resource(platform: Platform, cache: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with two engines on the first node that share a cache."""
    manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    spec = manifest["spec"]
    spec["replicas"] = 2
    spec["model"] = {
        "source": {"objectStore": {"url": f"s3://{BUCKET}/small", "credentialsSecretRef": {"name": "bucket"}}},
        "dtype": "Float32",
        "maxSequenceLength": 1024,
        "cache": cache,
    }
    node = platform.cluster.settings.nodes[0].name
    spec["engine"]["podTemplate"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return manifest
