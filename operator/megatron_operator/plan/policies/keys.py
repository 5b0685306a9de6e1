"""The policy that rotates CURVE keys: the next stage, from the Secret and the coordinator's report.

Every stage waits until it has taken effect, because the kubelet updates a mounted Secret with a delay.
"""

from __future__ import annotations

from datetime import timedelta

from megatron_operator.model.conditions import Reason
from megatron_operator.model.states import KeyStage
from megatron_operator.model.text import parse
from megatron_operator.plan.check import check_finding
from megatron_operator.plan.policies.engines import running
from megatron_operator.plan.policies.verdict import Verdict, waiting
from megatron_operator.plan.rollout import Canary
from megatron_operator.plan.scene import Scene
from megatron_operator.plan.world import ChildRef, EmitEvent, KeysView, RotateKeys
from megatron_operator.render.keys import AFTER

LOOK_SECONDS = 2.0
"""Polling interval of a stage: an unchanged report of the coordinator wakes no task."""


def wanted_generation(scene: Scene, keys: KeysView) -> int:
    """Return the desired generation by the spec or the age of the current one; never an earlier one."""
    spec = scene.world.resource.spec.keys
    made = parse(keys.since)
    if spec.rotate_after_days is not None and made is not None:
        aged = scene.world.now - made >= timedelta(days=spec.rotate_after_days)
        return max(spec.generation, keys.generation + aged)
    return max(spec.generation, keys.generation)


def rotate_keys(scene: Scene) -> Verdict | None:
    """Rotate the keys: accept both generations, switch all components to the new one, remove the old one."""
    keys = scene.world.keys
    if keys is None:
        return None
    if keys.stage is KeyStage.SETTLED:
        wanted = wanted_generation(scene, keys)
        if wanted == keys.generation or not running(scene):
            return None
        return _go_on(scene, wanted, KeyStage.ADMITTING, "the new keys to be accepted beside the old ones")
    found = _unfinished(scene, keys)
    if found is None:
        return _go_on(scene, keys.generation, AFTER[keys.stage], "the Secret to be written")
    return waiting(scene, Reason.ROTATING_KEYS, _step(keys.generation), found, requeue_after=LOOK_SECONDS)


def rotate_keys_meanwhile(scene: Scene) -> Verdict | None:
    """A rollout cannot continue before its check passes or the spec changes: the keys do not wait for it."""
    wrong = (engine for engine in scene.engines if engine.canary is Canary.FAILED and scene.is_drained(engine))
    return rotate_keys(scene) if check_finding(scene) is not None or any(wrong) else None


def _step(generation: int) -> str:
    return f"rotating the keys to generation {generation}"


def _go_on(scene: Scene, generation: int, stage: KeyStage, waits_for: str) -> Verdict:
    name = scene.ctx.keys_name
    rejection = scene.rendered.just_rejected(ChildRef("Secret", name))
    if rejection is not None:
        on = f"Secret {name} to be writable; the API server said {rejection.code}: {rejection.message}"
        return waiting(scene, Reason.CHILD_REFUSED, _step(generation), on)
    actions: tuple[RotateKeys | EmitEvent, ...] = (RotateKeys(name, generation, stage),)
    if stage is KeyStage.SETTLED:
        said = f"all components use the keys of generation {generation}; earlier keys are rejected"
        actions = (*actions, EmitEvent("Normal", "KeysRotated", said))
    return waiting(scene, Reason.ROTATING_KEYS, _step(generation), waits_for, actions=actions)


def _unfinished(scene: Scene, keys: KeysView) -> str | None:
    """Return what the current stage waits for; None if it is complete."""
    coordinator, used = scene.world.coordinator, scene.world.coordinator.keys
    if not coordinator.reachable or used is None:
        return "the coordinator to report its keys"
    if keys.stage is KeyStage.ADMITTING:
        return None if keys.new <= used.admitted else "the coordinator to accept the new keys, which a kubelet updates"
    if keys.stage is KeyStage.SWITCHING:
        old = keys.old & used.connected
        if old:
            return "engines and servers to use their new keys, which kubelets update"
        return None if running(scene) else "the resource to run: its coordinator must be restarted"
    return None if keys.server == used.server else "the coordinator to restart with its new key"
