"""Decisions about packages, programs, pip settings, image builds and image loading, without executing them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tomllib
from pathlib import Path

import pytest

from localcluster import clientconfig, images, loading, packages, programs, runtime, store
from localcluster.errors import ClusterError
from localcluster.packages import Requirement
from localcluster.store import Image, Layer


def test_only_packages_of_missing_programs_are_installed_once() -> None:
    wanted = [Requirement("a", "a1"), Requirement("b", "b1"), Requirement("a", "a2"), Requirement("c", "c1")]
    assert packages.missing(wanted, has=lambda program: program == "b1") == ["a", "c"]
    assert packages.missing(packages.NODE, has=lambda _: True) == []


def test_without_apt_the_error_names_packages_and_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ClusterError, match=r"missing: etcd-server, openssl.*CLUSTER=current"):
        packages.ensure(packages.CONTROL_PLANE, steps=None)  # type: ignore[arg-type]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"):
        packages.ensure(packages.CONTROL_PLANE, steps=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "message"), [("go1.22.4", "go1.22.4; Kubernetes 1.34 needs Go 1.24"), (None, "not installed")]
)
def test_an_old_or_missing_go_is_rejected(
    version: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        (tmp_path / "go").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=message):
        programs.go_version()


def test_the_program_cache_follows_compiler_and_module(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module x\n")
    key = programs.cache_key("go1.24.0", tmp_path)
    assert key == programs.cache_key("go1.24.0", tmp_path)
    assert key != programs.cache_key("go1.25.0", tmp_path)
    (tmp_path / "main.go").write_text("package main\n")
    assert key != programs.cache_key("go1.24.0", tmp_path)


def test_only_network_errors_are_retried() -> None:
    assert programs.is_network_trouble('Get "https://proxy": dial tcp 1.2.3.4:443: i/o timeout')
    assert not programs.is_network_trouble("./main.go:3:1: undefined: x")


def test_pip_settings_take_precedence_in_pips_order_and_apply_to_uv(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("[global]\nindex-url = https://one/simple\ntimeout = 5\ncert = /x\n")
    second.write_text("[install]\nindex-url = https://two/simple\n")
    found = clientconfig.pip_settings({"PIP_TRUSTED_HOST": "h"}, [first, second, tmp_path / "absent"])
    assert found == {"index-url": "https://two/simple", "timeout": "5", "trusted-host": "h"}
    uv = tomllib.loads(clientconfig.uv_toml({}, found, cache="/c"))
    assert (uv["index-url"], uv["allow-insecure-host"], uv["cache-dir"]) == ("https://two/simple", ["h"], "/c")
    uv = tomllib.loads(clientconfig.uv_toml({"UV_DEFAULT_INDEX": "https://three"}, found, cache="/c"))
    assert uv["index-url"] == "https://three"


def test_without_settings_the_clients_use_their_defaults() -> None:
    assert "index" not in clientconfig.uv_toml({}, {}, cache="/c") + clientconfig.pip_conf({})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in images.INPUTS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "/" in name:
            path.mkdir()
            path = path / "module.py"
        path.write_text(name)
    return tmp_path


def test_an_image_is_rebuilt_only_for_a_changed_input_or_base(repository: Path) -> None:
    before = images.inputs_digest(repository, "base:1")
    (repository / "docs").mkdir()
    (repository / "docs" / "x.md").write_text("x")
    cache = repository / "operator/megatron_operator/__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_text("x")
    assert images.inputs_digest(repository, "base:1") == before
    assert images.inputs_digest(repository, "base:2") != before
    (repository / "runtime/megatron_runtime/new.py").write_text("")
    assert images.inputs_digest(repository, "base:1") != before


def test_the_large_image_is_built_only_if_it_is_named() -> None:
    assert set(images.TARGETS) - set(images.DEFAULT_TARGETS) == {"runtime-vllm"}


def test_without_uv_on_the_path_a_build_uses_the_cache_of_make_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", "/home/me")
    assert clientconfig.uv_cache({}) == Path("/home/me/.cache/uv")
    assert clientconfig.uv_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/uv")
    assert clientconfig.uv_cache({"XDG_CACHE_HOME": "/c", "UV_CACHE_DIR": "/u"}) == Path("/u")


def test_the_hashed_inputs_are_those_of_the_docker_ignore_file() -> None:
    allowed = (images.REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in allowed if line.startswith("!")} == set(images.INPUTS) - {
        "Dockerfile",
        ".dockerignore",
    }


def test_chain_ids_are_those_of_the_image_specification() -> None:
    one, two = "sha256:" + "1" * 64, "sha256:" + "2" * 64
    joined = "sha256:" + hashlib.sha256(f"{one} {two}".encode()).hexdigest()
    assert loading.chain_ids([one, two]) == [one, joined]


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("mount -t bind /s/1/fs / -o rw,rbind\n", "/s/1/fs"),
        ("mount -t overlay overlay / -o index=off,workdir=/s/2/work,upperdir=/s/2/fs,lowerdir=/s/1/fs\n", "/s/2/fs"),
    ],
)
def test_the_writable_folder_of_a_snapshot(command: str, folder: str) -> None:
    assert loading.writable_folder(command) == Path(folder)
    with pytest.raises(ClusterError, match="not understood"):
        loading.writable_folder("mount -t zfs pool/x /")


def test_layers_become_hard_links_with_their_modes(tmp_path: Path) -> None:
    source, target = tmp_path / "overlay" / "id" / "diff", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("x")
    (source / "link").symlink_to("d/f")
    source.chmod(0o751)
    target.mkdir()
    # The mount namespace needs root; the command inside it does not.
    command = loading.copy_command(source, target, same_device=True)
    inner = command[command.index("sh") :]
    assert command[: command.index("sh")] == ["unshare", "--mount", "--propagation", "private"]
    loading.run(inner)
    assert (target / "d" / "f").stat().st_ino == (source / "d" / "f").stat().st_ino
    assert (target / "link").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o751


def image(reference: str = "localhost/x:dev") -> Image:
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:aa"]}}).encode()
    digest = "sha256:" + hashlib.sha256(config).hexdigest()
    manifest = json.dumps({"mediaType": "m", "config": {"digest": digest}}).encode()
    return Image(reference, manifest, config, (Layer("sha256:aa", Path("/l")),))


def test_the_imported_archive_contains_no_layer() -> None:
    with tarfile.open(fileobj=io.BytesIO(loading.bare_archive(image()))) as archive:
        names = archive.getnames()
        index = archive.extractfile("index.json")
        assert index is not None
        entry = json.loads(index.read())["manifests"][0]
    assert entry["digest"] == image().digest
    assert entry["annotations"] == {"io.containerd.image.name": "localhost/x:dev"}
    assert sum(name.startswith("blobs/") for name in names) == 2


def test_an_image_is_read_from_the_store_lowest_layer_first(tmp_path: Path) -> None:
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:aa", "sha256:bb"]}}).encode()
    digest = "sha256:" + hashlib.sha256(config).hexdigest()
    folder = tmp_path / "overlay-images" / "id"
    folder.mkdir(parents=True)
    (tmp_path / "overlay-layers").mkdir()
    (folder.parent / "images.json").write_text(json.dumps([{"id": "id", "names": ["localhost/x:dev"], "layer": "two"}]))
    layers = [{"id": "two", "parent": "one", "diff-digest": "sha256:bb"}, {"id": "one", "diff-digest": "sha256:aa"}]
    (tmp_path / "overlay-layers" / "layers.json").write_text(json.dumps(layers))
    (folder / "manifest").write_text(json.dumps({"config": {"digest": digest}}))
    (folder / digest).write_bytes(config)
    found = store.find("localhost/x:dev", storage=tmp_path)
    assert found is not None
    assert [layer.folder.parent.name for layer in found.layers] == ["one", "two"]
    assert store.find("localhost/y:dev", storage=tmp_path) is None
    (tmp_path / "overlay-layers" / "layers.json").write_text(json.dumps([{**layers[0], "parent": None}]))
    with pytest.raises(ClusterError, match="inconsistent"):
        store.find("localhost/x:dev", storage=tmp_path)


def test_ids_without_a_current_tag_are_stale() -> None:
    table = "REF TYPE DIGEST SIZE\nlocalhost/x:dev t sha256:new 1\nsha256:c1 t sha256:old 1\nsha256:c2 t sha256:new 1\n"
    assert runtime.stale_ids(table) == ["sha256:c1"]


def test_the_pause_image_contains_its_program_only() -> None:
    archive = runtime.pause_archive(b"program")
    assert archive == runtime.pause_archive(b"program")
    with tarfile.open(fileobj=io.BytesIO(archive)) as outer:
        layer = outer.extractfile("layer.tar")
        assert layer is not None
        with tarfile.open(fileobj=io.BytesIO(layer.read())) as inner:
            assert [(m.name, m.mode) for m in inner.getmembers()] == [("pause", 0o755)]


def test_the_base_is_made_from_all_components_of_the_mirror() -> None:
    listing = "http://a/ noble-updates main\nhttp://a/ noble main\nhttp://a/ noble universe\nhttp://b/ noble extra\n"
    assert images.archive(listing, "noble") == ("http://a/", ["main", "universe"])
    assert images.archive(listing, "jammy") == ("", [])
