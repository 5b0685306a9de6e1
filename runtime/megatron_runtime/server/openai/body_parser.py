"""The child process that parses large request bodies. bodies.py starts it. Requests and replies are pickled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from megatron_runtime.process.sacrificial_process import serve
from megatron_runtime.server.errors import ApiError

# These imports define the models of all bodies. They must come before the start of the thread that handles requests,
# because this thread can import nothing.
from megatron_runtime.server.openai import embeddings, messages, pooling, responses, schema
from megatron_runtime.server.openai.bodies import parse

__all__ = ["embeddings", "messages", "pooling", "responses", "schema"]


def _prepare(_setup: bytes) -> Callable[[bytes], bytes]:
    def handle(request: bytes) -> bytes:
        """Call parse(). Return its pickled result, or the pickled fields of the ApiError that parse() raised.

        request: the pickled arguments of parse().
        """
        parsed: Any = None
        rejection = None
        try:
            parsed = parse(*pickle.loads(request))
        except ApiError as error:
            rejection = {name: getattr(error, name) for name in ("status", "message", "param", "code")}
        return pickle.dumps((parsed, rejection), 5)

    return handle


if __name__ == "__main__":
    serve(_prepare)
