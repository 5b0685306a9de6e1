"""Replacement of a coordinator that this operator has lost, before Kubernetes considers its node lost. Pure.

Kubernetes marks a node as lost after 50 s. Servers stay ready for 30 s. The operator deletes the pod earlier, so
that its Deployment creates another one. On a node that is alive, the kubelet ends the old process as after any
deletion.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_operator.model.conditions import Reason
from megatron_operator.plan.blockers import component_pods
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import Action, DeletePods, EmitEvent, PodView
from megatron_operator.render.context import COORDINATOR

REPLACE_SECONDS = 4.0
"""Time without a connection after which the pod is replaced. A coordinator that has restarted answers within 2 s."""


def replacement(scene: Scene) -> list[Action]:
    """Return the deletion of a lost coordinator's pod, and its Event; nothing while it may come back by itself."""
    pod, lost = _lost_pod(scene), scene.world.coordinator.lost_seconds
    if pod is None or lost is None or lost < REPLACE_SECONDS:
        return []
    reason = f"pod {pod.name} is ready and has not answered for {lost:.0f} s: replacing it"
    deletion = DeletePods(owner=scene.ctx.coordinator_name, pods=((pod.name, pod.uid),), reason=reason)
    return [deletion, EmitEvent("Warning", Reason.COORDINATOR_UNREACHABLE.value, reason)]


def replacement_in(scene: Scene) -> float | None:
    """Return the seconds until the coordinator's pod is replaced; None if it is not lost."""
    lost = scene.world.coordinator.lost_seconds
    return None if lost is None or _lost_pod(scene) is None else REPLACE_SECONDS - lost


def _lost_pod(scene: Scene) -> PodView | None:
    """Return the pod that this operator has been connected to, if its kubelet still reports it as ready.

    If it is not ready, the kubelet is alive and restarts it. A pod that never answered since its creation is not
    replaced: the cause is not its node, and another pod would not answer either.
    """
    lost = scene.world.coordinator.lost_seconds
    if lost is None:
        return None
    lost_at = scene.world.now - timedelta(seconds=lost)
    pods = [pod for pod in component_pods(scene, COORDINATOR) if pod.ready and not pod.deleting]
    return next((pod for pod in pods if pod.created_at is not None and pod.created_at < lost_at), None)
