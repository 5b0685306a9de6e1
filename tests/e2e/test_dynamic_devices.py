"""Engines with devices of a DRA driver, allocated by the scheduler and prepared by the kubelet.

The driver is the one of Kubernetes' own tests. Its devices are names: containerd 1.6 adds no CDI device to containers.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from go_modules import own_program
from soak import SOAK

from localcluster.kubectl import Kubectl
from localcluster.walkthrough import QUESTION

from .conftest import Platform, apply_sample, deploy

pytestmark = pytest.mark.skipif(not SOAK, reason="builds the driver; `make soak` runs it")

DRIVER = "gpu.example.com"
CLAIM = {"name": "device", "resourceClaimTemplateName": "one-device"}


@dataclass(frozen=True)
class Driver:
    """prepared: directory with a file for each claim that the kubelet has prepared."""

    prepared: Path

    def claims(self) -> set[str]:
        """Return the UIDs of the prepared claims."""
        names = (path.stem.removeprefix(f"{DRIVER}-") for path in self.prepared.glob("*.json"))
        return {name.removesuffix("-device") for name in names}


@contextmanager
def running(command: list[Any], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture
async def driver(platform: Platform, kube: Kubectl, tmp_path: Path) -> AsyncIterator[Driver]:
    """A driver with two devices on the first node, and a template of claims for one device."""
    node = platform.cluster.settings.nodes[0]
    kubelet = platform.cluster.layout.of_node(node.index).kubelet
    kubelet.joinpath("plugins", DRIVER).mkdir(exist_ok=True)
    prepared, log = tmp_path / "cdi", tmp_path / "driver.log"
    command = [
        own_program(Path(__file__).parent / "dra_driver"),
        "kubelet-plugin",
        f"--kubeconfig={platform.cluster.kubeconfig}",
        f"--drivername={DRIVER}",
        f"--node-name={node.name}",
        f"--plugin-registration-path={kubelet / 'plugins_registry'}",
        f"--datadir={kubelet / 'plugins'}",
        f"--cdi-dir={prepared}",
        "--num-devices=2",
    ]
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    device_class = {"kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}}
    request = {"name": "device", "exactly": {"deviceClassName": DRIVER}}
    template = {
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "one-device"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    for manifest in (device_class, template):
        kube.apply({"apiVersion": "resource.k8s.io/v1", **manifest})
    with running(command, log=log) as process:

        async def is_registered() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return bool(kube.json("resourceslices")["items"])

        await eventually(is_registered, what="the kubelet has accepted the driver, which publishes its devices")
        yield Driver(prepared)
        assert process.poll() is None, log.read_text()[-3000:]
    kube("delete", "deviceclass", DRIVER)
    kube("delete", "resourceslices", "--all")


def claims(kube: Kubectl) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kube.json("resourceclaims")["items"]
    return found


def allocated(claim: dict[str, Any]) -> list[str]:
    """Return the devices that the scheduler has allocated to a claim."""
    results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
    return [result["device"] for result in results if result["driver"] == DRIVER]


async def test_engines_serve_with_a_prepared_device_each(driver: Driver, kube: Kubectl) -> None:
    engine = {"name": "engine", "resources": {"claims": [{"name": "device"}], "limits": {"cpu": "1", "memory": "4Gi"}}}
    template = {"spec": {"resourceClaims": [CLAIM], "containers": [engine]}}
    batching = {"kvCacheMemory": "256Mi", "maxRequests": 16}
    deployed = deploy(kube, replicas=2, engine={"batching": batching, "podTemplate": template})
    assert deployed.chat.ask(QUESTION)
    kube.wait("mi/demo", "condition=EnginesReady")
    used = claims(kube)
    assert sorted(device for claim in used for device in allocated(claim)) == ["device-00", "device-01"]
    assert {owner["name"] for claim in used for owner in claim["status"]["reservedFor"]} == {
        "demo-engine-0-0",
        "demo-engine-1-0",
    }
    assert driver.claims() == {claim["metadata"]["uid"] for claim in used}

    kube("delete", "mi", "demo")

    async def is_released() -> bool:
        return not driver.claims() and not claims(kube)

    await eventually(is_released, what="the kubelet has released the devices, and the claims are deleted")


async def test_an_engine_starts_with_the_device_of_its_accelerator(driver: Driver, kube: Kubectl) -> None:
    """A native engine then expects a GPU. The status reports that this machine has none."""
    accelerator = {"claims": [{**CLAIM, "request": "device"}]}
    apply_sample(kube, engine={"gpusPerPod": 1, "accelerator": accelerator})

    async def has_ended() -> bool:
        found = [pod for pod in kube.json("pods")["items"] if pod["metadata"]["name"] == "demo-engine-0-0"]
        statuses = [status for pod in found for status in pod["status"].get("containerStatuses", ())]
        return any("terminated" in {**status["state"], **status["lastState"]} for status in statuses)

    await eventually(has_ended, what="the container of the engine has run")
    (claim,) = claims(kube)
    assert allocated(claim) in (["device-00"], ["device-01"])
    assert driver.claims() == {claim["metadata"]["uid"]}

    async def is_named() -> bool:
        conditions = {each["type"]: each for each in kube.json("mi", "demo")["status"]["conditions"]}
        return bool(conditions["Degraded"]["reason"] == "NoGpu")

    await eventually(is_named, what="the status names the missing GPU")
