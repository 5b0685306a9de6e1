"""Detects lost engines, coordinators and nodes, and replaces pods earlier than Kubernetes would.

Kubernetes marks a node as lost after 50 s, and servers on this node count as ready for 30 s. The operator deletes the
pod of a lost coordinator earlier, so that its Deployment creates another pod. If the node is alive, its kubelet ends
the old process as after any deletion.

A StatefulSet re-creates a pod only after the kubelet has confirmed the deletion of the old pod. The kubelet of a lost
node never confirms it. The operator force-deletes such pods of engines if the node is not ready or does not exist. It
never does so while the node is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from megatron_operator.decision.actions import Action, DeletePods, EmitEvent
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import LOST, REPORTED_STATES, UNKNOWN, UNRESPONSIVE, Engines
from megatron_operator.decision.world import LOST_SECONDS, UNKNOWN_SECONDS, PodView, World
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.conditions import ConditionType, Finding, Reason
from megatron_operator.resource.names import COORDINATOR, ENGINE, SERVER, STANDBY
from megatron_operator.resource.states import DesiredState

REPLACE_SECONDS = 4.0
"""Time without a connection after which a coordinator's pod is replaced. A restarted coordinator answers within 2 s."""
ISOLATED_SECONDS = 5.0
"""Interval at which an operator that suspects its own network checks again."""
MANY_SILENT = 3
"""Number of coordinators that must be silent before the operator suspects its own network."""
BACK_OFF = "CrashLoopBackOff"
SERVED_SECONDS = 20.0
"""Run time after which a server counts as having served."""
NODE_SECONDS = 5.0
"""Interval at which a node is read while the deletion of a pod on it is overdue."""


@dataclass(frozen=True)
class Losses:
    """Determines which engines and coordinators of a World's resource are lost, or whether this is unknown."""

    world: World
    desired: Desired
    engines: Engines

    def is_lost(self, engine: EngineView) -> bool:
        """Return whether an engine is lost.

        A lost engine is not registered with the coordinator, although none of its pods is being replaced.
        """
        world = self.world
        if not world.membership_known or engine.report is not None or self.desired.state is DesiredState.STOPPED:
            return False
        if not engine.whole:
            return False
        # After the loss of a coordinator, engines that did not register while the next one recovered are lost too.
        state = world.resource.engine_status(engine.name).get("state")
        known = state in (UNRESPONSIVE, LOST) or (state == UNKNOWN and self.coordinator_reported)
        return known or world.unregistered_seconds.get(engine.name, 0.0) >= LOST_SECONDS

    def is_unknown(self, engine: EngineView) -> bool:
        """Return True if the operator cannot determine whether an engine serves.

        This is the case if the engine has served and its pods run, but no coordinator has reported the engines for
        UNKNOWN_SECONDS.
        """
        if self.world.membership_known or engine.serving or self.engines.serves(engine) or not engine.whole:
            return False
        return self.world.resource.engine_status(engine.name).get("state") in (*REPORTED_STATES, UNKNOWN)

    @property
    def lost_in(self) -> float | None:
        """Seconds until the next unregistered engine counts as lost, or None if there is no such engine."""
        waits = [LOST_SECONDS - seconds for seconds in self.world.unregistered_seconds.values()]
        return min((left for left in waits if left > 0), default=None)

    @property
    def unknown_in(self) -> float | None:
        """Seconds until the last reported states of engines expire after the loss of their coordinator.

        The value is None if no engine has such a state.
        """
        if self.world.membership_known or not any(self.engines.serves(engine) for engine in self.engines.all):
            return None
        return UNKNOWN_SECONDS - self.world.coordinator.unknown_seconds

    @cached_property
    def coordinator_reported(self) -> bool:
        """Whether the status reports the loss of the coordinator."""
        wanted = (ConditionType.DEGRADED.value, "True", Reason.COORDINATOR_UNREACHABLE.value)
        conditions = self.world.resource.status.get("conditions") or ()
        return any((entry["type"], entry["status"], entry["reason"]) == wanted for entry in conditions)

    @property
    def finding(self) -> Finding | None:
        """The error about a lost coordinator, until a new coordinator knows the engines.

        The value is None if the coordinator is not lost, or may still recover automatically.
        """
        if self.world.membership_known:
            return None
        if self.world.isolated:
            message = "many coordinators do not answer, so the operator assumes that its own network has failed"
            return (
                Reason.OPERATOR_ISOLATED,
                f"{message}: it replaces no coordinator, and does not know which engines serve",
            )
        silent = self.world.coordinator.unknown_seconds >= UNKNOWN_SECONDS
        if not self.coordinator_reported and not (silent and _lost_pods(self.world)):
            return None
        message = "the coordinator is lost; which engines serve is unknown until a coordinator has recovered"
        return Reason.COORDINATOR_UNREACHABLE, message


def is_isolated(silent: Sequence[frozenset[str]], *, answering: int) -> bool:
    """Return whether the operator lost many coordinators at the same time, so its own network is the likely cause.

    A lost node silences all coordinators on it, while the coordinators on other nodes still answer.

    silent: the nodes of the pods of each coordinator that was connected and is silent.
    answering: number of coordinators that answer.
    """
    nodes = frozenset[str]().union(*silent)
    many = len(silent) >= MANY_SILENT and len(silent) > answering
    return many and (len(nodes) > 1 or answering == 0)


def replacement(world: World, ctx: RenderContext) -> list[Action]:
    """Return the actions that delete a lost coordinator's pod and write an Event.

    Returns an empty list while the coordinator may recover automatically. For a pair of coordinators, the actions
    delete both pods, because a live coordinator would have become active, and the pair would not be lost.
    """
    pods, lost = _lost_pods(world), world.coordinator.lost_seconds
    if not pods or lost is None or lost < REPLACE_SECONDS or world.isolated:
        return []
    names = " and ".join(pod.name for pod in pods)
    reason = f"pod {names} is ready and has not answered for {lost:.0f} s: replacing it"
    deletion = DeletePods(ctx.coordinator_name, tuple((pod.name, pod.uid) for pod in pods), reason)
    return [deletion, EmitEvent("Warning", Reason.COORDINATOR_UNREACHABLE.value, reason)]


def replacement_in(world: World) -> float | None:
    """Return the seconds until the coordinator's pod is replaced, or None if the coordinator is not lost."""
    lost = world.coordinator.lost_seconds
    if lost is None or not _lost_pods(world):
        return None
    return ISOLATED_SECONDS if world.isolated else REPLACE_SECONDS - lost


def _lost_pods(world: World) -> list[PodView]:
    """Return the ready coordinator pods to which this operator was connected before it lost the coordinator.

    If a pod is not ready, its kubelet is alive and restarts the container. A pod that has never answered since its
    creation is not replaced, because its node is not the cause, and another pod would not answer either.
    """
    lost = world.coordinator.lost_seconds
    if lost is None:
        return []
    lost_at = world.now - timedelta(seconds=lost)
    pods = [pod for pod in world.component_pods(COORDINATOR, STANDBY) if pod.ready and not pod.deleting]
    return [pod for pod in pods if pod.created_at is not None and pod.created_at < lost_at]


def crashed_servers(world: World, ctx: RenderContext) -> list[Action]:
    """Return the actions that delete server pods which have served and now wait in the kubelet's backoff.

    The actions also write Events. The Deployment starts another pod immediately. A pod that crashes while it starts is
    not deleted, because its replacement would crash too.
    """
    actions: list[Action] = []
    for pod in world.component_pods(SERVER):
        if pod.reason == BACK_OFF and pod.ran_seconds >= SERVED_SECONDS and not pod.deleting:
            ended = f"crashed after {pod.ran_seconds:.0f} s (exit code {pod.exit_code}, {pod.exit_reason or 'Error'})"
            reason = f"pod {pod.name} {ended} and waits to be restarted: replacing it"
            actions.append(DeletePods(ctx.server_name, ((pod.name, pod.uid),), reason))
            actions.append(EmitEvent("Warning", Reason.CRASH_LOOPING.value, reason))
    return actions


def overdue_in(pod: PodView, world: World) -> float | None:
    """Return the seconds until the deletion of an engine's pod is overdue, or None if the pod is not being deleted."""
    if pod.component != ENGINE or not pod.node or pod.ends_at is None:
        return None
    limit = timedelta(seconds=world.resource.spec.lifecycle.lost_node_seconds)
    return (pod.ends_at + limit - world.now).total_seconds()


def forced_deletions(world: World) -> list[Action]:
    """Return the actions that force-delete pods whose deletion is overdue and whose nodes are lost.

    The actions also write Events.
    """
    actions: list[Action] = []
    for pod in world.pods:
        if _forced_in(pod, world) == 0:
            since = world.lost_nodes[pod.node]
            state = "does not exist" if since is None else f"has not been ready since {since:%Y-%m-%dT%H:%M:%SZ}"
            reason = f"pod {pod.name} is terminating and its node {pod.node} {state}: force-deleting it"
            actions.append(DeletePods(pod.engine, ((pod.name, pod.uid),), reason, force=True))
            actions.append(EmitEvent("Warning", "PodForceDeleted", reason))
    return actions


def forced_in(world: World) -> float | None:
    """Return the seconds until a pod that is being deleted can be force-deleted, or until its node is read again.

    If several pods are being deleted, returns the shortest time. Returns None if no pod is being deleted.
    """
    waits = [left for pod in world.pods if (left := _forced_in(pod, world)) is not None]
    return min((left for left in waits if left > 0), default=None)


def _forced_in(pod: PodView, world: World) -> float | None:
    left = overdue_in(pod, world)
    if left is None or left > 0:
        return left
    if pod.node not in world.lost_nodes:
        return NODE_SECONDS
    since = world.lost_nodes[pod.node]
    if since is None:
        return 0
    limit = world.resource.spec.lifecycle.lost_node_seconds
    return max(0.0, limit - (world.now - since).total_seconds())
