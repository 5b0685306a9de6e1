"""The OpenAI server of one MegatronLLM, on its background loop."""

from __future__ import annotations

import asyncio
import socket

from megatron_runtime.apis._replicas import Replicas
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.server.app import create_app
from megatron_runtime.server.process import drain, http_server
from megatron_runtime.server.settings import LOOPBACK_HOSTS, ServerSettings, is_loopback, listen
from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.chat_template import end_idle_renderers

DRAIN_SECONDS = 5.0


class FrontEnd:
    """Serves HTTP from start() to stop(), as a client of the coordinator at `coordinator`.

    tokenizer_reference: the model reference whose tokenizer this is; None where only this program has it.
    max_sequence_length: prompt + answer of one request, in tokens.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        coordinator: str,
        tokenizer: Tokenizer,
        tokenizer_reference: str | None,
        model_name: str,
        max_sequence_length: int,
    ) -> None:
        settings = ServerSettings(
            coordinator=coordinator,
            model=tokenizer_reference or model_name,
            model_name=model_name,
            host=config.host,
            tool_call_parser=config.parsers[0] if config.parsers else "auto",
            max_sequence_length=max_sequence_length,
            drain_seconds=DRAIN_SECONDS,
            allowed_hosts=LOOPBACK_HOSTS if is_loopback(config.host) else (),
        )
        self._client = InferenceClient(coordinator, deserialize=False)
        try:
            self._app = create_app(settings, backend=self._client, tokenizer=tokenizer)
            self._listener = config.sock if config.sock is not None else listen(host=config.host, port=config.port)
        except BaseException:
            self._client.stop()
            raise
        self._http = http_server(self._app, access_log=config.verbose)
        self._serving: asyncio.Task[None] | None = None
        others = config.frontend_replicas - 1 if tokenizer_reference is not None else 0
        self._replicas = Replicas(settings, listener=self._listener, count=others)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        host: str = self._listener.getsockname()[0]
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        is_v6 = self._listener.family == socket.AF_INET6
        return f"http://[{reachable}]:{self.port}" if is_v6 else f"http://{reachable}:{self.port}"

    async def start(self) -> None:
        """Connect to the coordinator and begin to serve. Raises what the client raises; the socket is closed then."""
        try:
            await self._client.start()
        except BaseException:
            self._listener.close()
            raise
        self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        self._replicas.start()

    async def stop(self) -> None:
        """Let open requests end for a moment, then close. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        try:
            await asyncio.gather(self._replicas.stop(), drain(self._app.state.service, self._http))
            await serving
        finally:
            self._client.stop()
            self._listener.close()
            await asyncio.to_thread(end_idle_renderers)
