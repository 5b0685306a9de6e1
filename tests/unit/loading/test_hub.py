"""Downloads from a hub: complete, verified, in the cache of huggingface_hub, with errors of one line."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from eventually import LONG_SECONDS
from fake_hub import FakeHub, use_hub
from huggingface_hub import HfApi, constants, file_download, scan_cache_dir, snapshot_download
from huggingface_hub.utils import _http
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from random_checkpoint import LLAMA, random_tensors, write_model

from megatron_operator.controller.observe import read_progress
from megatron_operator.decision.causes import find_cause
from megatron_operator.decision.world import PodView
from megatron_operator.resource.conditions import Reason
from megatron_runtime.checkpoints.model_files import UnsafeNameError
from megatron_runtime.checkpoints.remote import hub_cache
from megatron_runtime.checkpoints.remote.download import cached_directory, connect, fetch
from megatron_runtime.checkpoints.remote.files import (
    MANIFEST_FILE,
    HubError,
    HubUnavailableError,
    Manifest,
    Progress,
    WrongContentError,
    choose,
    read_manifest,
    silent,
    verify_directory,
)
from megatron_runtime.checkpoints.remote.hub import Reference, _bar
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli import main
from megatron_runtime.cli.processes import free_ports
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
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub(dict(FILES)).running() as running:
        use_hub(monkeypatch, running.url, tmp_path_factory.mktemp("home"))
        yield running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before retries, of this project and of the library, which do not pass."""
    found: list[float] = []
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=found.append))
    return found


def get(
    directory: Path,
    pauses: list[float] | None = None,
    *,
    reference: Reference = MAIN,
    token_file: Path | None = None,
    include: tuple[str, ...] = (),
    progress: Progress = silent,
) -> Manifest:
    source, wait = connect(reference, token_file=token_file), (pauses if pauses is not None else []).append
    listing = source.list(wait=wait)
    return fetch(source, listing, choose(listing.files, include), directory, progress=progress, wait=wait)


def visible(directory: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".megatron")}


def megatron(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which reads the environment as a user's does."""
    command = [sys.executable, "-P", "-m", "megatron_runtime.cli", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LONG_SECONDS
    )


def test_only_the_files_of_a_model_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    manifest = get(tmp_path)
    assert visible(tmp_path) == {name: FILES[name] for name in WANTED}
    assert (manifest.repository, manifest.commit, set(manifest.files)) == ("org/name", hub.commit, WANTED)
    assert verify_directory(tmp_path) == manifest == read_manifest(tmp_path)


def test_files_with_the_same_content_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {f"{name}.json": b"{}" for name in "abc"}
    get(tmp_path)
    assert visible(tmp_path) == hub.files


def test_a_broken_connection_resumes_at_a_block_of_the_library(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": bytes(range(256)) * 100_000}
    hub.cut_after = [15_000_000]
    get(tmp_path)
    assert [part for _, part in hub.requests] == [None, f"bytes={constants.DOWNLOAD_CHUNK_SIZE}-"]
    assert visible(tmp_path) == hub.files


def test_a_server_without_ranges_sends_the_file_from_its_beginning(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": bytes(range(256)) * 100_000}
    hub.ignores_range = True
    hub.cut_after = [15_000_000]
    get(tmp_path)
    assert visible(tmp_path) == hub.files


def test_complete_files_of_a_killed_process_are_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.delay_seconds = LONG_SECONDS
    command = [sys.executable, "-P", "-m", "megatron_runtime.cli", "fetch", "org/name", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fetcher:
        while len(hub.requests) < 3 or visible(tmp_path).keys() != WANTED - {"model.safetensors"}:
            assert fetcher.poll() is None, f"exit code {fetcher.returncode}"
            time.sleep(0.02)
        fetcher.kill()
    hub.delay_seconds = 0.0
    hub.requests.clear()
    get(tmp_path)
    assert hub.requests == [("model.safetensors", None)]
    assert visible(tmp_path).keys() == WANTED


def test_files_that_are_complete_are_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    get(tmp_path)
    asked = len(hub.requests)
    get(tmp_path)
    assert len(hub.requests) == asked
    (tmp_path / "config.json").write_bytes(b'{"a": 2}')
    get(tmp_path)
    assert [name for name, _ in hub.requests[asked:]] == ["config.json"]


def test_another_commit_fetches_only_the_changed_files(hub: FakeHub, tmp_path: Path) -> None:
    get(tmp_path)
    asked = len(hub.requests)
    hub.commit, hub.files["config.json"] = "d" * 40, b'{"a": 3}'
    assert get(tmp_path).commit == "d" * 40
    assert [name for name, _ in hub.requests[asked:]] == ["config.json"]
    assert (tmp_path / "config.json").read_bytes() == b'{"a": 3}'


def test_files_that_a_revision_no_longer_has_are_removed(hub: FakeHub, tmp_path: Path) -> None:
    get(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    hub.commit = "d" * 40
    hub.files["model-00001-of-00001.safetensors"] = hub.files.pop("model.safetensors")
    get(tmp_path)
    assert visible(tmp_path).keys() == WANTED - {"model.safetensors"} | {"model-00001-of-00001.safetensors", "mine.txt"}


def test_two_repositories_do_not_share_a_directory(hub: FakeHub, tmp_path: Path) -> None:
    get(tmp_path)
    hub.repository = "org/other"
    with pytest.raises(HubError, match="holds files of org/name: name another one for org/other"):
        get(tmp_path, reference=Reference("org/other"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_content_is_fetched_again_once(name: str, hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged = {name: 1}
    get(tmp_path)
    assert visible(tmp_path)[name] == FILES[name]
    hub.damaged = {name: 2}
    (tmp_path / name).unlink()
    with pytest.raises(WrongContentError, match=rf"{name} of org/name@c{{40}} came twice without the digest"):
        get(tmp_path)
    assert not (tmp_path / name).exists()
    hub.damaged = {name: 2}
    with pytest.raises(WrongContentError, match="came twice"):
        cached_directory("hf:org/name")
    # The wrong content is not in the cache either.
    assert visible(cached_directory("hf:org/name"))[name] == FILES[name]


def test_the_progress_is_that_of_all_files(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    hub.files["config.json"] = b"{}"
    hub.damaged = {"model.safetensors": 1}
    get(tmp_path, progress=lambda *counts: seen.append(counts))
    assert {counts[1:] for counts in seen} == {(SIZE + 4, 3)}
    assert (seen[0][0], seen[-1][0]) == (0, SIZE + 4)
    assert 0 <= min(seen)[0] <= max(seen)[0] <= SIZE + 4
    seen.clear()
    get(tmp_path, progress=lambda *counts: seen.append(counts))
    assert {counts[0] for counts in seen} == {SIZE + 4}


def test_the_operator_reads_the_progress_of_a_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.delay_seconds = LONG_SECONDS
    (port,) = free_ports(1)
    pod = PodView("demo-engine-0-0", "1", "engine", fetching_at="127.0.0.1")
    command = [sys.executable, "-P", "-m", "megatron_runtime.cli", "fetch", "org/name"]
    options = ["--cache", str(tmp_path), "--progress-port", str(port)]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fetcher:
        while (found := read_progress(pod, port=port)) is None or found.bytes < 10:
            assert fetcher.poll() is None, f"exit code {fetcher.returncode}"
            time.sleep(0.02)
        fetcher.kill()
    assert (found.bytes, found.total_bytes) == (10, SIZE + 10), "the weights are not there yet"


def test_the_bytes_of_a_transfer_by_xet_count_once() -> None:
    """The library reports the bytes from the network and those on the disk, each since the beginning."""
    counts: list[int] = []
    with XetDownloadProgressReporter(
        reconstruction_desc="", total=30, log_level=0, tqdm_class=_bar(counts.append)
    ) as reporter:
        for written, transferred in ((0, 10), (10, 20), (30, 20)):
            report = SimpleNamespace(total_bytes=30, total_bytes_completed=written, total_bytes_completion_rate=None)
            report.total_transfer_bytes, report.total_transfer_bytes_completed = 20, transferred
            report.total_transfer_bytes_completion_rate = None
            reporter.update_progress(report)
    assert counts == [10, 30]


def test_an_overloaded_hub_is_retried_after_the_time_it_names(
    hub: FakeHub, tmp_path: Path, pauses: list[float]
) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.list_statuses = [(429, "3"), (503, "")]
    hub.statuses = [(429, "7"), (503, "9999")]
    get(tmp_path, pauses)
    assert pauses == [3.0, 2.0, 8.0, 60.0], "the library waits a second longer"


def test_retries_are_limited(hub: FakeHub, tmp_path: Path, pauses: list[float]) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.statuses = [(503, "")] * 6
    with pytest.raises(HubUnavailableError, match="the hub is overloaded: 503 slow down for org/name@main"):
        get(tmp_path, pauses)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_the_first_file_that_fails_ends_the_others(hub: FakeHub, tmp_path: Path, pauses: list[float]) -> None:
    hub.files = {f"{number}.json": b"x" * 10_000_000 for number in range(3)} | {"wrong.json": b"yz" * 500}
    hub.damaged = {"wrong.json": 2}
    hub.trickling = {f"{number}.json" for number in range(3)}
    source = connect(MAIN)
    listing = source.list()
    # The pauses between tries pass here: without them, the other files may run out of tries first.
    with pytest.raises(WrongContentError, match=r"wrong\.json"):
        fetch(source, listing, choose(listing.files, ()), tmp_path, progress=silent)
    assert visible(tmp_path) == {}


def test_a_private_repository_needs_its_token(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(HubError, match=r"401 Unauthorized .*give a token"):
        get(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(HubError, match=r"403 Forbidden .*gated repo"):
        get(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    get(tmp_path / "by-file", token_file=tmp_path / "token")
    monkeypatch.delenv("HF_TOKEN")
    Path(constants.HF_TOKEN_PATH).write_text("secret\n")
    get(tmp_path / "by-login")
    assert visible(tmp_path / "by-file") == visible(tmp_path / "by-login") == {name: FILES[name] for name in WANTED}


def test_the_token_is_not_sent_to_another_host(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files come from another host, and so do the headers of weights."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    with FakeHub(dict(FILES)).running() as store:
        hub.token, hub.elsewhere = "secret", store.url
        get(tmp_path)
        api = connect(MAIN)
        listing = api.list()
        weights = next(file for file in listing.files if file.path == "model.safetensors")
        assert b"".join(api.read(listing, weights, 100)) == FILES["model.safetensors"][:100]
        assert store.requests
        assert set(store.tokens) == {None}
    assert visible(tmp_path).keys() == WANTED


def test_the_token_is_not_sent_to_a_service_of_xet_elsewhere(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.files = {"model.safetensors": FILES["model.safetensors"]}
    with FakeHub({}).running() as service:
        hub.headers = {"x-xet-hash": "ab" * 32, "x-xet-refresh-route": f"{service.url}/token"}
        with pytest.raises(HubError, match="Repository not found"):
            get(tmp_path)
    assert (service.tokens, hub.requests) == ([None], [])


def test_missing_repositories_revisions_and_files_are_reported(hub: FakeHub, tmp_path: Path) -> None:
    for reference in (Reference("org/other"), Reference("org/name", "v9")):
        with pytest.raises(HubError, match=f"repository not found: {reference}"):
            get(tmp_path, reference=reference)
    with pytest.raises(HubError, match="has no file that is wanted"):
        get(tmp_path, include=("*.gguf",))


@pytest.mark.parametrize(
    "changes",
    [
        {"sha": "../../../evil"},
        {"sha": "main"},
        {"siblings": [{"rfilename": "../evil", "size": 1, "blobId": "b" * 40}]},
        {"siblings": [{"rfilename": "/tmp/evil", "size": 1, "blobId": "b" * 40}]},
        {"siblings": [{"rfilename": "config.json", "size": 1, "blobId": "../../evil"}]},
        {"siblings": [{"rfilename": "config.json", "size": None, "blobId": "b" * 40}]},
        {"siblings": [{"rfilename": "config.json"}]},
        {"siblings": [{"size": 1}]},
        {"siblings": 7},
    ],
    ids=str,
)
def test_a_list_of_files_that_cannot_be_used_is_rejected(changes: dict[str, Any], hub: FakeHub, tmp_path: Path) -> None:
    hub.list_body = json.dumps({**hub.listing(), **changes}).encode()
    with pytest.raises(HubError, match=hub.url) as rejected:
        get(tmp_path / "in")
    assert str(rejected.value).isprintable()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b"{}", b"\xff"])
def test_a_server_that_is_no_hub_is_named(body: bytes, hub: FakeHub, tmp_path: Path) -> None:
    hub.list_body = body
    with pytest.raises(HubError, match=rf"{hub.url} .*: .*name another hub") as rejected:
        get(tmp_path)
    assert str(rejected.value).isprintable()


def test_a_commit_other_than_the_requested_one_is_rejected(hub: FakeHub) -> None:
    wanted = "d" * 40
    hub.branch = wanted
    with pytest.raises(HubError, match=f"with sha '{hub.commit}': want a commit, and the one that was requested"):
        cached_directory(f"hf:org/name@{wanted}")


@pytest.mark.parametrize("name", ["etag", "x-linked-etag", "x-repo-commit"])
@pytest.mark.parametrize("value", ["../../../../evil", '"../../../../evil"', "/tmp/evil", ".."])
def test_headers_of_the_hub_do_not_lead_out_of_the_cache(
    name: str, value: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_hub(monkeypatch, hub.url, tmp_path / "a/b/c/d/e/home")
    hub.headers = {name: value}
    with pytest.raises(HubError, match=f"(?i)answers with {name} .*: want a name without '/'"):
        cached_directory("hf:org/name")
    found = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(hub_cache())]
    assert (found, hub.requests) == ([], [])


def test_messages_of_the_hub_are_printed_without_control_characters(hub: FakeHub, tmp_path: Path) -> None:
    hub.list_statuses = [(403, "")]
    hub.list_message = "\x1b[2Jno\x07" + "x" * 5000
    with pytest.raises(HubError, match="403") as rejected:
        get(tmp_path)
    assert str(rejected.value).isprintable()
    assert len(str(rejected.value)) < 1000


def test_a_repository_cannot_write_the_manifest(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[MANIFEST_FILE] = b"{}"
    manifest = get(tmp_path)
    assert set(manifest.files) == WANTED
    assert read_manifest(tmp_path) == manifest


def test_a_full_disk_is_reported(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
        with pytest.raises(
            OSError, match=r"no space left on device: .* has 100 bytes free, \d+ are to be fetched: free"
        ):
            get(tmp_path)
    assert not hub.requests

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(HfApi, "hf_hub_download", full)
    with pytest.raises(OSError, match="no space left on device to fetch org/name@main: free some") as failed:
        get(tmp_path)
    found = find_cause(f"OSError: {failed.value}")
    assert found is not None
    assert found.reason is Reason.DISK_FULL


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
    listing = connect(MAIN).list()
    assert len(choose(listing.files, ())) == 4


def test_verify_names_changed_and_missing_files(hub: FakeHub, tmp_path: Path) -> None:
    get(tmp_path)
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
        use_hub(monkeypatch, hub.url, tmp_path / "home")
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
    for path, content in model_hub.files.items():
        (repository / "blobs" / model_hub.digest(path)).write_bytes(content)
    resolve("hf:org/name")
    assert not model_hub.requests
    shutil.rmtree(repository / ".megatron")
    weights = "model.safetensors"
    (repository / "blobs" / model_hub.digest(weights)).write_bytes(bytes(len(model_hub.files[weights])))
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


@pytest.mark.parametrize("revision", ["", "@main", f"@{'c' * 40}"])
def test_offline_mode_uses_what_the_cache_has(
    revision: str, model_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hf:org/name{revision}"
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and .* does not have all files of org/name@"):
            resolve(name)
    # Another program fetched it, so there is no manifest.
    snapshot_download("org/name", token=model_hub.token)
    requests = len(model_hub.tokens)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert visible(resolve(name).path) == model_hub.files
    assert load_tokenizer(name).encode("a") == [0]
    assert len(model_hub.tokens) == requests


def test_offline_mode_fetches_nothing_to_a_directory(hub: FakeHub, tmp_path: Path) -> None:
    failed = megatron("fetch", "org/name", str(tmp_path / "a"), HF_HUB_OFFLINE="1")
    assert (failed.returncode, failed.stderr) == (1, "Error: HF_HUB_OFFLINE is set: unset it to fetch org/name@main\n")
    assert hub.tokens == []


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "gopher://127.0.0.1:9"])
def test_a_hub_on_loopback_is_reached_without_a_proxy(proxy: str, hub: FakeHub, tmp_path: Path) -> None:
    done = megatron("fetch", "org/name", str(tmp_path), HTTP_PROXY=proxy, http_proxy=proxy, ALL_PROXY=proxy)
    assert done.returncode == 0, done.stderr
    assert visible(tmp_path).keys() == WANTED
    assert len(hub.tokens) == 1 + 2 * len(WANTED), "one request lists, and two fetch a file"


@pytest.mark.parametrize(
    ("proxy", "exempt", "code", "words"),
    [
        ("http://127.0.0.1:9", "", 75, "does not answer for org/name@main"),
        ("gopher://127.0.0.1:9", "", 1, "cannot be used for hub.invalid"),
        ("gopher://127.0.0.1:9", "hub.invalid", 75, "Name or service not known"),
    ],
)
def test_no_proxy_exempts_a_hub(proxy: str, exempt: str, code: int, words: str, hub: FakeHub, tmp_path: Path) -> None:
    """The name has no address: only a proxy could reach it."""
    arguments = ("fetch", "org/name", str(tmp_path), "--endpoint", "http://hub.invalid")
    done = megatron(*arguments, HTTP_PROXY=proxy, http_proxy=proxy, NO_PROXY=exempt, no_proxy=exempt)
    assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_the_exit_code_tells_whether_a_retry_may_help(hub: FakeHub, tmp_path: Path) -> None:
    """A Job retries after exit code 75 and ends with exit code 1."""
    gone = megatron("fetch", "org/name", str(tmp_path), "--endpoint", "http://127.0.0.1:1")
    assert gone.returncode == os.EX_TEMPFAIL
    assert len(gone.stderr.splitlines()) == 1
    assert "http://127.0.0.1:1 does not answer for org/name@main" in gone.stderr
    hub.token = "secret"
    rejected = megatron("fetch", "org/name", str(tmp_path), "--endpoint", hub.url)
    assert (rejected.returncode, len(rejected.stderr.splitlines())) == (1, 1)


def test_the_operator_finds_the_cause_of_hub_errors(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The termination message of an engine or a Job becomes a reason in the status."""
    hub.token = "secret"
    with pytest.raises(HubError) as rejected:
        get(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(HubError) as absent:
        get(tmp_path, reference=Reference("org/other"))
    causes = [find_cause(str(caught.value)) for caught in (rejected, absent)]
    assert [cause.reason for cause in causes if cause] == [Reason.ACCESS_DENIED, Reason.WEIGHTS_MISSING]
