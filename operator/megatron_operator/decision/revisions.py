"""Determines the desired and the former revision of engines, surge engines, and the result of a revision's check.

A rollout waits for the result of the check, which the check's pod reports (see `render.check`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_operator.decision.desired import Desired
from megatron_operator.decision.diagnosis import References, creation_error, diagnose
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import Engines
from megatron_operator.decision.rendered import Rendered
from megatron_operator.decision.rollout import EngineFacts, kept_extras
from megatron_operator.decision.world import ChildRef, ChildView, PodView, World
from megatron_operator.render.check import check_pod_name
from megatron_operator.render.context import RenderContext
from megatron_operator.render.engine import engine_revision
from megatron_operator.resource.conditions import Finding, Reason
from megatron_operator.resource.names import CHECK
from megatron_operator.resource.states import DesiredState, SignalKind
from megatron_operator.resource.status import VERIFIED_REVISIONS
from megatron_operator.resource.text import seconds_since


@dataclass(frozen=True)
class Rollout:
    """The rollout of a World's resource."""

    world: World
    desired: Desired
    rendered: Rendered
    engines: Engines

    @cached_property
    def revision(self) -> str:
        """The desired revision, even if no engine is desired. The value is empty if the template cannot be rendered."""
        manifest = self.rendered.engine_manifest(0)
        return engine_revision(manifest) if manifest is not None else ""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of engines in rollout order. Prefill engines come first, because no answer is lost if the
        new revision cannot start.
        """
        return tuple(reversed(self.engines.ctx.roles))

    @cached_property
    def outdated(self) -> tuple[EngineView, ...]:
        """Desired engines whose revision differs from the spec's."""
        return tuple(engine for engine in self.engines.wanted if engine.stale)

    @cached_property
    def check_pods(self) -> tuple[PodView, ...]:
        """The pods of this resource that check a revision."""
        return tuple(pod for pod in self.world.pods if pod.component == CHECK and pod.owner == self.world.resource.uid)

    @cached_property
    def verified(self) -> tuple[str, ...]:
        """The most recent verified revisions, with the newest last.

        A revision is verified if its check has passed or an engine has served with it.
        """
        recent = {pod.revision for pod in self.check_pods if pod.phase == "Succeeded"}
        recent |= {engine.serving_revision for engine in self.engines.all} - {""}
        recorded = self.world.resource.status.get("verifiedRevisions") or ()
        before = (revision for revision in recorded if revision not in recent)
        return (*before, *sorted(recent))[-VERIFIED_REVISIONS:]

    @cached_property
    def check_due(self) -> bool:
        """Whether the desired revision must pass its check before an engine gets it.

        The check is due while engines of another revision serve. It stays due after it has begun, because these engines
        may restart meanwhile, or be scaled to zero and back.
        """
        if self.revision in self.verified:
            return False
        begun = any(pod.revision == self.revision and not pod.deleting for pod in self.check_pods)
        if not self.outdated:
            return begun and self.former != "" and not any(engine.scaled for engine in self.engines.wanted)
        extras = (
            engine for engine in self.engines.all if self.engines.may_surge(engine.role, engine.index) and engine.stale
        )
        return begun or any(engine.serving for engine in (*self.outdated, *extras))

    @cached_property
    def former(self) -> str:
        """Revision for an engine that starts before the desired revision may be used.

        It is the revision of the engines that do not have the desired revision. If there are no such engines, it is
        the last revision in `verified` that is not the desired revision. The value is empty if there is none.
        """
        if self.outdated:
            last = max(self.outdated, key=lambda engine: (engine.serving, engine.index)).statefulset
            return last.revision if last is not None else ""
        others = (revision for revision in reversed(self.verified) if revision != self.revision)
        return next((revision for revision in others if self.rendered.is_recorded(revision)), "")

    @cached_property
    def paused(self) -> bool:
        """Whether engines keep an earlier revision because the rollout is paused.

        If there are no engines, the earlier revision is the value of `former`.
        """
        absent = not any(engine.statefulset for engine in self.engines.wanted)
        held = absent and self.former and self.verified[-1] != self.revision
        return self.world.resource.spec.rollout.paused and bool(self.outdated or held)

    @cached_property
    def keeps_former(self) -> bool:
        """Whether engines keep an earlier revision.

        They do if the rollout is paused or the desired revision must be checked first.
        """
        return self.check_due or self.paused

    def keeps_server(self, view: ChildView | None) -> bool:
        """Return whether an update of the servers' Deployment must wait.

        The update waits while an engine has, or will get, a model that differs from the model of the spec.
        """
        if view is None or view.ref.kind != "Deployment" or view.model_hash in ("", self.rendered.model_hash):
            return False
        return bool(self.engines.old_model or self.keeps_former)

    @cached_property
    def extras(self) -> tuple[EngineView, ...]:
        """The additional engines that the rollout has started for a role, and still needs."""
        engines = self.engines
        added = [
            engine
            for engine in engines.all
            if engines.may_surge(engine.role, engine.index)
            and engine.scaled > 0
            and engine.statefulset is not None
            and engine.statefulset.owned
            and not engine.statefulset.deleting
        ]
        if not added or self.desired.state is not DesiredState.RUNNING:
            return ()
        names = [
            name
            for role in self.roles
            for name in kept_extras(
                [self.facts(engine) for engine in engines.of_role(role)],
                [self.facts(engine) for engine in added if engine.role == role],
                max_unavailable=self.world.resource.spec.rollout.unavailable,
            )
        ]
        return tuple(engine for engine in added if engine.name in names)

    @cached_property
    def all_draining(self) -> bool:
        """Whether a DRAIN of all engines is in effect although its goal is reached or obsolete.

        Only UNPAUSE ends this DRAIN, which also applies to newly registered engines. If engines have another model than
        the spec and no check of the new model is due, these engines are replaced before the DRAIN ends.
        """
        operation = self.desired.operation
        if operation is not None and operation.open:
            return False
        sent = operation is not None and operation.signal is SignalKind.DRAIN and operation.engine is None
        if not (sent or self.world.coordinator.drained_all):
            return False
        if sent and operation is not None and operation.goal is not self.desired.state:
            return True
        leaving = any(engine.stale_pods for engine in self.engines.all)
        return (not self.engines.old_model or self.keeps_former) and not leaving

    def facts(self, engine: EngineView) -> EngineFacts:
        """Return the rollout planner's view of an engine.

        The engine's process counts as serving only if it runs the revision of the StatefulSet.
        """
        report = engine.report
        return EngineFacts(
            name=engine.name,
            current=not engine.stale,
            leftover=bool(engine.stale_pods),
            leaving=all(pod.deleting for pod in engine.stale_pods),
            serving=engine.serving and not engine.superseded,
            draining=report is not None and report.draining,
            drained=self.engines.is_drained(engine),
            canary=engine.canary,
            responsive=report is None or not report.suspect,
        )


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
        return ChildRef("Pod", check_pod_name(self.ctx, self.rollout.revision))

    @cached_property
    def pod(self) -> PodView | None:
        """The pod that checks the desired revision, if it exists and is not being deleted."""
        checking = (pod for pod in self.rollout.check_pods if pod.revision == self.rollout.revision)
        return next((pod for pod in checking if not pod.deleting), None)

    @property
    def obsolete_pods(self) -> list[PodView]:
        """Pods that check a revision and are no longer needed.

        Such a pod is no longer needed if its revision is not the desired revision, is already in `Rollout.verified`, or
        is the revision of all engines.
        """
        rollout = self.rollout
        needed = rollout.check_due or (rollout.revision not in rollout.verified and bool(rollout.outdated))
        return [pod for pod in rollout.check_pods if not (needed and pod.revision == rollout.revision)]

    @cached_property
    def finding(self) -> Finding | None:
        """The error of the check that is due. The value is None while the check runs, or if no check is due."""
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
        """Whether the check that is due has failed with an error that a retry does not resolve."""
        pod = self.pod if self.rollout.check_due else None
        if pod is None or pod.phase != "Failed" or pod.exit_code not in FINAL_EXIT_CODES:
            return False
        # The Secret with the token may be rewritten.
        return self.finding is None or self.finding[0] is not Reason.ACCESS_DENIED

    def retry_in(self, pod: PodView) -> float:
        """Return the seconds until the failed check of `pod` is repeated.

        The time from the start of the failed check to its repetition equals the time for which the rollout had waited
        when the failed check started. This time doubles with each check, up to RETRY_MAX_SECONDS.
        """
        if pod.created_at is None:
            return RETRY_MAX_SECONDS
        age = (self.world.now - pod.created_at).total_seconds()
        since = (self.world.resource.status.get("plan") or {}).get("since")
        waited = seconds_since(since, self.world.now) - age if since is not None else 0.0
        return min(max(waited, RETRY_FIRST_SECONDS), RETRY_MAX_SECONDS) - age
