"""A change that names an object is carried out when the object exists, and clients reach a server all the time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from eventually import eventually
from machine import scaled

from megatron_operator.cluster.kinds import CLAIM, POD, SECRET, SERVICE, kind_of

from .conftest import condition

pytestmark = pytest.mark.cluster

DEPLOYMENT = kind_of("apps/v1", "Deployment")
SERVERS = "app.kubernetes.io/component=server"


async def create_secret(api: Any, namespace: str, name: str, *keys: str) -> None:
    data = {key: base64.b64encode(b"x").decode() for key in keys}
    await api.create(SECRET, {"metadata": {"name": name, "namespace": namespace}, "data": data}, manager="test")


async def servers_and_ports(api: Any, namespace: str) -> tuple[int, Any]:
    """Return the generation of the servers' Deployment and the ports of the Service."""
    deployment = await api.get(DEPLOYMENT, namespace, "demo-server")
    service = await api.get(SERVICE, namespace, "demo")
    return deployment["metadata"]["generation"], service["spec"]["ports"]


def statuses(status: dict[str, Any]) -> dict[str, str]:
    return {kind: condition(status, kind)["status"] for kind in ("Ready", "Degraded", "Progressing")}


LINGER_SECONDS = 8.0
"""A deleted server serves for as long as this (`--linger-seconds`). It has no process here that could."""


async def schemes(api: Any, namespace: str, lingering: dict[str, tuple[float, str]] | None = None) -> set[str]:
    """Return the schemes with which clients reach a server that is ready, or that was a moment ago."""
    service = await api.get(SERVICE, namespace, "demo")
    pods = await api.list(POD, namespace, selector=SERVERS)
    ready = [
        pod
        for pod in pods
        if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
    ]
    seen = {} if lingering is None else lingering
    now = asyncio.get_running_loop().time()
    seen |= {pod["metadata"]["uid"]: (now, pod["spec"]["containers"][0]["ports"][0]["name"]) for pod in ready}
    named = {name for at, name in seen.values() if now - at < LINGER_SECONDS}
    return {port["name"] for port in service["spec"]["ports"] if port["targetPort"] in named}


@asynccontextmanager
async def watched(api: Any, namespace: str) -> AsyncIterator[list[set[str]]]:
    """Collect the schemes all the time."""
    found: list[set[str]] = []

    async def look() -> None:
        lingering: dict[str, tuple[float, str]] = {}
        while True:
            found.append(await schemes(api, namespace, lingering))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_switch_to_tls_waits_for_its_secret_and_then_for_a_server(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, kubectl: Callable[..., Any]
) -> None:
    await resource.create(replicas=1)
    await resource.until(
        lambda status: statuses(status) == {"Ready": "True", "Degraded": "False", "Progressing": "False"}
    )
    before = await servers_and_ports(api, namespace)
    async with watched(api, namespace) as seen:
        await resource.patch(server={"tls": {"secretName": "certificat"}})
        status = await resource.until(
            lambda status: statuses(status) == {"Ready": "True", "Degraded": "True", "Progressing": "True"}
        )
        waited = kubectl("wait", "mi/demo", "--for=condition=Progressing=False", "--timeout=0")
        assert waited.returncode != 0, "nothing of the change is done"
        message = condition(status, "Degraded")["message"]
        assert message.startswith("spec.server.tls.secretName: Secret certificat does not exist; ")
        assert message.endswith("or correct spec.server.tls.secretName")
        assert status["endpoint"].startswith("http://")
        assert await servers_and_ports(api, namespace) == before

        await create_secret(api, namespace, "certificate", "tls.crt", "tls.key")
        await resource.patch(server={"tls": {"secretName": "certificate"}})
        waited = await asyncio.to_thread(
            kubectl, "wait", "mi/demo", "--for=condition=Progressing=False", f"--timeout={scaled(90):.0f}s"
        )
        assert waited.returncode == 0, waited.stderr
        assert (await schemes(api, namespace), (await resource.status())["endpoint"].partition(":")[0]) == (
            {"https"},
            "https",
        )

        async def both_were_observed() -> bool:
            return {"http"} in seen and {"https"} in seen

        await eventually(both_were_observed, what="clients reached a server with each scheme alone")
    assert all(seen), "at every moment a port leads to a server that is ready"


async def test_a_misspelt_key_changes_nothing_and_is_named_at_once(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str, kubectl: Callable[..., Any]
) -> None:
    await create_secret(api, namespace, "keys", "api-keys")
    await resource.create(replicas=1)
    await resource.until(lambda status: statuses(status)["Progressing"] == "False")
    before = await servers_and_ports(api, namespace)
    await resource.patch(server={"apiKeysSecretRef": {"name": "keys", "key": "apikeys"}})
    status = await resource.until(
        lambda status: statuses(status) == {"Ready": "True", "Degraded": "True", "Progressing": "True"}
    )
    message = condition(status, "Ready")["message"]
    assert "spec.server.apiKeysSecretRef: Secret keys has no key apikeys" in message
    assert "add key apikeys to secret keys, or correct spec.server.apiKeysSecretRef" in message
    for kind in ("Progressing=False", "Ready"):
        waited = kubectl("wait", "mi/demo", f"--for=condition={kind}", "--timeout=0")
        assert waited.returncode != 0, kind
    assert await servers_and_ports(api, namespace) == before
    await resource.patch(server={"apiKeysSecretRef": {"name": "keys", "key": "api-keys"}})
    await resource.until(lambda status: statuses(status)["Progressing"] == "False")
    assert await servers_and_ports(api, namespace) != before


async def test_what_is_missing_may_be_created_later(
    resource: Any, operator: Any, node: Any, api: Any, namespace: str
) -> None:
    """Without a further change of the resource, and without a restart of the operator."""
    await resource.create(replicas=1)
    await resource.until(lambda status: statuses(status)["Progressing"] == "False")
    volumes = [{"name": "extra", "persistentVolumeClaim": {"claimName": "extra"}}]
    await resource.patch(server={"podTemplate": {"spec": {"volumes": volumes}}})
    status = await resource.until(lambda status: statuses(status)["Degraded"] == "True")
    assert condition(status, "Degraded")["reason"] == "VolumeMissing"
    assert (
        "spec.server.podTemplate: PersistentVolumeClaim extra does not exist"
        in condition(status, "Degraded")["message"]
    )
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    await api.create(CLAIM, {"metadata": {"name": "extra", "namespace": namespace}, "spec": claim}, manager="test")
    await resource.until(
        lambda status: statuses(status) == {"Ready": "True", "Degraded": "False", "Progressing": "False"}
    )
