"""The OpenAI API as the terminal commands use it: which model, and text as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import click
import httpx

from megatron_runtime.cli.event_stream import (
    MAX_ERROR_BYTES,
    EventReader,
    StreamFailedError,
    StreamFormatError,
    terminal_text,
    texts_of,
)

DEFAULT_URL = "http://127.0.0.1:8000"


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --url, --model and --api-key."""
    for option in (
        click.option("--api-key", envvar="MEGATRON_API_KEY", help="Where the server asks for one."),
        click.option("--model", help="By default the first that the server offers."),
        click.option("--url", default=DEFAULT_URL, show_default=True, envvar="MEGATRON_URL", help="Of the server."),
    ):
        command = option(command)
    return command


class ApiClient:
    """One server. Every failure is a ClickException in words."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} is not a URL: use http://host:port.", param_hint="--url")
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=None))

    def first_model(self) -> str:
        with self._failures():
            with self._http.stream("GET", f"{self._url}/v1/models") as reply:
                content = _content(reply)
            _raise_for_error(reply.status_code, content)
            models = json.loads(content)["data"]
            if models:
                return str(models[0]["id"])
        raise click.ClickException(f"the server at {self._url} offers no model")

    def stream(self, path: str, body: dict[str, Any]) -> Generator[str]:
        """Yield the text of each event. Closing the iterator aborts the request."""
        request = {**{key: value for key, value in body.items() if value is not None}, "stream": True}
        with self._failures(), self._http.stream("POST", f"{self._url}/v1/{path}", json=request) as reply:
            if reply.status_code != 200:
                _raise_for_error(reply.status_code, _content(reply))
            events = EventReader()
            for data in reply.iter_raw():  # not decompressed: a few bytes could become gigabytes
                for event in events.feed(data):
                    yield from texts_of(event)
                if events.is_done:
                    return
        raise click.ClickException(f"the server at {self._url} ended the answer early")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise click.ClickException(
                f"no server answers at {self._url}: start one with 'megatron serve', or give --url"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(f"the connection to {self._url} failed: {error!r}") from error
        except StreamFailedError as error:
            raise click.ClickException(str(error)) from error
        except StreamFormatError as error:
            raise click.ClickException(f"{self._url} does not speak the OpenAI API: {error}") from error
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise click.ClickException(
                f"{self._url} does not speak the OpenAI API: {terminal_text(repr(error))}"
            ) from error


def echo_text(text: str) -> None:
    """Print a part of an answer; a terminal gets no control sequences of it."""
    click.echo(terminal_text(text) if sys.stdout.isatty() else text, nl=False)


def _content(reply: httpx.Response) -> bytes:
    """The begin of a body that is no stream."""
    content = b""
    for data in reply.iter_raw():
        content += data
        if len(content) >= MAX_ERROR_BYTES:
            break
    return content[:MAX_ERROR_BYTES]


def _raise_for_error(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = content[:200].decode(errors="replace")
    raise click.ClickException(f"{terminal_text(message)} (HTTP {status})")
