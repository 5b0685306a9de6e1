"""Forced deletion of the pods of engines on a lost node. Pure.

A StatefulSet creates a pod again only after the old one is deleted, which its kubelet confirms. The kubelet of a lost
node never does. The operator deletes the pod without it when the node is not ready or does not exist. It never does so
while the node is ready.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import Action, DeletePods, EmitEvent, PodView
from megatron_operator.render.context import ENGINE

NODE_SECONDS = 5.0
"""Interval at which the node of a pod is read whose deletion is overdue."""


def overdue_in(pod: PodView, scene: Scene) -> float | None:
    """Return the seconds until the deletion of an engine's pod is overdue; None if it is not being deleted."""
    if pod.component != ENGINE or not pod.node or pod.ends_at is None:
        return None
    limit = timedelta(seconds=scene.world.resource.spec.lifecycle.lost_node_seconds)
    return (pod.ends_at + limit - scene.world.now).total_seconds()


def forced_deletions(scene: Scene) -> list[Action]:
    """Return the forced deletions of pods that are overdue and whose nodes have been lost for as long, and Events."""
    actions: list[Action] = []
    for pod in scene.world.pods:
        if _forced_in(pod, scene) == 0:
            since = scene.world.lost_nodes[pod.node]
            state = "does not exist" if since is None else f"is not ready since {since:%Y-%m-%dT%H:%M:%SZ}"
            reason = f"pod {pod.name} is terminating and its node {pod.node} {state}: deleting it by force"
            actions.append(DeletePods(pod.engine, ((pod.name, pod.uid),), reason, force=True))
            actions.append(EmitEvent("Warning", "PodForceDeleted", reason))
    return actions


def forced_in(scene: Scene) -> float | None:
    """Return the seconds until a pod may be deleted by force, or its node is read again; None if none is deleted."""
    waits = [left for pod in scene.world.pods if (left := _forced_in(pod, scene)) is not None]
    return min((left for left in waits if left > 0), default=None)


def _forced_in(pod: PodView, scene: Scene) -> float | None:
    left = overdue_in(pod, scene)
    if left is None or left > 0:
        return left
    if pod.node not in scene.world.lost_nodes:
        return NODE_SECONDS
    since = scene.world.lost_nodes[pod.node]
    if since is None:
        return 0
    limit = scene.world.resource.spec.lifecycle.lost_node_seconds
    return max(0.0, limit - (scene.world.now - since).total_seconds())
