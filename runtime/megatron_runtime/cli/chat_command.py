"""`megatron chat`."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any

import click

from megatron_runtime.cli.api_client import ApiClient, connection_options, echo_text
from megatron_runtime.cli.options import COUNT, SECONDS

HELP = "/reset begins a new conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer."


@click.command()
@connection_options
@click.option("--system", help="Instructions that precede the conversation.")
@click.option("--max-tokens", type=COUNT, help="Of one answer.")
@click.option("--temperature", type=SECONDS, default=0.7, help="0 is greedy.")
@click.option("--seed", type=int, help="Makes sampled answers repeatable.")
def command(*, url: str, model: str | None, api_key: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to a model. Lines piped in are asked one after the other."""
    client = ApiClient(url, api_key=api_key)
    name = model or client.first_model()
    opening = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, str]] = list(opening)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing and history for input()

        click.secho(f"{name} at {url}. {HELP}", dim=True)
    while (line := _read_line(is_terminal=is_terminal)) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/help":
            click.secho(HELP, dim=True)
        elif line == "/reset":
            messages = list(opening)
            click.secho("A new conversation.", dim=True)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(client, {"model": name, "messages": messages, **sampling})
                messages.append({"role": "assistant", "content": answer})
            except click.ClickException as error:
                if not is_terminal:
                    raise
                error.show()
                messages.pop()


def _read_line(*, is_terminal: bool) -> str | None:
    try:
        return input("\n> " if is_terminal else "").strip()
    except EOFError:
        if is_terminal:
            click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _answer(client: ApiClient, body: dict[str, Any]) -> str:
    """Print the answer as it comes and return it; Ctrl-C ends it there, and the server stops generating."""
    pieces: list[str] = []
    with closing(client.stream("chat/completions", body)) as texts:
        try:
            for text in texts:
                pieces.append(text)
                echo_text(text)
        except KeyboardInterrupt:
            click.secho(" (stopped)", dim=True, nl=False)
    click.echo()
    return "".join(pieces)
