"""A pod that terminates on a node without a kubelet."""

from __future__ import annotations

from typing import Any

from megatron_operator.cluster.kinds import POD

GRACE_SECONDS = 1


async def terminate_on(api: Any, namespace: str, name: str, *, node: str) -> dict[str, Any]:
    """Bind a pod to a node, and delete it. Return the pod."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    await api.request("POST", POD.path(namespace, name, subresource="binding"), body=binding)
    pod: dict[str, Any] = await api.request(
        "DELETE", POD.path(namespace, name), body={"gracePeriodSeconds": GRACE_SECONDS}
    )
    return pod


async def present(api: Any, pod: dict[str, Any]) -> dict[str, Any] | None:
    """Return the pod that has this name now."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    found = await api.list(POD, namespace, fields=f"metadata.name={name}")
    return found[0] if found else None


async def replaced(api: Any, pod: dict[str, Any]) -> bool:
    found = await present(api, pod)
    return found is not None and found["metadata"]["uid"] != pod["metadata"]["uid"]
