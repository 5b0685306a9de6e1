"""Downloads from a hub: complete, verified, resumable, with clear errors."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_hub import FakeHub
from random_checkpoint import LLAMA, random_tensors, write_model

from megatron_operator.decision.causes import find_cause
from megatron_operator.resource.conditions import Reason
from megatron_runtime.checkpoints.hub.client import HubApi, HubError, HubUnavailableError, Reference
from megatron_runtime.checkpoints.hub.download import (
    MANIFEST_FILE,
    Manifest,
    WrongContentError,
    choose,
    fetch,
    hub_cache,
    read_manifest,
    verify_directory,
)
from megatron_runtime.checkpoints.model_files import UnsafeNameError
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli import main
from megatron_runtime.server.settings import default_model_name
from megatron_runtime.tokenization.loader import load_tokenizer

MAIN = Reference("org/name")
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 4000,
    "sub/tokenizer.json": b"{}",
    "README.md": b"words",
    "pytorch_model.bin": b"the same weights again",
}
WANTED = {"config.json", "model.safetensors", "sub/tokenizer.json"}
SIZE = len(FILES["model.safetensors"])


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(dict(FILES)).running() as running:
        yield running


@pytest.fixture
def pauses() -> list[float]:
    return []


def get(hub: FakeHub, directory: Path, pauses: list[float] | None = None, *, token: str | None = None) -> Manifest:
    api = HubApi(endpoint=hub.url, token=token)
    try:
        return fetch(MAIN, directory, api=api, wait=(pauses if pauses is not None else []).append)
    finally:
        api.close()


def visible(directory: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".megatron")}


def test_only_the_files_of_a_model_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    manifest = get(hub, tmp_path)
    assert visible(tmp_path) == {name: FILES[name] for name in WANTED}
    assert (manifest.repository, manifest.commit, set(manifest.files)) == ("org/name", hub.commit, WANTED)
    assert verify_directory(tmp_path) == manifest == read_manifest(tmp_path)


def test_a_broken_connection_resumes_at_the_same_byte(hub: FakeHub, tmp_path: Path, pauses: list[float]) -> None:
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.cut_after = [100_000, 0, 200_000]
    get(hub, tmp_path, pauses)
    assert [part for _, part in hub.requests] == [None, "bytes=100000-", "bytes=100000-", "bytes=300000-"]
    assert visible(tmp_path) == hub.files
    # A connection without progress is followed by a longer pause than one with progress.
    assert pauses == [1.0, 2.0, 1.0]


def test_a_server_without_ranges_is_read_past_the_received_bytes(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.ignores_range = True
    hub.cut_after = [100_001]
    get(hub, tmp_path)
    assert visible(tmp_path) == hub.files


_FETCHER = """
import sys
from pathlib import Path
from megatron_runtime.checkpoints.hub.client import HubApi, Reference
from megatron_runtime.checkpoints.hub.download import fetch
fetch(Reference("org/name"), Path(sys.argv[2]), api=HubApi(endpoint=sys.argv[1]), wait=lambda seconds: sys.exit("cut"))
"""


def test_bytes_of_a_killed_process_are_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    hub.cut_after = [300_000]
    fetcher = subprocess.run(
        [sys.executable, "-c", _FETCHER, hub.url, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert fetcher.stderr.endswith("cut\n")
    assert visible(tmp_path) == {}
    get(hub, tmp_path)
    assert hub.requests[-1] == ("model.safetensors", "bytes=300000-")
    assert visible(tmp_path) == hub.files


def test_files_that_are_complete_are_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    get(hub, tmp_path)
    asked = len(hub.requests)
    get(hub, tmp_path)
    assert len(hub.requests) == asked
    (tmp_path / "config.json").write_bytes(b'{"a": 2}')
    get(hub, tmp_path)
    assert [name for name, _ in hub.requests[asked:]] == ["config.json"]


def test_another_commit_fetches_only_the_changed_files(hub: FakeHub, tmp_path: Path) -> None:
    get(hub, tmp_path)
    asked = len(hub.requests)
    hub.commit, hub.files["config.json"] = "d" * 40, b'{"a": 3}'
    assert get(hub, tmp_path).commit == "d" * 40
    assert [name for name, _ in hub.requests[asked:]] == ["config.json"]
    assert (tmp_path / "config.json").read_bytes() == b'{"a": 3}'


def test_files_that_a_revision_no_longer_has_are_removed(hub: FakeHub, tmp_path: Path) -> None:
    get(hub, tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    hub.commit = "d" * 40
    hub.files["model-00001-of-00001.safetensors"] = hub.files.pop("model.safetensors")
    get(hub, tmp_path)
    assert visible(tmp_path).keys() == WANTED - {"model.safetensors"} | {"model-00001-of-00001.safetensors", "mine.txt"}


def test_two_repositories_do_not_share_a_directory(hub: FakeHub, tmp_path: Path) -> None:
    get(hub, tmp_path)
    hub.repository = "org/other"
    with pytest.raises(HubError, match="holds files of org/name: name another directory for org/other@main"):
        fetch(Reference("org/other"), tmp_path, api=HubApi(endpoint=hub.url))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_content_is_fetched_again_once(name: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged = {name: 1}
    get(hub, tmp_path)
    assert visible(tmp_path)[name] == FILES[name]
    hub.damaged = {name: 2}
    (tmp_path / name).unlink()
    with pytest.raises(WrongContentError, match=rf"{name} of org/name@c{{40}} came twice with digest"):
        get(hub, tmp_path)
    assert not (tmp_path / name).exists()


def test_no_more_bytes_are_received_than_the_file_has(hub: FakeHub, tmp_path: Path) -> None:
    hub.files, hub.endless = {"config.json": FILES["config.json"]}, {"config.json"}
    received: list[int] = []
    with pytest.raises(WrongContentError, match="came twice"):
        fetch(
            MAIN,
            tmp_path,
            api=HubApi(endpoint=hub.url),
            progress=lambda done, size, files: received.append(done),
        )
    assert max(received) < 10_000_000
    assert received[-1] == 0


def test_an_overloaded_hub_is_retried_after_the_time_it_names(
    hub: FakeHub, tmp_path: Path, pauses: list[float]
) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.statuses = [(429, "7"), (503, ""), (429, "9999")]
    hub.list_statuses = [(429, "3")]
    get(hub, tmp_path, pauses)
    assert pauses == [3.0, 7.0, 2.0, 60.0]


def test_retries_are_limited(hub: FakeHub, tmp_path: Path, pauses: list[float]) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.statuses = [(503, "")] * 6
    with pytest.raises(HubUnavailableError, match=r"0 of 8 bytes of config\.json are here: run this again to resume"):
        get(hub, tmp_path, pauses)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_the_first_file_that_fails_ends_the_others(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {f"{number}.json": b"x" * 10_000_000 for number in range(3)} | {"wrong.json": b"yz" * 500}
    hub.damaged = {"wrong.json": 2}
    hub.trickling = {f"{number}.json" for number in range(3)}
    with pytest.raises(WrongContentError, match=r"wrong\.json"):
        get(hub, tmp_path)
    assert visible(tmp_path) == {}


def test_an_unreachable_hub_is_reported() -> None:
    api = HubApi(endpoint="http://127.0.0.1:1")
    with pytest.raises(HubUnavailableError, match="does not answer for org/name@main"):
        api.list(MAIN)


def test_a_private_repository_needs_its_token(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "secret"
    with pytest.raises(HubError, match=r"401 Unauthorized .*give a token"):
        get(hub, tmp_path)
    with pytest.raises(HubError, match=r"403 Forbidden .*gated repo"):
        get(hub, tmp_path, token="wrong")
    get(hub, tmp_path, token="secret")
    assert visible(tmp_path).keys() == WANTED


def test_the_token_is_not_sent_to_another_host(hub: FakeHub, tmp_path: Path) -> None:
    """Large files come from another host."""
    with FakeHub(dict(FILES)).running() as store:
        hub.token, hub.elsewhere = "secret", store.url
        get(hub, tmp_path, token="secret")
        assert store.requests
        assert set(store.tokens) == {None}
    assert visible(tmp_path).keys() == WANTED


def test_missing_repositories_revisions_and_files_are_reported(hub: FakeHub, tmp_path: Path) -> None:
    api = HubApi(endpoint=hub.url)
    for reference in (Reference("org/other"), Reference("org/name", "v9")):
        with pytest.raises(HubError, match=f"repository not found: {reference}"):
            fetch(reference, tmp_path, api=api)
    with pytest.raises(HubError, match="has no file that is wanted"):
        fetch(MAIN, tmp_path, api=api, include=["*.gguf"])


def test_no_file_is_written_outside_of_the_directory(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["../evil"] = b"x"
    with pytest.raises(HubError, match=r"rfilename '\.\./evil': want a file name inside its directory"):
        get(hub, tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_a_repository_cannot_write_the_manifest(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[MANIFEST_FILE] = b"{}"
    manifest = get(hub, tmp_path)
    assert set(manifest.files) == WANTED
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    "content", ["", "[]", '{"files": 1}', '{"repository": "a/b", "commit": "c", "files": {"../x": {}}}']
)
def test_an_invalid_manifest_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(HubError, match="remove it and fetch again"):
        verify_directory(tmp_path)


@pytest.mark.parametrize("text", ["name", "a/b/c", "../b", "a/..", "", "hf:a", "a b/c"])
def test_invalid_references_are_rejected(text: str) -> None:
    with pytest.raises(HubError, match="write ORG/NAME"):
        Reference.parse(text)


def test_references_are_parsed() -> None:
    assert Reference.parse("hf:org/name@v1") == Reference.parse("hf://org/name@v1") == Reference("org/name", "v1")
    assert Reference.parse("org/name") == Reference("org/name", "main")
    assert default_model_name("hf:org/name@v1") == default_model_name("hf:org/name") == "name"


def test_all_files_of_a_distributed_checkpoint_are_chosen(hub: FakeHub) -> None:
    hub.files = {
        "release/__0_0.distcp": b"1",
        "release/.metadata": b"2",
        "release/common.pt": b"3",
        "config.json": b"4",
    }
    listing = HubApi(endpoint=hub.url).list(MAIN)
    assert len(choose(listing.files, ())) == 4


def test_verify_names_changed_and_missing_files(hub: FakeHub, tmp_path: Path) -> None:
    get(hub, tmp_path)
    data = bytearray(FILES["model.safetensors"])
    data[500_000] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").unlink()
    result = CliRunner().invoke(main, ["fetch", "--verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 of 3 files" in result.output
    assert "config.json (missing" in result.output
    assert f"model.safetensors ({SIZE} bytes" in result.output


def test_the_command_fetches_and_verifies(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "secret"
    (tmp_path / "token").write_text("secret\n")
    target = tmp_path / "model"
    arguments = ["fetch", "org/name", str(target), "--endpoint", hub.url, "--token-file", str(tmp_path / "token")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert f"3 files of org/name@{hub.commit}" in result.output
    result = CliRunner().invoke(main, ["fetch", "--verify", str(target)])
    assert result.exit_code == 0
    assert "are as they were fetched" in result.output
    assert CliRunner().invoke(main, ["fetch", "org/name"]).exit_code == 2


@pytest.fixture
def model_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return a hub with a real model, which processes find by the environment as in a pod."""
    model = write_model(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    import tokenizers

    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(model / "tokenizer.json"))
    with FakeHub.of(model).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", "from-a-secret")
        hub.token = "from-a-secret"
        yield hub


def test_a_reference_is_resolved_and_a_complete_commit_needs_no_hub(model_hub: FakeHub) -> None:
    source = resolve("hf:org/name@main")
    assert source.format == "SafeTensors"
    assert model_hub.commit in source.location.parts
    asked = len(model_hub.requests)
    assert model_hub.listed == 1
    # A complete commit in the cache needs no hub.
    model_hub.token = "changed"
    assert resolve(f"hf:org/name@{model_hub.commit}") == source
    assert len(model_hub.requests) == asked
    assert model_hub.listed == 1


def test_a_server_fetches_only_the_tokenizer(model_hub: FakeHub) -> None:
    assert load_tokenizer("hf:org/name").encode("a") == [0]
    assert "model.safetensors" not in {name for name, _ in model_hub.requests}
    resolve("hf:org/name")
    assert "model.safetensors" in {name for name, _ in model_hub.requests}


def test_other_programs_find_the_model_in_the_cache(model_hub: FakeHub) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    load_tokenizer("hf:org/name")
    source = resolve("hf:org/name")
    assert source.format == "SafeTensors"
    assert Path(snapshot_download("org/name", cache_dir=hub_cache(), local_files_only=True)) == source.location
    cache = scan_cache_dir(hub_cache())
    assert not cache.warnings
    ((revision,),) = [repository.revisions for repository in cache.repos]
    assert (revision.commit_hash, revision.refs) == (model_hub.commit, {"main"})
    assert {file.file_name for file in revision.files} == set(model_hub.files)


def test_contents_of_other_programs_are_verified_instead_of_transferred(model_hub: FakeHub) -> None:
    repository = hub_cache() / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    files = HubApi(token=model_hub.token).list(MAIN).files
    for file in files:
        (repository / "blobs" / file.digest).write_bytes(model_hub.files[file.path])
    resolve("hf:org/name")
    assert not model_hub.requests
    shutil.rmtree(repository / ".megatron")
    weights = next(file for file in files if file.path == "model.safetensors")
    (repository / "blobs" / weights.digest).write_bytes(bytes(weights.size))
    source = resolve("hf:org/name")
    assert [name for name, _ in model_hub.requests] == ["model.safetensors"]
    assert (source.location / "model.safetensors").read_bytes() == model_hub.files["model.safetensors"]


def test_links_that_other_programs_deleted_are_created_again(model_hub: FakeHub) -> None:
    source = resolve("hf:org/name")
    shutil.rmtree(source.location)
    asked = len(model_hub.requests)
    assert resolve("hf:org/name") == source
    assert len(model_hub.requests) == asked
    assert set(visible(source.location)) == set(model_hub.files)


def test_a_branch_that_leads_out_of_the_cache_is_rejected(model_hub: FakeHub) -> None:
    with pytest.raises(UnsafeNameError, match=r"'refs/\.\./\.\./evil' has an empty part or one that is"):
        resolve("hf:org/name@../../evil")
    assert model_hub.listed == 0


def test_concurrent_processes_fetch_once(model_hub: FakeHub) -> None:
    threads = [threading.Thread(target=resolve, args=("hf:org/name",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for name, _ in model_hub.requests]
    assert len(names) == len(set(names)) == 3


def test_a_repository_of_one_gguf_file_is_fetched_for_its_tokenizer(model_hub: FakeHub, tmp_path: Path) -> None:
    # The metadata is at its beginning.
    with resolve("builtin:smollm2-135m").location.open("rb") as gguf:
        model_hub.files = {"model-q4.gguf": gguf.read(8 << 20), "README.md": b"words"}
    assert load_tokenizer("hf:org/name").encode_chat([{"role": "user", "content": "x"}])


def test_the_exit_code_tells_whether_a_retry_may_help(hub: FakeHub, tmp_path: Path) -> None:
    """A Job retries after exit code 75 and ends with exit code 1."""
    gone = CliRunner().invoke(main, ["fetch", "org/name", str(tmp_path), "--endpoint", "http://127.0.0.1:1"])
    assert gone.exit_code == 75
    hub.token = "secret"
    rejected = CliRunner().invoke(main, ["fetch", "org/name", str(tmp_path), "--endpoint", hub.url])
    assert rejected.exit_code == 1


def test_the_operator_finds_the_cause_of_hub_errors(hub: FakeHub, tmp_path: Path) -> None:
    """The termination message of an engine or a Job becomes a reason in the status."""
    hub.token = "secret"
    with pytest.raises(HubError) as rejected:
        get(hub, tmp_path)
    with pytest.raises(HubError) as absent:
        fetch(Reference("org/other"), tmp_path, api=HubApi(endpoint=hub.url, token="secret"))
    causes = [find_cause(str(caught.value)) for caught in (rejected, absent)]
    assert [cause.reason for cause in causes if cause] == [Reason.ACCESS_DENIED, Reason.WEIGHTS_MISSING]
