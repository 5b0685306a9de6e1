"""The loss of a coordinator, and its replacement before Kubernetes considers its node lost. Pure.

Kubernetes marks a node as lost after 50 s. Servers stay ready for 30 s. The operator deletes the pod earlier, so
that its Deployment creates another one. On a node that is alive, the kubelet ends the old process as after any
deletion.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_operator.model.conditions import Reason
from megatron_operator.plan.blockers import Finding, component_pods
from megatron_operator.plan.losses import reports_lost_coordinator
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import UNKNOWN_SECONDS, Action, DeletePods, EmitEvent, PodView
from megatron_operator.render.context import COORDINATOR, STANDBY

REPLACE_SECONDS = 4.0
"""Time without a connection after which the pod is replaced. A coordinator that has restarted answers within 2 s."""


def loss(scene: Scene) -> Finding | None:
    """Return that the coordinator is lost, until one knows the engines again; None if it may come back by itself."""
    if scene.world.membership_known:
        return None
    silent = scene.world.coordinator.unknown_seconds >= UNKNOWN_SECONDS
    if not reports_lost_coordinator(scene) and not (silent and _lost_pods(scene)):
        return None
    return Reason.COORDINATOR_UNREACHABLE, "the coordinator is lost; which engines serve is unknown until one recovers"


def replacement(scene: Scene) -> list[Action]:
    """Return the deletion of a lost coordinator's pod, and its Event; nothing while it may come back by itself.

    Of a pair, both pods are lost: one of them would have become active.
    """
    pods, lost = _lost_pods(scene), scene.world.coordinator.lost_seconds
    if not pods or lost is None or lost < REPLACE_SECONDS:
        return []
    names = " and ".join(pod.name for pod in pods)
    reason = f"pod {names} is ready and has not answered for {lost:.0f} s: replacing it"
    deletion = DeletePods(scene.ctx.coordinator_name, tuple((pod.name, pod.uid) for pod in pods), reason)
    return [deletion, EmitEvent("Warning", Reason.COORDINATOR_UNREACHABLE.value, reason)]


def replacement_in(scene: Scene) -> float | None:
    """Return the seconds until the coordinator's pod is replaced; None if it is not lost."""
    lost = scene.world.coordinator.lost_seconds
    return None if lost is None or not _lost_pods(scene) else REPLACE_SECONDS - lost


def _lost_pods(scene: Scene) -> list[PodView]:
    """Return the pods that this operator has been connected to, if their kubelets still report them as ready.

    If it is not ready, the kubelet is alive and restarts it. A pod that never answered since its creation is not
    replaced: the cause is not its node, and another pod would not answer either.
    """
    lost = scene.world.coordinator.lost_seconds
    if lost is None:
        return []
    lost_at = scene.world.now - timedelta(seconds=lost)
    pods = [pod for pod in component_pods(scene, COORDINATOR, STANDBY) if pod.ready and not pod.deleting]
    return [pod for pod in pods if pod.created_at is not None and pod.created_at < lost_at]
