"""A value of a Secret, wherever it gets by mistake, reaches no message, log or warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from megatron_kubectl.cli import main as kubectl_main
from megatron_operator.cli import main as operator_main
from megatron_runtime.checkpoints.remote.files import HubError
from megatron_runtime.checkpoints.remote.hub import HubApi, Reference
from megatron_runtime.checkpoints.remote.object_store import ObjectReference, ObjectStoreError, _store
from megatron_runtime.cli import main as runtime_main
from megatron_runtime.distributed.shard import ParallelSizes, rank_identity
from megatron_runtime.process.options import EnvironmentOption
from megatron_runtime.process.secrets import SecretError
from megatron_runtime.process.tracing import tracer_from_environment
from megatron_runtime.protocol.headers import Role
from megatron_runtime.server.auth import ApiKeyFileError, ApiKeys, read_keys
from megatron_runtime.transport.security import Gatekeeper, KeyFileError, PeerKeys, generate_key_files

CANARY = "c4nary-Secret"
BROKEN = (CANARY, f"{CANARY}\nsecond line", f" {CANARY} é", f"-{CANARY}", f'{{"{CANARY}": 1}}', f"[{CANARY}")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[click.Command, tuple[str, ...]]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield command, (*path, name)


OPTIONS = [
    (program, path, option)
    for program in (runtime_main, operator_main, kubectl_main)
    for command, path in commands(program)
    for option in command.params
    if isinstance(option, click.Option) and option.envvar
]


def test_there_are_options_of_the_environment_and_all_are_of_one_class() -> None:
    assert len(OPTIONS) > 20
    assert {type(option) for _, _, option in OPTIONS} == {EnvironmentOption}


def test_an_option_of_the_environment_does_not_repeat_the_value_of_its_variable(monkeypatch: Any) -> None:
    failures: dict[str, list[click.BadParameter]] = {}
    for _, path, option in OPTIONS:
        variable = str(option.envvar)
        for value in BROKEN:
            with monkeypatch.context() as patched:
                patched.setenv(variable, value)
                context = click.Context(click.Command(path[-1]))
                try:
                    option.handle_parse_result(context, {}, [])
                except click.BadParameter as error:
                    failures.setdefault(variable, []).append(error)
    for variable, errors in failures.items():
        assert not [error for error in errors if CANARY in chain(error) + error.format_message()], variable
        assert all(variable in error.format_message() for error in errors)
    free = {"MEGATRON_RUNTIME_IMAGE", "MEGATRON_VLLM_RUNTIME_IMAGE", "MEGATRON_COORDINATOR_IMAGE", "POD_NAMESPACE"}
    assert {str(option.envvar) for _, _, option in OPTIONS} - set(failures) == free, "each other variable has a form"


def test_the_command_line_itself_is_repeated_because_its_user_wrote_it() -> None:
    command = ["engine", "--coordinator", "h:1", "--name", "e"]
    found = CliRunner().invoke(runtime_main, [*command, "--backend", "wrong"])
    assert "'wrong' is not one of" in found.output
    found = CliRunner(env={"MEGATRON_ENGINE_BACKEND": CANARY}).invoke(runtime_main, command)
    words = " ".join(found.output.split())
    assert "MEGATRON_ENGINE_BACKEND does not have a valid value: give one of native, vllm" in words


@pytest.mark.parametrize("text", [CANARY + "\nx", CANARY + "\r", CANARY + "\x7f", "é" + CANARY])
def test_a_token_of_a_hub_is_checked_before_it_is_sent(monkeypatch: Any, tmp_path: Path, text: str) -> None:
    monkeypatch.setenv("HF_TOKEN", text + "y")
    file = tmp_path / "token"
    file.write_text(text + "y")
    for token_file in (None, file):
        with pytest.raises(SecretError, match=r"HF_TOKEN.*does not have a valid value") as failed:
            HubApi(Reference("org/name"), endpoint="https://hub.example", token_file=token_file)
        assert CANARY not in chain(failed.value)
    file.write_bytes(b"\xff" + CANARY.encode())
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(file))
    for token_file in (None, file):
        with pytest.raises(HubError, match="is not a text file") as failed:
            HubApi(Reference("org/name"), endpoint="https://hub.example", token_file=token_file)
        assert CANARY not in chain(failed.value)


@pytest.mark.parametrize(
    "text", [CANARY, f"https://user:{CANARY}@hub.example", f"ftp://{CANARY}", f"http://h/{CANARY}\nx"]
)
def test_the_endpoint_of_a_hub_is_checked(monkeypatch: Any, text: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", text)
    for endpoint in (None, text):
        with pytest.raises(SecretError, match="HF_ENDPOINT") as failed:
            HubApi(Reference("org/name"), endpoint=endpoint)
        assert CANARY not in chain(failed.value)


WRONG_CREDENTIALS = [
    ("s3://b/p", "AWS_ACCESS_KEY_ID", f"{CANARY}\nx"),
    ("s3://b/p", "AWS_SESSION_TOKEN", f"{CANARY}\rx"),
    ("s3://b/p", "AWS_SKIP_SIGNATURE", CANARY),
    ("s3://b/p", "AWS_ENDPOINT_URL", CANARY),
    ("s3://b/p", "AWS_REGION", f"{CANARY}\nx"),
    ("gs://b/p", "GOOGLE_SERVICE_ACCOUNT_KEY", CANARY),
    ("gs://b/p", "GOOGLE_SERVICE_ACCOUNT_KEY", f'{{"private_key": "{CANARY}"}}'),
    ("gs://b/p", "GOOGLE_SKIP_SIGNATURE", CANARY),
    ("az://b/p", "AZURE_STORAGE_ACCOUNT_KEY", f"{CANARY}!"),
    ("az://b/p", "AZURE_STORAGE_SAS_TOKEN", CANARY),
    ("az://b/p", "AZURE_STORAGE_ENDPOINT", CANARY),
    ("az://b/p", "AZURE_SKIP_SIGNATURE", CANARY),
]


@pytest.mark.parametrize(("reference", "name", "value"), WRONG_CREDENTIALS)
def test_credentials_of_an_object_store_are_checked(monkeypatch: Any, reference: str, name: str, value: str) -> None:
    if name.startswith("AZURE"):
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError, match=name.partition("_")[0]) as failed:
        _store(ObjectReference.parse(reference))
    assert CANARY not in chain(failed.value)


@pytest.mark.parametrize(
    "content",
    [
        f"{CANARY}\x01".encode(),
        b"\xff" + CANARY.encode(),
        f"keys:\n- {CANARY}: x".encode(),
        f"keys:\n- {{key: {CANARY}, name: a, {CANARY}-2: 1}}".encode(),
        f"keys:\n- {{key: {CANARY}, name: '{CANARY} '}}".encode(),
        f"keys:\n- {{key: [{CANARY}], name: a}}".encode(),
        f"keys:\n{CANARY}: [".encode(),
        f"keys: []\n{CANARY}: 1".encode(),
        f'keys:\n- {{key: "{CANARY}\\n", name: a}}'.encode(),
        f"keys: {'[' * 400}{CANARY}".encode(),
    ],
)
def test_no_message_about_a_key_file_has_a_key(tmp_path: Path, content: bytes, caplog: Any) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ApiKeyFileError) as failed:
        read_keys(file)
    assert CANARY not in chain(failed.value)
    file.write_text("good\n")
    keys = ApiKeys(file)
    file.write_bytes(content)
    with caplog.at_level(logging.DEBUG):
        keys._checked -= 10
        keys._version = None  # type: ignore[assignment]
        keys.find(httpx.Headers({"authorization": "Bearer good"}))  # type: ignore[arg-type]
    assert "the previous API keys stay in use" in caplog.text
    assert CANARY not in caplog.text


def test_no_message_about_curve_keys_has_a_key(tmp_path: Path) -> None:
    for name, text in generate_key_files().items():
        (tmp_path / name).write_text(text)
    for content in (CANARY.encode(), CANARY.encode().ljust(40, b"\xff"), CANARY.encode().ljust(40, b"_")):
        (tmp_path / "engine.key").write_bytes(content)
        (tmp_path / "server.key").write_bytes(content)
        for load in (lambda: PeerKeys.load(tmp_path, Role.ENGINE), lambda: Gatekeeper(tmp_path)):
            with pytest.raises(KeyFileError) as failed:
                load()
            assert CANARY not in chain(failed.value)


@pytest.mark.parametrize("name", ["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"])
def test_numbers_of_ranks_do_not_repeat_the_variable(name: str) -> None:
    environment = {"NNODES": "2", "MASTER_ADDR": "h", "RANK": "0", name: CANARY}
    with pytest.raises(SecretError, match=name) as failed:
        rank_identity(ParallelSizes(tensor=2), environment)
    assert CANARY not in chain(failed.value)


VARIABLES = [
    ("OTEL_EXPORTER_OTLP_HEADERS", CANARY),
    ("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={CANARY}\nx"),
    ("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={CANARY}%0Ax"),
    ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", f"a=b,{CANARY}"),
    ("OTEL_EXPORTER_OTLP_HEADERS", f"a=Bearer {CANARY}"),
    ("OTEL_EXPORTER_OTLP_TIMEOUT", CANARY),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", CANARY),
    ("OTEL_RESOURCE_ATTRIBUTES", CANARY),
    ("OTEL_BSP_MAX_QUEUE_SIZE", CANARY),
    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://u:{CANARY}@127.0.0.1:9"),
]


@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_variables_of_traces_are_checked(monkeypatch: Any, caplog: Any, name: str, value: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.DEBUG):
        assert tracer_from_environment("x") is None
    assert f"traces are off: {name} does not have a valid value" in caplog.text
    assert CANARY not in caplog.text


def chain(error: BaseException | None) -> str:
    """Return what a report of an error shows, with the errors that caused it."""
    texts = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)
