"""The task of one resource: observe, decide, persist, act, wait to be woken; until the resource is gone.

An exception ends a pass, never the task: it is logged and the next pass comes after a pause that grows. Only the loss
of leadership goes up. What a pass does is decided by `decide` alone; this loop knows no rule about resources.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from megatron_operator.cluster.api import ApiError
from megatron_operator.cluster.cache import WATCH_LAG_SECONDS, Key, ResourceCache
from megatron_operator.cluster.lease import Elector, LeadershipLostError
from megatron_operator.cluster.projection import SeenResource
from megatron_operator.cluster.writer import Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.metrics import Metrics, Reading, VerbClock
from megatron_operator.controller.observe import Observer
from megatron_operator.link.connection import CoordinatorLink
from megatron_operator.plan.decide import refuse_spec
from megatron_operator.plan.world import Decision, World

logger = logging.getLogger(__name__)

BACKOFF_FIRST, BACKOFF_MAX = 0.2, 30.0
AFTER_ERROR_SECONDS = 1.0
EAGER_PASSES = 10
"""Passes that may follow one another without a pause because each changed something."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a task works with."""

    cache: ResourceCache
    observer: Observer
    writer: Writer
    actor: Actor
    link: CoordinatorLink
    elector: Elector
    metrics: Metrics
    decide: Callable[[World], Decision]
    resync_seconds: float
    coalesce_seconds: float = 0.02
    """Events come in bursts, one for each object: a pass begins so long after the first of them."""


class ResourceTask:
    """See the module. `wake` may be called from anywhere on the event loop, any number of times."""

    def __init__(self, *, uid: str, key: Key, woken: asyncio.Event, parts: Parts) -> None:
        self.uid = uid
        self.key = key
        self.busy_since: float | None = None
        self._woken = woken
        self._parts = parts
        self._eager = 0
        self._said: tuple[str, str, str] | None = None
        self._persisted: tuple[str, str] | None = None
        self._verbs = VerbClock(parts.metrics, time.monotonic)
        self._status: dict[str, Any] = {}

    def wake(self) -> None:
        self._woken.set()

    @property
    def reading(self) -> Reading:
        """What metrics say of the resource."""
        return Reading(*self.key, status=self._status, coordinator=self._parts.link.snapshot)

    @property
    def behind_seconds(self) -> float:
        """How long the watch has not shown something that is known to exist."""
        return self._parts.cache.behind_seconds

    async def run(self) -> None:
        """Until the resource is gone.

        Raises:
            LeadershipLostError: this process does not lead any more.
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
                    if isinstance(error, ApiError):
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
            await self._parts.link.close()

    async def run_once(self) -> float | None:
        """One pass; seconds until the next at the latest, or None when the resource is gone."""
        parts = self._parts
        resource = await parts.observer.resource()
        if resource is None:
            return None
        decision = await self._decide(resource)
        parts.link.expect_change(decision.attentive)
        self._log_decision(decision)
        self._status = decision.status
        self._verbs.look(decision.status.get("lifecycle") or {})
        if not await self._persist(resource, decision.status):
            return self._again()
        if await parts.actor.act(decision.actions, resource):
            return self._again()
        self._eager = 0
        # What was written and is not shown by the watch is looked up then.
        shown = parts.resync_seconds if parts.cache.behind_seconds == 0.0 else WATCH_LAG_SECONDS
        return min(shown, parts.resync_seconds, decision.requeue_after or parts.resync_seconds)

    async def _decide(self, resource: SeenResource) -> Decision:
        parts = self._parts
        try:
            actor = parts.actor
            world = await parts.observer.world(
                resource, term=parts.elector.term, refusals=actor.refusals, vetted=actor.vetted
            )
        except ValidationError as error:
            return refuse_spec(
                status=resource.status, generation=resource.generation, error=_first(error), now=datetime.now(UTC)
            )
        return parts.decide(world)

    async def _persist(self, resource: SeenResource, status: dict[str, Any]) -> bool:
        """Write the status if it differs. False: it was not what the decision was made from; decide again."""
        wanted, stored = _canonical(status), _canonical(resource.status)
        if wanted == stored or self._persisted == (wanted, stored):
            return True
        try:
            written = await self._parts.writer.apply_status(resource, status)
        except ApiError as error:
            if not (error.conflict or error.not_found):
                raise
            await self._parts.observer.reread_resource()
            return False
        self._parts.cache.wrote_resource(written)
        # A status that the schema stores differently must not be written again and again.
        self._persisted = (wanted, _canonical(written.status))
        return True

    def _again(self) -> float:
        self._eager += 1
        return 0.0 if self._eager <= EAGER_PASSES else 1.0

    async def _sleep(self, pause: float, *, fixed: float) -> None:
        """A wake-up shortens the pause, but for its `fixed` part: whatever failed is not hammered."""
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
        said = (decision.policy, decision.reason, decision.message)
        if said != self._said:
            self._said = said
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
        if isinstance(error, ApiError) and error.namespace_ends:
            logger.info("namespace is being deleted; waiting for the end", extra=fields)
        elif isinstance(error, ApiError):
            logger.warning("pass failed", extra=fields)
        else:
            logger.exception("pass failed", extra=fields)


def _first(error: ValidationError) -> str:
    """The first complaint about a spec, with its path."""
    entry = error.errors()[0]
    path = ".".join(str(part) for part in ("spec", *entry["loc"]))
    return f"{path}: {entry['msg']}"


def _canonical(status: object) -> str:
    return json.dumps(status, sort_keys=True, separators=(",", ":"), default=str)
