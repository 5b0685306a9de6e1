"""Derived views of a World: engines, effective desired state, observed state, rendered children.

Everything here is a function of the World. Policies read the scene, not the World's raw lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.model.names import CHECK, ENGINE
from megatron_operator.model.resource import SuspendLevel
from megatron_operator.model.settings import Settings
from megatron_operator.model.states import (
    CoordinatorState,
    DesiredState,
    EngineState,
    LifecyclePhase,
    ResourceState,
    SignalKind,
)
from megatron_operator.model.status import VERIFIED_REVISIONS
from megatron_operator.model.text import seconds_since
from megatron_operator.plan import operation as operations
from megatron_operator.plan.adapters import AdapterView
from megatron_operator.plan.budget import engine_budget
from megatron_operator.plan.engine_view import EngineView
from megatron_operator.plan.incidents import Restarts, count_restarts
from megatron_operator.plan.operation import Operation
from megatron_operator.plan.references import References, references
from megatron_operator.plan.rendered import APPS, Rendered
from megatron_operator.plan.rollout import Canary, EngineFacts, kept_extras
from megatron_operator.plan.update import Update
from megatron_operator.plan.world import (
    EVENT_SECONDS,
    UNKNOWN_SECONDS,
    ChildRef,
    EngineReport,
    PodView,
    World,
)
from megatron_operator.render.context import RenderContext, digest
from megatron_operator.render.engine import engine_revision
from megatron_operator.render.model_source import model_argument, model_hash
from megatron_operator.render.revision import KIND as REVISION_KIND
from megatron_operator.render.revision import has_inputs, revision_name
from megatron_runtime.protocol.lifecycle import STEADY_ENGINE_STATES

_ENGINE_KINDS = ("StatefulSet", "Service", "NetworkPolicy")
"""Children of one engine, which remain if the operator is killed while it removes the engine."""
MAX_STARTING = 256
"""Limit of engines that start at the same time, so that a mistaken number of replicas can be undone. The scheduler,
the nodes and the source of the weights start this many engines of one resource in parallel."""
WEIGHTS_REPORT_SECONDS = 30
"""Time in which engines report the weights of an update. Then a wrong report leads to another update."""
UNREACHABLE_GRACE_SECONDS = 30
LOST, UNKNOWN, UNRESPONSIVE = "Lost", "Unknown", "Unresponsive"
"""States of an engine in the status, besides those that it reports."""
REPORTED_STATES = frozenset(state.value for state in EngineState)
STUCK_GRACE_SECONDS = 120
"""Time after the drain deadline in which a Stopped resource keeps its pods if the coordinator does not stop the
engines. Then the pods are removed anyway: Stopped must not depend on a healthy coordinator."""


@dataclass(frozen=True)
class Scene:
    """A World with cached derived values."""

    world: World

    @cached_property
    def ctx(self) -> RenderContext:
        """The spec, with the current weights of the engines instead of the desired ones."""
        resource = self.world.resource
        spec, held = resource.spec, self.weights_held
        if held is not None and spec.weights is not None:
            spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"revision": held})})
        return RenderContext(resource.name, resource.namespace, resource.uid, spec, self.settings, self.server_key)

    @cached_property
    def update(self) -> Update:
        return Update(self.world, self.desired)

    @cached_property
    def settings(self) -> Settings:
        """The settings of the installation, with the release of the resource."""
        return self.update.release.settings(self.world.settings)

    @cached_property
    def rendered(self) -> Rendered:
        return Rendered(self.world, self.ctx, self.model_hash)

    @cached_property
    def server_key(self) -> int:
        """Generation of the coordinator's own key: from the Secret, or of the Secret that will be created."""
        if self.world.keys is not None:
            return self.world.keys.server_generation
        if ChildRef("Secret", f"{self.world.resource.name}-keys") in self.world.children:
            # The Secret exists and cannot be read: do not restart anything because of that.
            return int((self.status.get("keys") or {}).get("generation", 1))
        return self.next_keys

    @cached_property
    def next_keys(self) -> int:
        """Generation of the first keys: higher than any earlier one."""
        lost = (self.status.get("keys") or {}).get("generation", 0)
        return max(int(lost) + 1, self.world.resource.spec.keys.generation)

    @cached_property
    def weights_held(self) -> str | None:
        """Revision of the weights that engines serve; None before the first engine served, when pods use the spec's."""
        found = self.operation
        if found is not None and found.weights is not None and found.phase is LifecyclePhase.CONFIRMED:
            return found.weights
        held = self.status.get("weights") or {}
        return held.get("revision") if held.get("model") == self.model_hash else None

    @cached_property
    def model_hash(self) -> str:
        resource = self.world.resource
        plain = RenderContext(resource.name, resource.namespace, resource.uid, resource.spec, self.world.settings)
        return model_hash(plain)

    @cached_property
    def weights_epoch(self) -> int:
        """Epoch of the last confirmed update of the weights of this model; 0 if there was none."""
        found = self.operation
        if found is not None and found.weights is not None and found.phase is LifecyclePhase.CONFIRMED:
            return found.epoch or 0
        stored = self.status.get("weights") or {}
        return int(stored.get("epoch", 0)) if stored.get("model") == self.model_hash else 0

    def weights_of(self, engine: EngineView) -> str | None:
        """Return the revision of the weights that a serving engine reports; empty if they are of another source. None
        if that is unknown.

        An engine that was not updated in place has the weights of its pod. So does one that restarts in its pod while
        no coordinator remembers the update.
        """
        report, held = engine.report, self.weights_held
        if report is None or not report.serving or held is None:
            return None
        if report.source:
            return held if report.source == model_argument(self.ctx) else ""
        if report.source is None and report.epoch >= self.weights_epoch:
            return held
        return next((pod.weights for pod in engine.pods if not pod.deleting), None)

    @cached_property
    def wrong_weights(self) -> tuple[EngineView, ...]:
        """Serving engines with other weights than those of the last confirmed update."""
        if self.old_model:
            return ()
        held = self.weights_held
        return tuple(engine for engine in self.wanted if self.weights_of(engine) not in (None, held))

    @cached_property
    def mixed_weights(self) -> tuple[str, ...]:
        """Digests of the weights of engines of one revision, if they differ: they loaded different files."""
        digests: dict[str, set[str]] = {}
        for engine in self.serving:
            if engine.report is not None and engine.report.digest:
                digests.setdefault(engine.report.revision, set()).add(engine.report.digest)
        mixed = (found for found in digests.values() if len(found) > 1)
        return tuple(sorted(set().union(*mixed)))

    @cached_property
    def mixed_after_update(self) -> tuple[str, ...]:
        """The different digests, if loading the weights again has not made them equal."""
        last, stored = self.operation, (self.status.get("weights") or {}).get("differentDigests")
        updated = last is not None and last.over(SignalKind.UPDATE_WEIGHTS)
        recent = updated and last is not None and seconds_since(last.since, self.world.now) < WEIGHTS_REPORT_SECONDS
        return self.mixed_weights if recent or stored == list(self.mixed_weights) else ()

    @cached_property
    def weights_due(self) -> str | None:
        """Revision of the weights that engines should load in place; None if they have it.

        Different digests lead to an update only after an earlier one, which shows that the engines can update.
        """
        wanted, held = self.world.resource.spec.weights, self.weights_held
        if wanted is None or held is None:
            return None
        mixed = self.weights_epoch > 0 and self.mixed_weights and not self.mixed_after_update
        return wanted.revision if held != wanted.revision or self.wrong_weights or mixed else None

    @cached_property
    def references(self) -> References:
        """The Secrets and claims that the spec names."""
        return references(self.world.resource.spec.model_dump(mode="json"))

    @cached_property
    def status(self) -> Mapping[str, Any]:
        return self.world.resource.status

    @cached_property
    def lifecycle(self) -> Mapping[str, Any]:
        return self.status.get("lifecycle") or {}

    # --- What is wanted -----------------------------------------------------------------------------------------

    @cached_property
    def woken(self) -> bool:
        """Whether a request woke the suspended resource, now or earlier, and it has not been idle since.

        Only desiredState, zero replicas and wakeOnRequest end this before: an autoscaler changes the spec, too.
        """
        spec, coordinator = self.world.resource.spec, self.world.coordinator
        if spec.desired_state is not DesiredState.SUSPENDED or not spec.lifecycle.suspend.wake_on_request:
            return False
        if spec.replicas == 0:
            return False
        already = bool(self.lifecycle.get("woken"))
        if already and self.idle_in is not None and self.idle_in <= 0:
            return False
        suspended = coordinator.reachable and coordinator.state is CoordinatorState.SUSPENDED
        return already or (suspended and coordinator.queue_length > 0)

    @property
    def may_wake(self) -> bool:
        """Whether a request may wake the resource."""
        suspend = self.world.resource.spec.lifecycle.suspend
        return suspend.wake_on_request and self.desired is DesiredState.SUSPENDED

    @cached_property
    def idle_in(self) -> float | None:
        """Seconds until a woken resource without queued requests or requests in flight is suspended again; None while
        unknown."""
        coordinator, limit = self.world.coordinator, self.world.resource.spec.lifecycle.suspend.idle_seconds
        if not coordinator.reachable:
            return None
        busy = coordinator.queue_length > 0 or any(engine.in_flight for engine in coordinator.engines)
        return float(limit) if busy else limit - coordinator.idle_seconds

    @cached_property
    def desired(self) -> DesiredState:
        """`spec.desiredState`; zero replicas mean Suspended, and a request that wakes the resource means Running."""
        spec = self.world.resource.spec
        if spec.replicas == 0 and spec.desired_state in (DesiredState.RUNNING, DesiredState.PAUSED):
            return DesiredState.SUSPENDED
        return DesiredState.RUNNING if self.woken else spec.desired_state

    @cached_property
    def requested_at(self) -> str | None:
        """Time when the effective desired state was first seen; None if it is new."""
        same = self.lifecycle.get("desired") == self.desired.value
        return self.lifecycle.get("requestedAt") if same else None

    @cached_property
    def release(self) -> bool:
        """Whether the engine pods are removed while suspended."""
        spec = self.world.resource.spec
        suspend = spec.lifecycle.suspend
        if self.desired is not DesiredState.SUSPENDED:
            return False
        if suspend.level is SuspendLevel.RELEASE_PODS or spec.replicas == 0:
            return True
        left = self.escalation_in
        return left is not None and left <= 0

    @cached_property
    def escalation_in(self) -> float | None:
        """Seconds until a suspended resource also releases its pods; None if it keeps them."""
        after = self.world.resource.spec.lifecycle.suspend.escalate_after_seconds
        history = self.status.get("history") or []
        if after is None or not history or history[-1]["to"] != ResourceState.SUSPENDED.value:
            return None
        return after - seconds_since(history[-1]["at"], self.world.now)

    # --- The operation ------------------------------------------------------------------------------------------

    @cached_property
    def operation(self) -> Operation | None:
        return operations.resolve(operations.from_status(self.lifecycle), self.world, self.desired)

    @cached_property
    def adapters(self) -> AdapterView:
        return AdapterView(self.world, self.operation)

    def _over(self, signal: SignalKind) -> bool:
        found = self.operation
        return found is not None and found.goal is self.desired and found.over(signal)

    @cached_property
    def drained(self) -> bool:
        return self._over(SignalKind.DRAIN)

    @cached_property
    def all_draining(self) -> bool:
        """Whether a DRAIN of all engines is in effect although its goal is done or obsolete. Only UNPAUSE ends it, also
        for newly registered engines. Engines of another model are replaced first, if no check of the new one is due."""
        found = self.operation
        if found is not None and found.open:
            return False
        told = found is not None and found.signal is SignalKind.DRAIN and found.engine is None
        if not (told or self.world.coordinator.drained_all):
            return False
        if told and found is not None and found.goal is not self.desired:
            return True
        leaving = any(engine.stale_pods for engine in self.engines)
        return (not self.old_model or self.check_due or self.rollout_paused) and not leaving

    @cached_property
    def overdue_in(self) -> float | None:
        """Seconds until a stalled stop continues without the coordinator; None unless stopping."""
        if self.desired is not DesiredState.STOPPED or self.requested_at is None:
            return None
        grace = STUCK_GRACE_SECONDS if self.world.coordinator.reachable else UNREACHABLE_GRACE_SECONDS
        limit = self.world.resource.spec.lifecycle.drain_seconds + grace
        return limit - seconds_since(self.requested_at, self.world.now)

    @cached_property
    def stopped(self) -> bool:
        """Whether the engines need no further signal, so that their pods may be removed."""
        if self.desired is not DesiredState.STOPPED:
            return False
        overdue = self.overdue_in
        return self._over(SignalKind.STOP) or (overdue is not None and overdue <= 0)

    # --- Engines ------------------------------------------------------------------------------------------------

    @cached_property
    def engines(self) -> tuple[EngineView, ...]:
        """Every engine that is desired or exists, by index."""
        world, ctx = self.world, self.ctx
        pattern = re.compile(re.escape(f"{ctx.name}-engine-") + r"(0|[1-9][0-9]*)")
        indexes = set(range(ctx.spec.replicas))
        for ref in world.children:
            match = pattern.fullmatch(ref.name) if ref.kind in _ENGINE_KINDS else None
            if match and world.children[ref].owned:
                indexes.add(int(match.group(1)))
        reports = {report.name: report for report in world.coordinator.engines if world.coordinator.reachable}
        return tuple(self._engine(index, reports) for index in sorted(indexes))

    @cached_property
    def attempt(self) -> str:
        """Digest of the inputs of the engines and the last restart command; another one begins new restart budgets."""
        resource = self.world.resource
        manifest = self.rendered.engine_manifest(0)
        wanted = resource.spec.weights
        return digest(
            [
                engine_revision(manifest) if manifest is not None else "",
                wanted.revision if wanted is not None else "",
                resource.spec.lifecycle.restart_budget.model_dump(mode="json"),
                resource.restarted_at,
            ]
        )

    @cached_property
    def retry_in(self) -> float | None:
        """Seconds until the next engine with an exhausted budget is started again; None if none is."""
        times = [engine.budget.retry_at for engine in self.wanted if engine.budget.exhausted is not None]
        return min((-seconds_since(time, self.world.now) for time in times if time is not None), default=None)

    def _engine(self, index: int, reports: Mapping[str, EngineReport]) -> EngineView:
        world, name = self.world, self.ctx.engine_name(index)
        pods = tuple(pod for pod in world.pods if pod.component == ENGINE and pod.engine == name)
        manifest = self.rendered.engine_manifest(index)
        revision = engine_revision(manifest) if manifest else ""
        found = world.children.get(ChildRef("StatefulSet", name, APPS))
        return EngineView(
            index=index,
            name=name,
            surplus=index >= self.ctx.spec.replicas,
            held=found is not None and found.revision != revision and self._is_held(found.revision),
            statefulset=found,
            pods=pods,
            report=reports.get(name),
            rendered_revision=revision,
            budget=engine_budget(world, name, pods, revision=revision, attempt=self.attempt),
            **self._canary(index),
        )

    def _is_held(self, revision: str) -> bool:
        """Return whether a revision differs from the desired one only by how this operator renders it, and engines
        keep it until the resource is updated."""
        if not self.update.available:
            return False
        record = self.world.children.get(ChildRef(REVISION_KIND, revision_name(self.ctx, revision), APPS))
        return record is not None and record.data is not None and has_inputs(self.ctx, record.data)

    def _canary(self, index: int) -> dict[str, Any]:
        """Return the canary fields of an engine. A canary is due when a StatefulSet with pods changes its revision, and
        when an engine is added beyond spec.replicas."""
        name = self.ctx.engine_name(index)
        before = self.engine_status(name)
        found = self.world.children.get(ChildRef("StatefulSet", name, APPS))
        if found is None or found.replicas == 0:
            return {}
        rolled = before.get("revision") not in (None, "", found.revision)
        rolled |= self._may_surge(index) and not before.get("revision")
        canary = Canary.PENDING if rolled else Canary(before.get("canary", ""))
        if canary is not Canary.PENDING:
            return {"canary": canary, "canary_message": before.get("canaryMessage", "")}
        report = self.world.coordinator.canaries.get(name)
        if report is None or report.revision != found.revision:
            return {"canary": canary}
        answered = Canary.PASSED if report.ok else Canary.FAILED
        return {"canary": answered if report.supported else Canary.SKIPPED, "canary_message": report.message}

    def engine_status(self, name: str) -> Mapping[str, Any]:
        """Return the persisted status of an engine, or an empty one."""
        return next((entry for entry in self.status.get("engines") or () if entry["name"] == name), {})

    @cached_property
    def wanted(self) -> tuple[EngineView, ...]:
        return tuple(engine for engine in self.engines if not engine.surplus)

    def _may_surge(self, index: int) -> bool:
        spec = self.ctx.spec
        return spec.replicas <= index < spec.replicas + spec.rollout.max_surge

    @cached_property
    def extras(self) -> tuple[EngineView, ...]:
        """Engines beyond spec.replicas that a rollout added, or that it needs."""
        found = [engine for engine in self.engines if self._may_surge(engine.index) and engine.scaled > 0]
        found = [
            each for each in found if each.statefulset and each.statefulset.owned and not each.statefulset.deleting
        ]
        if not found or self.desired is not DesiredState.RUNNING:
            return ()
        names = kept_extras(
            [self.facts(engine) for engine in self.wanted],
            [self.facts(engine) for engine in found],
            max_unavailable=self.ctx.spec.rollout.unavailable,
        )
        return tuple(engine for engine in found if engine.name in names)

    def is_drained(self, engine: EngineView) -> bool:
        """Return whether a DRAIN of this engine is unnecessary: it has no requests, or its DRAIN is complete. An engine
        that has restarted since gets requests again."""
        if engine.report is None or not engine.serving:
            return True
        over = self.operation is not None and self.operation.over(SignalKind.DRAIN, engine=engine.name)
        return over and engine.report.draining

    def facts(self, engine: EngineView) -> EngineFacts:
        """Return the rollout planner's view of an engine. A process of an earlier revision proves nothing about the
        desired one."""
        report = engine.report
        return EngineFacts(
            name=engine.name,
            current=not engine.stale,
            leftover=bool(engine.stale_pods),
            leaving=all(pod.deleting for pod in engine.stale_pods),
            serving=engine.serving and not engine.superseded,
            draining=report is not None and report.draining,
            drained=self.is_drained(engine),
            canary=engine.canary,
            responsive=report is None or not report.suspect,
        )

    @cached_property
    def rollout_paused(self) -> bool:
        """Whether engines keep another revision than the desired one, because the rollout is paused. Without engines,
        it is the last one that served."""
        held = not any(each.statefulset for each in self.wanted) and self.former and self.verified[-1] != self.revision
        return self.world.resource.spec.rollout.paused and bool(self.outdated or held)

    @cached_property
    def keeps_former(self) -> bool:
        """Whether engines keep another revision: the desired one must be checked first, or its rollout is paused."""
        return self.check_due or self.rollout_paused

    @cached_property
    def serving(self) -> tuple[EngineView, ...]:
        return tuple(engine for engine in self.engines if engine.serving)

    @cached_property
    def old_model(self) -> tuple[EngineView, ...]:
        """Engines with pods of another model than the spec's."""
        return tuple(
            engine
            for engine in self.engines
            if engine.statefulset is not None and engine.scaled > 0 and engine.statefulset.model_hash != self.model_hash
        )

    @cached_property
    def held_back(self) -> frozenset[str]:
        """Names of the engines that get their pods later, because MAX_STARTING others start."""
        room = max(0, MAX_STARTING - sum(engine.starting for engine in self.engines))
        without_pods = [engine.name for engine in self.wanted if engine.scaled == 0 and self.pods_for(engine) > 0]
        return frozenset(without_pods[room:])

    @cached_property
    def engines_empty(self) -> bool:
        """Whether no engine has a pod or gets one without a further write."""
        return all(engine.empty for engine in self.engines)

    @cached_property
    def suspended(self) -> bool:
        """Whether the coordinator and all serving engines are SUSPENDED, and no operation is in progress."""
        return self.steady is CoordinatorState.SUSPENDED and not (self.operation and self.operation.open)

    def pods_for(self, engine: EngineView) -> int:
        """Return how many pods an engine should have: none, or all."""
        full = self.ctx.spec.pods_per_engine
        if engine.budget.exhausted is not None:
            return 0
        if self.desired is DesiredState.STOPPED:
            leave = self.stopped
        elif self.release:
            leave = self.suspended
        else:
            return full
        return 0 if leave or engine.scaled == 0 else full

    @cached_property
    def restarts(self) -> list[Restarts]:
        """The container restarts of each component."""
        return count_restarts(self.status.get("restarts") or (), self.world.pods, self.world.now)

    @cached_property
    def events_due_in(self) -> float | None:
        """Seconds until Events are read again; None unless only an Event can explain why a pod is missing."""
        incomplete = any(engine.incomplete for engine in self.engines)
        return EVENT_SECONDS if incomplete or any(pod.unexplained for pod in self.world.pods) else None

    @cached_property
    def downloading(self) -> tuple[PodView, ...]:
        """Pods whose init container downloads the model, or waits for another pod that does."""
        return tuple(pod for pod in self.world.pods if pod.fetching_at and not pod.deleting)

    def serves(self, engine: EngineView) -> bool:
        """Return whether an engine serves and responds. While the coordinator does not know its engines, an engine
        whose pods still run counts as before, for UNKNOWN_SECONDS."""
        if self.world.membership_known or engine.serving:
            return engine.responsive
        recent = self.world.coordinator.unknown_seconds < UNKNOWN_SECONDS
        return recent and engine.whole and self.engine_status(engine.name).get("state") in REPORTED_STATES

    # --- The check of a new revision ------------------------------------------------------------------------------

    @cached_property
    def revision(self) -> str:
        """The desired revision, with no desired engine too; empty if its template cannot be rendered."""
        manifest = self.rendered.engine_manifest(0)
        return engine_revision(manifest) if manifest is not None else ""

    @cached_property
    def check_pods(self) -> tuple[PodView, ...]:
        """The pods that check a revision of this resource."""
        return tuple(pod for pod in self.world.pods if pod.component == CHECK and pod.owner == self.world.resource.uid)

    @cached_property
    def verified(self) -> tuple[str, ...]:
        """The last revisions whose check passed, or of which an engine served; the latest last."""
        found = {pod.revision for pod in self.check_pods if pod.phase == "Succeeded"}
        found |= {engine.serving_revision for engine in self.engines} - {""}
        before = (revision for revision in self.status.get("verifiedRevisions") or () if revision not in found)
        return (*before, *sorted(found))[-VERIFIED_REVISIONS:]

    @cached_property
    def outdated(self) -> tuple[EngineView, ...]:
        """Desired engines that have another revision than the spec."""
        return tuple(engine for engine in self.wanted if engine.stale)

    @cached_property
    def check_due(self) -> bool:
        """Whether the desired revision must pass its check before an engine gets it: while engines of another revision
        serve, and once its check has begun, because they may restart meanwhile, or be scaled to zero and back."""
        if self.revision in self.verified:
            return False
        begun = any(pod.revision == self.revision and not pod.deleting for pod in self.check_pods)
        if not self.outdated:
            return begun and self.former != "" and not any(engine.scaled for engine in self.wanted)
        extras = (engine for engine in self.engines if self._may_surge(engine.index) and engine.stale)
        return begun or any(engine.serving for engine in (*self.outdated, *extras))

    @cached_property
    def former(self) -> str:
        """Revision of an engine that starts before the desired one may be used: that of the other engines; without
        engines the last verified one. Empty if there is none."""
        if self.outdated:
            last = max(self.outdated, key=lambda engine: (engine.serving, engine.index)).statefulset
            return last.revision if last is not None else ""
        others = (revision for revision in reversed(self.verified) if revision != self.revision)
        return next((revision for revision in others if self.rendered.is_recorded(revision)), "")

    # --- What is observed ---------------------------------------------------------------------------------------

    @cached_property
    def steady(self) -> CoordinatorState | None:
        """The coordinator's state if it is settled and every serving engine has the same, else None."""
        coordinator = self.world.coordinator
        if not coordinator.reachable or coordinator.state not in STEADY_ENGINE_STATES:
            return None
        agreeing = STEADY_ENGINE_STATES[coordinator.state]
        reports = (report for report in coordinator.engines if report.serving)
        return coordinator.state if all(report.state in agreeing for report in reports) else None

    @cached_property
    def observed(self) -> ResourceState:
        """The common state of coordinator, engines and pods, as reported by every rank."""
        if self.wanted and all(engine.budget.exhausted for engine in self.wanted):
            return ResourceState.FAILED
        if self.desired is DesiredState.STOPPED and self.engines_empty:
            return ResourceState.STOPPED
        if not self.world.coordinator.reachable:
            started = self.status.get("state") not in (None, ResourceState.PENDING.value)
            return ResourceState.UNKNOWN if started else ResourceState.PENDING
        some = bool(self.serving)
        if self.steady is CoordinatorState.RUNNING and some:
            return ResourceState.RUNNING
        if self.steady is CoordinatorState.PAUSED and some:
            return ResourceState.PAUSED
        if self.steady is CoordinatorState.SUSPENDED and (some or self.release):
            return ResourceState.SUSPENDED
        return ResourceState.PENDING

    @cached_property
    def state(self) -> ResourceState:
        """`status.state`: the observed state, or the verb in progress."""
        if self.observed in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.observed
        return self.state_with(self.operation)

    def state_with(self, operation: Operation | None) -> ResourceState:
        """Return `status.state` while `operation` is in progress."""
        if self.observed in (ResourceState.STOPPED, ResourceState.FAILED):
            return self.observed
        if self.desired is DesiredState.STOPPED and (self.serving or not self.engines_empty):
            return ResourceState.STOPPING
        if operation is not None and operation.open and operation.phase is not LifecyclePhase.UNKNOWN:
            verb = VERB_STATE.get(operation.signal)
            if verb is not None:
                return verb
        return self.observed


VERB_STATE: dict[SignalKind, ResourceState] = {
    SignalKind.PAUSE: ResourceState.PAUSING,
    SignalKind.UNPAUSE: ResourceState.UNPAUSING,
    SignalKind.SUSPEND: ResourceState.SUSPENDING,
    SignalKind.RESUME: ResourceState.RESUMING,
    SignalKind.STOP: ResourceState.STOPPING,
}
"""State of a resource while a signal is in progress. DRAIN of one engine does not change it."""
