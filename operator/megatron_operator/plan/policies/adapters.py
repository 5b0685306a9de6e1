"""The policy that makes spec.model.adapters the list of adapters of all engines, without a restart."""

from __future__ import annotations

from megatron_operator.model.states import SignalKind
from megatron_operator.plan.policies.lifecycle import start
from megatron_operator.plan.policies.verdict import Verdict
from megatron_operator.plan.policies.weights import REFRESHABLE
from megatron_operator.plan.scene import Scene


def set_adapters(scene: Scene) -> Verdict | None:
    """The engines have another list than the spec, or one of them has not loaded an adapter: set the list. After a
    failure the list is set without the adapters that cannot be loaded, the other policies go on, and the whole list is
    set again later. While suspended or stopped a change waits."""
    if REFRESHABLE.get(scene.desired) is not scene.observed or scene.old_model or scene.adapters.due is None:
        return None
    return start(scene, SignalKind.SET_ADAPTERS, adapters=scene.adapters.due)
