"""Coding agents against `megatron serve`: two turns, and a call of a tool that reads a file in the first one.

The engine follows a script, so the call is known. The content of the file reaches the script only through the agent's
own tool.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .conftest import MODEL, Client, Exchange, Server, call

FIRST, SECOND = "Which bird is named in note.txt?", "And which number is it?"
NOTE = "kingfisher 4127"
FIRST_ANSWER, SECOND_ANSWER = "The note names a kingfisher.", "Its number is 4127."


def script(tool_call: str) -> dict[str, str]:
    return {FIRST: tool_call, NOTE: FIRST_ANSWER, SECOND: SECOND_ANSWER}


def check(exchanges: list[Exchange], *, result: str) -> None:
    """Check that the tool's result came back, and that the second turn has the whole first one.

    result: type of the part that has the result.
    """
    with_result = [each for each in exchanges if NOTE in each.text]
    assert FIRST in with_result[0].text
    assert SECOND not in with_result[0].text
    assert f'"{result}"' in with_result[0].text
    last = exchanges[-1].text
    assert last.index(FIRST) < last.index(NOTE) < last.index(FIRST_ANSWER) < last.index(SECOND)


def test_claude_code(client: Callable[[str], Client], server: Server) -> None:
    claude = client("claude-code")
    (claude.work / "note.txt").write_text(NOTE)
    server.answers(script(call("Bash", command="cat note.txt", description="Read the note")))
    claude.variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    options = ("--allowedTools", "Bash", "--output-format", "stream-json", "--verbose")
    first = events(claude.run("claude", "-p", FIRST, *options))
    assert [block["name"] for block in blocks(first, "assistant") if block["type"] == "tool_use"] == ["Bash"]
    assert [block["content"] for block in blocks(first, "user") if block["type"] == "tool_result"] == [NOTE]
    assert first[-1]["result"] == FIRST_ANSWER
    second = events(claude.run("claude", "-p", SECOND, "--continue", *options))
    assert second[-1]["result"] == SECOND_ANSWER
    exchanges = server.exchanges(maximum=12)
    check(exchanges, result="tool_result")
    server.check_shapes("claude-code", exchanges)


def events(output: str) -> list[dict[str, Any]]:
    """Return the lines of an output that are JSON objects."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def blocks(messages: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the content of the messages of one type that Claude Code reports."""
    return [block for each in messages if each["type"] == kind for block in each["message"]["content"]]


def test_codex(client: Callable[[str], Client], server: Server) -> None:
    codex = client("codex")
    (codex.work / "note.txt").write_text(NOTE)
    server.answers(script(call("exec_command", cmd="cat note.txt")))
    (codex.home / ".codex").mkdir()
    (codex.home / ".codex" / "config.toml").write_text(
        f"""
model = "{MODEL}"
model_provider = "megatron"
check_for_update_on_startup = false
[model_providers.megatron]
name = "megatron"
base_url = "{server.url}/v1"
wire_api = "responses"
[analytics]
enabled = false
[feedback]
enabled = false
"""
    )
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    first = events(codex.run("codex", "exec", *options, FIRST))
    items = [event["item"] for event in first if event["type"] == "item.completed"]
    assert [item["aggregated_output"] for item in items if item["type"] == "command_execution"] == [NOTE]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [FIRST_ANSWER]
    second = events(codex.run("codex", "exec", *options, "resume", "--last", SECOND))
    items = [event["item"] for event in second if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [SECOND_ANSWER]
    exchanges = server.exchanges(maximum=12)
    check(exchanges, result="function_call_output")
    server.check_shapes("codex", exchanges)


def test_opencode(client: Callable[[str], Client], server: Server) -> None:
    opencode = client("opencode")
    (opencode.work / "note.txt").write_text(NOTE)
    server.answers(script(call("bash", command="cat note.txt")))
    (opencode.work / "opencode.json").write_text(
        json.dumps(
            {
                "model": f"megatron/{MODEL}",
                "small_model": f"megatron/{MODEL}",
                "autoupdate": False,
                "share": "disabled",
                "provider": {
                    "megatron": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": f"{server.url}/v1", "apiKey": "any"},
                        "models": {MODEL: {"limit": {"context": 100_000, "output": 8192}}},
                    }
                },
            }
        )
    )
    opencode.variables = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    first = events(opencode.run("opencode", "run", "--format", "json", FIRST))
    assert FIRST_ANSWER in str(first), first
    second = events(opencode.run("opencode", "run", "--format", "json", "--continue", SECOND))
    assert SECOND_ANSWER in str(second), second
    exchanges = server.exchanges(maximum=12)
    check(exchanges, result="tool")
    server.check_shapes("opencode", exchanges)


def test_aider(client: Callable[[str], Client], server: Server) -> None:
    """Aider offers the model no tools: the model writes edits of files as text."""
    aider = client("aider")
    (aider.work / "note.txt").write_text("kingfisher\n")
    edit = f"note.txt\n```\n{NOTE}\n```\n"
    server.answers({"Add its number": edit, SECOND: SECOND_ANSWER})
    options = (
        *("--model", f"openai/{MODEL}", "--openai-api-base", f"{server.url}/v1", "--openai-api-key", "any"),
        *("--edit-format", "whole", "--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update"),
        *("--analytics-disable", "--no-pretty", "--no-detect-urls", "--no-gitignore", "--restore-chat-history"),
    )
    aider.run("aider", *options, "--message", "Add its number to the note.", "note.txt")
    assert (aider.work / "note.txt").read_text() == f"{NOTE}\n"
    output = aider.run("aider", *options, "--message", SECOND, "note.txt")
    assert SECOND_ANSWER in output
    exchanges = server.exchanges(maximum=12)
    assert not any("tools" in each.body for each in exchanges)
    last = exchanges[-1].text
    assert last.index("Add its number") < last.index(SECOND)
    server.check_shapes("aider", exchanges)
