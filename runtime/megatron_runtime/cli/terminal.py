"""The commands `megatron chat` and `megatron generate`, which use a server from the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click

from megatron_runtime.cli.api_client import ApiClient, connection_options, echo_text
from megatron_runtime.cli.options import COUNT, FILE, SECONDS, config_option, together
from megatron_runtime.process.options import FiniteRange
from megatron_runtime.protocol import strict_json as json

HELP = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat."
_QUOTES = '"""'
_COMMAND = re.compile(r"/(\w*)(?:\s+(.*))?", re.DOTALL)
"""Matches a command, but not a path such as /etc/hosts, which is a message."""
SETTINGS: Mapping[str, click.ParamType] = {
    "temperature": FiniteRange(0, 2),
    "max-tokens": COUNT,
    "top-p": FiniteRange(0, 1),
    "seed": click.INT,
}
"""The settings that /set accepts, with the types of their values."""

chat_options = together(
    click.option("--system", help="System message at the start of the conversation."),
    click.option("--max-tokens", type=COUNT, help="Maximum number of tokens per answer."),
    click.option(
        "--temperature",
        type=SETTINGS["temperature"],
        default=0.7,
        help="Sampling temperature. 0 always takes the most likely token; higher values make answers more varied.",
    ),
    click.option("--seed", type=int, help="Random seed. The same seed and prompt give the same answer."),
)
"""Options of a conversation, shared by `megatron chat` and `megatron run`."""


class _LeaveError(Exception):
    """Raised if the user has ended the chat."""


@dataclass(slots=True)
class Conversation:
    """A conversation with one model, and the commands that change the conversation.

    messages: all messages with their roles, in the format of the server. A system message comes first.
    settings: sampling parameters of the requests. The keys are the names in SETTINGS, with `_` instead of `-`.
    """

    client: ApiClient
    model: str
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Send a message and print the answer. If the server rejects the message, the conversation does not change."""
        self._answer([*self.messages, {"role": "user", "content": text}])

    def command(self, name: str, argument: str) -> None:
        """Run the chat command /NAME. Raises click.UsageError for a wrong command, and _LeaveError to end the chat."""
        if name not in _COMMANDS:
            raise click.UsageError(f"unknown command '/{name}': /help lists the commands")
        _COMMANDS[name][2](self, argument)

    def system(self, text: str) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest
        _note("The system message is set." if text else "The system message is removed.")

    def set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if name not in SETTINGS:
            raise click.UsageError(f"/set {name}: no such setting: use {', '.join(SETTINGS)}")
        key = name.replace("-", "_")
        if not text.strip():
            self.settings.pop(key, None)
            _note(f"{name} is that of the server.")
            return
        try:
            self.settings[key] = SETTINGS[name].convert(text.strip(), None, None)
        except click.BadParameter as error:
            raise click.UsageError(f"/set {name}: {error.message}") from error
        _note(f"{name} is {self.settings[key]}.")

    def regenerate(self, argument: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise click.UsageError("/regenerate: there is no answer yet")
        self._answer(self.messages[:-1])

    def clear(self, argument: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        _note("A new conversation.")

    def save(self, argument: str) -> None:
        path = _path(argument, "save")
        try:
            path.write_text(json.dumps({"model": self.model, "messages": self.messages}, indent=2) + "\n")
        except OSError as error:
            raise click.UsageError(f"/save {argument}: {error.strerror}: name another file") from error
        _note(f"{len(self.messages)} messages are in {path}.")

    def load(self, argument: str) -> None:
        path = _path(argument, "load")
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            if not all(isinstance(message["role"] + message["content"], str) for message in messages):
                raise TypeError("role and content must be text")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise click.UsageError(f"/load {argument}: {error!r}: name a file that /save has written") from error
        self.messages = messages
        _note(f"{len(messages)} messages.")

    def help(self, argument: str) -> None:
        for name, (arguments, text, _) in _COMMANDS.items():
            _note(f"{f'/{name} {arguments}':<22} {text}")
        _note(f"{_QUOTES} begins and ends a message of several lines. {HELP}")

    def leave(self, argument: str) -> None:
        raise _LeaveError

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Print the model's answer to `messages`, and set the conversation to `messages` plus the answer."""
        body = {"model": self.model, "messages": messages, **self.settings}
        self.messages = [*messages, _answer(self.client, body)]


_COMMANDS: Mapping[str, tuple[str, str, Callable[[Conversation, str], None]]] = {
    "help": ("", "Show the commands.", Conversation.help),
    "system": ("TEXT", "Set the system message; without TEXT remove it.", Conversation.system),
    "set": ("NAME VALUE", f"Set {', '.join(SETTINGS)}; without VALUE, the server's default applies.", Conversation.set),
    "regenerate": ("", "Replace the last answer.", Conversation.regenerate),
    "clear": ("", "Begin a new conversation, with the same system message.", Conversation.clear),
    "save": ("FILE", "Write the conversation to FILE.", Conversation.save),
    "load": ("FILE", "Continue the conversation in FILE.", Conversation.load),
    "exit": ("", "End the chat, as does Ctrl-D.", Conversation.leave),
}
"""Arguments, help text and method of each command, by the name of the command."""


@click.command()
@connection_options
@chat_options
@config_option()
def chat(*, url: str, model: str | None, api_key: str | None, system: str | None, **sampling: Any) -> None:
    """Chat with a model. If standard input is a pipe, each line is one message or a command such as /help."""
    client = ApiClient(url, api_key=api_key)
    opening = [{"role": "system", "content": system}] if system else []
    settings = {name: value for name, value in sampling.items() if value is not None}
    conversation = Conversation(client, model or client.first_model(), settings, opening)
    is_terminal = _standard_input().isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing and history for input()

        _note(f"{conversation.model} at {url}. {HELP}")
    while (text := _read_message(is_terminal=is_terminal)) is not None:
        command = _COMMAND.fullmatch(text)
        try:
            if command is not None:
                conversation.command(command[1], (command[2] or "").strip())
            elif text:
                conversation.say(text)
        except _LeaveError:
            return
        except click.ClickException as error:
            if not is_terminal:
                raise
            click.echo(f"Error: {error.format_message()}", err=True)


def _read_message(*, is_terminal: bool) -> str | None:
    """Return the next message from standard input: a line, or the lines between two triple quotes.

    Returns "" after Ctrl-C, and None at the end of the input.
    """
    try:
        text = input("\n> " if is_terminal else "")
        before, quotes, rest = text.partition(_QUOTES)
        if not quotes or not (not before.strip() or _COMMAND.fullmatch(before.strip())):
            return text.strip()
        while _QUOTES not in rest:
            rest += "\n" + input("... " if is_terminal else "")
        return before + rest.partition(_QUOTES)[0].strip("\n")
    except EOFError:
        if is_terminal:
            click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _note(text: str) -> None:
    """Print a message of the program to standard error, so that it does not mix with answers."""
    click.secho(text, dim=True, err=True)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise click.UsageError(f"/{command}: name a file")
    return Path(argument).expanduser()


def _answer(client: ApiClient, body: dict[str, Any]) -> dict[str, str]:
    """Print the answer as it arrives, and return it as a message. Ctrl-C ends the answer and aborts the request.

    On a terminal, reasoning text is printed too, dimmed.
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
@click.option("--max-tokens", type=COUNT, default=128, help="Maximum number of tokens to generate.")
@click.option(
    "--temperature",
    type=SECONDS,
    default=0,
    help="Sampling temperature. 0 always takes the most likely token; higher values make answers more varied.",
)
@click.option(
    "--top-p",
    type=FiniteRange(0, 1),
    help="Sample only from the most likely tokens whose probabilities add up to this value, from 0 to 1. Default: "
    "the server's default.",
)
@click.option("--seed", type=int, help="Random seed. The same seed and prompt give the same answer.")
@click.option(
    "--stop", multiple=True, help="Text at which the answer ends. The text itself is not printed. Repeatable."
)
@click.option("--schema", type=FILE, help="File with a JSON schema that the answer must match.")
@click.option("--regex", help="Regular expression that the answer must match.")
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
    """Complete PROMPT and print the text as it arrives. If PROMPT is -, read the prompt from standard input."""
    text = _standard_input().read() if prompt == "-" else prompt
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


def _standard_input() -> TextIO:
    """Return standard input, decoded as UTF-8 in any locale and without the byte order mark that some systems write."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return sys.stdin


def _read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise click.BadParameter(f"{str(path)!r} is not valid JSON: {error}", param_hint="--schema") from error
