"""A hub that lies: nothing it says becomes a path outside, a secret elsewhere, or more memory than is stated."""

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_hub import FakeHub

from megatron_runtime.checkpoints.hub import client as hub_api
from megatron_runtime.checkpoints.hub.client import (
    FileTransfer,
    HubApi,
    HubError,
    HubUnavailableError,
    Listing,
    Reference,
    RemoteFile,
    parse_listing,
)
from megatron_runtime.checkpoints.hub.download import MANIFEST_FILE, fetch, model_directory
from megatron_runtime.checkpoints.model_files import ModelFileError

MAIN = Reference("org/name")
FILES = {"config.json": b'{"a": 1}', "sub/model.safetensors": bytes(1000)}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(dict(FILES)).running() as running:
        yield running


@pytest.fixture
def home(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


ENTRY = {"rfilename": "config.json", "size": 8, "blobId": "b" * 40}


def get(hub: FakeHub, directory: Path, **options: Any) -> None:
    api = HubApi(endpoint=hub.url, **options)
    try:
        fetch(MAIN, directory, api=api, wait=lambda seconds: None)
    finally:
        api.close()


def everything_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.mark.parametrize("sha", ["../../../evil", "/tmp/evil"])
def test_a_commit_that_is_none_becomes_no_path(sha: str, hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.list_body = json.dumps({**hub.listing(), "sha": sha}).encode()
    with pytest.raises(HubError, match=r"with sha .*: want 40 or 64 lowercase hexadecimal digits") as refused:
        model_directory("hf:org/name")
    assert hub.url in str(refused.value)
    assert everything_below(tmp_path) == set()
    assert not hub.requests


@pytest.mark.parametrize(
    "sha", ["..", "", "main", "a" * 39, "a" * 41, "A" * 40, "g" * 40, "a" * 39 + "\n", "\x1b[2J", None, 7, {}]
)
def test_a_commit_is_hexadecimal_digits(sha: Any) -> None:
    body = json.dumps({"sha": sha, "siblings": [ENTRY]}).encode()
    with pytest.raises(HubError, match=r"the-hub answers for org/name@main with sha .*: want 40 or 64") as refused:
        parse_listing(body, MAIN, hub="the-hub")
    assert str(refused.value).isprintable()


def test_another_commit_than_was_named_is_refused(hub: FakeHub, home: Path) -> None:
    wanted = "d" * 40
    hub.list_body = json.dumps(hub.listing()).encode()
    hub.branch = wanted
    with pytest.raises(HubError, match=f"with sha '{hub.commit}': want the commit that was asked for, {wanted}"):
        model_directory(f"hf:org/name@{wanted}")


def test_a_commit_of_sha256_is_one(hub: FakeHub, home: Path) -> None:
    hub.commit = "e" * 64
    assert model_directory("hf:org/name").name == "e" * 64
    asked = hub.listed
    model_directory(f"hf:org/name@{hub.commit}")
    assert hub.listed == asked


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        *(({**ENTRY, "blobId": value}, "blobId") for value in ("../../evil", "", "b" * 39, 7, ["b" * 40])),
        ({"rfilename": "config.json", "size": 8}, "blobId"),
        *(({**ENTRY, "size": value}, "size") for value in (-1, 1.5, "8", None, True, 1 << 60)),
        *(({**ENTRY, "lfs": {"sha256": value, "size": 8}}, "sha256") for value in ("../x", "c" * 63, 7)),
        *(({**ENTRY, "lfs": value}, "lfs") for value in ("text", 7, [1])),
        *(
            ({**ENTRY, "rfilename": value}, "rfilename")
            for value in (
                "/etc/x",
                "../x",
                "a/../../x",
                "a\\b",
                "a\0b",
                "a//b",
                ".",
                "",
                "x" * 300,
                "\ud800",
                None,
                7,
                {},
            )
        ),
        *((value, "rfilename") for value in (None, 7, "config.json", [])),
    ],
)
def test_an_entry_that_is_none_is_refused_by_field(entry: Any, field: str) -> None:
    body = json.dumps({"sha": "c" * 40, "siblings": [entry]}).encode()
    said = rf"the-hub answers for org/name@main with [^:]*{field}.*: want .*nothing is fetched"
    with pytest.raises(HubError, match=said) as refused:
        parse_listing(body, MAIN, hub="the-hub")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"sha": "' + b"c" * 40 + b'", "siblings": 7}',
    ],
)
def test_a_list_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(HubError, match=r"the-hub answers for org/name@main"):
        parse_listing(body, MAIN, hub="the-hub")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["config.json", "Config.JSON"], "which differ by case only"),
        (["é.json", "e\N{COMBINING ACUTE ACCENT}.json"], "which differ by case only"),
        (["config.json", "config.json"], "which differ by case only"),
        (["sub", "sub/config.json"], "its directory 'sub' as a file"),
        (["a/b", "a/b/c/config.json"], "its directory 'a/b' as a file"),
        (["SUB", "sub/config.json"], "its directory 'sub' as a file"),
    ],
)
def test_names_that_are_one_on_some_file_systems(names: list[str], said: str, hub: FakeHub, tmp_path: Path) -> None:
    entries = [{**ENTRY, "rfilename": name} for name in names]
    hub.list_body = json.dumps({"sha": "c" * 40, "siblings": entries}).encode()
    with pytest.raises(HubError, match=said):
        get(hub, tmp_path / "in")
    assert everything_below(tmp_path) == {"in", "in/.megatron-lock"}


def test_our_own_files_are_not_written_in_another_case(hub: FakeHub, tmp_path: Path) -> None:
    hub.files[".Megatron-Manifest.json"] = b"{}"
    get(hub, tmp_path)
    assert ".Megatron-Manifest.json" not in everything_below(tmp_path)


def test_a_long_name_in_many_directories_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    name = "/".join(["d" * 200] * 4 + ["model.safetensors"])
    hub.files = {name: b"weights"}
    get(hub, tmp_path)
    assert (tmp_path / name).read_bytes() == b"weights"


def test_a_directory_that_is_a_link_is_not_written_through(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "in" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(HubError, match=r"is a link to .*outside of .*remove the link"):
        get(hub, tmp_path / "in")
    assert everything_below(tmp_path / "outside") == set()


@pytest.mark.parametrize("name", [".megatron-lock", f"{MANIFEST_FILE}.new"])
def test_our_own_files_are_not_written_through_a_link(name: str, hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "in" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        get(hub, tmp_path / "in")
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_partial_file_is_not_written_through_a_link(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {"config.json": FILES["config.json"]}
    hub.cut_after = [3, 0, 0, 0, 0, 0]
    with pytest.raises(HubUnavailableError):
        get(hub, tmp_path / "in")
    (partial,) = (tmp_path / "in" / ".megatron-partial").iterdir()
    (tmp_path / "outside").write_text("precious")
    partial.unlink()
    partial.symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        get(hub, tmp_path / "in")
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_cache_that_leads_elsewhere_is_not_used(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    (home / "hub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (home / "hub" / "models--org--name").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFileError, match="outside of"):
        model_directory("hf:org/name")
    assert everything_below(tmp_path / "outside") == set()


# --- redirects, sizes and time ---------------------------------------------------------------------------------------


def transport(answer: Callable[[httpx.Request], httpx.Response], *, endpoint: str) -> HubApi:
    api = HubApi(endpoint=endpoint, token="secret")
    api._client._transport = httpx.MockTransport(answer)
    api._client._mounts = {}
    return api


@pytest.mark.parametrize(
    ("target", "has_token"),
    [
        ("https://hub.test/elsewhere", True),
        ("https://hub.test:444/elsewhere", False),
        ("https://other.test/elsewhere", False),
        ("https://hub.test.other.test/elsewhere", False),
        ("https://hub.test@other.test/elsewhere", False),
    ],
)
def test_the_token_goes_to_the_hub_alone(target: str, has_token: bool) -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers.get("authorization")))
        if len(seen) == 1:
            return httpx.Response(302, headers={"location": target})
        return httpx.Response(404)

    with pytest.raises(HubError, match="not found"):
        transport(answer, endpoint="https://hub.test").list(MAIN)
    assert seen[0][1] == "Bearer secret"
    assert (seen[1][1] == "Bearer secret") is has_token


@pytest.mark.parametrize("target", ["http://hub.test/x", "http://169.254.169.254/latest/meta-data"])
def test_a_redirect_without_encryption_is_not_followed(target: str) -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(302, headers={"location": target})

    with pytest.raises(HubError, match="without encryption: nothing is fetched from there"):
        transport(answer, endpoint="https://hub.test").list(MAIN)
    assert len(seen) == 1


@pytest.mark.parametrize("target", ["file:///etc/passwd", "gopher://x/", "https://[::bad", "https://hub.test/again"])
def test_a_redirect_that_leads_nowhere_is_an_error_of_the_hub(target: str) -> None:
    api = transport(lambda request: httpx.Response(302, headers={"location": target}), endpoint="https://hub.test")
    with pytest.raises((HubError, HubUnavailableError), match=r"https://hub\.test"):
        api.list(MAIN)


def test_an_endpoint_that_is_no_url() -> None:
    with pytest.raises(HubError, match="is no URL"):
        HubApi(endpoint="https://[::bad")


def test_a_list_without_an_end_is_cut_off(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_api, "MAX_LISTING_BYTES", 4 << 20)
    hub.list_forever = True
    with pytest.raises(HubError, match=f"in more than {4 << 20} bytes"):
        HubApi(endpoint=hub.url).list(MAIN)


def test_a_compressed_list_is_not_unpacked(hub: FakeHub) -> None:
    hub.list_body, hub.list_headers = gzip.compress(bytes(50_000_000)), {"content-encoding": "gzip"}
    with pytest.raises(HubError, match="compresses its list of the files"):
        HubApi(endpoint=hub.url).list(MAIN)


def test_a_list_that_takes_for_ever_is_given_up(hub: FakeHub) -> None:
    now = iter(range(0, 10**6, 61))
    hub.files = {f"{number}.json": b"{}" for number in range(5000)}
    with pytest.raises(HubUnavailableError, match="did not list the files of org/name@main within 120 s"):
        HubApi(endpoint=hub.url, clock=lambda: next(now)).list(MAIN)


def test_a_list_of_too_many_files_is_refused() -> None:
    body = b'{"sha": "' + b"c" * 40 + b'", "siblings": [' + b"0," * hub_api.MAX_FILES + b"0]}"
    with pytest.raises(HubError, match=f"siblings a list of length {hub_api.MAX_FILES + 1}: want a list of at most"):
        parse_listing(body, MAIN, hub="the-hub")


def test_a_file_that_comes_by_the_byte_is_given_up(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection brings a little and then ends: that is no progress."""
    hub.files = {"model.safetensors": bytes(1_000_000)}
    hub.cut_after = [1] * 100
    with pytest.raises(HubUnavailableError, match="run this again to go on"):
        get(hub, tmp_path)
    assert len(hub.requests) == 6


class _Trickling(HubApi):
    """Gives a byte each time, without an end."""

    opened = 0

    @contextmanager
    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[Iterator[bytes]]:
        self.opened += 1
        yield itertools.repeat(b"x")


def test_a_connection_that_trickles_is_broken_off(tmp_path: Path) -> None:
    """By a clock that moves a second with each byte."""
    file = RemoteFile("model.safetensors", 1_000_000, "a" * 64, None)
    api = _Trickling()
    now = itertools.count(step=1.0)
    with pytest.raises(HubUnavailableError, match="came at 60 bytes in 60 s"):
        FileTransfer(
            api=api,
            listing=Listing("org/name", "c" * 40, (file,)),
            file=file,
            target=tmp_path / "model.safetensors",
            partial=tmp_path / "partial",
            received=lambda count: None,
            wait=lambda seconds: None,
            clock=lambda: next(now),
        ).run()
    assert api.opened == 6


def test_what_the_hub_says_is_printed_without_control_characters(hub: FakeHub, tmp_path: Path) -> None:
    answer = httpx.Response(403, headers={"x-error-message": "\x1b[2Jno\x07" + "x" * 5000})
    with pytest.raises(HubError, match="403") as refused:
        transport(lambda request: answer, endpoint="https://hub.test").list(MAIN)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000
