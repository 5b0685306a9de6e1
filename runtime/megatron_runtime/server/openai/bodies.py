"""Memory limits for request bodies, and the child process that parses large bodies.

pydantic holds the global interpreter lock while it parses, so parsing in a thread would stall all streams of the
server. Parsing a body of up to PARSED_IN_PLACE_BYTES takes at most a few milliseconds. A child process parses larger
bodies. Unpickling the parsed body takes a fraction of the parsing time.
"""

from __future__ import annotations

import atexit
import os
import pickle
from codecs import BOM_UTF8
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from megatron_runtime.process.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess
from megatron_runtime.server.errors import ApiError, from_validation, try_again
from megatron_runtime.server.guards import JsonScan
from megatron_runtime.server.openai.schema import ModelRequest

PARSED_IN_PLACE_BYTES = 64 * 1024
PARSE_SECONDS = 10.0
"""Timeout for parsing one body, in seconds. The most complex bodies take 0.2 s."""
PARSE_MEMORY_BYTES = 1 << 30
"""Bytes of address space for parsing in the child process, in addition to the imported modules."""
TOKEN_BYTES = 40
"""Bytes of memory for a token id in a list: the pointer and the integer."""

_MAX_REPLY_BYTES = 256 << 20
_PARSER = "megatron_runtime.server.openai.body_parser"

_Model = TypeVar("_Model", bound=ModelRequest)


class BodyBudget:
    """Counts the bytes that the requests of this server hold, by tenant, and limits their sum.

    If the limit is reached, the server still accepts the bodies of a tenant that holds less than its fair share.
    Therefore no tenant can block other tenants, and the server holds at most twice the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[str, int] = {}
        self.total = 0

    def add(self, tenant: str, size: int) -> None:
        """Count `size` bytes for a tenant. `size` can be negative.

        Raises ApiError 429, without counting the bytes, if they would exceed the limit.
        """
        if size > 0 and self.total + size > self.limit:
            share = self.limit // len({*self.held, tenant})
            if self.held.get(tenant, 0) + size > share:
                message = (
                    f"Requests of this server hold {self.limit} bytes of bodies, prompts and answers, or would with "
                    "this one: try again."
                )
                raise try_again(429, message, code="too_many_requests")
        self.force(tenant, size)

    def force(self, tenant: str, size: int) -> None:
        """Count `size` bytes for a tenant, even beyond the limit."""
        self.total += size
        self.held[tenant] = self.held.get(tenant, 0) + size

    def release(self, tenant: str, size: int) -> None:
        """Stop counting `size` bytes of a tenant."""
        self.force(tenant, -size)
        if not self.held[tenant]:
            del self.held[tenant]


class Lease:
    """The bytes that one request holds until release()."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self.tenant = tenant
        self.size = 0
        self._budget = budget

    def add(self, size: int) -> None:
        """Count `size` additional bytes for this request. `size` can be negative.

        Raises ApiError 429 if the server would hold too many bytes.
        """
        self._budget.add(self.tenant, size)
        self.size += size

    def force(self, size: int) -> None:
        """Count `size` bytes that the request already holds, even beyond the limit."""
        self._budget.force(self.tenant, size)
        self.size += size

    def release(self) -> None:
        self._budget.release(self.tenant, self.size)
        self.size = 0


def parse(model: type[_Model], body: bytes, scan: JsonScan) -> _Model:
    """Return the validated request body as a `model`. Raises ApiError 400.

    scan: counts of the body. JSON in strings of the body is added to the counts.
    """
    try:
        return model.model_validate_json(body.removeprefix(BOM_UTF8), context=scan).prepared()
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_context=False)) from error


def parse_in_child(model: type[_Model], parts: Sequence[bytes], scan: JsonScan) -> _Model:
    """Call parse() in the child process, and return its result. Blocks this thread, while other threads run.

    parts: the bytes of the request body, as consecutive parts.

    Raises the errors of parse(), ApiError 400 if parsing the body takes too much time or memory, and ApiError 503 if
    the child process does not start.
    """
    try:
        reply = _child.call(pickle.dumps((model, b"".join(parts), scan), 5), timeout_seconds=PARSE_SECONDS)
    except ProcessLostError as error:
        message = f"The request body is too complex: the process that parses it is limited, and {error}."
        raise ApiError(400, message, code="body_too_complex") from error
    except ProcessStartError as error:
        raise try_again(503, f"No process can parse the request body: {error}.", code="internal_error") from error
    parsed, rejection = pickle.loads(reply)
    if rejection is not None:
        raise ApiError(**rejection)
    result: _Model = parsed
    return result


def _new_child() -> SacrificialProcess:
    return SacrificialProcess(_PARSER, memory_bytes=PARSE_MEMORY_BYTES, max_reply_bytes=_MAX_REPLY_BYTES)


_child = _new_child()


def end_parser() -> None:
    """Stop the child process that parses request bodies. Call this when the server stops.

    The next call of parse_in_child() restarts the process.
    """
    global _child
    before, _child = _child, _new_child()
    before.close()


def _start_over() -> None:
    """Discard the connection to the child process. Runs in a new process after a fork.

    Two processes must not share the connection.
    """
    global _child
    _child = _new_child()


os.register_at_fork(after_in_child=_start_over)
atexit.register(lambda: _child.close())
