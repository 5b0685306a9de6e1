"""The files of a release: notes, agreement of versions, krew manifest, archive."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
import yaml

from tools import release

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added

- Two.

## [0.1.0] - 2026-11-01

- One.
"""


def test_notes_are_the_section_of_the_version() -> None:
    assert release.notes(CHANGELOG, "0.2.0") == "### Added\n\n- Two.\n"
    assert release.notes(CHANGELOG, "0.1.0") == "- One.\n"


@pytest.mark.parametrize("version", ["0.3.0", "0.2", "Unreleased", "0.2.0rc1"])
def test_a_version_without_entries_is_an_error(version: str) -> None:
    with pytest.raises(release.ReleaseError, match=re.escape(f"no entries for [{version}]")):
        release.notes(CHANGELOG, version)


def test_version_chart_and_registry_agree() -> None:
    version = release.project_version()
    owner = release.IMAGE_REGISTRY.partition("/")[2]
    assert release.disagreements(version, tag=f"v{version}", owner=owner.upper()) == []


@pytest.mark.parametrize(
    ("version", "tag", "owner", "words"),
    [
        ("9.9.9", None, None, "Chart.yaml: appVersion is"),
        ("9.9.9", None, None, "megatron_runtime.__version__ is"),
        (None, "v9.9.9", None, "the tag is 9.9.9"),
        (None, "9.9.9", None, "must begin with v"),
        (None, None, "another", "publishes to ghcr.io/another"),
    ],
)
def test_a_disagreement_names_its_place(version: str | None, tag: str | None, owner: str | None, words: str) -> None:
    found = release.disagreements(version or release.project_version(), tag=tag, owner=owner)
    assert any(words in line for line in found)


def test_an_image_of_another_registry_is_a_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Chart.yaml", "values.yaml"):
        (tmp_path / name).write_text((release.CHART / name).read_text().replace("ghcr.io/", "quay.io/"))
    monkeypatch.setattr(release, "CHART", tmp_path)
    found = release.disagreements(release.project_version(), tag=None, owner=None)
    assert len(found) == 3
    assert all("quay.io" in line for line in found)


def test_an_archive_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    program, text = tmp_path / "program", tmp_path / "LICENSE"
    program.write_bytes(b"#!/bin/sh\n")
    program.chmod(0o700)
    text.write_text("text")
    for name in ("a.tar.gz", "b.tar.gz"):
        release.archive(tmp_path / name, {"kubectl-megatron": program, "LICENSE": text})
        program.touch()
    assert release.sha256(tmp_path / "a.tar.gz") == release.sha256(tmp_path / "b.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert [(entry.name, oct(entry.mode)) for entry in tar] == [("kubectl-megatron", "0o755"), ("LICENSE", "0o644")]


def test_the_krew_manifest_names_the_archive_and_its_digest() -> None:
    manifest = release.krew_manifest(version="1.2.3", repository="org/repo", archive="x.tar.gz", digest="0" * 64)
    (platform,) = yaml.safe_load(yaml.safe_dump(manifest))["spec"]["platforms"]
    assert platform["uri"] == "https://github.com/org/repo/releases/download/v1.2.3/x.tar.gz"
    assert platform["sha256"] == "0" * 64
    assert manifest["spec"]["version"] == "v1.2.3"


def test_each_action_is_pinned_by_commit() -> None:
    files = [*release.ROOT.glob(".github/workflows/*.yml"), *release.ROOT.glob(".github/actions/*/action.yml")]
    assert len(files) == 4
    for path in files:
        uses = re.findall(r"uses: (.*)", path.read_text())
        assert uses
        for action in uses:
            local = action.startswith("./")
            assert local or re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), f"{path.name}: {action}"


def test_each_job_runs_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (release.ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("ci", "soak"):
        workflow = yaml.safe_load((release.ROOT / f".github/workflows/{name}.yml").read_text())
        for job in workflow["jobs"].values():
            assert set(job["strategy"]["matrix"]["target"]) <= targets
    called = set(re.findall(r"\bmake ([a-z-]+)", (release.ROOT / ".github/workflows/release.yml").read_text()))
    assert called
    assert called <= targets
