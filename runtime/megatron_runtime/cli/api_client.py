"""A client of the OpenAI API for the terminal commands. It validates the size, types and characters of answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import httpx

from megatron_runtime.cli.options import Parsed, together
from megatron_runtime.process.environment import http_client
from megatron_runtime.process.options import API_KEY, environment_option
from megatron_runtime.protocol import strict_json as json

MAX_EVENT_BYTES = 16 << 20
"""Maximum size of a line of a stream, in bytes."""
MAX_ERROR_BYTES = 64 << 10
"""Maximum number of bytes that the client reads of an answer that is not a stream."""

_DATA = b"data:"
_DONE = b"[DONE]"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DEFAULT_URL = "http://127.0.0.1:8000"


class StreamFormatError(ValueError):
    """Raised if an answer is neither a list of models nor a stream of completions. The message gives the reason."""


class StreamFailedError(Exception):
    """Raised if the server ends the stream with an error event. The message comes from the server."""


class EventReader:
    """A parser of server-sent events in a byte stream. is_done: whether the stream is complete."""

    def __init__(self) -> None:
        self.is_done = False
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the events that the bytes in `data` complete, and nothing after the end of the stream.

        Raises StreamFormatError for malformed data, and StreamFailedError for an error event.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = bytes(self._rest) + line
            self._rest.clear()
            event = self._event(whole)
            if event is not None:
                yield event
            if self.is_done:
                return
        if len(self._rest) + len(rest) > MAX_EVENT_BYTES:
            raise StreamFormatError(f"a line of the stream has more than {MAX_EVENT_BYTES} bytes")
        self._rest += rest

    def _event(self, line: bytes) -> dict[str, Any] | None:
        if not line.startswith(_DATA):
            return None
        data = line.removeprefix(_DATA).strip()
        if data == _DONE:
            self.is_done = True
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StreamFormatError(f"an event is not valid JSON: {error}") from error
        if not isinstance(event, dict):
            raise StreamFormatError(f"an event is {type(event).__name__}, not a JSON object")
        if "error" in event:
            failure = event["error"]
            message = failure.get("message") if isinstance(failure, dict) else failure
            raise StreamFailedError(terminal_text(str(message)))
        return event


@dataclass(frozen=True, slots=True)
class Part:
    """New text of a streamed answer.

    text:      new text of the answer itself.
    reasoning: new text of the model's reasoning, which comes before `text`.
    """

    text: str
    reasoning: str = ""


def parts_of(event: dict[str, Any]) -> Iterator[Part]:
    """Yield the new text of each choice in a completion or chat event. Raises StreamFormatError."""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else [None]:
        text: Any = None
        reasoning: Any = ""
        if isinstance(choice, dict) and "text" in choice:
            text = choice["text"]
        elif isinstance(choice, dict) and isinstance(delta := choice.get("delta"), dict):
            text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        if not isinstance(text, str) or not isinstance(reasoning, str):
            raise StreamFormatError("an event has no choices with text or delta")
        yield Part(text, reasoning)


def terminal_text(text: str) -> str:
    """Return the text for a terminal, with all control characters except tab and newline escaped."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _server_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise click.BadParameter(f"{text!r} is not a URL: use http://host:port.")
    return text


SERVER_URL = Parsed("url", _server_url)
connection_options = together(
    environment_option("--url", default=DEFAULT_URL, type=SERVER_URL, envvar="MEGATRON_URL", help="URL of the server."),
    click.option("--model", help="Name of the model. Default: the first model in the server's /v1/models."),
    environment_option(
        "--api-key", type=API_KEY, envvar="MEGATRON_API_KEY", help="API key to send, if the server requires a key."
    ),
)


@contextmanager
def readable_failures(url: str) -> Iterator[None]:
    """Return a context that converts connection errors and stream errors of the server at `url` to ClickException."""
    try:
        yield
    except httpx.ConnectError as error:
        message = f"no server answers at {url}: start one with 'megatron serve', or give --url"
        raise click.ClickException(message) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise click.ClickException(f"the connection to {url} failed: {error!r}") from error
    except UnicodeEncodeError as error:
        message = "the text is not UTF-8: convert it, for example with 'iconv -t UTF-8'"
        raise click.ClickException(message) from error
    except StreamFailedError as error:
        raise click.ClickException(str(error)) from error
    except StreamFormatError as error:
        raise click.ClickException(f"{url} does not serve the OpenAI API: {error}") from error


class ApiClient:
    """A client of one OpenAI server. Every failure raises ClickException with a readable message."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = http_client(httpx.Client, self._url, headers=headers, timeout=httpx.Timeout(10, read=None))

    def first_model(self) -> str:
        with self._reply("GET", "models") as reply:
            try:
                names = [str(model["id"]) for model in json.loads(_content(reply))["data"]]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StreamFormatError(terminal_text(repr(error))) from error
        if not names:
            raise click.ClickException(f"the server at {self._url} offers no model")
        return names[0]

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Part]:
        """Yield the parts of a streamed answer. Closing the iterator aborts the request."""
        request = {**{key: value for key, value in body.items() if value is not None}, "stream": True}
        with self._reply("POST", path, request) as reply:
            events = EventReader()
            for data in reply.iter_raw():  # the data is not decompressed, because a few bytes could expand to gigabytes
                for event in events.feed(data):
                    yield from parts_of(event)
                if events.is_done:
                    return
        raise click.ClickException(f"the server at {self._url} ended the answer early")

    @contextmanager
    def _reply(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[httpx.Response]:
        """Return a context that sends a request and yields the reply.

        The reply has status 200, and its content is not read yet.
        """
        with readable_failures(self._url), self._http.stream(method, f"{self._url}/v1/{path}", json=body) as reply:
            if reply.status_code != 200:
                content = _content(reply)
                try:
                    message = str(json.loads(content)["error"]["message"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    message = content[:200].decode(errors="replace")
                raise click.ClickException(f"{terminal_text(message)} (HTTP {reply.status_code})")
            yield reply


def echo_text(text: str, *, dim: bool = False) -> None:
    """Print a part of an answer. Control characters are escaped if the output is a terminal."""
    click.secho(terminal_text(text) if sys.stdout.isatty() else text, nl=False, dim=dim or None)


def _content(reply: httpx.Response) -> bytes:
    """Return the first MAX_ERROR_BYTES bytes of a reply that is not a stream."""
    content = b""
    for data in reply.iter_raw():
        content += data
        if len(content) >= MAX_ERROR_BYTES:
            break
    return content[:MAX_ERROR_BYTES]
