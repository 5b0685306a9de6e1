"""The commands of `kubectl megatron` as a user runs them, against the fake API server through a kubectl without login:
the single file in a Python without any package.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import fake_kubectl
import pytest
import yaml
from eventually import eventually
from machine import scaled

Command = Callable[..., Awaitable[tuple[int, str, str]]]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The single file of the plugin."""
    file = tmp_path_factory.mktemp("plugin") / "kubectl-megatron"
    subprocess.run([sys.executable, ROOT / "tools" / "build_plugin.py", file], check=True)
    return file


@pytest.fixture
def environment(fake: Any, tmp_path: Path, program: Path) -> dict[str, str]:
    """The variables of a command."""
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return {
        **os.environ,
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "PATH": fake_kubectl.install(tmp_path),
        "TMPDIR": str(tmp_path),
        "PLUGIN": str(program),
    }


async def start(environment: dict[str, str], *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-I", "-S", environment["PLUGIN"], *arguments]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


@pytest.fixture
def run(environment: dict[str, str]) -> Command:
    """Run a command to its end; return exit code, standard output and standard error."""

    async def call(*arguments: str) -> tuple[int, str, str]:
        process = await start(environment, *arguments)
        async with asyncio.timeout(scaled(60)):
            output, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()

    return call


async def test_list_shows_all_resources_and_why_one_is_degraded(run: Command) -> None:
    code, output, errors = await run("list")
    assert (code, errors) == (0, "")
    header, broken, demo = output.splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MODEL", "REASON", "AGE"]
    assert broken.split()[:3] == ["broken", "Failed", "0/1"] or "CrashLooping" in broken
    assert demo.split()[:3] == ["demo", "Running", "2/2"]
    wide = (await run("list", "-A", "-o", "wide"))[1].splitlines()[0]
    assert wide.startswith("NAMESPACE   NAME")
    assert wide.endswith("WAITS FOR")
    assert (await run("list", "-o", "name"))[1].splitlines() == [
        f"megatroninference.inference.megatron.dev/{name}" for name in ("broken", "demo")
    ]
    found = json.loads((await run("list", "-o", "json"))[1])
    assert [each["name"] for each in found] == ["broken", "demo"]
    assert found[0]["degraded"]
    assert await run("list", "-n", "other") == (0, "", "no resources in namespace other\n")


async def test_reading_commands_print_json(run: Command) -> None:
    status = json.loads((await run("status", "demo", "-o", "json"))[1])
    assert (status["state"], status["operatorProblem"], len(status["status"]["engines"])) == ("Running", None, 2)
    explained = json.loads((await run("explain", "broken", "-o", "json"))[1])
    assert any("broken-engine-0" in line for line in explained["explanation"])
    done = json.loads((await run("rollout", "status", "demo", "-o", "json"))[1])
    assert (done["done"], done["updated"], done["replicas"]) == (True, 2, 2)


async def test_logs_of_pods_are_interleaved_by_time_and_escaped(run: Command) -> None:
    code, output, _ = await run("logs", "demo", "--component", "engine", "--tail", "2")
    assert code == 0
    assert output.splitlines() == [
        f"demo-engine-{engine}-0 | line {number} of demo-engine-{engine}-0 engine\\x1b[2J"
        for number in range(2)
        for engine in range(2)
    ]
    assert "demo-engine-0" not in (await run("logs", "demo", "--engine", "1"))[1]
    first = json.loads((await run("logs", "demo", "--engine", "1", "-o", "json"))[1].splitlines()[0])
    assert first["pod"] == "demo-engine-1-0"
    code, _, errors = await run("logs", "demo", "--engine", "prefill-2")
    assert (code, "demo-prefill-2" in errors) == (1, True)
    code, _, errors = await run("logs", "demo", "--engine", "demo-engine-0")
    assert code == 2
    assert "is 'demo-engine-0'; give an index such as 0, or prefill-0 for a prefill engine" in " ".join(errors.split())
    code, _, errors = await run("logs", "demo", "--engine", "7")
    assert code == 1
    assert "no pod of engine demo-engine-7; its pods: demo-coordinator" in errors
    code, _, errors = await run("logs", "demo", "--engine", "0", "--component", "server")
    assert code == 2
    assert "--engine: not allowed with --component server" in errors


async def test_followed_logs_include_engines_that_start_later(environment: dict[str, str], run: Command) -> None:
    follower = await start(environment, "logs", "demo", "--component", "engine", "-f", "--tail", "0")
    assert follower.stdout is not None
    async with asyncio.timeout(scaled(60)):
        assert b"demo-engine-" in await follower.stdout.readline()
        code, output, _ = await run("scale", "demo", "--replicas", "3")
        assert (code, output.splitlines()[-1]) == (0, "demo: done, 3 of 3 engines updated, 3/3 ready")
        while b"demo-engine-2-0" not in await follower.stdout.readline():
            pass
    follower.terminate()
    await follower.wait()


async def test_top_shows_each_engine_with_its_rates(run: Command) -> None:
    code, output, _ = await run("top", "demo", "--interval", "0.5")
    assert code == 0
    title, header, *engines = output.splitlines()
    assert title.startswith("default/demo: Running, 2/2 engines ready; 3 queued in the coordinator; ")
    assert header.split("   ")[0].strip() == "ENGINE"
    for number, row in enumerate(engines):
        name, _, queue, tokens, running, use, hits, drafts, rate, epoch, _ = row.split()
        assert tokens == ("30000", "500")[number]
        assert (name, queue, running, hits, epoch) == (f"demo-engine-{number}", "2", "4", "75%", "7")
        assert drafts == "-", "this engine does not speculate"
        assert use.endswith("%")
        assert int(rate) > 0
    found = json.loads((await run("top", "demo", "--interval", "0.5", "-o", "json"))[1])
    assert [engine["prefixHitRate"] for engine in found["engines"]] == [0.75, 0.75]


async def test_explain_names_engines_with_uneven_queues(run: Command, fake: Any) -> None:
    uneven = "load is uneven: demo-engine-0 has 30000 queued prompt tokens, demo-engine-1 has 500; use spec.coordinator"
    assert uneven in (await run("explain", "demo"))[1]
    fake.values["megatron_queued_prompt_tokens"] = "500"
    assert "uneven" not in (await run("explain", "demo"))[1]


async def test_top_names_metrics_that_the_user_may_not_read(run: Command, fake: Any) -> None:
    fake.denied.add("GET /proxy/")
    output = (await run("top", "demo", "--interval", "0.5"))[1]
    assert "metrics are incomplete: metrics of pod demo-" in output
    assert "cannot get" in output
    assert "networkPolicy.apiServer" not in output, "the user lacks a permission"


async def test_top_names_the_chart_value_that_lets_the_api_server_read_metrics(run: Command, fake: Any) -> None:
    fake.blocked.add("/proxy/metrics")
    output = (await run("top", "demo", "--interval", "0.5"))[1]
    assert "metrics are incomplete: metrics of pod demo-" in output
    assert "dial tcp" in output
    assert "the chart's value networkPolicy.apiServer" in output


async def test_a_rollout_that_does_not_end_in_time_fails_with_what_it_waits_for(run: Command, fake: Any) -> None:
    code, output, errors = await run("rollout", "status", "broken", "--timeout", "1")
    assert code == 1
    assert "engines updated" in output + errors
    fake.denied.add("PATCH ")
    code, _, errors = await run("scale", "demo", "--replicas", "1")
    assert code == 1
    assert "default/demo: 403 Forbidden" in errors
    assert (await run("scale", "demo", "--replicas", "-1"))[0] == 2


async def test_the_proxy_ends_with_a_killed_command(environment: dict[str, str], tmp_path: Path) -> None:
    follower = await start(environment, "logs", "demo", "-f")
    assert follower.stdout is not None
    async with asyncio.timeout(scaled(60)):
        await follower.stdout.readline()
        (folder,) = await asyncio.to_thread(lambda: list(tmp_path.glob("kubectl-megatron-*")))
        follower.kill()
        await follower.wait()
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(str(folder / "api"))
            except (ConnectionRefusedError, FileNotFoundError):
                break
            writer.close()
            await asyncio.sleep(0.05)
        await eventually(lambda: asyncio.to_thread(lambda: not folder.exists()), what="the directory is removed")


async def test_a_kubeconfig_that_cannot_be_used_is_named(environment: dict[str, str]) -> None:
    for arguments, variables, expected in (
        (["list", "--context", "nope"], {}, "--context: the kubeconfig has no context 'nope'; use one of here"),
        (["list"], {"KUBECONFIG": "/nonexistent"}, "no usable kubeconfig: "),
        (["list"], {"PATH": "/nonexistent"}, "kubectl, which logs in to the cluster, is not on PATH"),
    ):
        process = await start({**environment, **variables}, *arguments)
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert expected in errors.decode()


async def test_the_file_explains_what_the_dashboard_needs(run: Command) -> None:
    code, _, errors = await run("dashboard", "--no-browser")
    assert code == 1
    assert "install the dashboard with pip install 'megatron-inference[dashboard]'" in errors


async def test_a_link_to_the_file_completes_commands_options_and_names_for_kubectl(
    environment: dict[str, str], program: Path, tmp_path: Path
) -> None:
    link = tmp_path / "kubectl_complete-megatron"
    link.symlink_to(program)

    async def complete(*words: str, **variables: str) -> list[str]:
        process = await start({**environment, "PLUGIN": str(link), **variables}, *words)
        output, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
        *candidates, directive = output.decode().splitlines()
        assert directive == ":4", "kubectl offers no names of files"
        return [candidate.partition("\t")[0] for candidate in candidates]

    assert await complete("pa") == ["pause"]
    assert await complete("rollout", "") == ["status"]
    assert await complete("pause", "--no-w") == ["--no-wait"]
    assert await complete("pause", "de") == ["demo"]
    assert sorted(await complete("logs", "--component", "")) == ["coordinator", "engine", "server"]
    assert await complete("pause", "de", KUBECONFIG="/nonexistent") == []


def test_the_file_is_the_same_for_the_same_sources(program: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "build_plugin.py", tmp_path / "again"], check=True)
    assert (tmp_path / "again").read_bytes() == program.read_bytes()
    assert os.access(program, os.X_OK)


BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "-o", "wide"],
        ["list", "-o", "json"],
        ["status", "broken"],
        ["status", "broken", "-o", "json"],
        ["explain", "broken"],
        ["explain", "broken", "-o", "json"],
        ["logs", "demo", "--tail", "2"],
        ["logs", "demo", "--tail", "2", "-o", "json"],
    ],
    ids=" ".join,
)
async def test_characters_that_change_the_direction_are_escapes(run: Command, fake: Any, arguments: list[str]) -> None:
    fake.suffix = BIDI
    await eventually(lambda: _published(fake), what="the texts have them")
    code, output, _ = await run(*arguments)
    assert code == 0
    assert "".join(f"\\u{ord(char):04x}" for char in BIDI) in output
    assert not set(BIDI) & set(output)


async def _published(fake: Any) -> bool:
    return all(BIDI in each["status"]["model"] for each in fake._stored["resources"].values())


async def test_credentials_that_have_expired_are_renewed(run: Command, fake: Any) -> None:
    """kubectl gets new ones after an answer 401."""
    fake.expired["GET"] = 1
    code, output, _ = await run("list", "-o", "name")
    assert (code, "demo" in output) == (0, True)
    fake.expired["GET"] = 2
    code, _, errors = await run("list", "-o", "name")
    assert (code, "401 Unauthorized" in errors) == (1, True)
