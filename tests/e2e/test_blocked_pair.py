"""Pods of one engine that cannot reach each other: the status names them before they load, and they recover."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml
from eventually import eventually
from soak import SOAK

from localcluster.kubectl import Kubectl

from .conftest import SAMPLE, Platform

RENDEZVOUS_PORT = "29500"


@contextmanager
def kept_apart(bridge: str) -> Iterator[None]:
    """Drop the packets between pods, as a NetworkPolicy without an exception for them does."""
    rule = ["-i", bridge, "-o", bridge, "-p", "tcp", "--dport", RENDEZVOUS_PORT, "-j", "DROP"]
    subprocess.run(["iptables", "-w", "-I", "FORWARD", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-w", "-D", "FORWARD", *rule], check=True)


@pytest.mark.skipif(not SOAK, reason="the unit tests show it with processes; `make soak` runs it with pods")
async def test_pods_that_cannot_connect_are_named_and_recover(platform: Platform, kube: Kubectl) -> None:
    manifest = yaml.safe_load(SAMPLE.read_text())
    spec = manifest["spec"]
    spec["parallelism"] = {"pipeline": 2}
    spec["engine"]["ranksPerPod"] = 1

    async def named() -> bool:
        text = str(kube.json("mi", "demo").get("status", {}))
        return "RendezvousFailed" in text and "demo-engine-0-0" in text and "demo-engine-0-1" in text

    with kept_apart(platform.cluster.settings.bridge):
        kube.apply(manifest)
        await eventually(named, seconds=180, what="the status names both pods", look_seconds=0.5)
        status = kube.json("mi", "demo")["status"]
        degraded = next(entry for entry in status["conditions"] if entry["type"] == "Degraded")
        assert degraded["status"] == "True"
        assert RENDEZVOUS_PORT in degraded["message"]
    kube.wait("mi/demo", "condition=Ready")
