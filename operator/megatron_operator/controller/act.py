"""Executes the actions of one pass. All actions are idempotent. The pass stops at the first failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, TypeVar, cast

from megatron_operator.cluster.api import KubeApiError, Object
from megatron_operator.cluster.cache import ResourceCache
from megatron_operator.cluster.keys import adoption_patch, new_keys_secret, repair_patch, rotation_patch
from megatron_operator.cluster.kinds import SECRET
from megatron_operator.cluster.lease import Elector
from megatron_operator.cluster.projection import SeenResource
from megatron_operator.cluster.writer import NotOwnedError, Recorder, Writer
from megatron_operator.controller.observe import Observer
from megatron_operator.decision.actions import (
    Action,
    AdoptKeys,
    ApplyChild,
    AskCanary,
    CreateKeys,
    CreatePod,
    DeleteChild,
    DeletePods,
    EmitEvent,
    RotateKeys,
    Signal,
    VetChild,
)
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import ApplyRejection, ChildRef, PodView
from megatron_operator.link.connection import CoordinatorLink
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_stored_spec
from megatron_operator.resource.states import SignalKind
from megatron_operator.resource.text import stamp_seconds
from megatron_runtime.transport.security import KeyPair

logger = logging.getLogger(__name__)


AT_ONCE = 8
"""Limit of concurrent applies or deletions of one resource."""
WORKLOADS = ("Deployment", "StatefulSet")
"""Kinds that create pods."""
UNCHANGING = (Signal, AskCanary, EmitEvent)
"""Actions that change no object that decisions read."""
T = TypeVar("T")


async def _at_once(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines with limited concurrency, and return their results.

    If a coroutine fails, the other coroutines still run to their end. The first failure is then raised.
    """
    room = asyncio.Semaphore(AT_ONCE)

    async def run(each: Coroutine[Any, Any, T]) -> T:
        async with room:
            return await each

    outcomes = await asyncio.gather(*map(run, work), return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise failures[0]
    return cast("list[T]", outcomes)


def _secret(name: str) -> ChildRef:
    return ChildRef(SECRET.kind, name, SECRET.api_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Executes the actions of the decisions about one custom resource."""

    cache: ResourceCache
    writer: Writer
    observer: Observer
    recorder: Recorder
    link: CoordinatorLink
    elector: Elector
    settings: Settings
    admin: KeyPair | None
    count_signal: Callable[[SignalKind], None]
    rejections: dict[ChildRef, ApplyRejection] = field(default_factory=dict)
    vetted: dict[ChildRef, str] = field(default_factory=dict)

    async def act(self, actions: Sequence[Action], resource: SeenResource) -> bool:
        """Execute the actions in sequence.

        Return True if the next pass should follow immediately, because an action changed something.

        Raises:
            KubeApiError: a possibly transient failure. The caller repeats the pass after a backoff.
            LeadershipLostError: this process must exit.
        """
        changed = False
        for kind, together in groupby(actions, type):
            changed = changed or kind not in UNCHANGING
            if kind is ApplyChild:
                going_on = await self._apply_all(
                    [action for action in together if isinstance(action, ApplyChild)], resource
                )
            elif kind is DeleteChild:
                await _at_once(
                    self._delete_child(action, resource) for action in together if isinstance(action, DeleteChild)
                )
                going_on = True
            else:
                going_on = await self._in_order(together, resource)
            if not going_on:
                break
        return changed

    async def _in_order(self, actions: Iterable[Action], resource: SeenResource) -> bool:
        """Execute actions until one of them fails. Return whether all actions were executed."""
        for action in actions:
            going_on = True
            match action:
                case CreateKeys():
                    going_on = await self._accepted(self._create_keys(action, resource), _secret(action.name))
                case AdoptKeys() | RotateKeys():
                    going_on = await self._accepted(self._change_keys(action, resource), _secret(action.name))
                case VetChild():
                    going_on = await self._accepted(self._vet(action, resource), action.ref, action.hash)
                case CreatePod():
                    going_on = await self._accepted(self._create_pod(action, resource), action.ref, action.hash)
                case DeletePods():
                    await self._delete_pods(action, resource)
                case Signal():
                    self._signal(action, resource)
                case AskCanary():
                    self.elector.require_leadership()
                    self.link.ask_canary(action)
                case EmitEvent():
                    self.elector.require_leadership()
                    await self.recorder.emit(action, name=resource.name, namespace=resource.namespace, uid=resource.uid)
            if not going_on:
                return False
        return True

    async def _apply_all(self, actions: Sequence[ApplyChild], resource: SeenResource) -> bool:
        """Apply children concurrently: first the children that pods refer to, then the children that create pods."""
        for workloads in (False, True):
            wave = [action for action in actions if (action.ref.kind in WORKLOADS) is workloads]
            applies = (self._accepted(self._apply(action, resource), action.ref, action.hash) for action in wave)
            if not all(await _at_once(applies)):
                return False
        return True

    async def _accepted(self, write: Awaitable[bool], ref: ChildRef, manifest_hash: str = "") -> bool:
        """Await a write. Return whether the write took place.

        If the write fails with a permanent error, record the error as the child's rejection and return False.

        manifest_hash: hash of the written manifest; empty for the keys Secret.
        """
        try:
            done = await write
        except KubeApiError as error:
            if not error.permanent:
                raise
            logger.warning("child rejected", extra={"child": str(ref), "code": error.code, "error": error.message})
            self.rejections[ref] = ApplyRejection(
                hash=manifest_hash, code=error.code, message=error.message, at=datetime.now(UTC)
            )
            return False
        if done:
            self.rejections.pop(ref, None)
        return done

    async def _apply(self, action: ApplyChild, resource: SeenResource) -> bool:
        known = self.cache.child(action.ref)
        try:
            seen = await self.writer.apply_child(action.manifest, owner_uid=resource.uid, known=known)
        except KubeApiError as error:
            if error.conflict and not isinstance(error, NotOwnedError):
                # The object was replaced or has another owner, so read it and decide again.
                await self.observer.reread_child(action.ref, namespace=resource.namespace)
            raise
        self.cache.applied(seen)
        return True

    async def _vet(self, action: VetChild, resource: SeenResource) -> bool:
        known = self.cache.child(action.ref)
        if known is None or not known.may_be_of(resource.uid):
            return False
        try:
            await self.writer.vet_child(action.manifest, known=known)
        except KubeApiError as error:
            if error.conflict or error.not_found:
                await self.observer.reread_child(action.ref, namespace=resource.namespace)
                return False
            raise
        self.vetted[action.ref] = action.hash
        return True

    async def _create_pod(self, action: CreatePod, resource: SeenResource) -> bool:
        try:
            pod: PodView | None = reduce_pod(await self.writer.create(action.manifest))
        except KubeApiError as error:
            if error.reason != "AlreadyExists":
                raise
            # An earlier process created it and the watch does not show it yet, or it has another owner.
            pod = await self.observer.read_pod(action.ref.name, namespace=resource.namespace)
        if pod is None:
            return False
        if pod.owner != resource.uid:
            raise NotOwnedError(action.ref, namespace=resource.namespace)
        self.cache.created(pod)
        return True

    async def _create_keys(self, action: CreateKeys, resource: SeenResource) -> bool:
        if self.admin is None:
            raise ValueError(f"Secret {action.name}: keys were asked for, but this operator runs without security")
        now = stamp_seconds(datetime.now(UTC))
        manifest = new_keys_secret(self._context(resource), self.admin, generation=action.generation, since=now)
        secret = await self.observer.reread_keys(resource)
        if secret is not None:
            ctx = self._context(resource)
            return await self._patch_keys(
                repair_patch(secret, ctx, self.admin, generation=action.generation, since=now), action.name, resource
            )
        try:
            created = await self.writer.create(manifest)
        except KubeApiError as error:
            if error.code == 409 and error.reason == "AlreadyExists":
                raise NotOwnedError(_secret(action.name), namespace=resource.namespace) from error
            raise
        self.observer.remember_keys(created)
        return True

    def _context(self, resource: SeenResource) -> RenderContext:
        spec, _ = parse_stored_spec(resource.spec)
        return RenderContext(resource.name, resource.namespace, resource.uid, spec, self.settings)

    async def _change_keys(self, action: AdoptKeys | RotateKeys, resource: SeenResource) -> bool:
        if self.admin is None:
            raise ValueError(f"Secret {action.name}: keys were to be changed, but this operator runs without security")
        secret = await self.observer.reread_keys(resource)
        if secret is None:
            return False
        if isinstance(action, AdoptKeys):
            patch: Object | None = adoption_patch(secret, self._context(resource))
        else:
            patch = rotation_patch(secret, action, self.admin, now=stamp_seconds(datetime.now(UTC)))
        return await self._patch_keys(patch, action.name, resource)

    async def _patch_keys(self, patch: Object | None, name: str, resource: SeenResource) -> bool:
        """Apply a patch to the keys Secret. Return False if the Secret has changed or does not exist, otherwise True.

        patch: None if the Secret needs no change.
        """
        if patch is None:
            return True
        logger.info("changing keys", extra={"secret": name})
        try:
            written = await self.writer.patch(SECRET, name, namespace=resource.namespace, body=patch)
        except KubeApiError as error:
            if error.conflict or error.not_found:
                await self.observer.reread_keys(resource)
                return False
            raise
        self.observer.remember_keys(written)
        return True

    async def _delete_child(self, action: DeleteChild, resource: SeenResource) -> None:
        logger.info("deleting", extra={"child": str(action.ref), "why": action.reason})
        try:
            await self.writer.delete_child(action.ref, namespace=resource.namespace, uid=action.uid)
        except KubeApiError as error:
            if not (error.not_found or error.conflict):
                raise
            self.cache.gone(action.uid)
            await self.observer.reread_child(action.ref, namespace=resource.namespace)
        else:
            self.cache.deleted(action.uid)

    async def _delete_pods(self, action: DeletePods, resource: SeenResource) -> None:
        logger.info("deleting pods", extra={"owner": action.owner, "why": action.reason})
        for name, uid in action.pods:
            try:
                await self.writer.delete_pod(name, namespace=resource.namespace, uid=uid, force=action.force)
            except KubeApiError as error:
                if not (error.not_found or error.conflict):
                    raise
                self.cache.gone(uid)
            else:
                self.cache.deleted(uid)

    def _signal(self, action: Signal, resource: SeenResource) -> None:
        self.elector.require_leadership()
        if self.link.awaits(action.operation_id):
            return
        sent = self.link.signal(action)
        logger.info(
            "signal sent" if sent else "signal not sent: no connection",
            extra={
                "resource": f"{resource.namespace}/{resource.name}",
                "signal": action.kind.value,
                "operation_id": action.operation_id,
                "fence": action.fence,
            },
        )
        if sent:
            self.count_signal(action.kind)
