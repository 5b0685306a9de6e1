"""`start_text_gen_server` and `stop_text_gen_server`, functions that start and stop this project's OpenAI server.

The module path is the same as in Megatron-Core.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from megatron_runtime.in_process.event_loop import EventLoopManager
from megatron_runtime.in_process.front_end import FrontEnd, ServeConfig
from megatron_runtime.tokenization import tokenizer_of

__all__ = ["start_text_gen_server", "stop_text_gen_server"]

_MODEL_NAME = "EMPTY"
"""Model name in answers, as in Megatron-Core's server."""

_lock = threading.Lock()
_running: tuple[EventLoopManager, FrontEnd] | None = None


def start_text_gen_server(
    coordinator_addr: str,
    tokenizer: Any,
    rank: int,
    server_port: int,
    parsers: list[str] | None = None,
    verbose: bool = False,
    num_replicas: int = 4,
    hostname: str | None = None,
    sock: socket.socket | None = None,
) -> None:
    """Start an HTTP server in a thread of this process. It runs until stop_text_gen_server() is called.

    The server accepts every model name in requests.

    coordinator_addr: address of a coordinator of this project.
    tokenizer:        an object with `tokenize(text)` and `detokenize(tokens)`.
    rank:             rank of the caller; has no effect.
    parsers:          a list with at most one element, the name of a tool-call parser.
    num_replicas:     has no effect, because only this process has the tokenizer.
    hostname:         address to listen on; None: all IPv4 addresses.
    sock:             a bound socket to use instead of hostname and server_port.

    Raises:
        RuntimeError: a server is already running.
        OSError: the port is in use.
        CoordinatorUnreachableError: no coordinator answers.
    """
    global _running
    config = ServeConfig(
        host=hostname or "0.0.0.0",
        port=server_port,
        parsers=parsers or [],
        verbose=verbose,
        frontend_replicas=1,
        sock=sock,
        model_name=_MODEL_NAME,
    )
    with _lock:
        if _running is not None:
            raise RuntimeError("a server runs in this process: call stop_text_gen_server() first")
        manager = EventLoopManager()
        manager.start()

        async def start() -> FrontEnd:
            front_end = FrontEnd(
                config,
                coordinator=coordinator_addr,
                tokenizer=tokenizer_of(tokenizer),
                tokenizer_reference=None,
                model_name=_MODEL_NAME,
                max_sequence_length=None,
                any_model_name=True,
            )
            await front_end.start()
            return front_end

        try:
            _running = manager, manager.run_sync(start())
        except BaseException:
            manager.stop()
            raise


def stop_text_gen_server() -> None:
    """Drain the server's open requests, and close the server. Idempotent."""
    global _running
    with _lock:
        running, _running = _running, None
        if running is not None:
            manager, front_end = running
            try:
                manager.run_sync(front_end.stop())
            finally:
                manager.stop()
