"""The policy that rotates CURVE keys. It selects the next stage from the Secret and the coordinator's report.

The next stage begins only when the current stage is in effect in all pods, because the kubelet updates a mounted Secret
with a delay.
"""

from __future__ import annotations

from megatron_operator.decision.actions import EmitEvent, RotateKeys
from megatron_operator.decision.desired import Keys
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.rendered import Rendered
from megatron_operator.decision.revisions import RevisionCheck
from megatron_operator.decision.rollout import Canary
from megatron_operator.decision.world import ChildRef, KeysView, World
from megatron_operator.render.context import RenderContext
from megatron_operator.render.keys import AFTER
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import KeyStage

LOOK_SECONDS = 2.0
"""Polling interval of a stage, because an unchanged report of the coordinator wakes no task."""


def rotate_keys(world: World, keys: Keys, ctx: RenderContext, rendered: Rendered, observed: Observed) -> Verdict | None:
    """Return a verdict that starts the next step of a key rotation or waits for the current step.

    The first step makes all components accept both generations, the second switches them to the new keys, and the
    third removes the old keys. Returns None if no rotation is due.
    """
    view, wanted = world.keys, keys.wanted_generation
    if view is None or wanted is None:
        return None
    if view.stage is KeyStage.SETTLED:
        if wanted == view.generation or not observed.running:
            return None
        on = "the new keys to be accepted in addition to the old ones"
        return _write(ctx, rendered, wanted, KeyStage.ADMITTING, on)
    unfinished = _unfinished(world, view, observed)
    if unfinished is None:
        return _write(ctx, rendered, view.generation, AFTER[view.stage], "the Secret to be written")
    return waiting(Reason.ROTATING_KEYS, _step(view.generation), unfinished, requeue_after=LOOK_SECONDS)


def rotate_keys_meanwhile(
    world: World,
    keys: Keys,
    ctx: RenderContext,
    rendered: Rendered,
    engines: Engines,
    observed: Observed,
    check: RevisionCheck,
) -> Verdict | None:
    """Apply rotate_keys() during a rollout that cannot continue until its check passes or the spec changes.

    Returns None in all other cases.
    """
    wrong = (engine for engine in engines.all if engine.canary is Canary.FAILED and engines.is_drained(engine))
    if check.finding is None and not any(wrong):
        return None
    return rotate_keys(world, keys, ctx, rendered, observed)


def _step(generation: int) -> str:
    return f"rotating the keys to generation {generation}"


def _write(ctx: RenderContext, rendered: Rendered, generation: int, stage: KeyStage, waits_for: str) -> Verdict:
    """Return the verdict that writes the keys Secret in the form that it has in `stage` of the rotation.

    If the API server has just rejected the Secret, the verdict only waits.
    """
    name = ctx.keys_name
    rejection = rendered.just_rejected(ChildRef("Secret", name))
    if rejection is not None:
        on = f"Secret {name} to be writable; the API server answered {rejection.code}: {rejection.message}"
        return waiting(Reason.CHILD_REFUSED, _step(generation), on)
    actions: tuple[RotateKeys | EmitEvent, ...] = (RotateKeys(name, generation, stage),)
    if stage is KeyStage.SETTLED:
        message = f"all components use the keys of generation {generation}; earlier keys are rejected"
        actions = (*actions, EmitEvent("Normal", "KeysRotated", message))
    return waiting(Reason.ROTATING_KEYS, _step(generation), waits_for, actions=actions)


def _unfinished(world: World, keys: KeysView, observed: Observed) -> str | None:
    """Return what the current stage of the key rotation waits for, or None if the stage is complete."""
    coordinator, used = world.coordinator, world.coordinator.keys
    if not coordinator.reachable or used is None:
        return "the coordinator to report its keys"
    if keys.stage is KeyStage.ADMITTING:
        return None if keys.new <= used.admitted else "the coordinator to accept the new keys, which a kubelet updates"
    if keys.stage is KeyStage.SWITCHING:
        old = keys.old & used.connected
        if old:
            return "engines and servers to use their new keys, which kubelets update"
        return None if observed.running else "the resource to run: its coordinator must be restarted"
    return None if keys.server == used.server else "the coordinator to restart with its new key"
