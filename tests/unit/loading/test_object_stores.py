"""Downloads from object stores: complete, of one version, resumable, with clear errors. The S3 server is moto's."""

import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from go_modules import kept_programs
from object_server import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    BUCKET,
    KEYS,
    FaultyProxy,
    azure_server,
    gcs_server,
    s3_server,
    upload,
    upload_to_azure,
    upload_to_gcs,
)
from random_checkpoint import LLAMA, random_tensors, write_model
from soak import SOAK
from threaded_server import serving

from megatron_operator.controller.observe import read_progress
from megatron_operator.decision.causes import find_cause
from megatron_operator.decision.world import PodView
from megatron_operator.resource.conditions import Reason
from megatron_runtime.checkpoints.remote.download import connect, fetch, parse_reference
from megatron_runtime.checkpoints.remote.files import (
    MANIFEST_FILE,
    Manifest,
    WrongContentError,
    choose,
    verify_directory,
)
from megatron_runtime.checkpoints.remote.metadata import metadata_directory
from megatron_runtime.checkpoints.remote.object_store import (
    ObjectReference,
    ObjectStoreError,
    ObjectStoreUnavailableError,
)
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli import main
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.server.settings import default_model_name
from megatron_runtime.tokenization.loader import load_tokenizer

FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 40_000,
    "sub/tokenizer.json": b"{}",
    "README.md": b"words",
}
WANTED = {"config.json", "model.safetensors", "sub/tokenizer.json"}
SIZE = len(FILES["model.safetensors"])


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """A proxy before the S3 server, which the environment names; the caches are empty."""
    with FaultyProxy(s3).running() as running:
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": running.url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield running


@pytest.fixture
def prefix(s3: str, request: pytest.FixtureRequest) -> str:
    """A prefix of this test with the files."""
    name = f"{request.node.name}/v1"
    upload(s3, name, FILES)
    return name


def get(url: str, directory: Path, pauses: list[float] | None = None) -> Manifest:
    source, wait = connect(parse_reference(url)), (pauses if pauses is not None else []).append
    listing = source.list(wait=wait)
    return fetch(source, listing, choose(listing.files, ()), directory, wait=wait)


def visible(directory: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".megatron")}


def test_the_files_below_a_prefix_are_fetched(proxy: FaultyProxy, prefix: str, s3: str, tmp_path: Path) -> None:
    upload(s3, f"{prefix}0", {"config.json": b"of another model"})
    manifest = get(f"s3://{BUCKET}/{prefix}/", tmp_path)
    assert visible(tmp_path) == {name: FILES[name] for name in WANTED}
    assert (manifest.repository, set(manifest.files)) == (f"s3://{BUCKET}/{prefix}", WANTED)
    assert verify_directory(tmp_path) == manifest


def test_a_broken_connection_resumes_at_the_byte_after_the_last_piece(
    proxy: FaultyProxy, s3: str, tmp_path: Path
) -> None:
    upload(s3, "resumed", {"model.safetensors": FILES["model.safetensors"]})
    proxy.cut_after = [1 << 20, 300_000, 2 << 20]
    pauses: list[float] = []
    get(f"s3://{BUCKET}/resumed", tmp_path, pauses)
    assert visible(tmp_path) == {"model.safetensors": FILES["model.safetensors"]}
    starts = [int(part.removeprefix("bytes=").split("-")[0]) for part in proxy.ranges("model.safetensors") if part]
    assert starts == sorted(starts), "no byte before the last complete piece is transferred again"
    assert len(pauses) >= 1


def test_a_killed_download_resumes(proxy: FaultyProxy, s3: str, tmp_path: Path) -> None:
    upload(s3, "killed", {"model.safetensors": FILES["model.safetensors"]})
    _kill_and_resume(proxy, f"s3://{BUCKET}/killed", tmp_path / "model")


@pytest.mark.skipif(not SOAK, reason="builds a Google Cloud Storage server: set MEGATRON_SOAK=1")
def test_a_killed_download_from_google_cloud_storage_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs_server(kept_programs()) as server, FaultyProxy(server).running() as proxy:
        monkeypatch.setenv("GOOGLE_BASE_URL", proxy.url)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        upload_to_gcs(server, "killed", {"model.safetensors": FILES["model.safetensors"]})
        _kill_and_resume(proxy, f"gs://{BUCKET}/killed", tmp_path / "model")
        upload_to_gcs(server, "llama/v1", FILES)
        get(f"gs://{BUCKET}/llama/v1", tmp_path / "llama")
        assert visible(tmp_path / "llama") == {name: FILES[name] for name in WANTED}
        with pytest.raises(ObjectStoreError, match="no objects with the prefix 'nothing' in bucket models"):
            get(f"gs://{BUCKET}/nothing", tmp_path / "nothing")


@pytest.mark.skipif(not SOAK, reason="installs an Azure Blob Storage server: set MEGATRON_SOAK=1")
def test_a_killed_download_from_azure_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with azure_server(kept_programs()) as server, FaultyProxy(server).running() as proxy:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/{AZURE_ACCOUNT}")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
        upload_to_azure(server, "killed", {"model.safetensors": FILES["model.safetensors"]})
        _kill_and_resume(proxy, f"az://{BUCKET}/killed", tmp_path / "model")
        upload_to_azure(server, "llama/v1", FILES)
        get(f"az://{BUCKET}/llama/v1", tmp_path / "llama")
        assert visible(tmp_path / "llama") == {name: FILES[name] for name in WANTED}
        with pytest.raises(ObjectStoreError, match=r"az://absent/a does not exist \(404 ContainerNotFound\)"):
            get("az://absent/a", tmp_path / "absent")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY[4:])
        with pytest.raises(ObjectStoreError, match=r"denied \(403 \w+\): set AZURE_STORAGE_ACCOUNT_NAME"):
            get(f"az://{BUCKET}/llama/v1", tmp_path / "denied")


def _kill_and_resume(proxy: FaultyProxy, url: str, directory: Path) -> None:
    """Kill `megatron fetch` in the middle of model.safetensors, and run it again."""
    proxy.paused.set()
    command = [sys.executable, "-m", "megatron_runtime.cli", "fetch", url, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fetcher:
        while not proxy.halted.wait(0.1):
            assert fetcher.poll() is None, f"exit code {fetcher.returncode}"
        # The first mebibyte is a request of its own, which is on the disk when the second one begins.
        fetcher.send_signal(signal.SIGKILL)
    parts = (directory / ".megatron-partial").rglob("*")
    assert 1 << 20 <= sum(path.stat().st_size for path in parts if path.is_file()) < SIZE
    assert not (directory / "model.safetensors").exists()
    proxy.paused.clear()
    before = len(proxy.requests)
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"{directory} holds 1 files" in done.stdout
    ranges = [part for _, _, part in proxy.requests[before:] if part]
    assert int(ranges[0].removeprefix("bytes=").split("-")[0]) >= 1 << 20
    assert visible(directory) == {"model.safetensors": FILES["model.safetensors"]}


def test_an_object_that_changes_is_not_mixed_with_its_earlier_content(
    proxy: FaultyProxy, s3: str, tmp_path: Path
) -> None:
    upload(s3, "changing", {"model.safetensors": bytes(3 << 20)})
    reference = parse_reference(f"s3://{BUCKET}/changing")
    api = connect(reference)
    listing = api.list()
    upload(s3, "changing", {"model.safetensors": b"x" * (3 << 20)})
    with pytest.raises(ObjectStoreError, match=r"model\.safetensors of s3://models/changing changed while it was read"):
        list(api.read(listing, listing.files[0], 3 << 20))
    # The next run lists the new version; a complete file of the same size is replaced.
    get(f"s3://{BUCKET}/changing", tmp_path)
    upload(s3, "changing", {"model.safetensors": b"y" * (3 << 20)})
    get(f"s3://{BUCKET}/changing", tmp_path)
    assert visible(tmp_path) == {"model.safetensors": b"y" * (3 << 20)}


def test_the_digests_of_an_uploaded_manifest_are_verified(proxy: FaultyProxy, s3: str, tmp_path: Path) -> None:
    entry = {"sha256": "0" * 64, "size": 8}
    manifest = json.dumps({"repository": "a/b", "commit": "c", "files": {"config.json": entry}}).encode()
    upload(s3, "manifest", {"config.json": b'{"a": 1}', MANIFEST_FILE: manifest})
    with pytest.raises(WrongContentError, match=r"config\.json of s3://models/manifest@\w+ came twice without"):
        get(f"s3://{BUCKET}/manifest", tmp_path)
    upload(s3, "manifest", {"config.json": b'{"a": 12}'})
    with pytest.raises(ObjectStoreError, match=r"'config\.json' of .* has 9 bytes, its \S+ lists 8: upload"):
        get(f"s3://{BUCKET}/manifest", tmp_path)
    upload(s3, "manifest", {MANIFEST_FILE: manifest.replace(b"config.json", b"other.json")})
    with pytest.raises(ObjectStoreError, match=r"has no object 'other\.json', which its \S+ lists"):
        get(f"s3://{BUCKET}/manifest", tmp_path)


def test_a_missing_object_is_permanent_and_an_overloaded_server_is_not(
    proxy: FaultyProxy, prefix: str, tmp_path: Path
) -> None:
    with pytest.raises(ObjectStoreError, match=r"no objects with the prefix 'nothing' in bucket models") as missing:
        get(f"s3://{BUCKET}/nothing", tmp_path)
    found = find_cause(f"ObjectStoreError: {missing.value}")
    assert found is not None
    assert found.reason is Reason.WEIGHTS_MISSING
    with pytest.raises(ObjectStoreError, match=r"s3://absent/a does not exist \(404 NoSuchBucket\)"):
        get("s3://absent/a", tmp_path)
    with pytest.raises(ObjectStoreError, match=r"s3://models/a\.gguf does not exist \(404\)"):
        get(f"s3://{BUCKET}/a.gguf", tmp_path)
    proxy.statuses = [503, 503]
    pauses: list[float] = []
    get(f"s3://{BUCKET}/{prefix}", tmp_path, pauses)
    assert pauses == [1.0, 2.0]
    proxy.statuses = [500] * 6
    with pytest.raises(ObjectStoreUnavailableError, match=r"overloaded \(500\)"):
        get(f"s3://{BUCKET}/{prefix}", tmp_path / "again")
    proxy.statuses = [403]
    with pytest.raises(ObjectStoreError, match=r"denied \(403\): set AWS_ACCESS_KEY_ID and AWS_SECRET") as denied:
        get(f"s3://{BUCKET}/{prefix}", tmp_path / "denied")
    found = find_cause(f"ObjectStoreError: {denied.value}")
    assert found is not None
    assert found.reason is Reason.ACCESS_DENIED


def test_errors_name_the_reference_and_quote_no_url(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    result = CliRunner().invoke(main, ["fetch", f"s3://{BUCKET}/a", str(tmp_path / "a")])
    assert result.exit_code == os.EX_TEMPFAIL
    assert "the server of s3://models/a does not answer" in result.output
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2024-01-01&sig=secretsignature")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/account")
    result = CliRunner().invoke(main, ["fetch", "az://container/a", str(tmp_path / "b")])
    assert "the server of az://container/a does not answer" in result.output
    assert "secretsignature" not in result.output


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/a?versionId=1",
        "https://user:password@host/a",
        "https://host/a%2fb",
        "s3://bucket/a\nb",
        "gs://-x/a",
    ],
)
def test_urls_that_are_not_those_of_a_model_are_rejected(url: str) -> None:
    with pytest.raises(ObjectStoreError, match=r"is not the URL of a model.*: write s3://BUCKET/PREFIX"):
        parse_reference(url)


def test_names_in_a_cache_differ_by_url() -> None:
    found = {ObjectReference.parse(url).cache_name for url in ("s3://a/b", "s3://a/b/c", "s3://a/b-c", "gs://a/b")}
    assert len(found) == 4
    assert ObjectReference.parse("s3://a/b/") == ObjectReference.parse("s3://a/b")
    assert default_model_name("s3://models/llama/v1") == "v1"


def test_an_unsafe_key_is_rejected(proxy: FaultyProxy, s3: str, tmp_path: Path) -> None:
    upload(s3, "unsafe", {"config.json": b"{}", "a\\b": b"x"})
    with pytest.raises(ObjectStoreError, match="object with an unsafe name"):
        get(f"s3://{BUCKET}/unsafe", tmp_path)
    assert visible(tmp_path) == {}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a small model."""
    directory = tmp_path / "source"
    write_model(directory, LLAMA, random_tensors(LLAMA))
    return directory


def test_a_url_is_a_model_reference(proxy: FaultyProxy, s3: str, model: Path) -> None:
    files = visible(model)
    upload(s3, "served", files)
    found = resolve(f"s3://{BUCKET}/served")
    assert found.format == "SafeTensors"
    assert visible(found.path) == files
    before = len(proxy.requests)
    assert resolve(f"s3://{BUCKET}/served") == found
    assert [path for _, path, _ in proxy.requests[before:] if "list-type" not in path] == []
    weights = len(proxy.ranges("model.safetensors"))
    upload(s3, "served", {"config.json": files["config.json"] + b"\n"})
    again = resolve(f"s3://{BUCKET}/served")
    assert again.path != found.path
    assert (again.path / "config.json").read_bytes() == files["config.json"] + b"\n"
    assert len(proxy.ranges("model.safetensors")) == weights, "a content that the cache has is not transferred again"


def test_a_check_reads_the_headers_of_the_weights(proxy: FaultyProxy, s3: str, model: Path) -> None:
    files = visible(model)
    upload(s3, "checked", files)
    with metadata_directory(f"s3://{BUCKET}/checked") as directory:
        assert resolve(str(directory)).format == "SafeTensors"
        assert (directory / "model.safetensors").stat().st_size == len(files["model.safetensors"])


def test_a_model_cache_is_filled_once_and_read_without_the_network(
    proxy: FaultyProxy, s3: str, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload(s3, "shared", visible(model))
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "megatron_runtime.cli", "fetch", f"s3://{BUCKET}/shared", "--cache", str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    weights = [part for part in proxy.ranges("model.safetensors") if part]
    starts = [part.split("-")[0] for part in weights]
    assert len(set(starts)) == len(starts) > 0, "each byte is transferred once"
    monkeypatch.setenv("MEGATRON_MODEL_CACHE", str(cache))
    before = len(proxy.requests)
    for path in [cache, *cache.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)
    found = resolve(f"s3://{BUCKET}/shared")
    assert found.path.is_relative_to(cache)
    with metadata_directory(f"s3://{BUCKET}/shared") as directory:
        assert directory == found.path
    assert len(proxy.requests) == before
    # Other models are fetched to the user's own cache.
    upload(s3, "other", visible(model))
    assert not resolve(f"s3://{BUCKET}/other").path.is_relative_to(cache)


def test_the_operator_reads_the_progress_of_a_download(proxy: FaultyProxy, s3: str, tmp_path: Path) -> None:
    upload(s3, "progress", {"model.safetensors": FILES["model.safetensors"]})
    proxy.paused.set()
    (port,) = free_ports(1)
    pod = PodView("demo-engine-0-0", "1", "engine", fetching_at="127.0.0.1")
    assert read_progress(pod, port=port) is None
    command = [sys.executable, "-m", "megatron_runtime.cli", "fetch", f"s3://{BUCKET}/progress"]
    options = ["--cache", str(tmp_path / "cache"), "--progress-port", str(port)]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as fetcher:
        while not proxy.halted.wait(0.1):
            assert fetcher.poll() is None, f"exit code {fetcher.returncode}"
        found = read_progress(pod, port=port)
        proxy.paused.clear()
        fetcher.kill()
    assert found is not None
    assert (found.pod, found.total_bytes) == ("demo-engine-0-0", SIZE)
    assert 1 << 20 <= found.bytes < SIZE
    assert found.bytes_per_second >= 0


def test_a_server_fetches_only_the_tokenizer(proxy: FaultyProxy, s3: str) -> None:
    tokenizer = _tokenizer()
    upload(s3, "tokens", {"model.safetensors": bytes(1000), "config.json": b"{}", "tokenizer.json": tokenizer})
    assert load_tokenizer(f"s3://{BUCKET}/tokens").vocab_size > 0
    assert proxy.ranges("model.safetensors") == []


def _tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {letter: index for index, letter in enumerate("abcdefgh")}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made.to_str().encode()


def test_one_gguf_object_is_a_model(proxy: FaultyProxy, s3: str) -> None:
    upload(s3, "gguf", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    found = resolve(f"s3://{BUCKET}/gguf/a.gguf")
    assert (found.format, found.path.name) == ("GGUF", "a.gguf")
    assert proxy.ranges("b.gguf") == []


@pytest.fixture
def https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A directory and its URL on an HTTPS server with a certificate of its own."""
    root, certificate = tmp_path / "www", tmp_path / "server.pem"
    root.mkdir()
    subject = (
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-addext",
        "basicConstraints=critical,CA:FALSE",
    )
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    key = tmp_path / "server.key"
    subprocess.run(
        [*command, "-days", "1", *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(partial(_Ranges, directory=str(root)), tls=context) as server:
        yield root, f"https://localhost:{server.server_port}"


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files with ranges."""

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        wanted, path = self.headers.get("range"), Path(self.translate_path(self.path))
        if wanted is None or not path.is_file():
            super().do_GET()
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        data = path.read_bytes()
        body = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("content-range", f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}")
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        self.wfile.write(body)


def test_a_directory_of_an_https_server_is_a_model(https: tuple[Path, str], model: Path) -> None:
    root, url = https
    for name, data in visible(model).items():
        (root / name).write_bytes(data)
    assert visible(resolve(url).path) == visible(model)
    (root / "model.safetensors").rename(root / "model-1-of-1.safetensors")
    index = {"weight_map": {"a.weight": "model-1-of-1.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-1-of-1.safetensors" in visible(resolve(f"{url}/").path)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../server.key"}}))
    with pytest.raises(ObjectStoreError, match="an object with an unsafe name"):
        resolve(url)
    (root / "model.safetensors.index.json").unlink()
    with pytest.raises(ObjectStoreError, match=r"localhost:\d+/model\.safetensors does not exist \(404\)"):
        resolve(url)


def test_an_https_server_must_have_a_trusted_certificate(
    https: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ObjectStoreUnavailableError, match=r"does not answer \(InvalidCertificate\("):
        resolve(https[1])
