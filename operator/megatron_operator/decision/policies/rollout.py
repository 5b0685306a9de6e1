"""Policies that roll out a changed spec to the engines.

`decision.rollout` chooses the next step, and this module converts the step to messages and actions. While the resource
is paused or suspended, only engines that do not serve are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_operator.decision.actions import Action, ApplyChild, AskCanary, CreatePod, DeletePods, EmitEvent, VetChild
from megatron_operator.decision.desired import Desired
from megatron_operator.decision.engine_view import EngineView
from megatron_operator.decision.engines import Engines, Observed
from megatron_operator.decision.policies.engines import delete_pods
from megatron_operator.decision.policies.lifecycle import start
from megatron_operator.decision.policies.verdict import Verdict, waiting
from megatron_operator.decision.rendered import Rendered
from megatron_operator.decision.revisions import RevisionCheck, Rollout
from megatron_operator.decision.rollout import (
    Await,
    Check,
    Drain,
    Finished,
    Halt,
    Prove,
    Recreate,
    Replace,
    Step,
    Surge,
    next_step,
)
from megatron_operator.decision.world import ChildRef, Manifest, World
from megatron_operator.render.check import check_pod
from megatron_operator.render.children import engine_children
from megatron_operator.render.context import RenderContext
from megatron_operator.render.model_source import model_argument
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.states import DesiredState, SignalKind

ASK_AGAIN_SECONDS = 2.0
"""Time after which a canary without a verdict is sent again."""


def replace_model(
    world: World,
    desired: Desired,
    ctx: RenderContext,
    rendered: Rendered,
    engines: Engines,
    observed: Observed,
    rollout: Rollout,
    check: RevisionCheck,
) -> Verdict | None:
    """Return a verdict that drains and then replaces all engines and servers together, or None if this is not due.

    The replacement is due if source, dtype or maximum length of the model has changed.

    Engines of different models must not serve together, because one model must not continue another model's tokens.
    """
    old = [engine for engine in engines.old_model if not engine.surplus and _appliable(rendered, engine)]
    server = rendered.server
    if not old or desired.state is not DesiredState.RUNNING or rollout.paused:
        return None
    if server is None or _server_rejected(rendered):
        return None
    serving = [engine for engine in old if engine.serving]
    operation = desired.operation
    over = operation is not None and operation.over(SignalKind.DRAIN)
    step = "replacing the model"
    if serving and (not over or rollout.check_due):
        if not observed.running:
            return None
        exists = ChildRef.of(server) in world.children
        return (
            _unvetted(world, rendered, serving[0], *([server] if exists else []))
            or _unchecked(ctx, rendered, rollout, check, reason=Reason.REPLACING_MODEL, step=step)
            or start(world, desired, SignalKind.DRAIN)
        )
    reason = "the model of the spec changed"
    actions: list[Action] = [ApplyChild(server)]
    for engine in old:
        actions += _swap(rendered, engine, reason)
    actions.append(EmitEvent("Normal", "ModelReplaced", f"{reason}: replacing {len(old)} engines and the servers"))
    names = ", ".join(engine.name for engine in old[:8])
    return waiting(Reason.REPLACING_MODEL, step, f"{names} to load it", actions=tuple(actions), operation=None)


def rollout(
    world: World,
    desired: Desired,
    ctx: RenderContext,
    rendered: Rendered,
    engines: Engines,
    observed: Observed,
    rollout: Rollout,
    check: RevisionCheck,
) -> Verdict | None:
    """Return a verdict that replaces engines whose revision differs from the spec's, or None if no step is due.

    The roles follow one after the other. In each role, `maxUnavailable` and `maxSurge` limit the replacements.
    """
    present = [engine for engine in engines.wanted if engine.scaled > 0]
    if any(engine.stale and not _appliable(rendered, engine) for engine in present):
        return None
    if engines.old_model and _server_rejected(rendered):
        # The existing OpenAI servers cannot use engines of another model.
        return None
    limits = world.resource.spec.rollout
    carrier = _Carrier(
        world=world, desired=desired, ctx=ctx, rendered=rendered, engines=engines, rollout=rollout, check=check
    )
    for role in rollout.roles:
        step = next_step(
            [rollout.facts(engine) for engine in present if engine.role == role],
            extras=[rollout.facts(engine) for engine in rollout.extras if engine.role == role],
            max_unavailable=limits.unavailable,
            max_surge=limits.max_surge,
            running=observed.running,
            checked=not rollout.check_due,
            paused=limits.paused,
        )
        verdict = carrier.carry_out(step)
        if verdict is not None:
            return verdict
    return None


@dataclass(frozen=True, kw_only=True)
class _Carrier:
    """Carries out one step of a rollout: chooses the messages and actions for the step."""

    world: World
    desired: Desired
    ctx: RenderContext
    rendered: Rendered
    engines: Engines
    rollout: Rollout
    check: RevisionCheck

    def carry_out(self, step: Step) -> Verdict | None:
        """Return the verdict of a step, or None if the rollout is complete."""
        methods: dict[type, Callable[[Any], Verdict | None]] = {
            Check: self._check,
            Replace: self._replace,
            Recreate: self._recreate,
            Surge: self._surge,
            Drain: self._drain,
            Prove: self._prove,
            Await: self._await,
            Halt: self._halt,
            Finished: lambda _: None,
        }
        return methods[type(step)](step)

    @cached_property
    def _by_name(self) -> dict[str, EngineView]:
        return {engine.name: engine for engine in (*self.engines.wanted, *self.rollout.extras)}

    @property
    def _title(self) -> str:
        wanted = self.engines.wanted
        return f"rolling out revision {wanted[0].rendered_revision}" if wanted else "rolling out"

    def _waiting(self, on: str, *actions: Action) -> Verdict:
        return waiting(Reason.ROLLING_OUT, self._title, on, actions=actions)

    def _vetted(self, name: str) -> Verdict | None:
        return _unvetted(self.world, self.rendered, self._by_name[name])

    def _check(self, step: Check) -> Verdict | None:
        return self._vetted(step.name) or _unchecked(
            self.ctx, self.rendered, self.rollout, self.check, reason=Reason.ROLLING_OUT, step=self._title
        )

    def _replace(self, step: Replace) -> Verdict:
        wanted = self.engines.wanted
        done = sum(engine.scaled > 0 and not engine.stale and not engine.stale_pods for engine in wanted)
        actions: list[Action] = []
        for name in step.names:
            engine = self._by_name[name]
            before = engine.statefulset.revision if engine.statefulset is not None else ""
            why = f"{name} is updated from revision {before} to {engine.rendered_revision}"
            reason = f"{why} ({done} of {len(wanted)} engines are updated)"
            actions += _swap(self.rendered, engine, reason)
            if engine.stale:
                actions.append(EmitEvent("Normal", "EngineReplaced", reason))
        on = f"{', '.join(step.names[:8])} to register"
        return waiting(Reason.ROLLING_OUT, self._title, on, actions=tuple(actions), operation=None)

    def _recreate(self, step: Recreate) -> Verdict:
        reason = "the template was updated, but the pods were not deleted yet"
        deletions = tuple(delete_pods(self._by_name[name], reason) for name in step.names)
        on = f"{', '.join(step.names[:8])} to register"
        return waiting(Reason.ROLLING_OUT, self._title, on, actions=deletions, operation=None)

    def _surge(self, step: Surge) -> Verdict:
        """Return the verdict that adds a surge engine, with the lowest free index after the configured engines.

        If no index is free, the verdict waits until an earlier surge engine is deleted.
        """
        unvetted = self._vetted(step.name)
        if unvetted is not None:
            return unvetted
        ctx = self.ctx.of_role(self._by_name[step.name].role)
        first, limit = ctx.spec.engines_of(ctx.role), ctx.spec.rollout.max_surge
        engines = [engine for engine in self.engines.all if engine.role == ctx.role]
        present = {engine.index for engine in engines if engine.statefulset is not None or engine.pods}
        index = next((index for index in range(first, first + limit) if index not in present), None)
        if index is None:
            return self._waiting("an earlier surge engine to be deleted")
        name = ctx.engine_name(index)
        reason = f"{name} is added until the engines of the previous revision are replaced"
        children = engine_children(ctx, index, pods=ctx.spec.pods_per_engine)
        return self._waiting(
            f"{name} to register", *map(ApplyChild, children), EmitEvent("Normal", "EngineAdded", reason)
        )

    def _drain(self, step: Drain) -> Verdict:
        return self._vetted(step.name) or start(self.world, self.desired, SignalKind.DRAIN, engine=step.name)

    def _prove(self, step: Prove) -> Verdict:
        engine = self._by_name[step.name]
        revision = engine.statefulset.revision if engine.statefulset is not None else ""
        return waiting(
            Reason.ROLLING_OUT,
            self._title,
            f"the answer of {step.name} to its canary request",
            actions=(AskCanary(step.name, revision, model_argument(self.ctx)),),
            requeue_after=ASK_AGAIN_SECONDS,
        )

    def _await(self, step: Await) -> Verdict:
        return self._waiting(f"{', '.join(step.names[:8])}: {step.what}")

    def _halt(self, step: Halt) -> Verdict:
        if step.drain:
            return start(self.world, self.desired, SignalKind.DRAIN, engine=step.name)
        why = self._by_name[step.name].canary_message
        on = f"a change of the spec; {step.name} gave a wrong answer to its canary request: {why}"
        return waiting(Reason.CANARY_FAILED, self._title, on)


def _appliable(rendered: Rendered, engine: EngineView) -> bool:
    manifest = rendered.engine_manifest(engine.index, role=engine.role)
    statefulset = engine.statefulset
    usable = statefulset is not None and statefulset.owned and not statefulset.deleting
    return usable and manifest is not None and rendered.rejected(manifest) is None


def _server_rejected(rendered: Rendered) -> bool:
    server = rendered.server
    return server is not None and rendered.rejected(server) is not None


def _unvetted(world: World, rendered: Rendered, engine: EngineView, *others: Manifest) -> Verdict | None:
    """Return a verdict that tests the templates in a dry run before the engine is drained for them.

    Returns None if no test is due.
    """
    manifest = rendered.engine_manifest(engine.index, role=engine.role)
    templates = [*others, manifest] if manifest is not None and engine.stale else others
    for template in templates:
        vet = VetChild(template)
        if world.vetted.get(vet.ref) == vet.hash:
            continue
        on = f"the API server to accept the template of {vet.ref.name} in a dry run"
        step = f"rolling out revision {engine.rendered_revision}"
        return waiting(Reason.ROLLING_OUT, step, on, actions=(vet,))
    return None


def _unchecked(
    ctx: RenderContext, rendered: Rendered, rollout: Rollout, check: RevisionCheck, *, reason: Reason, step: str
) -> Verdict | None:
    """Return a verdict that checks the desired revision before a serving engine is drained for it.

    Returns None if no check is due.

    reason, step: reason and step of the rollout, for the status. An error of the check replaces the reason.
    """
    if not rollout.check_due:
        return None
    revision, pod, finding = rollout.revision, check.pod, check.finding
    reason, why = (finding[0], f": {finding[1]}") if finding is not None else (reason, "")
    if pod is not None and check.failed:
        on = f"a change of the spec; the check of revision {revision} failed, and no engine is replaced{why}"
        return waiting(reason, step, f"{on}; delete the pod to check again")
    if pod is not None and pod.phase == "Failed":
        left = check.retry_in(pod)
        again = DeletePods("", ((pod.name, pod.uid),), f"the check of revision {revision} is repeated")
        on = f"the next check of revision {revision}{why}"
        return waiting(reason, step, on, actions=(again,) if left <= 0 else (), requeue_after=left)
    actions: tuple[Action, ...] = ()
    if not rollout.check_pods and rendered.just_rejected(check.ref) is None:  # one pod at a time
        manifest = check_pod(ctx)
        actions = (CreatePod(manifest),)
    return waiting(reason, step, f"pod {check.ref.name} to check revision {revision}{why}", actions=actions)


def _swap(rendered: Rendered, engine: EngineView, reason: str) -> list[Action]:
    """Return the actions that apply an engine's new template and replace all its pods together."""
    actions: list[Action] = []
    manifest = rendered.engine_manifest(engine.index, role=engine.role)
    if engine.stale and manifest is not None:
        actions.append(ApplyChild(manifest))
    deletion = delete_pods(engine, reason)
    return [*actions, deletion] if deletion.pods else actions
