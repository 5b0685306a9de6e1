"""`megatron chat` and `megatron generate`: clients of a server, in the terminal."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.api_client import ApiClient, connection_options, echo_text
from megatron_runtime.cli.options import COUNT, FILE, SECONDS

HELP = "/reset begins a new conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer."


@click.command()
@connection_options
@click.option("--system", help="Instructions that precede the conversation.")
@click.option("--max-tokens", type=COUNT, help="Of one answer.")
@click.option("--temperature", type=SECONDS, default=0.7, help="0 is greedy.")
@click.option("--seed", type=int, help="Makes sampled answers repeatable.")
def chat(*, url: str, model: str | None, api_key: str | None, system: str | None, **sampling: Any) -> None:
    """Talk to a model. Each line of a piped standard input is one message."""
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
                messages.append(_answer(client, {"model": name, "messages": messages, **sampling}))
            except click.ClickException as error:
                if not is_terminal:
                    raise
                error.show()
                messages.pop()


def _read_line(*, is_terminal: bool) -> str | None:
    """Return the next line, "" after Ctrl-C, None at the end of the input."""
    try:
        return input("\n> " if is_terminal else "").strip()
    except EOFError:
        if is_terminal:
            click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _answer(client: ApiClient, body: dict[str, Any]) -> dict[str, str]:
    """Print the answer as it arrives and return the message. Ctrl-C ends it, and the server stops generating.

    On a terminal its reasoning is printed too, dimmed.
    """
    text = reasoning = ""
    shows_reasoning = sys.stdout.isatty()
    with closing(client.stream("chat/completions", body)) as parts:
        try:
            for part in parts:
                if part.reasoning:
                    reasoning += part.reasoning
                    if shows_reasoning:
                        echo_text(part.reasoning, dim=True)
                if part.text:
                    is_first = not text and bool(reasoning) and shows_reasoning
                    echo_text(f"\n\n{part.text}" if is_first else part.text)
                    text += part.text
        except KeyboardInterrupt:
            click.secho(" (stopped)", dim=True, nl=False)
    click.echo()
    message = {"role": "assistant", "content": text}
    return {**message, "reasoning_content": reasoning} if reasoning else message


@click.command()
@click.argument("prompt")
@connection_options
@click.option("--max-tokens", type=COUNT, default=128)
@click.option("--temperature", type=SECONDS, default=0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="Sample from the likeliest tokens of this much probability.")
@click.option("--seed", type=int, help="Makes a sampled answer repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--schema", type=FILE, help="A file with a JSON schema that the answer must follow.")
@click.option("--regex", help="A regular expression that the answer must match.")
def generate(
    *,
    prompt: str,
    url: str,
    model: str | None,
    api_key: str | None,
    stop: tuple[str, ...],
    schema: Path | None,
    regex: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT (- reads it from standard input) and print the text as it arrives."""
    text = sys.stdin.read() if prompt == "-" else prompt
    client = ApiClient(url, api_key=api_key)
    body = {
        "model": model or client.first_model(),
        "prompt": text,
        **sampling,
        "stop": list(stop) or None,
        "guided_json": None if schema is None else _read_schema(schema),
        "guided_regex": regex,
    }
    with closing(client.stream("completions", body)) as parts:
        for part in parts:
            echo_text(part.text)
    click.echo()


def _read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.BadParameter(f"{str(path)!r} is not valid JSON: {error}", param_hint="--schema") from error
