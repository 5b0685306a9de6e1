"""Turns a World into a Decision, which has a status and actions.

The actions are the upkeep of children, the actions of the first policy that applies, the replacement of lost pods, and
Events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from megatron_operator.decision.actions import Action, ApplyChild, CreateKeys, Decision, DeleteChild, EmitEvent
from megatron_operator.decision.coordinator_snapshot import CanaryReport, CoordinatorSnapshot, OperationReport
from megatron_operator.decision.losses import crashed_servers, forced_deletions, forced_in, replacement, replacement_in
from megatron_operator.decision.policies import POLICIES
from megatron_operator.decision.policies.verdict import Recorded, Verdict
from megatron_operator.decision.restarts import crash_events
from megatron_operator.decision.scene import Scene
from megatron_operator.decision.status import compose, condition, step_status, unwatched
from megatron_operator.decision.update import BEGUN
from megatron_operator.decision.upkeep import upkeep
from megatron_operator.decision.world import (
    DOWNLOAD_SECONDS,
    MISSING_SECONDS,
    OBJECT_SECONDS,
    OPTIONAL_SECONDS,
    UNCONFIGURED,
    PodView,
    World,
    has_optional_children,
)
from megatron_operator.resource.conditions import ConditionType, Finding, Reason
from megatron_operator.resource.names import COORDINATOR, DECODE, PREFILL
from megatron_operator.resource.spec import MegatronInferenceSpec
from megatron_operator.resource.text import printable, printable_data, stamp_seconds

CONNECT_SECONDS = 10.0
"""Time after the creation of a coordinator's pod within which the operator connects to it."""
Report = TypeVar("Report", OperationReport, CanaryReport)
OBSERVED_KINDS = ("Deployment", "Pod", "Secret", "Service", "StatefulSet")
"""Kinds that every decision needs. If the operator cannot watch one of them, the decision only reports this error.
Objects of other kinds are not changed while they are unknown.
"""
NOT_QUOTED = "(not quoted: the chart's podPolicy.quotedImageRepositories does not list the image)"
MAX_TEXT = 2048
"""Maximum number of characters of a string in a status, after escaping."""


def decide(world: World) -> Decision:
    """Return the decision for a world. The function is pure, so equal worlds give equal decisions."""
    if any(kind in world.unwatched for kind in OBSERVED_KINDS) and not world.resource.deleting:
        return _unobserved(world)
    scene = Scene(quotable(world))
    verdicts = ((policy, scene.read_by(policy)) for policy in POLICIES)
    policy, verdict = next((policy, verdict) for policy, verdict in verdicts if verdict is not None)
    if world.resource.deleting:
        return Decision(policy.__name__, verdict.reason.value, verdict.message, status=dict(world.resource.status))
    operation = scene.desired.operation if verdict.operation is Recorded.UNCHANGED else verdict.operation
    actions: list[Action] = upkeep(scene) if verdict.upkeep else []
    changing = next((change for action in actions if (change := _change(action, world))), "")
    status = printable_data(compose(scene, verdict, operation, changing=changing), limit=MAX_TEXT)
    crashes = crash_events(world.resource.status.get("restarts") or (), status["restarts"], scene.world.pods)
    losses = (
        *replacement(scene.world, scene.ctx),
        *crashed_servers(scene.world, scene.ctx),
        *forced_deletions(scene.world),
    )
    coordinators = scene.world.component_pods(COORDINATOR)
    replaced = any(pod.deleting for pod in coordinators) or not any(_is_established(pod, world) for pod in coordinators)
    events = _events(world.resource.status, status, replaced=replaced)
    object_seconds = _object_seconds(scene)
    every = _once((*actions, *losses, *verdict.actions, *events, *crashes))
    return Decision(
        policy=policy.__name__,
        reason=verdict.reason.value,
        message=printable(verdict.message),
        status=status,
        actions=tuple(action for action in every if not _is_held(action, world)),
        healing=(*(action for action in actions if _heals(action, world) and not _is_held(action, world)), *losses),
        objects=scene.rendered.named_objects,
        object_seconds=object_seconds,
        attentive=bool(verdict.step) or scene.desired.may_wake,
        requeue_after=_requeue_after(scene, verdict, object_seconds),
    )


def _object_seconds(scene: Scene) -> float:
    """Return the interval in seconds at which the objects that pods need are read.

    The interval is shorter if such an object may be missing.
    """
    unmounted = any(pod.unexplained or pod.reason == UNCONFIGURED for pod in scene.world.pods)
    lacking = unmounted or any(scene.rendered.missing(manifest) for manifest in scene.rendered.workloads)
    return MISSING_SECONDS if lacking else OBJECT_SECONDS


def _requeue_after(scene: Scene, verdict: Verdict, object_seconds: float) -> float | None:
    """Return the seconds until the decision can change without an event.

    Returns None if only an event can change it.
    """
    world = scene.world
    times = (
        verdict.requeue_after,
        scene.rendered.rejection_retry_in,
        scene.engines.events_due_in,
        DOWNLOAD_SECONDS if world.downloads or world.loads else None,
        OPTIONAL_SECONDS if has_optional_children(world.resource.spec) else None,
        object_seconds if scene.rendered.named_objects else None,
        scene.losses.lost_in,
        scene.losses.unknown_in,
        scene.engines.retry_in,
        scene.engines.avoided_in,
        scene.adapters.retry_in,
        replacement_in(world),
        min((contest.retry_in for contest in world.contests.values() if contest.retry_in > 0), default=None),
        forced_in(world),
        *(restarts.report_in(world.now) for restarts in scene.restarts),
    )
    return min((max(0.0, time) for time in times if time is not None), default=None)


def _once(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return the actions with at most one action per child.

    If several actions concern one child, the last one is kept. A policy's action therefore replaces the upkeep's
    action.
    """
    last = {action.ref: index for index, action in enumerate(actions) if isinstance(action, ApplyChild | DeleteChild)}
    return tuple(
        action
        for index, action in enumerate(actions)
        if not isinstance(action, ApplyChild | DeleteChild) or last[action.ref] == index
    )


def _is_held(action: Action, world: World) -> bool:
    """Return whether an action must wait, because its child is unknown or another program reverts the apply."""
    if isinstance(action, ApplyChild | DeleteChild) and action.ref.kind in world.unwatched:
        return True
    if not isinstance(action, ApplyChild) or action.ref not in world.contests:
        return False
    return world.contests[action.ref].holds(action.manifest, world.children.get(action.ref))


def _change(action: Action, world: World) -> str:
    """Return a description of the change that an upkeep action makes.

    The result is empty if the child already has the desired state.
    """
    if not isinstance(action, ApplyChild | DeleteChild) or _is_held(action, world):
        return ""
    view = world.children.get(action.ref)
    if isinstance(action, ApplyChild) and view is not None:
        replicas = action.manifest["spec"]["replicas"] if view.ref.kind == "StatefulSet" else view.replicas
        if (view.hash, view.replicas) == (action.hash, replicas):
            return ""
    return f"{action.ref} to be {'applied' if isinstance(action, ApplyChild) else 'deleted'}"


def _heals(action: Action, world: World) -> bool:
    """Return whether an action creates a missing object. Such an action may run before the status is written."""
    return isinstance(action, CreateKeys) or (isinstance(action, ApplyChild) and action.ref not in world.children)


def _is_established(coordinator: PodView, world: World) -> bool:
    """Return whether a pod of the coordinator is ready, and old enough that the operator has connected to it."""
    created = coordinator.created_at
    return coordinator.ready and (created is None or (world.now - created).total_seconds() > CONNECT_SECONDS)


def _events(before: Mapping[str, Any], after: Mapping[str, Any], *, replaced: bool = False) -> list[EmitEvent]:
    """Return one Event for each state transition, each new error, and each request that crashes engines.

    before, after: the stored status and the new status.
    replaced: whether the coordinator's pod is being replaced or has just started. In this case, the Event of the state
              Unknown has type Normal.
    """
    events: list[EmitEvent] = []
    if before.get("state") != after["state"]:
        origin = before.get("state") or "new"
        ready = _condition(after, ConditionType.READY)
        lost = after["state"] == "Unknown" and not replaced
        severity = "Warning" if after["state"] == "Failed" or lost else "Normal"
        events.append(EmitEvent(severity, after["state"], f"{origin} -> {after['state']}: {ready['message']}"))
    for kind in (ConditionType.DEGRADED, ConditionType.UPDATE_AVAILABLE, ConditionType.UNKNOWN_FIELDS):
        found, earlier = _condition(after, kind), _condition(before, kind)
        known = (earlier.get("status"), earlier.get("reason")) == ("True", found.get("reason"))
        if found.get("status") == "True" and not known:
            severity = "Normal" if found["reason"] == Reason.UPDATE_AVAILABLE else "Warning"
            events.append(EmitEvent(severity, found["reason"], found["message"]))
    phases = [(status.get("update") or {}).get("phase") in BEGUN for status in (before, after)]
    if phases == [False, True]:
        events.append(EmitEvent("Normal", "UpdateBegun", f"updating to release {after['release']['version']}"))
    recorded = {entry["id"] for entry in before.get("failedRequests") or ()}
    for failed in after.get("failedRequests") or ():
        if failed["id"] not in recorded:
            engines = ", ".join(failed["engines"])
            message = f"request {failed['id']} crashed {engines}; the client got the error engine_failed"
            events.append(EmitEvent("Warning", Reason.REQUEST_ENDS_ENGINES.value, message))
    return events


def _condition(status: Mapping[str, Any], kind: ConditionType) -> Mapping[str, Any]:
    return next((entry for entry in status.get("conditions") or () if entry["type"] == kind.value), {})


def reject_spec(*, status: Mapping[str, Any], generation: int, error: str, now: datetime) -> Decision:
    """Return the decision for a spec that this version cannot parse.

    The decision only reports the error. It changes no child.
    """
    values = {ConditionType.READY: "False", ConditionType.PROGRESSING: "Unknown", ConditionType.DEGRADED: "True"}
    return _unchanged(
        {**status, "state": "Pending", "observedGeneration": generation},
        values,
        (Reason.INVALID_SPEC, error),
        step=("reading the spec", f"a corrected spec: {error}"),
        before=status,
        now=now,
    )


def _unobserved(world: World) -> Decision:
    """Return the decision if a kind of object that decisions need cannot be read.

    The decision only reports this error. It changes no child.
    """
    unknown = (
        ConditionType.READY,
        ConditionType.COORDINATOR_READY,
        ConditionType.ENGINES_READY,
        ConditionType.LIFECYCLE_SETTLED,
        ConditionType.PROGRESSING,
    )
    status, finding = world.resource.status, unwatched(world)
    claim = {"manager": world.manager} if world.manager else {}
    return _unchanged(
        {"observedGeneration": world.resource.generation, **status, "state": "Unknown", **claim},
        {**dict.fromkeys(unknown, "Unknown"), ConditionType.DEGRADED: "True"},
        finding,
        step=("reading the objects of the resource", f"a permission of the operator: {finding[1]}"),
        before=status,
        now=world.now,
    )


def _unchanged(
    status: Mapping[str, Any],
    values: Mapping[ConditionType, str],
    finding: Finding,
    *,
    step: tuple[str, str],
    before: Mapping[str, Any],
    now: datetime,
) -> Decision:
    """Return a decision that changes only the status.

    values: the new status of each condition that reports `finding`.
    step:   the current step, and what the step waits for.
    before: the stored status.
    """
    reason, message = finding[0], printable(finding[1])
    conditions = {entry["type"]: entry for entry in before.get("conditions") or ()}
    rewritten = {
        kind.value: condition(
            kind,
            (value, reason, message),
            generation=status["observedGeneration"],
            before=conditions.get(kind.value),
            now=stamp_seconds(now),
        )
        for kind, value in values.items()
    }
    composed = {
        **status,
        "conditions": list({**conditions, **rewritten}.values()),
        "plan": step_status(before, step[0], printable(step[1])[:1024], now=now),
    }
    events = _events(before, composed)
    return Decision(reason.value, reason.value, message, status=composed, actions=tuple(events))


def quotable(world: World) -> World:
    """Return the World without the messages of containers whose images may not be quoted.

    Only images of the repositories that the installation lists may be quoted. A container of any other image can read
    Secrets and files. It can write the contents to its termination message, or send them to the coordinator as an
    error. Without this filter, a user who may only read the status could read these contents.
    """
    quotes = world.settings.quotes
    pods = tuple(
        pod if not pod.last_message or quotes(pod.image) else replace(pod, last_message=NOT_QUOTED)
        for pod in world.pods
    )
    foreign = not all(quotes(image) for image in _images(world.resource.spec))
    coordinator = _without_words(world.coordinator) if foreign else world.coordinator
    return replace(world, pods=pods, coordinator=coordinator)


def _images(spec: MegatronInferenceSpec) -> Iterator[str]:
    """Yield every container image in the spec."""
    for image in (spec.engine.image, spec.engine.vllm.image if spec.engine.vllm else None):
        if image is not None:
            yield image
    roles = [spec.engine.of_role(role).pod_template for role in (DECODE, PREFILL)]
    for template in (spec.engine.pod_template, *roles, spec.coordinator.pod_template, spec.server.pod_template):
        pod = (template or {}).get("spec")
        for field in ("containers", "initContainers"):
            containers = pod.get(field) if isinstance(pod, dict) else None
            for container in containers if isinstance(containers, list) else ():
                if isinstance(container, dict) and "image" in container:
                    yield str(container["image"])


def _without_words(snapshot: CoordinatorSnapshot) -> CoordinatorSnapshot:
    """Return the snapshot without texts. Numbers and states are kept, because decisions depend on them."""
    operations = {name: _without_message(report) for name, report in snapshot.operations.items()}
    canaries = {name: _without_message(report) for name, report in snapshot.canaries.items()}
    engines = tuple(replace(engine, digest="", recomputes=None) for engine in snapshot.engines)
    adapters = snapshot.adapters and tuple(
        replace(report, error=NOT_QUOTED if report.error else "") for report in snapshot.adapters
    )
    return replace(snapshot, operations=operations, canaries=canaries, engines=engines, adapters=adapters)


def _without_message(report: Report) -> Report:
    return replace(report, message=NOT_QUOTED if report.message else "")
