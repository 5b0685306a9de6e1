"""Finds the log-probabilities of one request in a PARTIAL, without unpacking the other requests' values."""

from __future__ import annotations

import logging
from array import array

from megatron_runtime.protocol.codec import MalformedMessageError, values_of_map
from megatron_runtime.protocol.limits import UID_BYTES

logger = logging.getLogger(__name__)


class Extras:
    """The packed log-probabilities of all requests in one PARTIAL, with an index by request.

    raw: `extras` of the message. All requests of the message share this object, so the index is built once.
    """

    __slots__ = ("_bounds", "_raw", "_uids")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._uids: bytes | None = None
        self._bounds = array("I")

    def of(self, uid: bytes) -> bytes:
        """Return the packed log-probabilities of the request `uid`, or b"" if the message has none for this request."""
        uids = self._uids if self._uids is not None else self._index()
        at = uids.find(uid)
        while at >= 0 and at % UID_BYTES:
            at = uids.find(uid, at + 1)
        if at < 0:
            return b""
        begin, end = self._bounds[2 * (at // UID_BYTES) :][:2]
        return self._raw[begin:end]

    def _index(self) -> bytes:
        uids = []
        try:
            for uid, begin, end in values_of_map(self._raw):
                if isinstance(uid, bytes) and len(uid) == UID_BYTES:
                    uids.append(uid)
                    self._bounds.extend((begin, end))
        except MalformedMessageError as error:
            logger.warning("the extras of a partial cannot be read: %s", error)
        self._uids = b"".join(uids)
        return self._uids
