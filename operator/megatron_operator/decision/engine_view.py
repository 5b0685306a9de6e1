"""The view of one engine that policies read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.decision.coordinator_snapshot import EngineReport
from megatron_operator.decision.restarts import EngineBudget
from megatron_operator.decision.rollout import Canary
from megatron_operator.decision.world import ChildView, PodView
from megatron_operator.resource.names import DECODE


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: its StatefulSet, its pods, and its state in the coordinator."""

    index: int
    """Index of the engine within its role."""
    name: str
    surplus: bool
    """Whether the index exceeds the number of engines of the role."""
    held: bool
    """Whether the revision differs from the desired one only because an update of the resource has not begun."""
    statefulset: ChildView | None
    pods: tuple[PodView, ...]
    report: EngineReport | None
    rendered_revision: str
    budget: EngineBudget
    canary: Canary = Canary.NONE
    canary_message: str = ""
    role: str = DECODE

    @property
    def serving(self) -> bool:
        return self.report is not None and self.report.serving

    @property
    def responsive(self) -> bool:
        """Whether the engine serves and sends heartbeats."""
        return self.report is not None and self.report.serving and not self.report.suspect

    @property
    def whole(self) -> bool:
        """Whether all pods of the engine have started, and none is being deleted."""
        started = all((pod.started or pod.ready) and not pod.deleting for pod in self.pods)
        return bool(self.pods) and started and not self.incomplete

    @property
    def serving_revision(self) -> str:
        """Revision of the serving process.

        The value is empty if no process serves, or if its revision differs from the revision of the StatefulSet.
        """
        if not self.serving or self.statefulset is None or self.report is None:
            return ""
        if self.report.revision:
            return self.statefulset.revision if self.report.revision == self.statefulset.revision else ""
        return "" if self.stale_pods else self.statefulset.revision

    @property
    def superseded(self) -> bool:
        """Whether the coordinator reports an engine process with an earlier revision than the engine's StatefulSet."""
        reported = self.report.revision if self.report is not None else ""
        return not self.stale and self.statefulset is not None and reported not in ("", self.statefulset.revision)

    @property
    def scaled(self) -> int:
        """`spec.replicas` of the engine's StatefulSet; 0 if the engine has no StatefulSet."""
        return self.statefulset.replicas if self.statefulset else 0

    @property
    def incomplete(self) -> bool:
        """Whether the StatefulSet of the engine has not created all pods yet."""
        return len(self.pods) < self.scaled

    @property
    def starting(self) -> bool:
        """Whether the engine should have pods, some of its pods are missing or not ready, and it does not serve."""
        found = self.statefulset
        return found is not None and found.replicas > 0 and not self.serving and found.ready_replicas < found.replicas

    @property
    def empty(self) -> bool:
        """Whether the engine has no pods and its StatefulSet requests none."""
        return self.scaled == 0 and not self.pods

    @property
    def stale(self) -> bool:
        """Whether the StatefulSet has a revision other than the spec's, so that a rollout will replace the engine."""
        found = self.statefulset
        differs = found is not None and self.rendered_revision != "" and found.revision != self.rendered_revision
        return differs and not self.held

    @property
    def stale_pods(self) -> tuple[PodView, ...]:
        """Pods that were created from an earlier template of their StatefulSet. Some may be terminating."""
        revision = self.statefulset.revision if self.statefulset else ""
        return tuple(pod for pod in self.pods if pod.revision not in ("", revision))
