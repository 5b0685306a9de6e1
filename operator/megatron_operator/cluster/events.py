"""Events of the custom resource. Repeated Events with the same text increase the count of one Event."""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.kinds import EVENT, RESOURCE
from megatron_operator.decision.world import EmitEvent
from megatron_operator.resource.names import FIELD_MANAGER
from megatron_operator.resource.text import printable

logger = logging.getLogger(__name__)

MAX_NOTE = 1000
"""The API server rejects longer notes, in bytes."""


class Recorder:
    """Writes Events. A failure is logged and not retried, because Events are not state."""

    def __init__(self, api: KubeApi, *, instance: str) -> None:
        self._api = api
        self._instance = instance[:128]

    async def emit(self, event: EmitEvent, *, name: str, namespace: str, uid: str) -> None:
        body = self._body(event, name=name, namespace=namespace, uid=uid)
        try:
            await self._api.create(EVENT, body, manager=FIELD_MANAGER)
        except KubeApiError as error:
            if error.code == 409 and error.reason == "AlreadyExists":
                await self._count_again(body)
            elif not error.namespace_ends:
                logger.warning("event not written", extra={"reason": event.reason, "error": str(error)})

    async def _count_again(self, body: Object) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        try:
            stored = await self._api.get(EVENT, namespace, name)
            if stored is not None:
                count = int((stored.get("series") or {}).get("count") or 1) + 1
                series = {"series": {"count": count, "lastObservedTime": body["eventTime"]}}
                await self._api.merge_patch(EVENT, namespace, name, series, manager=FIELD_MANAGER)
        except KubeApiError as error:
            logger.warning("event not counted", extra={"reason": body["reason"], "error": str(error)})

    def _body(self, event: EmitEvent, *, name: str, namespace: str, uid: str) -> Object:
        message = printable(event.message)
        words = "\0".join((uid, event.type, event.reason, message))
        digest = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{name}.{digest}", "namespace": namespace},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": message.encode()[:MAX_NOTE].decode(errors="ignore"),
            "regarding": {
                "apiVersion": RESOURCE.api_version,
                "kind": RESOURCE.kind,
                "name": name,
                "namespace": namespace,
                "uid": uid,
            },
        }
