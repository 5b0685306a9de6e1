"""The task of one resource: a loop of observe, decide, persist, act and wait, until the resource is deleted.

An exception ends a pass but not the task. The exception is logged, and the next pass follows after a backoff. Only
LeadershipLostError leaves the task. All rules about resources are in `decide`. The supervisor runs one task per
resource UID, from the first observation of the resource until the task ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.cache import WATCH_LAG_SECONDS, Key, ResourceCache
from megatron_operator.cluster.claims import READ_SECONDS, Claims
from megatron_operator.cluster.lease import Elector, LeadershipLostError
from megatron_operator.cluster.projection import SeenResource
from megatron_operator.cluster.writer import Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.metrics import Metrics, Reading, VerbClock
from megatron_operator.controller.observe import Observer
from megatron_operator.decision.actions import Decision
from megatron_operator.decision.decide import reject_spec
from megatron_operator.decision.losses import is_isolated
from megatron_operator.decision.world import OBJECT_SECONDS, ChildRef, World
from megatron_operator.link.connection import CoordinatorLink
from megatron_operator.resource.names import COORDINATOR, STANDBY
from megatron_operator.resource.states import UpdatePhase
from megatron_runtime.protocol import strict_json as json

logger = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_MAX = 0.2, 30.0
AFTER_ERROR_SECONDS = 1.0
EAGER_PASSES = 10
"""Maximum number of consecutive passes without a pause while each pass changes something."""


class UpdateLimit:
    """Limits how many resources are updated at the same time.

    A resource occupies a slot while `status.update.phase` is Running.

    The caller calls may_begin(), decides, and calls decided(). It awaits nothing between these calls, so that two
    resources cannot take the same slot.

    limit: number of slots.
    resources: returns all resources that the watch has reported, by UID. If decided() has not been called for a
        resource yet, the phase in its stored status counts. A new leader therefore counts the updates that its
        predecessor began.
    """

    def __init__(self, limit: int, resources: Callable[[], Mapping[str, Iterable[SeenResource]]]) -> None:
        self._limit = limit
        self._resources = resources
        self._phases: dict[str, str] = {}
        self._waiting: dict[str, Callable[[], None]] = {}

    def may_begin(self, uid: str) -> bool:
        """Return whether this resource holds a slot, or a slot is free."""
        shown = {
            other: _phase(seen.status)
            for other, versions in self._resources().items()
            for seen in versions
            if other not in self._phases
        }
        running = [other for other, phase in {**shown, **self._phases}.items() if phase == UpdatePhase.RUNNING]
        return uid in running or len(running) < self._limit

    def decided(self, uid: str, status: Mapping[str, object], *, wake: Callable[[], None]) -> None:
        """Record the status that was decided for a resource.

        wake: wakes the resource's task. While the resource waits for a slot, UpdateLimit calls `wake` when a slot
            becomes free.
        """
        phase = _phase(status)
        if phase == UpdatePhase.WAITING:
            self._waiting[uid] = wake
        else:
            self._waiting.pop(uid, None)
        self._changed(uid, phase)

    def ended(self, uid: str) -> None:
        """Release the slot of a resource that was deleted or whose task has ended."""
        self._waiting.pop(uid, None)
        self._changed(uid, "")
        self._phases.pop(uid, None)

    def _changed(self, uid: str, phase: str) -> None:
        before, self._phases[uid] = self._phases.get(uid, ""), phase
        if before == UpdatePhase.RUNNING and phase != before:
            for wake in self._waiting.values():
                wake()


def _phase(status: Mapping[str, object]) -> str:
    update = status.get("update")
    return str(update.get("phase", "")) if isinstance(update, Mapping) else ""


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that a ResourceTask uses."""

    cache: ResourceCache
    observer: Observer
    writer: Writer
    actor: Actor
    link: CoordinatorLink
    elector: Elector
    metrics: Metrics
    claims: Claims
    updates: UpdateLimit
    decide: Callable[[World], Decision]
    isolated: Callable[[], bool]
    """See World.isolated."""
    resync_seconds: float
    coalesce_seconds: float = 0.02
    """Delay of a pass after the first event, because events arrive in bursts."""


class ResourceTask:
    """The asyncio task that reconciles one custom resource, one pass at a time.

    It sleeps until `wake` is called, which code on the event loop may do at any time.
    """

    def __init__(self, *, uid: str, key: Key, woken: asyncio.Event, parts: Parts) -> None:
        self.uid = uid
        self.key = key
        self.busy_since: float | None = None
        self._woken = woken
        self._parts = parts
        self._eager = 0
        self._last_logged: tuple[str, str, str] | None = None
        self._persisted: tuple[str, str] | None = None
        self._verbs = VerbClock(parts.metrics, time.monotonic)
        self._status: dict[str, Any] = {}
        self._manager = ""
        """Lease of another operator that manages the resource."""
        self._contested = 0
        self._waiting, self._waiting_since = ("", ""), time.monotonic()
        """The condition that the last decision waits for, and the time since which it waits."""
        self._objects: frozenset[ChildRef] = frozenset()
        self._object_seconds = OBJECT_SECONDS

    def wake(self) -> None:
        self._woken.set()

    @property
    def reading(self) -> Reading:
        """The state of the resource, as metrics export it."""
        return Reading(
            *self.key,
            status=self._status,
            coordinator=self._parts.link.snapshot,
            manager=self._manager,
            contested=self._contested,
        )

    @property
    def coordinator(self) -> tuple[bool | None, frozenset[str]]:
        """Whether the coordinator is silent, and the names of the nodes of the coordinator's pods.

        The first value is True if the coordinator was connected and is lost, False while it is connected, and None if
        it has not been connected yet.
        """
        pods = self._parts.cache.pods()
        nodes = frozenset(pod.node for pod in pods if pod.component in (COORDINATOR, STANDBY) and not pod.deleting)
        return self._parts.link.silent, nodes

    @property
    def behind_seconds(self) -> float:
        """Longest time in seconds for which the watch has not shown a known version of an object; 0 if it shows all."""
        return self._parts.cache.behind_seconds

    async def run(self) -> None:
        """Run until the resource is deleted.

        Raises:
            LeadershipLostError: this process is no longer the leader.
        """
        backoff = BACKOFF_FIRST
        try:
            while True:
                if self._woken.is_set():
                    await asyncio.sleep(self._parts.coalesce_seconds)
                self._woken.clear()
                began = self.busy_since = time.monotonic()
                asked = 0.0
                try:
                    pause = await self.run_once()
                    outcome, backoff = "ok", BACKOFF_FIRST
                except (LeadershipLostError, asyncio.CancelledError):
                    raise
                except Exception as error:
                    pause, backoff, outcome = backoff, min(2 * backoff, BACKOFF_MAX), "error"
                    if isinstance(error, KubeApiError):
                        asked = error.retry_after
                        pause = max(pause, asked)
                    self._log_failure(error, pause)
                finally:
                    self.busy_since = None
                self._parts.metrics.passes.labels(outcome=outcome).inc()
                self._parts.metrics.seconds.observe(time.monotonic() - began)
                if pause is None:
                    return
                await self._sleep(pause, fixed=0.0 if outcome == "ok" else max(asked, AFTER_ERROR_SECONDS))
        finally:
            self._parts.updates.ended(self.uid)
            await self._parts.link.close()

    async def run_once(self) -> float | None:
        """Run one pass.

        Return the maximum number of seconds until the next pass, or None if the resource is deleted.
        """
        parts = self._parts
        resource = await parts.observer.resource()
        if resource is None:
            return None
        if await self._is_managed_elsewhere(resource):
            return READ_SECONDS
        decision = await self._decide(resource)
        parts.link.expect_change(decision.attentive)
        self._log_decision(decision)
        self._status, self._contested = decision.status, len(parts.cache.contests())
        self._verbs.look(decision.status.get("lifecycle") or {})
        if not await self._persisted_or_healed(resource, decision):
            return self._again()
        if await parts.actor.act(decision.actions, resource):
            return self._again()
        self._eager = 0
        # By then, objects that were written and are missing in the watch are read.
        shown = parts.resync_seconds if parts.cache.behind_seconds == 0.0 else WATCH_LAG_SECONDS
        return min(shown, parts.resync_seconds, decision.requeue_after or parts.resync_seconds)

    async def _is_managed_elsewhere(self, resource: SeenResource) -> bool:
        """Return whether another operator manages, or may manage, the resource.

        If so, this operator changes nothing.
        """
        manager = str(resource.status.get("manager") or "")
        other = await self._parts.claims.other(manager)
        if bool(other) is not bool(self._manager):
            message = "resource left to another operator" if other else "resource taken over"
            logger.warning(message, extra={"resource": "/".join(self.key), "lease": manager, "detail": other})
        self._manager = manager if other else ""
        if other:
            self._status = {}
            self._parts.link.point_to((), None)
        return bool(other)

    async def _decide(self, resource: SeenResource) -> Decision:
        parts = self._parts
        try:
            actor = parts.actor
            world = await parts.observer.world(
                resource, term=parts.elector.term, rejections=actor.rejections, vetted=actor.vetted
            )
        except ValidationError as error:
            return reject_spec(
                status=resource.status, generation=resource.generation, error=_first(error), now=datetime.now(UTC)
            )
        isolated = world.coordinator.lost_seconds is not None and parts.isolated()
        world = replace(
            world,
            isolated=isolated,
            may_update=parts.updates.may_begin(self.uid),
            waiting=self._waiting,
            waiting_seconds=time.monotonic() - self._waiting_since,
        )
        # A new spec must not use objects that were deleted since the last read.
        is_new = resource.status.get("observedGeneration") != resource.generation
        refs, seconds = self._objects, 0.0 if is_new else self._object_seconds
        namespace = resource.namespace
        world = replace(world, objects=await parts.observer.objects(refs, namespace=namespace, seconds=seconds))
        decision = parts.decide(world)
        if decision.objects - refs:
            objects = await parts.observer.objects(decision.objects, namespace=namespace, seconds=OBJECT_SECONDS)
            decision = parts.decide(replace(world, objects=objects))
        self._objects, self._object_seconds = decision.objects, decision.object_seconds
        plan = decision.status.get("plan") or {}
        waiting = (str(plan.get("step", "")), str(plan.get("waitingOn", "")))
        if waiting != self._waiting:
            self._waiting, self._waiting_since = waiting, time.monotonic()
        parts.updates.decided(self.uid, decision.status, wake=self.wake)
        return decision

    async def _persisted_or_healed(self, resource: SeenResource, decision: Decision) -> bool:
        """Persist the status of a decision. If the write fails, execute only the actions in `decision.healing`.

        Return whether the other actions of the decision may follow.

        Raises:
            KubeApiError: the status cannot be written.
        """
        try:
            persisted = await self._persist(resource, decision.status)
        except KubeApiError:
            await self._parts.actor.act(decision.healing, resource)
            raise
        if not persisted and self._eager >= EAGER_PASSES:
            await self._parts.actor.act(decision.healing, resource)
        return persisted

    async def _persist(self, resource: SeenResource, status: dict[str, Any]) -> bool:
        """Write the status if it differs from the stored status.

        Return False if the resource has changed since the decision, so that the caller must decide again. Otherwise,
        return True.
        """
        wanted, stored = _canonical(status), _canonical(resource.status)
        if wanted == stored or self._persisted == (wanted, stored):
            return True
        try:
            written = await self._parts.writer.apply_status(resource, status)
        except KubeApiError as error:
            if not (error.conflict or error.not_found):
                raise
            await self._parts.observer.reread_resource()
            return False
        self._parts.cache.wrote_resource(written)
        # A status that the API server stores in another form must not be written in every pass.
        self._persisted = (wanted, _canonical(written.status))
        return True

    def _again(self) -> float:
        self._eager += 1
        return 0.0 if self._eager <= EAGER_PASSES else 1.0

    async def _sleep(self, pause: float, *, fixed: float) -> None:
        """Sleep for `pause` seconds. A wake-up ends the sleep early, but not before `fixed` seconds.

        fixed: the backoff after a failure, in seconds.
        """
        unconditional = min(pause, fixed)
        if unconditional:
            await asyncio.sleep(unconditional)
            pause -= unconditional
        try:
            async with asyncio.timeout(pause):
                await self._woken.wait()
        except TimeoutError:
            return

    def _log_decision(self, decision: Decision) -> None:
        summary = (decision.policy, decision.reason, decision.message)
        if summary != self._last_logged:
            self._last_logged = summary
            logger.info(
                "decision",
                extra={
                    "resource": "/".join(self.key),
                    "policy": decision.policy,
                    "reason": decision.reason,
                    "detail": decision.message,
                    "actions": [type(action).__name__ for action in decision.actions],
                },
            )

    def _log_failure(self, error: Exception, pause: float) -> None:
        fields = {"resource": "/".join(self.key), "error": str(error), "retry_seconds": pause}
        if isinstance(error, KubeApiError) and error.namespace_ends:
            logger.info("namespace is being deleted; waiting until the resource is gone", extra=fields)
        elif isinstance(error, KubeApiError):
            logger.warning("pass failed", extra=fields)
        else:
            logger.exception("pass failed", extra=fields)


def _first(error: ValidationError) -> str:
    """Return the first error of an invalid spec, with the path of its field."""
    entry = error.errors()[0]
    path = ".".join(str(part) for part in ("spec", *entry["loc"]))
    return f"{path}: {entry['msg']}"


def _canonical(status: object) -> str:
    return json.dumps(status, sort_keys=True, separators=(",", ":"), default=str)


class TaskSupervisor:
    """Starts and stops the tasks of the resources. Each resource has one task.

    make_task: creates a task from the UID and key of a resource, and the event that wakes the task.
    """

    def __init__(self, make_task: Callable[[str, Key, asyncio.Event], ResourceTask]) -> None:
        self._make_task = make_task
        self._tasks: dict[str, tuple[ResourceTask, asyncio.Task[None]]] = {}
        self._by_key: dict[Key, str] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets the fatal exception of a task, which is the loss of leadership."""

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def oldest_pass_seconds(self) -> float:
        """Age of the longest running pass in seconds; 0 if no pass is running."""
        now = time.monotonic()
        return max((now - task.busy_since for task, _ in self._tasks.values() if task.busy_since), default=0.0)

    @property
    def behind_seconds(self) -> float:
        """Longest time in seconds for which the watch has not shown a known version of an object of any resource."""
        return max((task.behind_seconds for task, _ in self._tasks.values()), default=0.0)

    @property
    def isolated(self) -> bool:
        """Whether a fault of this process's own network is the likely reason why its coordinators are silent."""
        coordinators = [task.coordinator for task, _ in self._tasks.values()]
        silent = [nodes for is_silent, nodes in coordinators if is_silent]
        answering = sum(is_silent is False for is_silent, _ in coordinators)
        return is_isolated(silent, answering=answering)

    def readings(self) -> list[Reading]:
        """Return the state of each resource, as metrics export it. This method is callable on any thread."""
        return [task.reading for task, _ in list(self._tasks.values())]

    def wake_resource(self, uid: str, key: Key, *, exists: bool = True) -> None:
        """Wake the task of a resource that was created, changed or deleted. If the resource is new, start its task.

        exists: False if the resource was deleted. Its task then ends automatically.
        """
        if uid not in self._tasks and not exists:
            return
        if uid not in self._tasks:
            task = self._make_task(uid, key, asyncio.Event())
            runner = asyncio.create_task(task.run(), name=f"resource {key[0]}/{key[1]}")
            runner.add_done_callback(lambda done: self._ended(task, done))
            self._tasks[uid] = (task, runner)
            self._by_key[key] = uid
        self._tasks[uid][0].wake()

    def wake_instance(self, key: Key) -> None:
        """Wake the task of the resource `key`, because one of the resource's objects has changed."""
        uid = self._by_key.get(key)
        if uid is not None:
            self._tasks[uid][0].wake()

    def wake_all(self) -> None:
        for task, _ in self._tasks.values():
            task.wake()

    async def stop(self) -> None:
        """Cancel all tasks. When tasks are started again, they continue from the persisted state."""
        runners = [runner for _, runner in self._tasks.values()]
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    def _ended(self, task: ResourceTask, runner: asyncio.Task[None]) -> None:
        del self._tasks[task.uid]
        if self._by_key.get(task.key) == task.uid:
            del self._by_key[task.key]
        if runner.cancelled():
            return
        error = runner.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
        elif error is None:
            logger.info("resource gone", extra={"resource": "/".join(task.key)})
