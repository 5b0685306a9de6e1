"""The OpenAI API as the terminal commands use it: which model, and text as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import click
import httpx

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
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=None))

    def first_model(self) -> str:
        with self._failures():
            reply = self._http.get(f"{self._url}/v1/models")
            _raise_for_error(reply)
            models = reply.json()["data"]
        if not models:
            raise click.ClickException(f"the server at {self._url} offers no model")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the choice of each event. Closing the iterator aborts the request."""
        request = {**{key: value for key, value in body.items() if value is not None}, "stream": True}
        with self._failures(), self._http.stream("POST", f"{self._url}/v1/{path}", json=request) as reply:
            if reply.status_code != 200:
                reply.read()
            _raise_for_error(reply)
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise click.ClickException(event["error"]["message"])
                    yield from event["choices"]
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
        except (ValueError, KeyError, TypeError) as error:
            raise click.ClickException(f"{self._url} does not speak the OpenAI API: {error!r}") from error


def _raise_for_error(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    try:
        message = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = reply.text[:200]
    raise click.ClickException(f"{message} (HTTP {reply.status_code})")
