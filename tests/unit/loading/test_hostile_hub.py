"""A hostile hub cannot write outside of the directory, obtain the token of another host, or exceed memory limits."""

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

from megatron_runtime.checkpoints.model_files import ModelFileError
from megatron_runtime.checkpoints.remote import hub as hub_api
from megatron_runtime.checkpoints.remote.download import MANIFEST_FILE, cached_directory, fetch
from megatron_runtime.checkpoints.remote.hub import (
    HubApi,
    HubError,
    HubUnavailableError,
    Listing,
    Reference,
    RemoteFile,
    parse_listing,
)

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
def test_an_invalid_commit_is_not_used_as_a_path(sha: str, hub: FakeHub, home: Path, tmp_path: Path) -> None:
    hub.list_body = json.dumps({**hub.listing(), "sha": sha}).encode()
    with pytest.raises(HubError, match=r"with sha .*: want 40 or 64 lowercase hexadecimal digits") as rejected:
        cached_directory("hf:org/name")
    assert hub.url in str(rejected.value)
    assert everything_below(tmp_path) == set()
    assert not hub.requests


@pytest.mark.parametrize(
    "sha", ["..", "", "main", "a" * 39, "a" * 41, "A" * 40, "g" * 40, "a" * 39 + "\n", "\x1b[2J", None, 7, {}]
)
def test_a_commit_must_be_hexadecimal_digits(sha: Any) -> None:
    body = json.dumps({"sha": sha, "siblings": [ENTRY]}).encode()
    with pytest.raises(HubError, match=r"the-hub answers for org/name@main with sha .*: want 40 or 64") as rejected:
        parse_listing(body, MAIN, hub="the-hub")
    assert str(rejected.value).isprintable()


def test_a_commit_other_than_the_requested_one_is_rejected(hub: FakeHub, home: Path) -> None:
    wanted = "d" * 40
    hub.list_body = json.dumps(hub.listing()).encode()
    hub.branch = wanted
    with pytest.raises(HubError, match=f"with sha '{hub.commit}': want the requested commit, {wanted}"):
        cached_directory(f"hf:org/name@{wanted}")


def test_a_commit_may_be_a_sha256(hub: FakeHub, home: Path) -> None:
    hub.commit = "e" * 64
    assert cached_directory("hf:org/name").name == "e" * 64
    asked = hub.listed
    cached_directory(f"hf:org/name@{hub.commit}")
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
def test_an_invalid_entry_is_rejected_by_field(entry: Any, field: str) -> None:
    body = json.dumps({"sha": "c" * 40, "siblings": [entry]}).encode()
    message = rf"the-hub answers for org/name@main with [^:]*{field}.*: want .*nothing is fetched"
    with pytest.raises(HubError, match=message) as rejected:
        parse_listing(body, MAIN, hub="the-hub")
    assert str(rejected.value).isprintable()


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
def test_an_invalid_list_is_rejected(body: bytes) -> None:
    with pytest.raises(HubError, match=r"the-hub answers for org/name@main"):
        parse_listing(body, MAIN, hub="the-hub")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "Config.JSON"], "which differ by case only"),
        (["é.json", "e\N{COMBINING ACUTE ACCENT}.json"], "which differ by case only"),
        (["config.json", "config.json"], "which differ by case only"),
        (["sub", "sub/config.json"], "its directory 'sub' as a file"),
        (["a/b", "a/b/c/config.json"], "its directory 'a/b' as a file"),
        (["SUB", "sub/config.json"], "its directory 'sub' as a file"),
    ],
)
def test_names_that_collide_on_some_file_systems_are_rejected(
    names: list[str], message: str, hub: FakeHub, tmp_path: Path
) -> None:
    entries = [{**ENTRY, "rfilename": name} for name in names]
    hub.list_body = json.dumps({"sha": "c" * 40, "siblings": entries}).encode()
    with pytest.raises(HubError, match=message):
        get(hub, tmp_path / "in")
    assert everything_below(tmp_path) == {"in", "in/.megatron-lock"}


def test_own_files_are_not_overwritten_by_names_in_another_case(hub: FakeHub, tmp_path: Path) -> None:
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
def test_own_files_are_not_written_through_a_link(name: str, hub: FakeHub, tmp_path: Path) -> None:
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


def test_a_cache_that_links_elsewhere_is_not_used(hub: FakeHub, home: Path, tmp_path: Path) -> None:
    (home / "hub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (home / "hub" / "models--org--name").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFileError, match="outside of"):
        cached_directory("hf:org/name")
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
def test_only_the_hub_gets_the_token(target: str, has_token: bool) -> None:
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
def test_an_unusable_redirect_is_an_error_of_the_hub(target: str) -> None:
    api = transport(lambda request: httpx.Response(302, headers={"location": target}), endpoint="https://hub.test")
    with pytest.raises((HubError, HubUnavailableError), match=r"https://hub\.test"):
        api.list(MAIN)


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(HubError, match="is not a URL"):
        HubApi(endpoint="https://[::bad")


def test_an_endless_list_is_rejected_at_the_limit(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_api, "MAX_LISTING_BYTES", 4 << 20)
    hub.list_forever = True
    with pytest.raises(HubError, match=f"in more than {4 << 20} bytes"):
        HubApi(endpoint=hub.url).list(MAIN)


def test_a_compressed_list_is_not_decompressed(hub: FakeHub) -> None:
    hub.list_body, hub.list_headers = gzip.compress(bytes(50_000_000)), {"content-encoding": "gzip"}
    with pytest.raises(HubError, match="compresses its list of the files"):
        HubApi(endpoint=hub.url).list(MAIN)


def test_a_slow_list_times_out(hub: FakeHub) -> None:
    now = iter(range(0, 10**6, 61))
    hub.files = {f"{number}.json": b"{}" for number in range(5000)}
    with pytest.raises(HubUnavailableError, match="did not list the files of org/name@main within 120 s"):
        HubApi(endpoint=hub.url, clock=lambda: next(now)).list(MAIN)


def test_a_list_of_too_many_files_is_rejected() -> None:
    body = b'{"sha": "' + b"c" * 40 + b'", "siblings": [' + b"0," * hub_api.MAX_FILES + b"0]}"
    with pytest.raises(HubError, match=f"siblings a list of length {hub_api.MAX_FILES + 1}: want a list of at most"):
        parse_listing(body, MAIN, hub="the-hub")


def test_a_file_that_arrives_a_byte_per_connection_fails(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection transfers a byte and ends, which does not count as progress."""
    hub.files = {"model.safetensors": bytes(1_000_000)}
    hub.cut_after = [1] * 100
    with pytest.raises(HubUnavailableError, match="run this again to resume"):
        get(hub, tmp_path)
    assert len(hub.requests) == 6


class _Trickling(HubApi):
    """Transfers one byte at a time, without an end."""

    opened = 0

    def list(self, reference: Reference, **_: Any) -> Listing:
        return Listing(reference.repository, "c" * 40, (RemoteFile("model.safetensors", 1_000_000, "a" * 64, None),))

    @contextmanager
    def open(self, listing: Listing, file: RemoteFile, *, start: int) -> Iterator[Iterator[bytes]]:
        self.opened += 1
        yield itertools.repeat(b"x")


def test_a_connection_below_the_minimum_rate_is_closed(tmp_path: Path) -> None:
    """The clock advances a second with each byte."""
    now = itertools.count(step=1.0)
    api = _Trickling(clock=lambda: next(now))
    with pytest.raises(HubUnavailableError, match="came at 60 bytes in 60 s"):
        fetch(MAIN, tmp_path, api=api, wait=lambda seconds: None)
    assert api.opened == 6


def test_messages_of_the_hub_are_printed_without_control_characters(hub: FakeHub, tmp_path: Path) -> None:
    answer = httpx.Response(403, headers={"x-error-message": "\x1b[2Jno\x07" + "x" * 5000})
    with pytest.raises(HubError, match="403") as rejected:
        transport(lambda request: answer, endpoint="https://hub.test").list(MAIN)
    assert str(rejected.value).isprintable()
    assert len(str(rejected.value)) < 1000
