"""The check of a new revision, as its pod reports it (see `render.check`). A rollout waits for its result."""

from __future__ import annotations

from megatron_operator.model.conditions import Finding, Reason
from megatron_operator.model.names import CHECK
from megatron_operator.model.text import seconds_since
from megatron_operator.plan.diagnosis import creation_error, diagnose
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import ChildRef, PodView
from megatron_operator.render.check import check_name

FINAL_EXIT_CODES = (1, 2)
"""Exit codes of `megatron engine --check` after an error that a retry does not resolve."""
RETRY_FIRST_SECONDS, RETRY_MAX_SECONDS = 10.0, 300.0


def check_ref(scene: Scene) -> ChildRef:
    """Return the reference of the pod that checks the desired revision."""
    return ChildRef("Pod", check_name(scene.ctx, scene.revision))


def present_check(scene: Scene) -> PodView | None:
    """Return the pod that checks the desired revision, if it exists and is not being deleted."""
    return next((pod for pod in scene.check_pods if pod.revision == scene.revision and not pod.deleting), None)


def obsolete_checks(scene: Scene) -> list[PodView]:
    """Return pods whose result is no longer needed: they check another revision, or one that is verified or that every
    engine has."""
    needed = scene.check_due or (scene.revision not in scene.verified and bool(scene.outdated))
    return [pod for pod in scene.check_pods if not (needed and pod.revision == scene.revision)]


def check_finding(scene: Scene) -> Finding | None:
    """Return why the check that is due does not pass; None while it runs, or without one."""
    if not scene.check_due:
        return None
    pod = present_check(scene)
    if pod is None:
        rejection = scene.world.rejections.get(check_ref(scene))
        if rejection is None or scene.check_pods:
            return None
        return creation_error(f"pod {check_ref(scene).name}", rejection.message, component=CHECK)
    found = diagnose(pod, scene.references)
    if found is None and pod.phase == "Failed":
        return Reason.CRASH_LOOPING, f"pod {pod.name} ended without an exit code: {pod.reason} {pod.message}".rstrip()
    if found is not None and found[0] is Reason.CRASH_LOOPING and pod.exit_code in FINAL_EXIT_CODES:
        return Reason.ENGINE_CONFIG_REFUSED, found[1]
    return found


def check_failed(scene: Scene) -> bool:
    """Return whether the check that is due has failed, and a retry does not help."""
    pod = present_check(scene) if scene.check_due else None
    return pod is not None and pod.phase == "Failed" and pod.exit_code in FINAL_EXIT_CODES


def retry_in(scene: Scene, pod: PodView) -> float:
    """Return the seconds until a failed check is repeated: the time between two checks doubles.

    It is as long as the rollout has waited when this check began, so no number of attempts needs to be stored.
    """
    if pod.created_at is None:
        return RETRY_MAX_SECONDS
    age = (scene.world.now - pod.created_at).total_seconds()
    since = (scene.status.get("plan") or {}).get("since")
    waited = seconds_since(since, scene.world.now) - age if since is not None else 0.0
    return min(max(waited, RETRY_FIRST_SECONDS), RETRY_MAX_SECONDS) - age
