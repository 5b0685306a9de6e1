"""The chat page at /: it is complete, runs only its own script, and chats with the model."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from eventually import LONG_SECONDS

IN_NODE = Path(__file__).with_name("console_in_node.mjs")
SCRIPT = re.compile(r'<script type="module">(.*?)</script>', re.DOTALL)

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="the script is run by node")


def sources(policy: str, directive: str) -> list[str]:
    found = re.search(rf"(?:^|; ){directive} ([^;]*)", policy)
    assert found is not None, f"{directive} is not in {policy}"
    return found[1].split()


async def test_the_page_loads_nothing_from_other_servers(running: Any) -> None:
    reply = await running.http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?:|//\w|@import|url\(| src=| href=", reply.text)


async def test_its_policy_allows_only_its_own_script_and_style(running: Any) -> None:
    reply = await running.http.get("/")
    policy = reply.headers["content-security-policy"]
    assert sources(policy, "default-src") == ["'none'"]
    assert sources(policy, "connect-src") == ["'self'"]
    for directive in ("base-uri", "form-action", "frame-ancestors"):
        assert sources(policy, directive) == ["'none'"]
    for element in ("script", "style"):
        (body,) = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert sources(policy, f"{element}-src") == [f"'sha256-{digest}'"]
    assert "unsafe" not in policy
    # What a hash does not admit: handlers and styles written into elements.
    assert not re.search(r"<[^>]+ (on\w+|style)=", SCRIPT.sub("", reply.text))


async def test_the_page_needs_no_key(start: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    running = await start(api_keys_file=tmp_path / "keys")
    assert (await running.http.get("/")).status_code == 200


async def chat(running: Any, tmp_path: Path, *texts: str, key: str = "") -> dict[str, Any]:
    """What the page shows after its user has sent `texts`."""
    found = SCRIPT.search((await running.http.get("/")).text)
    assert found is not None
    script = tmp_path / "console.js"
    script.write_text(found[1])
    node = await asyncio.create_subprocess_exec(
        *("node", str(IN_NODE), str(script), running.url, key, *texts), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(node.communicate(), LONG_SECONDS)
    assert node.returncode == 0
    return json.loads(output)


@needs_node
async def test_it_streams_answers_and_keeps_the_conversation(running: Any, answer: str, tmp_path: Path) -> None:
    shown = await chat(running, tmp_path, "Hello?", "And then?")
    answer = answer.strip()
    kinds = [kind for kind, _ in shown["turns"]]
    assert kinds == ["turn user", "turn assistant"] * 2
    assert [text.strip() for _, text in shown["turns"]] == ["Hello?", answer, "And then?", answer]
    assert shown["model"] == "smollm2"
    assert shown["state"] == "ready"
    second = running.tokenizer.decode(running.backend.requests[1][0])
    assert "Hello?" in second
    assert answer[:20] in second
    assert "And then?" in second


@needs_node
async def test_it_sends_the_entered_key_and_reports_a_wrong_one(start: Any, answer: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    running = await start(api_keys_file=tmp_path / "keys")
    shown = await chat(running, tmp_path, "Hello?", key="secret")
    assert shown["turns"][1] == ["turn assistant", answer]
    rejected = await chat(running, tmp_path, "Hello?", key="wrong")
    assert rejected["turns"] == []
    assert "API key" in rejected["state"]


@needs_node
async def test_reasoning_is_shown_apart_and_sent_back(start_with_template: Any, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}>{{ m.content }};{% endfor %}<think>"
    running = await start_with_template(template, special=["<think>", "</think>"], reasoning_parser="think")
    running.backend.answer = "Hm.</think>Yes."
    shown = await chat(running, tmp_path, "Hello?", "And?")
    assert shown["turns"][1] == ["turn assistant", "Reasoning|Hm.|Yes."]
    assert running.tokenizer.decode(running.backend.requests[1][0]) == ">Hello?;Hm.>Yes.;>And?;"


@needs_node
async def test_a_question_stopped_before_its_answer_can_be_edited(running: Any, tmp_path: Path) -> None:
    running.backend.free_tokens = 0
    running.backend.gate.clear()
    shown = await chat(running, tmp_path, "STOP Hello?")
    assert (shown["turns"], shown["typed"]) == ([], "Hello?")


@needs_node
async def test_an_error_is_shown_and_the_conversation_continues(running: Any, answer: str, tmp_path: Path) -> None:
    shown = await chat(running, tmp_path, "word " * 9000, "Hello?")
    assert [kind for kind, _ in shown["turns"]] == ["turn user", "turn error", "turn user", "turn assistant"]
    assert "maximum context length" in shown["turns"][1][1]
