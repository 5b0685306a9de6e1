"""`megatron` whose `serve` records the requests of clients, and can follow a script in place of a model.

RECORD_FILE: file that gets a line of JSON for each request, when it has been answered: its method, path and body,
                 and status and text of the answer.
SCRIPT_FILE: file with a JSON object of answers by texts. The engine writes the answer of the text that the prompt
                 has last. The file may change between requests. Absent: the engine runs the model.
"""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import echo_engine
import numpy as np
import numpy.typing as npt
from echo_executor import EchoExecutor
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime.cli import main, processes
from megatron_runtime.process.children import end_with_parent, module_command
from megatron_runtime.sampling.batch import RowFailure
from megatron_runtime.server import process
from megatron_runtime.server.app import create_app
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

PROGRAM = __file__
MODEL = "builtin:smollm2-135m"
UNSCRIPTED = "The script has no answer to this prompt."


class ScriptedExecutor(EchoExecutor):
    """Writes the answers of the script. A token that the request's grammar forbids fails the request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tokenizer = load_tokenizer(MODEL, renders_chat=False)
        self.eos_ids = tokenizer.eos_ids
        (self._message_start,) = tokenizer.encode("<|im_start|>", add_special=False)
        self._header = tokenizer.encode("<|im_start|>assistant\n", add_special=False)
        self._encode = lru_cache(lambda text: [*tokenizer.encode(text, add_special=False), self.eos_ids[0]])
        self._decode = lru_cache(lambda tokens: tokenizer.decode(np.frombuffer(tokens, np.int32).tolist()))

    def next_token(self, context: npt.NDArray[np.int32], weights: int, allowed: npt.NDArray[np.uint32] | None) -> int:
        """Return the next token of the script's answer; then the end token."""
        end = np.flatnonzero(context == self._message_start)[-1] + len(self._header)
        prompt = self._decode(context[:end].astype(np.int32).tobytes())
        script = {"": UNSCRIPTED, **json.loads(Path(os.environ["SCRIPT_FILE"]).read_text())}
        last = max((text for text in script if text in prompt), key=lambda text: prompt.rfind(text) * bool(text))
        tokens = self._encode(script[last])
        written = len(context) - end
        token = tokens[min(written, len(tokens) - 1)]
        is_allowed = allowed is None or allowed[token // 32] >> (token % 32) & 1
        return token if is_allowed else RowFailure.MASK


class Recorder:
    """Middleware that appends each exchange to a file."""

    def __init__(self, app: ASGIApp, *, file: Path) -> None:
        self._app = app
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/readyz":  # a probe of `megatron serve`
            await self._app(scope, receive, send)
            return
        request, answer, status, is_recorded = bytearray(), bytearray(), 0, False

        def record() -> None:
            nonlocal is_recorded
            if is_recorded:
                return
            is_recorded = True
            exchange = {
                "method": scope["method"],
                "path": scope["path"],
                "body": json.loads(request) if request else None,
                "status": status,
                "answer": answer.decode(errors="replace"),
            }
            with self._file.open("a") as file:
                file.write(json.dumps(exchange) + "\n")

        async def received() -> Message:
            message = await receive()
            request.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                record()  # before the client has the whole answer and its test looks
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            record()


def create_recorded_app(settings: ServerSettings, *, tokenizer: Tokenizer, **options: Any) -> FastAPI:
    if "SCRIPT_FILE" in os.environ:
        tokenizer.context_length = None  # a script has no model, whose context is shorter than the prompts of agents
    app = create_app(settings, tokenizer=tokenizer, **options)
    app.add_middleware(Recorder, file=Path(os.environ["RECORD_FILE"]))
    return app


def command(module: str, name: str, *arguments: str) -> list[str]:
    """Return the command of a child process of `megatron`."""
    is_own = name == "server" or (name == "engine" and "SCRIPT_FILE" in os.environ)
    return [sys.executable, PROGRAM, name, *arguments] if is_own else module_command(module, name, *arguments)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        echo_engine.EchoExecutor = ScriptedExecutor  # type: ignore[misc]
        end_with_parent()
        echo_engine.main(sys.argv[2:])
    else:
        process.create_app = create_recorded_app
        processes.module_command = command  # type: ignore[assignment]
        main(prog_name="megatron")
