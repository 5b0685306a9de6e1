"""Compares how many tool calls of a small model are valid under `tool_choice: auto`, between this checkout and another.

    python bench/tool_calls.py --against ../other --json tool_calls.json

`megatron serve` of each checkout starts once, with the checkout's own virtual environment .venv and the same model.
Each prompt goes to all servers, in alternating order. A prompt has five tools, an earlier call of another tool (without
which small models write no calls), and a question that requires one tool. Answers are greedy. Three figures count
answers. `calls` counts answers with a tool call. `parses` counts answers in which each call names a tool and has a JSON
object as arguments. `fits` counts answers whose arguments are also valid by the tool's schema.
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import click
import httpx
import jsonschema
from peer_bench.cells import Engine
from peer_bench.servers import Server
from peers import commit

from megatron_runtime.cli.bench.report import machine
from megatron_runtime.protocol import strict_json as json

THIS, OTHER = "this", "other"
FIGURES = ("calls", "parses", "fits")
REPOSITORY = Path(__file__).parents[1]
TIMEOUT_SECONDS = 300
_HELP = {"show_default": True}
Message: TypeAlias = dict[str, Any]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 40}
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "get_forecast": (
        "Get the weather forecast of a city.",
        _object(city=TEXT, days={"type": "integer", "minimum": 1, "maximum": 14}, unit={"enum": ["celsius", "kelvin"]}),
    ),
    "book_table": (
        "Book a table in a restaurant.",
        _object(
            restaurant=TEXT,
            guests={"type": "integer", "minimum": 1, "maximum": 20},
            time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        ),
    ),
    "send_message": (
        "Send a message to people.",
        _object(
            to={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 4}, text=TEXT, urgent={"type": "boolean"}
        ),
    ),
    "convert_money": (
        "Convert an amount of money.",
        _object(
            amount={"type": "number"}, source={"enum": ["EUR", "USD", "JPY"]}, target={"enum": ["EUR", "USD", "JPY"]}
        ),
    ),
    "set_light": (
        "Set the light of a room.",
        _object(room={"enum": ["kitchen", "bedroom", "office"]}, color=_object(name=TEXT, level={"enum": [1, 2, 3]})),
    ),
}
"""Description of each tool and schema of its arguments, by the tool's name."""
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_forecast": (
        ("Lima", "Oslo", "Cairo", "Perth", "Quito", "Riga", "Seoul", "Turin", "Accra", "Delhi"),
        (
            "What will the weather be like in {} for the next three days?",
            "Give me the forecast of {} for a week.",
            "Will it rain in {} tomorrow?",
            "How cold does it get in {} within five days?",
        ),
    ),
    "book_table": (
        (
            "Luna",
            "the Old Mill",
            "Sakura",
            "Casa Rosa",
            "Bistro Nord",
            "Olive",
            "Harbour 9",
            "Saffron",
            "Fuji",
            "Delia",
        ),
        (
            "Book a table for two at {} at eight in the evening.",
            "We are five. Reserve a table at {} for half past seven.",
            "I want to have lunch at {} with a friend. Get us a table at noon.",
            "Please reserve {} for ten people at 19:15.",
        ),
    ),
    "send_message": (
        ("Ana", "Ben", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivan", "Julia"),
        (
            "Tell {} that I am late.",
            "Write to {} and Tom that the meeting is cancelled. It is urgent.",
            "Send {} my thanks for the flowers.",
            "Let {} know that dinner is ready.",
        ),
    ),
    "convert_money": (
        ("3", "12.50", "40", "99", "150", "220", "875", "1000", "4300", "25000"),
        (
            "How many dollars are {} euros?",
            "Convert {} yen to euros.",
            "What do I get for {} dollars in yen?",
            "I have {} euros. How much is that in yen?",
        ),
    ),
    "set_light": (
        ("red", "blue", "green", "white", "orange", "violet", "pink", "yellow", "cyan", "amber"),
        (
            "Make the light in the kitchen {}.",
            "Turn the bedroom {} and very bright.",
            "I work late: a dim {} light in the office, please.",
            "Set the kitchen to {} at the lowest level.",
        ),
    ),
}
"""Subjects and questions about them, by the tool that the questions require."""
EARLIER: dict[str, tuple[str, dict[str, Any]]] = {
    "get_forecast": ("Is it warm in Bern today?", {"city": "Bern", "days": 1, "unit": "celsius"}),
    "set_light": ("Make the office blue.", {"room": "office", "color": {"name": "blue", "level": 2}}),
}
"""An earlier question and the arguments of its tool call, by tool. A prompt has the entry of a tool that the prompt's
last question does not require.
"""


def prompts(count: int) -> list[list[Message]]:
    """Return `count` conversations, which use the tools in rotation."""
    by_tool = [
        [conversation(tool, question.format(subject)) for question, subject in product(questions, subjects)]
        for tool, (subjects, questions) in TOPICS.items()
    ]
    return [conversations[place] for place in range(len(by_tool[0])) for conversations in by_tool][:count]


def conversation(tool: str, question: str) -> list[Message]:
    """Return a conversation whose last question requires `tool`."""
    name = next(name for name in EARLIER if name != tool)
    earlier, arguments = EARLIER[name]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": earlier},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": question},
    ]


def judged(message: Message) -> dict[str, bool]:
    """Return, for each condition in FIGURES, whether the message of an answer fulfils it."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    values = []
    for call in calls:
        try:
            value = json.loads(call["arguments"])
        except ValueError:
            value = None
        values.append((TOOLS.get(call["name"]), value))
    parses = bool(calls) and all(tool is not None and isinstance(value, dict) for tool, value in values)
    fits = parses and all(
        jsonschema.Draft202012Validator(tool[1]).is_valid(value) for tool, value in values if tool is not None
    )
    return {"calls": bool(calls), "parses": parses, "fits": fits}


def start(name: str, checkout: Path, model: str, dtype: str) -> Server:
    options = ["serve", "--model", model, "--dtype", dtype, "--device", "cpu", "--port", "{port}"]
    server = Server(Engine(name, model, [str(checkout / ".venv/bin/megatron"), *options]), "/readyz")
    server.start(os.sched_getaffinity(0))
    return server


def answer(server: Server, messages: list[Message], max_tokens: int) -> Message:
    """Return the answer of a server to `messages`, generated with greedy sampling and at most `max_tokens` tokens."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, (text, schema) in TOOLS.items()
    ]
    body = {"model": server.model, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": max_tokens}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT_SECONDS)
    message: Message = reply.raise_for_status().json()["choices"][0]["message"]
    return message


@click.command()
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkout of another version to compare with.",
)
@click.option("--prompts", "count", type=click.IntRange(1, 200), default=200, **_HELP)
@click.option("--model", default="builtin:smollm2-135m", **_HELP)
@click.option("--dtype", default="bfloat16", **_HELP)
@click.option("--max-tokens", type=click.IntRange(min=16), default=160, **_HELP)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(*, against: Path | None, count: int, model: str, dtype: str, max_tokens: int, json_file: Path | None) -> None:
    """Compare the validity of a model's tool calls between this checkout and another."""
    checkouts = {THIS: REPOSITORY, **({} if against is None else {OTHER: against.absolute()})}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    servers: dict[str, Server] = {}
    try:
        for name, checkout in checkouts.items():
            servers[name] = start(name, checkout, model, dtype)
        for number, messages in enumerate(prompts(count)):
            for name in sorted(servers, reverse=number % 2 == 1):
                message = answer(servers[name], messages, max_tokens)
                judgement = {"prompt": messages[-1]["content"], **judged(message)}
                answers[name].append(
                    {**judgement, "content": message["content"], "calls_made": message.get("tool_calls")}
                )
    finally:
        for server in servers.values():
            server.close()
    shares = {
        name: {figure: sum(row[figure] for row in rows) / count for figure in FIGURES} for name, rows in answers.items()
    }
    for name, share in shares.items():
        click.echo(f"{name}: " + ", ".join(f"{figure} {100 * share[figure]:.1f} %" for figure in FIGURES))
    if json_file is not None:
        facts = machine() | {"commit": commit()}
        options = {"model": model, "dtype": dtype, "prompts": count, "max_tokens": max_tokens}
        json_file.write_text(
            json.dumps({"machine": facts, **options, "shares": shares, "answers": answers}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
