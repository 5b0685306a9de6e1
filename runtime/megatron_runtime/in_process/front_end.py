"""The HTTP front end of MegatronLLM.serve().

It runs an OpenAI server on the background loop, and further server processes on the same socket.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from dataclasses import dataclass, field
from functools import partial

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.client.rejection import UnavailableError
from megatron_runtime.process.children import END_SIGNAL, child_environment, module_command
from megatron_runtime.process.threads import off_loop
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.server.app import create_app
from megatron_runtime.server.openai.bodies import end_parser
from megatron_runtime.server.process import HttpServer, drain
from megatron_runtime.server.settings import LOOPBACK_HOSTS, ServerSettings, is_loopback, listen, url_of
from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.chat_template import end_idle_renderers

DRAIN_SECONDS = 5.0
GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL for a server process."""


@dataclass(kw_only=True)
class ServeConfig:
    """Settings of the HTTP front end that serve() starts on the primary rank.

    host, port:        address of the server; with port 0, the server picks a free port, which `url` contains.
    parsers:           name of the tool-call parser; empty means that the model's chat template determines it.
    verbose:           log each request. This process logs to the logger uvicorn.access at level INFO, and the child
                       processes log to standard error.
    frontend_replicas: number of HTTP servers on the socket. One runs in this process, the others in child processes.
                       Only one runs if the tokenizer has no model reference.
    sock:              a bound socket to use instead of host and port.
    model_name:        name in /v1/models; None means the model's own name.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4
    sock: socket.socket | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"ServeConfig.port={self.port}: want 0 to 65535")
        if self.frontend_replicas < 1:
            raise ValueError(f"ServeConfig.frontend_replicas={self.frontend_replicas}: want at least 1")
        if len(self.parsers) > 1:
            raise ValueError(f"ServeConfig.parsers={self.parsers!r}: want at most one")


class FrontEnd:
    """An HTTP server from start() to stop(). It is a client of the coordinator at `coordinator`.

    tokenizer_reference: model reference from which another process can load the tokenizer; None if there is none.
    max_sequence_length: limit of prompt + answer of one request, in tokens; None leaves the check to the engines.
    any_model_name: whether the served model answers requests with an unknown model name.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        coordinator: str,
        tokenizer: Tokenizer,
        tokenizer_reference: str | None,
        model_name: str,
        max_sequence_length: int | None,
        any_model_name: bool = False,
    ) -> None:
        self._settings = ServerSettings(
            coordinator=coordinator,
            model=tokenizer_reference or model_name,
            model_name=model_name,
            any_model_name=any_model_name,
            host=config.host,
            tool_call_parser=config.parsers[0] if config.parsers else "auto",
            max_sequence_length=max_sequence_length,
            drain_seconds=DRAIN_SECONDS,
            access_log=config.verbose,
            allowed_hosts=LOOPBACK_HOSTS if is_loopback(config.host) else (),
        )
        self._client = CoordinatorClient(coordinator)
        try:
            self._app = create_app(self._settings, backend=self._client, tokenizer=tokenizer)
            self._listener = config.sock if config.sock is not None else listen(host=config.host, port=config.port)
        except BaseException:
            self._client.stop()
            raise
        self._http = HttpServer(self._app, access_log=self._settings.access_log)
        self._serving: asyncio.Task[None] | None = None
        self._replicas = config.frontend_replicas - 1 if tokenizer_reference is not None else 0
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return url_of(self._listener)

    async def start(self) -> None:
        """Connect to the coordinator and start to serve.

        If the connection fails, close the socket and raise the error.
        """
        try:
            await self._client.start()
        except BaseException:
            self._listener.close()
            raise
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._processes = [self._start_replica() for _ in range(self._replicas)]

    async def stop(self) -> None:
        """Drain open requests, then close. This method is idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        processes, self._processes = self._processes, []
        for process in processes:
            process.send_signal(END_SIGNAL)
        try:
            await asyncio.gather(
                *(off_loop(partial(_wait_or_kill, process)) for process in processes),
                drain(self._app.state.service, self._http),
            )
            await serving
            self._app.state.service.prompts.close()
        finally:
            self._client.stop()
            self._listener.close()
            await off_loop(end_idle_renderers)
            await off_loop(end_parser)

    async def fail(self, cause: str) -> None:
        """Answer open requests of this process with status 503, and stop the server.

        Call this method when the coordinator or the last engine has failed.

        cause: text of the 503 responses.
        """
        self._client.stop(partial(UnavailableError, ErrorCode.UNAVAILABLE, cause), is_lost=True)
        await self.stop()

    def _start_replica(self) -> subprocess.Popen[bytes]:
        """Start a `megatron server` process on the same socket with the same settings. It exits with this process."""
        settings, descriptor = self._settings, self._listener.fileno()
        command = [
            *module_command("megatron_runtime.cli", "server"),
            *("--coordinator", settings.coordinator.removeprefix("tcp://")),
            *("--model", settings.model, "--model-name", settings.served_name),
            *("--host", settings.host, "--listen-fd", str(descriptor)),
            *("--max-sequence-length", str(settings.max_sequence_length)),
            *("--tool-call-parser", settings.tool_call_parser),
            *("--reasoning-parser", settings.reasoning_parser),
            *(f"--allowed-host={host}" for host in settings.allowed_hosts),
            "--health-port=off",  # all replicas would use the same port
            *("--drain-seconds", str(settings.drain_seconds), "--linger-seconds", "0"),
            *(("--access-log", "--log-level", "info") if settings.access_log else ("--log-level", "warning")),
        ]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env=child_environment(ends_with_parent=True),
            start_new_session=True,
        )


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
