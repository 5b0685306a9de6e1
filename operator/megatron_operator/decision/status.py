"""Composes `.status` from a scene and a verdict.

Two invariants hold. Equal facts give equal bytes, and a timestamp changes only with its fact, so a pass without changes
writes nothing. The status has no values that change with traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import LOST, UNKNOWN, UNRESPONSIVE
from megatron_operator.decision.operation import Operation
from megatron_operator.decision.policies.guards import QUIET
from megatron_operator.decision.policies.verdict import Verdict
from megatron_operator.decision.rendered import APPS
from megatron_operator.decision.rollout import Canary
from megatron_operator.decision.scene import Scene
from megatron_operator.decision.world import ChildRef, World, manifest_hash
from megatron_operator.render.context import scale_selector
from megatron_operator.resource.conditions import ConditionType, Finding, Reason
from megatron_operator.resource.names import COORDINATOR, DECODE, PREFILL, SERVER, STANDBY
from megatron_operator.resource.states import DesiredState, ResourceState
from megatron_operator.resource.status import FAILED_REQUESTS, HISTORY_LENGTH
from megatron_operator.resource.text import printable, seconds_since, stamp, stamp_seconds

T = ConditionType
REACHED = {state: ResourceState(state.value) for state in DesiredState}
"""The state of a resource that has reached its desired state, by desired state."""
STABLE = frozenset({*REACHED.values(), ResourceState.FAILED})

NAMED_FIELDS = 8
NO_FORMAT = "none"
WAIT_SECONDS = 1800.0
"""Deadline of every wait. It is long because large models load for many minutes. A download in progress has no
deadline.
"""
LIMITS = {
    "maxSequenceLength": "max_sequence_length",
    "kvCacheBytes": "kv_cache_bytes",
    "maxRequests": "max_requests",
    "maxTokens": "max_tokens",
}
"""Field of EngineReport for each field of `status.limits`."""
FULL_TEXTS = 64
"""Maximum number of complete messages about single engines in a status. Further messages are truncated to SHORT_TEXT
characters.
"""
ENGINE_TEXT, SHORT_TEXT = 1024, 80

ConditionFinding = tuple[str, Reason, str]
"""Status, reason and message of a condition."""


def compose(scene: Scene, verdict: Verdict, operation: Operation | None, *, changing: str = "") -> dict[str, Any]:
    """Return the new `.status` of the resource.

    operation: the operation to record.
    changing: description of the change that the decision makes to a child; empty if the decision changes no child.
    """
    world, ctx = scene.world, scene.ctx
    state = scene.observed.state_with(operation)
    progress = _progress(scene, verdict, changing)
    conditions = _conditions(scene, verdict, state, progress)
    # A reader of the list of resources would take a reached state to mean that the resource is ready.
    shown = ResourceState.PENDING if _is_reached(scene, state) and not _is_ready(scene, state) else state
    epoch = world.coordinator.epoch if world.coordinator.reachable else scene.world.resource.status.get("epoch", 0)
    serving = [engine for engine in (*scene.engines.wanted, *scene.rollout.extras) if scene.engines.serves(engine)]
    status: dict[str, Any] = {
        "observedGeneration": world.resource.generation,
        "state": shown.value,
        "ready": f"{0 if scene.blockers.server() else _counted(scene, serving)}/{ctx.spec.num_engines}",
        "model": ctx.model_name,
        "revision": _revision(scene),
        "endpoint": (scene.rendered.front_door_waits and world.resource.status.get("endpoint")) or ctx.endpoint,
        "epoch": epoch,
        "replicas": sum(engine.scaled > 0 for engine in scene.engines.all if engine.role == DECODE),
        "readyReplicas": sum(engine.role == DECODE for engine in serving),
        "updatedReplicas": sum(_updated(engine) for engine in scene.engines.of_role(DECODE)),
        "selector": scale_selector(ctx),
        "conditions": conditions,
        "lifecycle": _lifecycle(scene, operation),
        "restarts": [restarts.to_status() for restarts in scene.restarts],
        "attempt": scene.engines.attempt,
        "engines": _engines(scene),
        "history": _history(scene, operation, state),
    }
    unknown = [engine for engine in scene.engines.all if scene.losses.is_unknown(engine)]
    optional = {
        "manager": world.manager,
        "verifiedRevisions": list(scene.rollout.verified),
        "weights": _weights(scene, serving=[*serving, *unknown]),
        "adapters": scene.adapters.entries,
        "formats": _formats(scene),
        "keys": _keys(scene),
        "roles": _roles(scene, serving),
        "failedRequests": _failed_requests(scene),
        "limits": _limits(scene, serving),
        "download": _download(scene),
        "loading": _loading(scene),
        "plan": progress and step_status(world.resource.status, *progress[1:], now=world.now),
    }
    present = {name: value for name, value in optional.items() if value}
    return {**status, **present, **scene.update.status(complete=_has_release(scene))}


def _counted(scene: Scene, engines: Sequence[EngineView]) -> int:
    """Return the number of engines in `engines`. For each role, count at most as many engines as the spec requests."""
    counts = [sum(engine.role == role for engine in engines) for role in scene.ctx.roles]
    limits = map(scene.ctx.spec.engines_of, scene.ctx.roles)
    return sum(map(min, counts, limits))


def _roles(scene: Scene, serving: Sequence[EngineView]) -> list[dict[str, Any]]:
    """Return the number of desired, ready and updated engines of each role.

    Returns an empty list if the spec defines no roles.
    """
    return [
        {
            "name": role,
            "desired": scene.ctx.spec.engines_of(role),
            "ready": sum(engine.role == role for engine in serving),
            "updated": sum(_updated(engine) for engine in scene.engines.of_role(role)),
        }
        for role in (scene.ctx.roles if PREFILL in scene.ctx.roles else ())
    ]


def _formats(scene: Scene) -> Mapping[str, str] | None:
    """Return `status.formats`, the formats of answers that the servers parse.

    If the coordinator does not report the formats, return the formats in the current status, or None if it has none.
    """
    formats = scene.world.coordinator.formats
    if formats is None:
        return scene.world.resource.status.get("formats")
    return {"toolCalls": formats.tool_calls or NO_FORMAT, "reasoning": formats.reasoning or NO_FORMAT}


def _download(scene: Scene) -> dict[str, Any] | None:
    """Return the progress of the download to the cache, or None if no download is in progress."""
    download = scene.world.download
    if download is None:
        return None
    progress = {"pod": download.pod, "bytes": download.bytes, "totalBytes": download.total_bytes}
    if download.bytes_per_second > 0:
        left = max(0, download.total_bytes - download.bytes)
        progress |= {"bytesPerSecond": download.bytes_per_second, "secondsLeft": -(-left // download.bytes_per_second)}
    return progress


def _loading(scene: Scene) -> dict[str, Any] | None:
    """Return the progress of the first engine that loads its weights.

    Returns None if the progress is unknown, or if an engine serves.
    """
    loading = scene.world.loading
    if loading is None or not scene.world.loads:
        return None
    counts = {"bytes": loading.bytes, "totalBytes": loading.total_bytes, "secondsLeft": loading.seconds_left}
    return {
        "pod": loading.pod,
        "stage": loading.stage,
        **{name: count for name, count in counts.items() if count is not None},
    }


def _limits(scene: Scene, serving: Sequence[EngineView]) -> Mapping[str, int]:
    """Return `status.limits`. Each limit is the minimum over the serving engines.

    If no engine reports a limit, return the limits in the current status, or an empty mapping if it has none.
    """
    reports = [engine.report for engine in serving if engine.report is not None]
    limits = {}
    for field, name in LIMITS.items():
        values = [value for report in reports if (value := getattr(report, name)) is not None]
        if values:
            limits[field] = min(values)
    return limits or scene.world.resource.status.get("limits") or {}


def _revision(scene: Scene) -> str:
    """Return the revision that engines should have.

    If engines keep their revision until the resource is updated, return the revision of the first engine.
    """
    if not scene.engines.wanted:
        return str(scene.world.resource.status.get("revision", ""))
    first = scene.engines.wanted[0]
    return first.statefulset.revision if first.held and first.statefulset is not None else first.rendered_revision


def _has_release(scene: Scene) -> bool:
    """Return whether coordinator, servers and engines run the release of the resource and are ready."""
    engines = scene.engines
    due = [engine for engine in engines.wanted if engines.pods_for(engine) > 0 or engine.budget.exhausted is not None]
    rolled_out = not scene.rendered.shared[1] and not _unfinished(scene)
    return rolled_out and all(_updated(engine) and engine.responsive for engine in due)


def _failed_requests(scene: Scene) -> list[dict[str, Any]]:
    """Return the failed requests that the status has recorded or the coordinator reports.

    The requests are sorted by time, so that equal reports give equal bytes.
    """
    entries = {entry["id"]: entry for entry in scene.world.resource.status.get("failedRequests") or ()}
    for failed in scene.world.coordinator.failed_requests:
        entry = {"id": failed.id, "engines": list(failed.engines), "time": stamp(failed.time)}
        entries.setdefault(failed.id, entry)
    return sorted(entries.values(), key=lambda entry: (entry["time"], entry["id"]))[-FAILED_REQUESTS:]


def _weights(scene: Scene, *, serving: list[EngineView]) -> Mapping[str, Any] | None:
    """Return `status.weights`, or None if no weights are recorded or the spec has no section `weights`.

    The weights are first recorded when the first engine serves. After that, only updates in place change them.

    While engines of an earlier model serve, the status keeps their weights, because the change of the model may be
    reverted.
    """
    wanted = scene.world.resource.spec.weights
    if wanted is None:
        return None
    if any(engine in scene.engines.old_model for engine in serving):
        return scene.world.resource.status.get("weights")
    if wanted.revision is None:
        published = scene.weights.published
        return {**published, "model": scene.rendered.model_hash} if published else None
    held = scene.weights.confirmed.revision or (wanted.revision if serving else None)
    if held is None:
        return None
    return {
        "revision": held,
        "model": scene.rendered.model_hash,
        **({"epoch": scene.weights.confirmed.epoch} if scene.weights.confirmed.epoch else {}),
        **({"differentDigests": list(scene.weights.mixed_after_update)} if scene.weights.mixed_after_update else {}),
    }


def _keys(scene: Scene) -> Mapping[str, Any] | None:
    """Return `status.keys`, or None if there are no keys.

    If the Secret was deleted, the recorded value is kept, so that new keys get another generation.
    """
    keys = scene.world.keys
    if keys is None:
        return scene.world.resource.status.get("keys")
    return {
        "generation": keys.generation,
        "stage": keys.stage.value,
        **({"since": keys.since} if keys.since else {}),
    }


def _updated(engine: EngineView) -> bool:
    """Return whether an engine has the desired revision and, after a rollout, has passed its canary."""
    proven = engine.canary not in (Canary.PENDING, Canary.FAILED)
    return engine.scaled > 0 and not engine.stale and not engine.stale_pods and proven


def _lifecycle(scene: Scene, operation: Operation | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "desired": scene.desired.state.value,
        "observed": scene.observed.state.value,
        "requestedAt": scene.desired.requested_at or stamp(scene.world.now),
    }
    if scene.world.fence_offset:
        fields["fenceOffset"] = scene.world.fence_offset
    if scene.desired.woken:
        fields["woken"] = True
    if operation is not None:
        fields |= operation.to_status()
    return fields


def step_status(status: Mapping[str, Any], step: str, waiting_on: str, *, now: datetime) -> dict[str, Any]:
    """Return `status.plan` for the current step.

    status: the stored status.
    """
    before = status.get("plan") or {}
    since = before.get("since") if before.get("step") == step else None
    return {"step": step, "waitingOn": waiting_on, "since": since or stamp_seconds(now)}


def _engine_state(scene: Scene, engine: EngineView) -> str:
    if engine.budget.exhausted is not None:
        return "Failed"
    if engine.report is not None:
        if engine.report.suspect:
            return UNRESPONSIVE
        return engine.report.state.value if engine.report.serving else "Loading"
    if scene.losses.is_lost(engine):
        return LOST
    if scene.engines.serves(engine):
        return str(scene.world.resource.engine_status(engine.name)["state"])
    if scene.losses.is_unknown(engine):
        return UNKNOWN
    return "Released" if engine.empty and scene.engines.pods_for(engine) == 0 else "Pending"


def _last_revision(scene: Scene, engine: EngineView) -> str:
    """Return the revision that an engine has or last had.

    If its StatefulSet was deleted, the StatefulSet is created again with this revision.
    """
    return "" if engine.surplus else str(scene.world.resource.engine_status(engine.name).get("revision", ""))


def _engines(scene: Scene) -> list[dict[str, Any]]:
    """Return `status.engines`, which has one entry per engine.

    The length of the texts in the entries is limited, because etcd limits objects to 1.5 MiB.
    """
    entries = [_engine(scene, engine) for engine in scene.engines.all]
    texts = [(entry, name) for entry in entries for name in ("diagnosis", "canaryMessage") if name in entry]
    for number, (entry, name) in enumerate(texts):
        limit = ENGINE_TEXT if number < FULL_TEXTS else SHORT_TEXT
        if len(entry[name]) > limit:
            entry[name] = entry[name][: limit - 1] + "…"
    return entries


def _engine(scene: Scene, engine: EngineView) -> dict[str, Any]:
    report = engine.report
    # A coordinator that restarts does not change what runs.
    remembered = report is None and (scene.engines.serves(engine) or scene.losses.is_unknown(engine))
    known = scene.world.resource.engine_status(engine.name) if remembered else {}
    digest = report.digest if report else known.get("digest")
    return {
        "name": engine.name,
        "state": _engine_state(scene, engine),
        "revision": engine.statefulset.revision if engine.statefulset else _last_revision(scene, engine),
        "epoch": report.epoch if report else known.get("epoch", 0),
        "ranks": report.ranks if report else known.get("ranks", 0),
        **({"digest": digest} if digest else {}),
        **({"role": engine.role} if PREFILL in scene.ctx.roles or engine.role == PREFILL else {}),
        **({"recomputes": report.recomputes} if report and report.recomputes else {}),
        **({"weights": weights} if (weights := scene.weights.of(engine)) else {}),
        **({"canary": engine.canary.value} if engine.canary else {}),
        **({"canaryMessage": engine.canary_message[:400]} if engine.canary_message else {}),
        **engine.budget.to_status(),
    }


def _history(scene: Scene, operation: Operation | None, state: ResourceState) -> list[dict[str, Any]]:
    history = list(scene.world.resource.status.get("history") or [])
    last = history[-1]["to"] if history else ResourceState.PENDING.value
    if state not in STABLE or state.value == last:
        return history
    since = seconds_since(scene.desired.requested_at, scene.world.now)
    entry: dict[str, Any] = {
        "from": last,
        "to": state.value,
        "by": _requester(scene),
        "at": stamp(scene.world.now),
        "seconds": round(since, 3) if since != float("inf") else 0.0,
    }
    if operation is not None:
        entry["operationId"] = operation.id
    return [*history, entry][-HISTORY_LENGTH:]


def _requester(scene: Scene) -> str:
    spec = scene.ctx.spec
    if scene.desired.woken:
        return "spec.lifecycle.suspend.wakeOnRequest"
    if spec.num_engines == 0 and spec.desired_state in (DesiredState.RUNNING, DesiredState.PAUSED):
        return "spec.replicas"
    return scene.world.resource.changed_by or "spec.desiredState"


# --- Conditions -----------------------------------------------------------------------------------------------------


def _conditions(
    scene: Scene, verdict: Verdict, state: ResourceState, progress: tuple[Reason, str, str] | None
) -> list[dict[str, Any]]:
    degraded = _degraded(scene, verdict, progress)
    findings = {
        T.READY: _ready(scene, verdict, state, degraded),
        T.COORDINATOR_READY: _coordinator_ready(scene),
        T.ENGINES_READY: _engines_ready(scene),
        T.LIFECYCLE_SETTLED: _lifecycle_settled(scene, verdict, state),
        T.PROGRESSING: _progressing(scene, verdict, progress),
        T.DEGRADED: degraded,
        T.UPDATE_AVAILABLE: scene.update.finding,
        T.SINGLE_SERVER: _single_server(scene),
        T.UNKNOWN_FIELDS: _unknown_fields(scene),
        **({T.ROLE_MISSING: _role_missing(scene)} if PREFILL in scene.ctx.roles else {}),
    }
    before = {entry["type"]: entry for entry in scene.world.resource.status.get("conditions") or ()}
    generation = scene.world.resource.generation
    # kubectl wait must not mistake serving pods of the earlier spec for the changed spec.
    ready_for = before.get(T.READY.value, {}).get("observedGeneration", generation) if progress else generation
    return [
        condition(
            kind,
            finding,
            generation=ready_for if kind is T.READY else generation,
            before=before.get(kind.value),
            now=stamp_seconds(scene.world.now),
        )
        for kind, finding in findings.items()
    ]


def condition(
    kind: ConditionType, finding: ConditionFinding, *, generation: int, before: dict[str, Any] | None, now: str
) -> dict[str, Any]:
    """Return a condition. Its lastTransitionTime changes only if its status differs from the status in `before`."""
    status, reason, message = finding
    kept = before["lastTransitionTime"] if before is not None and before["status"] == status else now
    return {
        "type": kind.value,
        "status": status,
        "reason": reason.value,
        "message": printable(message)[:1024],
        "observedGeneration": generation,
        "lastTransitionTime": kept,
    }


def _single_server(scene: Scene) -> ConditionFinding:
    view = scene.world.children.get(ChildRef("Deployment", scene.ctx.server_name, APPS))
    replicas = scene.ctx.spec.server.replicas
    count = replicas if replicas is not None else view.replicas if view is not None else 1
    if count > 1:
        return "False", Reason.ALL_WELL, f"{count} OpenAI servers share the requests"
    return "True", Reason.ONE_SERVER, "if this server fails, requests fail; set spec.server.replicas to 2 or more"


def _unknown_fields(scene: Scene) -> ConditionFinding:
    paths = scene.world.resource.unknown_fields
    if not paths:
        return "False", Reason.ALL_WELL, "every field of the spec is known"
    more = f" and {len(paths) - NAMED_FIELDS} more" if len(paths) > NAMED_FIELDS else ""
    return (
        "True",
        Reason.FIELDS_IGNORED,
        (
            f"{', '.join(paths[:NAMED_FIELDS])}{more}: operator {scene.world.settings.version} does not know these "
            "fields and ignores them; upgrade the operator to use them"
        ),
    )


def _is_reached(scene: Scene, state: ResourceState) -> bool:
    return state is REACHED[scene.desired.state] and scene.observed.state is state


def _is_ready(scene: Scene, state: ResourceState) -> bool:
    """Return whether the desired state is reached and a server is ready.

    If the desired state is Running, an engine must also respond. Otherwise, the coordinator must have no error. A
    resource that is paused on request is therefore ready. Tools such as kstatus derive a health from the condition
    Ready, and do not wait for a paused resource.
    """
    if not _is_reached(scene, state) or scene.blockers.server() is not None:
        return False
    if scene.desired.state is DesiredState.RUNNING:
        return any(engine.responsive for engine in scene.engines.all)
    return scene.blockers.component(COORDINATOR) is None


def _ready(scene: Scene, verdict: Verdict, state: ResourceState, degraded: ConditionFinding) -> ConditionFinding:
    """Return the condition Ready.

    If the verdict reports no problem, the condition reports the error of a degraded resource, or why no server is
    ready. Tables of resources show only the reason of this condition.
    """
    reason, message = verdict.reason, verdict.message
    if reason in (Reason.SERVING, *(reason for reason, _ in QUIET.values())):
        waits = scene.blockers.server()
        if degraded[0] == "True":
            _, reason, message = degraded
        elif waits is not None:
            reason, message = waits[0], f"waiting for {waits[1]}"
    return ("True" if _is_ready(scene, state) else "False"), reason, message


def _coordinator_ready(scene: Scene) -> ConditionFinding:
    coordinator = scene.world.coordinator
    if not coordinator.reachable:
        reason, on = scene.blockers.coordinator()
        return "False", reason, f"waiting for {on}"
    if coordinator.state.value == "RECOVERING":
        return "False", Reason.COORDINATOR_RECOVERING, Reason.COORDINATOR_RECOVERING.doc
    return "True", Reason.AVAILABLE, "the coordinator answers"


def _engines_ready(scene: Scene) -> ConditionFinding:
    wanted = len(scene.engines.wanted)
    engines = (*scene.engines.wanted, *scene.rollout.extras)
    serving = _counted(scene, [engine for engine in engines if engine.responsive])
    absence = _without_engines(scene)
    if absence is not None:
        return absence
    if serving == wanted:
        return "True", Reason.AVAILABLE, f"{serving} of {wanted} engines are registered"
    reason, on = scene.blockers.desired_engines()
    return "False", reason, f"{serving} of {wanted} engines are registered; waiting for {on}"


def _without_engines(scene: Scene) -> ConditionFinding | None:
    """Return the finding for conditions about engines if no engine is requested, or if the engines are unknown.

    Returns None otherwise.
    """
    if scene.observed.state is ResourceState.STOPPED:
        return "False", Reason.STOPPED, "there are no engine pods"
    if scene.desired.releases_pods and scene.engines.empty:
        return "False", Reason.SUSPENDED, "the engine pods are removed"
    if not scene.world.coordinator.reachable:
        return "Unknown", Reason.COORDINATOR_UNREACHABLE, "only the coordinator knows which engines serve"
    if not scene.world.membership_known:
        return "Unknown", Reason.COORDINATOR_RECOVERING, Reason.COORDINATOR_RECOVERING.doc
    return None


def _role_missing(scene: Scene) -> ConditionFinding:
    """Return the condition RoleMissing.

    It is True if no engine of a role serves, so that engines of the other role must do the work of this role.
    """
    absence = _without_engines(scene)
    if absence is not None:
        return absence
    serving = {engine.role for engine in scene.engines.all if engine.responsive}
    reasons = {
        DECODE: (Reason.NO_DECODE_ENGINE, "no decode engine serves, so prefill engines generate"),
        PREFILL: (
            Reason.NO_PREFILL_ENGINE,
            "no prefill engine serves, so decode engines compute all prompts in chunks",
        ),
    }
    for role, (reason, effect) in reasons.items():
        if role not in serving:
            count = scene.ctx.spec.engines_of(role)
            remedy = (
                f"waiting for {scene.blockers.desired_engines(role)[1]}"
                if count
                else f"raise {scene.ctx.spec.count_field(role)}"
            )
            return "True", reason, f"{effect}; {remedy}"
    return "False", Reason.ALL_WELL, "engines of both roles serve"


def _lifecycle_settled(scene: Scene, verdict: Verdict, state: ResourceState) -> ConditionFinding:
    if _is_reached(scene, state):
        return "True", Reason.SETTLED, f"{state.value}, as requested"
    return "False", verdict.reason, f"{scene.desired.state.value} is requested, {state.value} is observed"


def _progress(scene: Scene, verdict: Verdict, changing: str) -> tuple[Reason, str, str] | None:
    """Return the reason, the current step and what the step waits for. Returns None if every child is up to date.

    Children can also be out of date while everything serves, because their controllers are still rolling them out.
    """
    if verdict.step:
        return verdict.reason, verdict.step, verdict.waiting_on
    unfinished = changing or _unfinished(scene)
    if not unfinished:
        return None
    rejection = scene.blockers.rejection()
    if rejection is not None:
        return rejection[0], "applying children", f"a corrected spec: {rejection[1]}"
    return Reason.ROLLING_OUT, "rolling out children", unfinished


def _unfinished(scene: Scene) -> str:
    """Return a description of a child that differs from the spec, or whose pods are outdated or not ready.

    Returns an empty string if there is no such child. Children that wait for an update of the resource, or for engines
    with another model, do not count. Engines of another revision, which wait for their rollout, do not count either.
    """
    rendered = scene.rendered
    for manifest in (*rendered.shared[0], *rendered.engine_policies):
        ref = ChildRef.of(manifest)
        view = scene.world.children.get(ref)
        if scene.update.holds(manifest, view) or scene.rollout.keeps_server(view):
            continue
        if view is None or view.hash != manifest_hash(manifest):
            return f"{ref} to be applied"
        if not view.rolled_out:
            return f"the pods of {ref.name} to be replaced and ready"
    for engine in scene.engines.wanted:
        statefulset = engine.statefulset
        if engine.stale:
            continue
        if engine.budget.exhausted is not None:
            return f"engine {engine.name} to be started again"
        if statefulset is None or statefulset.replicas != scene.engines.pods_for(engine):
            return f"StatefulSet {engine.name} to be applied"
        if not statefulset.rolled_out or engine.stale_pods:
            return f"the pods of {engine.name} to be replaced and ready"
    return ""


def _progressing(scene: Scene, verdict: Verdict, progress: tuple[Reason, str, str] | None) -> ConditionFinding:
    """Return the condition Progressing.

    The condition is False only if every child matches the spec. Like the condition of a paused Deployment, it is
    Unknown while changes of the spec wait.
    """
    if progress is not None:
        reason, step, on = progress
        return "True", reason, f"{step}: waiting for {on}"
    if scene.rollout.paused:
        count = f"{len(scene.rollout.outdated)} of {len(scene.engines.wanted)} engines keep their earlier revision"
        return "Unknown", Reason.ROLLOUT_PAUSED, f"the rollout of revision {scene.rollout.revision} is paused; {count}"
    deferred = _deferred(scene)
    if deferred:
        return "Unknown", verdict.reason, f"changes to {', '.join(deferred[:8])} wait until the resource runs"
    return "False", Reason.SETTLED, "all changes are complete"


def _deferred(scene: Scene) -> list[str]:
    """Return the engines and spec fields whose changes wait until the resource runs."""
    keys = scene.world.keys
    return [
        *(engine.name for engine in scene.engines.all if engine.surplus or engine.stale),
        *(["spec.weights"] if scene.weights.due is not None else []),
        *(["spec.model.adapters"] if scene.adapters.due is not None else []),
        *(["spec.keys"] if keys is not None and keys.generation != scene.keys.wanted_generation else []),
    ]


def _degraded(scene: Scene, verdict: Verdict, progress: tuple[Reason, str, str] | None) -> ConditionFinding:
    error = _degradation(scene) or scene.losses.finding or _overdue(scene, progress)
    if error is not None:
        return "True", error[0], error[1]
    if verdict.reason in (Reason.SIGNAL_FAILED, Reason.CHILD_NOT_OWNED, Reason.CANARY_FAILED, Reason.STALE_FENCE):
        return "True", verdict.reason, verdict.message
    return "False", Reason.ALL_WELL, "nothing is wrong"


def _degradation(scene: Scene) -> Finding | None:
    """Return the first error that may not resolve without an intervention, or None if there is no such error."""
    blockers = scene.blockers
    rejection = blockers.rejection()
    if rejection is not None:
        return rejection
    for engine in (*scene.engines.wanted, *scene.rollout.extras):
        error = blockers.engine(engine)
        if error is not None:
            failed = [each for each in scene.engines.wanted if each.budget.exhausted is not None and each != engine]
            more = f"; {len(failed)} more engines have failed" if failed else ""
            return error[0], f"{error[1][: 1000 - len(more)]}{more}"
    return (
        scene.weights.finding
        or blockers.component(COORDINATOR)
        or (blockers.component(STANDBY) if scene.ctx.has_standby else None)
        or blockers.component(SERVER)
        or scene.check.finding
        or scene.adapters.finding
        or (unwatched(scene.world) if scene.world.unwatched else None)
        or _contested(scene)
    )


def unwatched(world: World) -> Finding:
    """Return the finding that the operator cannot watch some kinds."""
    kinds, why = sorted(world.unwatched), next(iter(world.unwatched.values()))
    return Reason.WATCH_DENIED, (
        f"the operator cannot watch {', '.join(kinds)} in namespace {world.resource.namespace} and changes nothing "
        f"that depends on them: {why}"
    )


def _overdue(scene: Scene, progress: tuple[Reason, str, str] | None) -> Finding | None:
    """Return the finding that the operator has waited too long in one step, or None if this is not the case."""
    world = scene.world
    if progress is None or world.downloads or world.waiting_seconds < WAIT_SECONDS:
        return None
    step, on = progress[1:]
    if (printable(step), printable(on)) != world.waiting:
        return None
    return Reason.DEADLINE_EXCEEDED, f"{step}: waiting for {on} for more than {WAIT_SECONDS // 60:.0f} min"


def _contested(scene: Scene) -> Finding | None:
    """Return the finding that another program keeps changing a child, or None if there is no such conflict."""
    for ref, contest in sorted(scene.world.contests.items(), key=lambda pair: str(pair[0])):
        opponent = f"field manager {contest.opponent}" if contest.opponent else "another program"
        return Reason.CHILD_CONTESTED, (
            f"{ref}: {opponent} changes what the operator applies; it is applied once per minute until that ends"
        )
    return None
