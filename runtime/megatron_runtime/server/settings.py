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

    header_seconds:     maximum time from the connection, or from the first byte of a request, to the end of its
                        headers.
    body_seconds:       maximum time from the end of the headers to the end of the body.
    body_idle_seconds:  maximum pause between two parts of a body.
    stall_seconds:      time in which a client must read a full write buffer of at most 48 KiB.
    keep_alive_seconds: maximum time between two requests.
    handshake_seconds:  maximum duration of the TLS handshake.
    max_connections:    maximum number of connections. A further connection closes the connection that has been idle
                        longest. If no connection is idle, the further connection gets a 503 answer.
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
    model:              model reference, from which the tokenizer is read.
    model_name:         name of the model in /v1/models; None: the last part of the reference.
    model_aliases:      additional names of the model in requests and in /v1/models.
    model_hash:         model hash that engines must have to serve the requests, up to 128 characters; empty: any hash.
    host, port:         address of the HTTP server; port 0 picks a free port.
    health_port:        port of probes and metrics, which need no API key there; None: metrics are on `port` and need an
                        API key.
    keys_dir:           directory of client.key, client.pub and server.pub; None: no encryption.
    tls_certificate_file, tls_key_file: PEM chain and key, read again when they change; None: plain HTTP.
    api_keys_file:      API keys for the routes under /v1: one key per line, or YAML. Read again when it changes; None:
                        requests need no key.
    share_prefix_cache: whether API keys share cached prefixes. If so, the holder of a key can detect from
                        `cached_tokens` and response times which prompts other holders have sent. Without API keys, the
                        setting has no effect.
    any_model_name:     whether the served model answers requests with an unknown model name, as in Megatron-Core's
                        server. If not, such a request gets 404.
    allow_priority:     whether requests can have a `priority` other than 0.
    reserve_tokens:     maximum number of generated tokens that a request reserves for each choice if its API key has a
                        token limit.
    backend:            backend of the engines. "vllm": vLLM renders conversations and parses answers, if it is
                        installed and supports the model. "native": this server renders and parses.
    tool_call_parser:   format of the model's tool calls: a name in `table.PARSERS`, a vLLM parser (only with the
                        backend "vllm"), "auto" for the format that the chat template describes, or "none" to offer no
                        tools.
    generation_config:  "auto": default sampling parameters come from the model's generation_config.json; "none": the
                        default sampling parameters have no effect.
    reasoning_parser:   how the model marks its reasoning: a name in `reasoning.FORMATS`, a vLLM parser (only with the
                        backend "vllm"), "auto" for the markers in the chat template, or "none" to return reasoning as
                        text.
    max_sequence_length: maximum number of tokens of prompt plus answer of a request; None: the limit of the model.
    max_body_bytes:     maximum size of a request body.
    max_bodies_bytes:   maximum memory that requests hold until they are answered (bodies, prompts, answers without
                        streaming). Further requests get 429.
    max_open_requests:  maximum number of choices that run or wait at the same time. Further requests get 429.
    keep_alive_seconds: time without an event after which a stream gets a comment.
    coordinator_wait_seconds: how long a new request waits for an unreachable coordinator before it gets 503.
    drain_seconds:      maximum time, after SIGTERM, for open requests to end before the server aborts them.
    linger_seconds:     after SIGTERM, the server closes when no request has begun for this time. Load balancers notice
                        with a delay that the server is not ready.
    access_log:         whether to log each HTTP request.
    allowed_hosts:      accepted values of the Host header, without port. The Origin that a browser sends must equal the
                        Host header. Empty: any.
    allowed_origins:    origins of web pages that can use the server, such as "http://localhost:3000"; "*": all.
    allowed_media_hosts: hosts from which images, audio and video of requests are fetched: names, or addresses, which
                         can be private. Empty: only data URLs are accepted.
    connections:        deadlines and limits of HTTP connections.
    vllm_metrics:       whether to also export metrics under vLLM's names, which begin with "vllm:".
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
        """Return all names of the model without duplicates."""
        return tuple(dict.fromkeys((self.served_name, *self.model_aliases)))


def default_model_name(model: str) -> str:
    """Return the default name of a model: the text after "builtin:", or the last part of its path or repository."""
    name = PurePath(model.rpartition(":")[2]).name.removesuffix(".gguf") or model
    return name.partition("@")[0] if model.startswith("hf:") else name


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach a server that binds to the address or name `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket) -> str:
    """Return the URL at which clients on this host reach a server with this listening socket."""
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def listen(*, host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Call this before the slow part of the start, so that early connections wait and do not fail.

    Raises OSError, whose message names the address and the options to change.
    """
    try:
        listener = listening_socket(host, port, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        message = f"cannot listen on {host}:{port} ({reason}): choose another --host or --port"
        raise OSError(error.errno, message) from error
    # Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets with an explicit protocol number.
    # Without TCP_NODELAY, the second event of a stream waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
