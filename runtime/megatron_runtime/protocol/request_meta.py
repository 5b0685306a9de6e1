"""The fields of a request that the coordinator reads: the element `meta` of SUBMIT and DISPATCH."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.adapters import MAX_ADAPTER_NAME_CHARACTERS
from megatron_runtime.protocol.codec import MalformedMessageError
from megatron_runtime.protocol.text import shown


class RequestMeta(NamedTuple):
    """The fields of a request that the coordinator reads. The bodies contain all other fields."""

    streaming: bool = False
    seed: int = 0
    deadline_ms: int | None = None
    """Remaining time when the message is sent; None means no deadline."""
    text: bool = False
    """Whether the prompt is UTF-8 text. The coordinator tokenizes it if it has a tokenizer, otherwise an engine with a
    tokenizer does.
    """
    priority: int = 0
    """The waiting request with the lowest number is dispatched first."""
    cache_salt: str = ""
    """Seed of the block hashes, so that requests with different salts share no prefix."""
    engine: str = ""
    """The only engine that may answer. Empty means any engine."""
    tenant: str = ""
    """Opaque id of the tenant whose share of the engines the request counts against. If it is empty, the client's
    connection is the tenant.
    """
    adapter: str = ""
    """Name of the LoRA adapter that answers. Empty means the base model."""

    request_id: str = ""
    """Id by which logs and traces of all components name the request. Empty if it has none."""
    traceparent: str = ""
    """W3C trace context of the span that sent the request. Empty if the request is not traced."""
    needs: str = ""
    """Names, separated by spaces, of the features that an engine must have, and of the sampling parameters that it must
    support. Empty if every engine can answer.
    """
    session: str = ""
    """Opaque id of a session. Its requests go to one engine while this engine holds their prefix. Empty means no
    session.
    """

    def items(self) -> tuple[Any, ...]:
        """Return the elements to send. Empty optional elements at the end are omitted."""
        count = len(self)
        while count > _REQUIRED and not self[count - 1]:
            count -= 1
        return self[:count]

    @classmethod
    def from_list(cls, value: Any) -> Self:
        """Return the RequestMeta that a list of elements encodes.

        The last nine elements can be absent, because peers of earlier releases do not send them. Raises
        MalformedMessageError.
        """
        if type(value) is list and len(value) >= 4:
            meta = cls._make((value + _META[len(value) :])[: len(_META)])
            stream, seed, deadline, text, priority, salt, engine, tenant, adapter, request, trace, needs, session = meta
            if (
                type(stream) is type(text) is bool
                and type(seed) is type(priority) is int
                and 0 <= seed < 1 << 64
                and (deadline is None or type(deadline) is int)
                and type(salt) is type(engine) is type(tenant) is type(adapter) is str
                and type(request) is type(trace) is type(needs) is type(session) is str
                and len(salt) <= limits.MAX_SALT_CHARACTERS
                and len(tenant) <= limits.MAX_TENANT_CHARACTERS
                and len(adapter) <= MAX_ADAPTER_NAME_CHARACTERS
                and len(request) <= limits.MAX_REQUEST_ID_CHARACTERS
                and len(trace) <= limits.MAX_TRACEPARENT_CHARACTERS
                and len(needs) <= limits.MAX_NEEDS_CHARACTERS
                and len(session) <= limits.MAX_SESSION_CHARACTERS
            ):
                return meta
        raise MalformedMessageError(
            f"request meta {shown(value)}: want [streaming, seed, deadline_ms, text, priority, cache_salt, engine, "
            "tenant, adapter, request_id, traceparent, needs, session]"
        )


_META = list(RequestMeta())
"""Default values of the elements."""
_REQUIRED = 6
"""Number of elements that are always sent."""
