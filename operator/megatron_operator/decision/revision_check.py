"""The check of a new revision, as its pod reports it (see `render.check`). A rollout waits for its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_operator.decision.diagnosis import creation_error, diagnose
from megatron_operator.decision.references import References
from megatron_operator.decision.revisions import Rollout
from megatron_operator.decision.world import ChildRef, PodView, World
from megatron_operator.render.check import check_name
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.conditions import Finding, Reason
from megatron_operator.resource.names import CHECK
from megatron_operator.resource.text import seconds_since

FINAL_EXIT_CODES = (1, 2)
"""Exit codes of `megatron engine --check` after an error that a retry does not resolve."""
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 10.0, 300.0


@dataclass(frozen=True)
class RevisionCheck:
    """The check of the desired revision of a World."""

    world: World
    ctx: RenderContext
    references: References
    rollout: Rollout

    @cached_property
    def ref(self) -> ChildRef:
        """Reference of the pod that checks the desired revision."""
        return ChildRef("Pod", check_name(self.ctx, self.rollout.revision))

    @cached_property
    def pod(self) -> PodView | None:
        """The pod that checks the desired revision, if it exists and is not being deleted."""
        checking = (pod for pod in self.rollout.check_pods if pod.revision == self.rollout.revision)
        return next((pod for pod in checking if not pod.deleting), None)

    @property
    def obsolete_pods(self) -> list[PodView]:
        """Pods whose result is no longer needed: they check another revision, or one that is verified or that every
        engine has."""
        rollout = self.rollout
        needed = rollout.check_due or (rollout.revision not in rollout.verified and bool(rollout.outdated))
        return [pod for pod in rollout.check_pods if not (needed and pod.revision == rollout.revision)]

    @cached_property
    def finding(self) -> Finding | None:
        """Why the check that is due does not pass; None while it runs, or without one."""
        if not self.rollout.check_due:
            return None
        pod = self.pod
        if pod is None:
            rejection = self.world.rejections.get(self.ref)
            if rejection is None or self.rollout.check_pods:
                return None
            return creation_error(f"pod {self.ref.name}", rejection.message, component=CHECK)
        found = diagnose(pod, self.references)
        if found is None and pod.phase == "Failed":
            message = f"pod {pod.name} ended without an exit code: {pod.reason} {pod.message}"
            return Reason.CRASH_LOOPING, message.rstrip()
        if found is not None and found[0] is Reason.CRASH_LOOPING and pod.exit_code in FINAL_EXIT_CODES:
            return Reason.ENGINE_CONFIG_REFUSED, found[1]
        return found

    @property
    def failed(self) -> bool:
        """Whether the check that is due has failed, and a retry does not help."""
        pod = self.pod if self.rollout.check_due else None
        return pod is not None and pod.phase == "Failed" and pod.exit_code in FINAL_EXIT_CODES

    def retry_in(self, pod: PodView) -> float:
        """Return the seconds until a failed check is repeated: the time between two checks doubles.

        It is as long as the rollout has waited when this check began, so no number of attempts needs to be stored.
        """
        if pod.created_at is None:
            return RETRY_MAX_SECONDS
        age = (self.world.now - pod.created_at).total_seconds()
        since = (self.world.resource.status.get("plan") or {}).get("since")
        waited = seconds_since(since, self.world.now) - age if since is not None else 0.0
        return min(max(waited, RETRY_FIRST_SECONDS), RETRY_MAX_SECONDS) - age
