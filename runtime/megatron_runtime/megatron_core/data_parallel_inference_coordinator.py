"""Defines `DataParallelInferenceCoordinator`. The module path is the same as in Megatron-Core.

This coordinator runs in the caller's process and has one port for clients and engines. This module does not import
torch.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.synchronize
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import uvloop

from megatron_runtime.coordinator.core.context import SHARED_PORT
from megatron_runtime.coordinator.core.records import Engine
from megatron_runtime.coordinator.core.settings import (
    CoordinatorSettings,
    PrefixCachingCoordinatorPolicy,
    RoutingPolicy,
    Timing,
)
from megatron_runtime.coordinator.service import Coordinator, run
from megatron_runtime.protocol import lifecycle
from megatron_runtime.protocol.headers import Header, Role
from megatron_runtime.protocol.messages import tokens_to_bytes
from megatron_runtime.requests.hashing import frame_hashes
from megatron_runtime.transport.zmtp.router import Router

__all__ = [
    "CONTROL_TRANSITIONS",
    "HANDLERS",
    "CoordinatorSettings",
    "CoordinatorState",
    "DataParallelInferenceCoordinator",
    "PrefixCachingCoordinatorPolicy",
    "RoutingPolicy",
    "message_handler",
    "run",
]

logger = logging.getLogger(__name__)

CONTROL_TRANSITIONS = lifecycle.TRANSITIONS
HANDLERS: Mapping[Header, Callable[..., Any]] = MappingProxyType({})
"""Always empty, because a program cannot replace the handler of a message."""


def message_handler(*headers: Header) -> Callable[..., Any]:
    """Raise NotImplementedError, because this coordinator has no table of handlers."""
    names = ", ".join(header.name for header in headers)
    raise NotImplementedError(
        f"message_handler({names}): this coordinator has no table of handlers that can be extended"
    )


class DataParallelInferenceCoordinator:
    """A coordinator with one port for clients and engines, which runs in the process of the caller.

    The constructor binds the port, sends the address into `pipe_connection`, and waits for `data_parallel_size`
    engines. Call start() afterwards to serve. Without a hostname, the coordinator listens on the loopback interface
    only, because connections are not authenticated.

    data_parallel_size:        number of engines for which the constructor waits; 0: it does not wait.
    tokenizer:                 an object with `tokenize(text)`, which is needed for clients that send text, and
        `detokenize(tokens)`, which provides the text of answers for clients with Megatron-Core's protocol.
    inference_coordinator_port: port to listen on; None: a free port. In Megatron-Core 0.17 and later releases of
        Megatron-Core, the fourth positional argument is max_requests instead. Therefore, a port below 1024 raises
        ValueError.
    deterministic_mode:        whether routing depends only on the order in which requests arrive.
    block_size_tokens, enable_prefix_caching, prefix_caching_coordinator_policy, prefix_caching_routing_alpha: options
        of routing by cached prefix.
    max_requests:              maximum number of requests that an engine runs concurrently; None: no limit. The
        coordinator uses this number in routing by cached prefix, and as the limit of engines with Megatron-Core's
        protocol, which do not report a limit.
    hostname:                  address to listen on.
    plain_release:             see CoordinatorSettings.
    schedule_output_path:      JSON file to which stop() writes the scheduling decisions.

    All methods must be called in the thread that runs start().
    """

    CoordinatorState = lifecycle.CoordinatorState

    def __init__(
        self,
        pipe_connection: Connection | None,
        data_parallel_size: int,
        tokenizer: Any,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: RoutingPolicy = PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
        schedule_output_path: str | None = None,
        *,
        prefix_caching_routing_alpha: float = 0.5,
        max_requests: int | None = None,
        hostname: str | None = None,
        plain_release: Literal["0.17", "0.20"] = "0.17",
    ) -> None:
        if inference_coordinator_port is not None and 0 < inference_coordinator_port < 1024:
            raise ValueError(
                f"inference_coordinator_port {inference_coordinator_port}: want a port from 1024, or None; if it is "
                f"the number of requests per engine, give max_requests={inference_coordinator_port} by keyword"
            )
        if max_requests is not None and max_requests < 1:
            raise ValueError(f"max_requests {max_requests}: want at least 1, or None for no limit")
        prefixes = enable_prefix_caching and block_size_tokens is not None
        policy = RoutingPolicy(prefix_caching_coordinator_policy) if prefixes else RoutingPolicy.LOAD_BALANCED
        settings = CoordinatorSettings(
            listen=hostname or "127.0.0.1",
            client_port=inference_coordinator_port or 0,
            single_port=True,
            routing_policy=policy,
            deterministic=deterministic_mode,
            alpha=prefix_caching_routing_alpha,
            block_size_tokens=block_size_tokens,
            schedule_output_path=Path(schedule_output_path) if schedule_output_path is not None else None,
            plain_max_requests=max_requests or 0,
            plain_release=plain_release,
            timing=Timing(recovery=0.0),
        )
        self.data_parallel_size = data_parallel_size
        self.tokenizer = tokenizer
        self._block_size_tokens = block_size_tokens if prefixes else None
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._coordinator = self._runner.run(self._open(settings))
        self._core = self._coordinator.core
        if pipe_connection is not None:
            pipe_connection.send(self.address)
            pipe_connection.close()
        if data_parallel_size > 0:
            self._runner.run(self._coordinator.wait_for_engines(data_parallel_size))

    async def _open(self, settings: CoordinatorSettings) -> Coordinator:
        coordinator = Coordinator(settings, tokenizer=self.tokenizer)
        coordinator.start()
        return coordinator

    @property
    def address(self) -> str:
        return self._coordinator.transport.addresses[Role.CLIENT]

    def start(self) -> None:
        """Serve until stop() or a SHUTDOWN message."""
        self._runner.run(self._coordinator.ended.wait())

    def stop(self) -> None:
        """Stop, and release all resources. Idempotent."""
        if self._coordinator.transport.addresses:
            self._runner.run(self._coordinator.close())
            self._coordinator.transport.addresses = {}
        self._runner.close()

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> lifecycle.CoordinatorState:
        return self._core.verbs.state

    @property
    def router_socket(self) -> Router:
        """The ROUTER socket for all communication. Only the coordinator's loop may send and receive on this socket."""
        return self._coordinator.transport.router(SHARED_PORT)

    @property
    def identities_of_data_parallel_ranks(self) -> deque[bytes]:
        """Identities of the engines that serve, in the order of their registration."""
        return deque(engine.peer[1] for engine in self._core.engines.serving())

    @property
    def request_id_to_client_id(self) -> dict[int, bytes]:
        """The identity of the client that has submitted each dispatched request, by the request's dispatch id."""
        return {number: entry.client.peer[1] for number, entry in self._core.engines.dispatched()}

    @property
    def request_id_to_client_request_id(self) -> dict[int, int | bytes]:
        """The id that the client has assigned to each dispatched request, by the request's dispatch id."""
        uids = {}
        for number, entry in self._core.engines.dispatched():
            given = self._coordinator.plain.number_of(entry.uid)
            uids[number] = entry.uid if given is None else given
        return uids

    @property
    def next_request_id(self) -> int:
        """The dispatch id of the next request that the coordinator sends. Engines identify requests by dispatch id."""
        return self._core.dispatcher.next_dispatch_id

    # --- routing ------------------------------------------------------------------------------------------------

    def get_next_data_parallel_rank(self) -> bytes:
        """Return the identity of the next engine in round-robin order."""
        return self._core.router.next_in_turn(self._candidates()).peer[1]

    def compute_request_hashes(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the hashes of all complete blocks of a prompt; an empty list if prefix caching is disabled."""
        if self._block_size_tokens is None:
            return []
        tokens = self.tokenizer.tokenize(prompt) if isinstance(prompt, str) else prompt
        return frame_hashes(tokens_to_bytes(list(tokens)), self._block_size_tokens)

    def get_best_data_parallel_rank(self, request_hashes: Sequence[int]) -> bytes:
        """Return the identity of the engine to which a prompt with these block hashes is routed."""
        hashes = {self._block_size_tokens: request_hashes} if self._block_size_tokens and request_hashes else {}
        return self._core.router.select(self._candidates(), hashes).peer[1]

    def _update_rank_hashes(self, rank_identity: bytes, request_hashes: Sequence[int]) -> None:
        """Record that an engine receives a prompt whose blocks have these hashes."""
        self._core.router.blocks.give(self._engine(rank_identity), request_hashes)

    def _candidates(self) -> list[Engine]:
        candidates = self._core.engines.serving()
        if not candidates:
            raise RuntimeError("no engine is registered: start one with this coordinator's address first")
        return candidates

    # --- engines and answers ------------------------------------------------------------------------------------

    def _engine(self, identity: bytes) -> Engine:
        engine = self._core.engines.at((SHARED_PORT, identity))
        if engine is None:
            known = list(self.identities_of_data_parallel_ranks)
            raise KeyError(f"no engine with identity {identity!r} is registered; serving: {known}")
        return engine

    def _remove_engine(self, identity: bytes) -> None:
        """Remove an engine. Its requests are dispatched to other engines."""
        self._coordinator.remove_engine(self._engine(identity), "removed")

    def _send_to_engine(self, identity: bytes, payload: bytes) -> bool:
        """Send one frame to an engine. Return whether the socket accepted the frame.

        If the engine has no connection, this method also removes the engine from the coordinator.
        """
        engine = self._engine(identity)
        is_sent = self._coordinator.transport.send(engine.peer, [payload])
        self.router_socket.flush()
        if not self._coordinator.transport.is_connected(engine.peer):
            self._coordinator.remove_engine(engine, "its connection is gone")
        return is_sent

    def detokenize(self, finished_request: dict[str, Any]) -> None:
        """Set `generated_text` in `finished_request` to the text of the tokens in its `generated_tokens`."""
        finished_request["generated_text"] = self.tokenizer.detokenize(finished_request["generated_tokens"])

    @classmethod
    def entrypoint(
        cls,
        pipe_connection: Connection,
        ready_event: threading.Event | multiprocessing.synchronize.Event,
        data_parallel_size: int,
        tokenizer: Any,
        inference_coordinator_port: int | None = None,
        deterministic_mode: bool = False,
        block_size_tokens: int | None = None,
        enable_prefix_caching: bool = False,
        prefix_caching_coordinator_policy: RoutingPolicy = PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK,
        schedule_output_path: str | None = None,
        **options: Any,
    ) -> None:
        """Run a coordinator in this process until it stops. A keyboard interrupt stops it.

        The coordinator sends its address into the pipe before engines connect, and sets `ready_event` after
        `data_parallel_size` engines have registered.

        options: further keywords of the constructor: prefix_caching_routing_alpha, max_requests, hostname,
                 plain_release.
        """
        coordinator = cls(
            pipe_connection,
            data_parallel_size,
            tokenizer,
            inference_coordinator_port,
            deterministic_mode,
            block_size_tokens,
            enable_prefix_caching,
            prefix_caching_coordinator_policy,
            schedule_output_path,
            **options,
        )
        try:
            ready_event.set()
            coordinator.start()
        except KeyboardInterrupt:
            logger.info("the coordinator was interrupted")
        finally:
            coordinator.stop()


CoordinatorState = DataParallelInferenceCoordinator.CoordinatorState
