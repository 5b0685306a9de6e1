"""The `megatron` command: help without heavy imports, errors of options, terminal clients, supervision."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron_runtime.cli import main
from megatron_runtime.cli.options import MEMORY, model_reference
from megatron_runtime.cli.processes import Child, ChildFailedError, Supervisor
from megatron_runtime.process.children import PARENT_VARIABLE

MEGATRON = [sys.executable, "-m", "megatron_runtime.cli"]


async def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command beside the server under test. Return its exit code, standard output and standard error."""
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments, input=stdin)
    return result.exit_code, result.stdout, result.stderr


async def run_process(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *MEGATRON,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_help_lists_every_command_and_imports_none() -> None:
    code, out, _ = await run_process("--help")
    assert code == 0
    for name in ("serve", "chat", "generate", "coordinator", "engine", "server"):
        assert f"\n  {name} " in out
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0
    program = (
        "import sys, megatron_runtime.cli;"
        "heavy = {'torch', 'zmq', 'fastapi', 'tokenizers', 'httpx', 'numpy'} & set(sys.modules); sys.exit(bool(heavy))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine", "--name", "e"], ["--coordinator"]),
        (["engine", "--name", "e", "--coordinator", "nowhere"], ["--coordinator", "'nowhere'", "host:port"]),
        (["engine", "--name", "e", "--coordinator", "h:1", "--kv-cache-memory", "2Gb"], ["--kv-cache-memory", "2Gi"]),
        (["engine", "--name", "e", "--coordinator", "h:1", "--backend", "gpu"], ["--backend", "'gpu'", "'vllm'"]),
        (["engine", "--name", "e", "--coordinator", "h:1", "--health-port", "x"], ["--health-port", "'x'", "off"]),
        (["coordinator", "--routing-policy", "Random"], ["--routing-policy", "'Random'", "LoadBalanced"]),
        (["coordinator", "--alpha", "2"], ["--alpha", "2.0"]),
        (["coordinator", "--keys-dir", "/no/such"], ["--keys-dir", "/no/such"]),
        (["server", "--coordinator", "h:99999"], ["--coordinator", "99999"]),
        (["server", "--coordinator", "h:1", "--api-keys-file", "/no/such"], ["--api-keys-file", "/no/such"]),
        (["serve", "--engines", "0"], ["--engines", "0"]),
        (["serve", "--adapter", "sql"], ["--adapter", "'sql'", "NAME=SOURCE"]),
        (["serve", "--adapter", "a b=hf:org/x"], ["--adapter", "'a b'", "use a letter or digit"]),
        (["serve", "--adapter", "smollm2-135m=hf:org/x"], ["the name of the model", "give it another one"]),
        (["serve", "--adapter", "a=hf:org/x", "--adapter", "a=hf:org/y"], ["'a' is listed twice"]),
        (["serve", "--tool-call-parser", "x"], ["--tool-call-parser", "'x'", "'hermes'"]),
        (["serve", "--routing-policy", "x"], ["--routing-policy", "'x'", "'LongestPrefix'"]),
        (["serve", "--port", "70000"], ["--port", "70000"]),
        (["chat", "--url", "localhost"], ["--url", "'localhost'", "http://host:port"]),
        (["sing"], ["No such command", "'sing'"]),
    ],
)
def test_bad_option_names_itself_its_value_and_the_remedy(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output


def test_empty_keys_file_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# no keys yet\n\n")
    result = CliRunner().invoke(main, ["server", "--coordinator", "h:1", "--api-keys-file", str(file)])
    assert result.exit_code == 2
    assert "holds no key" in result.output


@pytest.mark.parametrize(
    ("text", "size"), [("2Gi", 2 << 30), ("512Mi", 512 << 20), ("1.5G", 1_500_000_000), ("1024", 1024)]
)
def test_memory_reads_kubernetes_quantities(text: str, size: int) -> None:
    assert MEMORY.convert(text, None, None) == size


async def test_server_without_a_model_fails_in_one_line() -> None:
    code, _, err = await run_process("server", "--coordinator", "127.0.0.1:1", "--model", "/no/model", "--port", "0")
    assert code == 1
    assert err.startswith("Error: model '/no/model' does not exist")


async def test_generate_prints_the_text_as_it_arrives(running: Any, answer: str) -> None:
    code, out, err = await run("generate", "Once", "--url", running.url)
    assert (code, out, err) == (0, answer + "\n", "")
    code, out, _ = await run("generate", "-", "--url", running.url, "--stop", "café", stdin="Twice")
    assert out == answer.split("café")[0] + "\n"
    code, _, err = await run("generate", "x", "--url", running.url, "--temperature", "inf")
    assert code == 2
    assert "'--temperature': inf is not a finite number" in err
    code, _, err = await run("generate", "x", "--url", running.url, "--model", "other")
    assert (code, err.strip()) == (
        1,
        "Error: The model 'other' does not exist: this server offers 'smollm2'. (HTTP 404)",
    )


async def test_generate_asks_for_a_structured_output(running: Any, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    code, _, err = await run("generate", "x", "--url", running.url, "--schema", str(schema), "--top-p", "0.5")
    assert (code, err) == (0, "")
    params = running.backend.requests[0][1]
    assert params.structured_output == {"type": "json_schema", "value": {"type": "object"}}
    assert (await run("generate", "x", "--url", running.url, "--regex", "a+"))[0] == 0
    assert running.backend.requests[1][1].structured_output == {"type": "regex", "value": "a+"}
    schema.write_text("{")
    code, _, err = await run("generate", "x", "--url", running.url, "--schema", str(schema))
    assert code == 2
    assert "is not valid JSON" in err


async def test_chat_keeps_the_conversation(running: Any, tokenizer: Any, answer: str) -> None:
    code, out, _ = await run("chat", "--url", running.url, "--temperature", "0", stdin="Hi\nAnd?\n/clear\nNew\n")
    assert code == 0
    assert out.count(answer) == 3
    sent = [tokenizer.decode(prompt, skip_special=False) for prompt, _ in running.backend.requests]
    assert answer in sent[1]
    assert answer not in sent[2]


async def test_commands_change_the_conversation(running: Any, tokenizer: Any, answer: str, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    lines = [
        '"""First line',
        'second line"""',
        "/set temperature 1.5",
        "/set max-tokens 7",
        "/system Be brief.",
        "/regenerate",
        f"/save {file}",
        "/set max-tokens",
        "/clear",
        "/etc/hosts?",
        f"/load {file}",
        "Go on",
        "/exit",
        "Never sent",
    ]
    options = ("--url", running.url, "--temperature", "0", "--system", "Be long.")
    code, _, err = await run("chat", *options, stdin="\n".join(lines))
    assert code == 0, err
    sent = [tokenizer.decode(prompt, skip_special=False) for prompt, _ in running.backend.requests]
    params = [parameters for _, parameters in running.backend.requests]
    assert len(sent) == 4
    assert "First line\nsecond line" in sent[0]
    assert "Be long." in sent[0]
    assert "First line\nsecond line" in sent[1]
    assert "Be brief." in sent[1]
    assert answer not in sent[1], "the answer is generated again"
    assert (params[0].temperature, params[1].temperature, params[1].num_tokens_to_generate) == (0, 1.5, 7)
    assert params[2].num_tokens_to_generate != 7
    assert "/etc/hosts?" in sent[2]
    assert "Be brief." in sent[2]
    assert "First line" not in sent[2]
    assert sent[3].startswith(sent[1])
    assert "Go on" in sent[3]
    assert "/etc/hosts?" not in sent[3]
    assert [message["role"] for message in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sing", "unknown command '/sing': /help lists"),
        ("/set warmth 1", "/set warmth: no such setting: use temperature"),
        ("/set temperature 3", "/set temperature: 3.0 is not in the range"),
        ("/set temperature nan", "/set temperature: nan is not a finite number"),
        ("/regenerate", "there is no answer yet"),
        ("/load /no/such", "name a file that /save has written"),
        ("/save", "/save: name a file"),
    ],
)
async def test_a_wrong_command_names_the_remedy(running: Any, line: str, words: str) -> None:
    code, _, err = await run("chat", "--url", running.url, stdin=line + "\n")
    assert code == 2
    assert words in " ".join(err.split())


async def test_ctrl_c_stops_an_answer_only_and_ctrl_d_ends_the_chat(running: Any) -> None:
    terminal, end = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(*MEGATRON, "chat", "--url", running.url), stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    shown = b""

    async def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += await asyncio.to_thread(os.read, terminal, 4096)
        shown = shown.partition(text)[2]

    running.backend.gate.clear()
    await until(b"> ")
    os.write(terminal, b'"""one\n')
    await until(b"... ")
    os.write(terminal, b'two"""\n')
    await running.backend.until(open_requests=1)
    process.send_signal(signal.SIGINT)
    await until(b"(stopped)")
    await running.backend.until(open_requests=0, aborted=1)
    await until(b"> ")
    os.write(terminal, b"/sing\n")
    await until(b"unknown command '/sing'")
    await until(b"> ")
    os.write(terminal, b"\x04")
    assert await process.wait() == 0
    os.close(terminal)


async def test_terminal_clients_report_that_no_server_answers() -> None:
    for command in (["generate", "x"], ["chat"]):
        code, _, err = await run(*command, "--url", "http://127.0.0.1:1", stdin="x\n")
        assert code == 1
        assert "no server answers at http://127.0.0.1:1: start one with 'megatron serve'" in err


async def test_api_key_is_sent(start_with_keys: Any) -> None:
    running = await start_with_keys("secret\n")
    assert (await run("generate", "x", "--url", running.url))[0] == 1
    assert (await run("generate", "x", "--url", running.url, "--api-key", "secret"))[0] == 0


async def _supervised(*arguments: str) -> tuple[Supervisor, Child, list[str]]:
    said: list[str] = []
    supervisor = Supervisor(say=lambda name, line: said.append(line))
    child = Child("server", arguments)
    await supervisor.start(child)
    return supervisor, child, said


async def test_a_child_that_cannot_start_ends_the_supervisor_with_its_error() -> None:
    supervisor, _, _ = await _supervised(
        "server", "--coordinator", "127.0.0.1:1", "--model", "/no/model", "--port", "0"
    )
    with pytest.raises(ChildFailedError, match=r"server ended with status 1\n  Error: model '/no/model'"):
        await supervisor.failed
    await supervisor.stop(grace_seconds=5)


async def test_a_child_that_ends_later_is_restarted_within_a_budget(running: Any) -> None:
    supervisor, child, said = await _supervised("generate", "x", "--url", running.url)
    running.backend.gate.clear()
    supervisor.are_ready = True
    for restart in range(4):
        await running.backend.until(open_requests=1)
        assert child.process is not None
        child.process.kill()
        await running.backend.until(open_requests=0, aborted=restart + 1)
    with pytest.raises(ChildFailedError, match="server ended with signal SIGKILL"):
        await supervisor.failed
    assert said.count("server ended with signal SIGKILL; starting it again") == 3
    await supervisor.stop(grace_seconds=5)


async def test_children_end_with_their_parent(running: Any) -> None:
    """The kernel ends the child, because its parent was killed."""
    running.backend.gate.clear()
    program = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen({[*MEGATRON, 'generate', 'x', '--url', running.url]!r},"
        f" env={{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}, start_new_session=True)\n"
        "child.wait()\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    await running.backend.until(open_requests=1)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await running.backend.until(open_requests=0, aborted=1)


def test_a_repository_of_the_hub_needs_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").touch()
    references = ["Qwen/Qwen3-0.6B", "org/name@v1.0", "models/mine", "builtin:smollm2-135m", "/a/b", "./a/b", "a.gguf"]
    assert [model_reference(name) for name in references] == [
        "hf:Qwen/Qwen3-0.6B",
        "hf:org/name@v1.0",
        *references[2:],
    ]
