"""Settings of one server process, and its listening socket."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from megatron_runtime.process.listening import listening_socket

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
BACKLOG = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Deadlines in seconds, and the maximum number of connections.

    header_seconds:     from the connection, or the first byte of a request, to the end of its headers.
    body_seconds:       from the end of the headers to the end of the body.
    body_idle_seconds:  longest pause between two parts of a body.
    stall_seconds:      time in which a client must read a full write buffer of at most 48 KiB.
    keep_alive_seconds: time between two requests.
    handshake_seconds:  duration of the TLS handshake.
    max_connections:    maximum number of connections. A further connection closes the one that has been idle longest;
                        if none is idle, it is answered with 503.
    """

    header_seconds: float = 20.0
    body_seconds: float = 120.0
    body_idle_seconds: float = 20.0
    stall_seconds: float = 60.0
    keep_alive_seconds: int = 75
    handshake_seconds: float = 10.0
    max_connections: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of `megatron server`.

    coordinator:        address of the coordinator's client port, "tcp://host:port".
    model:              model reference; the tokenizer is read from it.
    model_name:         name under which /v1/models offers it; None means the last part of the reference.
    model_aliases:      further names of the model in requests and in /v1/models.
    model_hash:         model hash that engines must have to serve the requests, up to 128 characters; empty: any.
    host, port:         where HTTP listens; port 0 picks a free one.
    health_port:        where probes and metrics are, without a key; None: metrics are on `port`, behind the API key.
    keys_dir:           directory of client.key, client.pub and server.pub; None means no encryption.
    tls_certificate_file, tls_key_file: PEM chain and key, read again when they change; None serves plain HTTP.
    api_keys_file:      API keys that open /v1: one per line, or YAML. Read again when it changes; None leaves the
                        server open.
    share_prefix_cache: API keys share cached prefixes, so that `cached_tokens` and response times reveal to the holder
                        of one key which prompts others sent. Without API keys it has no effect.
    any_model_name:     requests with an unknown model name are answered by the served model, as in Megatron-Core's
                        server; otherwise with 404.
    allow_priority:     requests may have a `priority` other than 0.
    reserve_tokens:     maximum number of generated tokens that a request of a key with a token limit reserves for each
                        choice.
    backend:            backend of the engines. "vllm": conversations are rendered and answers are parsed by vLLM, if it
                        is installed and reads the model; "native": by this server.
    tool_call_parser:   format of the model's tool calls: a name of `table.PARSERS`, with the backend vllm one of its
                        parsers, "auto" for the one that its chat template describes, "none" to offer no tools.
    generation_config:  "auto": default sampling parameters come from the model's generation_config.json; "none": the
                        defaults are neutral.
    reasoning_parser:   how the model marks its reasoning: a name of `reasoning.FORMATS`, with the backend vllm one of
                        its parsers, "auto" for the markers in its chat template, "none" to leave it in the text.
    max_sequence_length: prompt + answer of one request, in tokens; None means the limit of the model.
    max_body_bytes:     longest request body.
    max_bodies_bytes:   memory that requests hold until they are answered (bodies, prompts, whole answers); beyond that
                        429.
    max_open_requests:  maximum number of choices that run or wait at the same time; beyond that 429.
    keep_alive_seconds: a stream without an event for this long gets a comment.
    coordinator_wait_seconds: how long a new request waits for an unreachable coordinator, then 503.
    drain_seconds:      after SIGTERM, time for open requests to end before they are aborted.
    linger_seconds:     after SIGTERM, the server closes when no request has begun for this long: load balancers notice
                        late that it is not ready.
    access_log:         log each HTTP request.
    allowed_hosts:      values of the Host header, without port, that are served; a browser's Origin must equal the Host
                        header; empty: any.
    allowed_origins:    origins of web pages that may use the server, such as "http://localhost:3000"; "*": all.
    allowed_media_hosts: hosts from which images, audio and video of requests are fetched: names, or addresses, which
                        may be private; empty: requests have data URLs only.
    connections:        deadlines and limits of HTTP connections.
    vllm_metrics:       also expose metrics under their vllm: names.
    """

    coordinator: str = ""
    model: str = "builtin:smollm2-135m"
    model_name: str | None = None
    model_aliases: tuple[str, ...] = ()
    any_model_name: bool = False
    model_hash: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    health_port: int | None = None
    keys_dir: Path | None = None
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    api_keys_file: Path | None = None
    share_prefix_cache: bool = False
    allow_priority: bool = False
    reserve_tokens: int = 1024
    backend: Literal["native", "vllm"] = "native"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    max_sequence_length: int | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    max_bodies_bytes: int = 384 * 1024 * 1024
    max_open_requests: int = 10_000
    keep_alive_seconds: float = 15.0
    coordinator_wait_seconds: float = 30.0
    drain_seconds: float = 60.0
    linger_seconds: float = 0.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_media_hosts: tuple[str, ...] = ()
    connections: ConnectionLimits = ConnectionLimits()
    vllm_metrics: bool = True
    access_log: bool = False

    @property
    def served_name(self) -> str:
        return self.model_name or default_model_name(self.model)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return all names of the model, without repetitions."""
        return tuple(dict.fromkeys((self.served_name, *self.model_aliases)))


def default_model_name(model: str) -> str:
    """Return the default name of a model: the text after "builtin:", or the last part of its path or repository."""
    name = PurePath(model.rpartition(":")[2]).name.removesuffix(".gguf") or model
    return name.partition("@")[0] if model.startswith("hf:") else name


def is_loopback(host: str) -> bool:
    """Return whether an address or name to bind is reachable from this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket) -> str:
    """Return the URL of a server on a listening socket, for clients on this host."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def listen(*, host: str, port: int) -> socket.socket:
    """Return a listening socket.

    It is opened before the slow part of the start, so that early connections wait instead of failing.

    Raises OSError that names the address and the options to change.
    """
    try:
        listener = listening_socket(host, port, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        message = f"cannot listen on {host}:{port} ({reason}): choose another --host or --port"
        raise OSError(error.errno, message) from error
    # Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets with an explicit protocol number.
    # Without it the second event of a stream waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
