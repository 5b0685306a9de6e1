"""Builds the files of a release below build/release: `python tools/release.py COMMAND`, or the targets of the Makefile.

The command `check` compares the version, the registry and the changelog. `wheels` builds the Python packages, and
`files` builds everything else that is not an image. `dry-run` runs all of these steps, builds the images that this
machine can build, and lists what only the release workflow builds.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import click
import yaml

import megatron_operator
import megatron_runtime
from localcluster import images, programs
from localcluster.errors import ClusterError
from localcluster.progress import Steps
from localcluster.shell import run
from megatron_operator.resource.settings import IMAGE_REGISTRY
from megatron_runtime.protocol import strict_json as json

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/megatron-inference"
OUTPUT = ROOT / "build/release"
DISTRIBUTIONS = OUTPUT / "dist"
PLUGIN = ROOT / "build/kubectl-megatron"
TOOLS = ROOT / "build/release-tools/bin"
MANYLINUX = f"manylinux_2_28_{platform.machine()}"
"""Tag of the oldest systems that the wheel supports: Debian 10, Ubuntu 20.04, RHEL 8. auditwheel fails if the library
needs a newer system.
"""
SOFTWARE = ("operator", "runtime", "runtime-vllm")
"""Images by the NAME in requirements/NAME.txt, which lists the packages of an image and becomes its bill of
materials.
"""
MANIFESTS = ("manifests/crd.yaml", "manifests/install.yaml")
UNRELEASED = "Unreleased"


class ReleaseError(RuntimeError):
    """The release cannot be built. The message names the file, the value and the remedy."""


def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def notes(changelog: str, version: str) -> str:
    """Return the section of a version in the changelog, without its title.

    Raises ReleaseError if the section is missing or empty.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    found = next((each for each in sections if re.match(rf"\[{re.escape(version)}\]", each)), "")
    text = found.partition("\n")[2].strip()
    if not text:
        raise ReleaseError(
            f"CHANGELOG.md has no entries for [{version}]: move those of [{UNRELEASED}] to `## [{version}] - DATE`"
        )
    return text + "\n"


def disagreements(version: str, *, tag: str | None, owner: str | None) -> list[str]:
    """Return a message with the remedy for each file that names another version or registry than the release."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    versions = {
        "charts/megatron-inference/Chart.yaml: version": chart["version"],
        "charts/megatron-inference/Chart.yaml: appVersion": chart["appVersion"],
        "megatron_operator.__version__": megatron_operator.__version__,
        "megatron_runtime.__version__": megatron_runtime.__version__,
    }
    if tag is not None:
        versions["the tag"] = tag.removeprefix("v") if tag.startswith("v") else f"{tag} (must begin with v)"
    found = [
        f"{place} is {value}, the version in pyproject.toml is {version}: make them equal"
        for place, value in versions.items()
        if value != version
    ]
    for place, image in (("operator", "operator"), ("runtime", "runtime"), ("vllm", "runtime-vllm")):
        repository, wanted = values[place]["image"]["repository"], f"{IMAGE_REGISTRY}/megatron-{image}"
        if repository != wanted:
            found.append(f"values.yaml: {place}.image.repository is {repository}, must be {wanted}")
    if owner is not None and f"ghcr.io/{owner.lower()}" != IMAGE_REGISTRY:
        found.append(
            f"the workflow publishes to ghcr.io/{owner.lower()}, IMAGE_REGISTRY in "
            f"megatron_operator/resource/settings.py is {IMAGE_REGISTRY}: change it and values.yaml, and run `make "
            "generate`"
        )
    return found


def krew_manifest(*, version: str, repository: str, archive: str, digest: str) -> dict[str, Any]:
    """Return the krew manifest of the kubectl plugin."""
    home = f"https://github.com/{repository}"
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "megatron"},
        "spec": {
            "version": f"v{version}",
            "homepage": home,
            "shortDescription": "Control language models that MegatronInference serves",
            "description": "Shows, scales, pauses, suspends, restarts and explains MegatronInference resources.\n",
            "caveats": "Needs python3, version 3.11 or newer, on PATH.\n",
            "platforms": [
                {
                    "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]},
                    "uri": f"{home}/releases/download/v{version}/{archive}",
                    "sha256": digest,
                    "bin": "kubectl-megatron",
                    "files": [{"from": name, "to": "."} for name in ("kubectl-megatron", "LICENSE")],
                }
            ],
        },
    }


def archive(target: Path, files: dict[str, Path]) -> None:
    """Write a .tar.gz without times and owners, so that its bytes depend only on names and contents of the files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = path.stat().st_size, 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as source:
                tar.addfile(entry, source)
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums() -> list[Path]:
    """Write the file SHA256SUMS, which lists all other files of the release. Return the paths of these other files."""
    files = sorted(path for path in OUTPUT.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{sha256(path)}  {path.relative_to(OUTPUT)}\n" for path in files]
    (OUTPUT / "SHA256SUMS").write_text("".join(lines))
    return files


# --- Python packages ------------------------------------------------------------------------------------------------


def uv() -> str:
    return shutil.which("uv") or str(ROOT / "build/uv/bin/uv")


def build_wheel() -> Path:
    """Build the source distribution, and from it the wheel with the CPU kernels' library. Return the wheel's path."""
    pinned = ["--build-constraints", ROOT / "requirements/build.txt", "--require-hashes", "--python", sys.executable]
    shutil.rmtree(DISTRIBUTIONS, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
        run([uv(), "build", "-q", *pinned, "--out-dir", folder, ROOT])
        (built,) = Path(folder).glob("*.whl")
        # PyPI accepts wheels with a manylinux tag only.
        path = f"{TOOLS}:{os.environ['PATH']}"
        command = [TOOLS / "auditwheel", "repair", "--plat", MANYLINUX, "--wheel-dir", DISTRIBUTIONS, built]
        run(command, env={"PATH": path})
        (source,) = Path(folder).glob("*.tar.gz")
        shutil.copy2(source, DISTRIBUTIONS)
    (wheel,) = DISTRIBUTIONS.glob("*.whl")
    return wheel


_LOAD = """
import json, pathlib, megatron_kernels.cpu.build as build
from megatron_kernels.cpu.library import instruction_set, instruction_sets, library
library()
packaged = build.library().parent == pathlib.Path(build.__file__).parent
print(json.dumps({"packaged": packaged, "selected": instruction_set(), "runs": instruction_sets()}))
"""


def check_wheel(wheel: Path) -> str:
    """Install the wheel into an empty environment without a compiler, run `megatron`, and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        run([uv(), "venv", "-q", "--python", sys.executable, environment])
        run([uv(), "pip", "install", "-q", "--python", environment / "bin/python", wheel])
        bare = {"PATH": f"{environment}/bin", "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONPATH": "", "HOME": folder}
        version = run([environment / "bin/megatron", "--version"], env=bare, cwd=Path(folder)).stdout.strip()
        help_ = run([environment / "bin/megatron", "--help"], env=bare, cwd=Path(folder)).stdout
        if "Commands:" not in help_:
            raise ReleaseError(f"{wheel.name}: `megatron --help` lists no commands:\n{help_}")
        loaded = json.loads(run([environment / "bin/python", "-c", _LOAD], env=bare, cwd=Path(folder)).stdout)
    if not loaded["packaged"]:
        raise ReleaseError(f"{wheel.name} has no library of the CPU kernels: install g++ and build it again")
    return f"{version}; CPU kernels load, {loaded['selected']} of {', '.join(loaded['runs'])}"


# --- everything else ------------------------------------------------------------------------------------------------


def package_chart(version: str, steps: Steps) -> Path:
    helm = programs.ensure(["helm"], steps) / "helm"
    run([helm, "package", CHART, "--destination", OUTPUT])
    return OUTPUT / f"megatron-inference-{version}.tgz"


def package_plugin(version: str, repository: str) -> tuple[Path, Path]:
    """Build the kubectl plugin. Return its archive and the manifest for krew."""
    run(["make", "--no-print-directory", "plugin"], cwd=ROOT)
    packed = OUTPUT / f"kubectl-megatron-v{version}.tar.gz"
    archive(packed, {"kubectl-megatron": PLUGIN, "LICENSE": ROOT / "LICENSE"})
    manifest = OUTPUT / "krew/megatron.yaml"
    manifest.parent.mkdir(exist_ok=True)
    content = krew_manifest(version=version, repository=repository, archive=packed.name, digest=sha256(packed))
    manifest.write_text(yaml.safe_dump(content, sort_keys=False))
    return packed, manifest


def write_bills_of_materials() -> list[Path]:
    """Write, for each image, a CycloneDX JSON file with the packages that the image installs from PyPI.

    Return the files.

    Each image itself also contains a bill of materials for all its files.
    """
    written = []
    for name in SOFTWARE:
        target = OUTPUT / f"sbom-{name}.cdx.json"
        command = [TOOLS / "cyclonedx-py", "requirements", ROOT / f"requirements/{name}.txt", "--output-reproducible"]
        run([*command, "--pyproject", ROOT / "pyproject.toml", "--of", "JSON", "-o", target])
        written.append(target)
    return written


def repository_name() -> str:
    """Return the name of the repository on GitHub, as OWNER/NAME."""
    return os.environ.get("GITHUB_REPOSITORY") or f"{IMAGE_REGISTRY.partition('/')[2]}/megatron-inference"


def write_files(version: str, text: str) -> list[tuple[str, str, str]]:
    """Write chart, plugin, krew manifest, manifests, bills of materials and notes. Return a table row for each file."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "notes.md").write_text(text)
    steps = Steps()
    chart = package_chart(version, steps)
    with steps.step("kubectl plugin"):
        plugin, krew = package_plugin(version, repository_name())
    with steps.step("bills of materials"):
        bills = write_bills_of_materials()
    for name in MANIFESTS:
        shutil.copy2(ROOT / name, OUTPUT)
    return [
        ("chart", chart.name, f"version and appVersion {version}"),
        ("kubectl plugin", plugin.name, f"{plugin.stat().st_size // 1024} KiB"),
        ("krew manifest", str(krew.relative_to(OUTPUT)), f"sha256 {sha256(plugin)[:12]}…"),
        ("manifests", ", ".join(Path(name).name for name in MANIFESTS), IMAGE_REGISTRY),
        ("bills of materials", f"sbom-*.cdx.json ({len(bills)})", "packages of requirements/*.txt"),
        ("release notes", "notes.md", f"{len(text.splitlines())} lines"),
    ]


def build_images() -> list[tuple[str, str, str]]:
    """Build the images without GPU packages, on this machine's distribution. Return a table row for each image."""
    built = images.build(images.DEFAULT_TARGETS, Steps())
    (OUTPUT / "images.json").write_text(json.dumps({image.reference: image.digest for image in built}, indent=2) + "\n")
    return [("image", image.reference, f"{platform.machine()}, {image.digest[:19]}…") for image in built]


WORKFLOW_ONLY = (
    ("images", "operator, runtime, runtime-vllm for amd64 and arm64", "on the pinned base, with SBOM and provenance"),
    ("signatures", "images and chart", "cosign, with the identity of the workflow"),
    ("wheel", "of the other architecture", "on a machine of that architecture"),
    ("attestations", "wheels and files", "GitHub and PyPI"),
    ("uploads", "PyPI, ghcr.io, GitHub release", ""),
)


def table(title: str, rows: list[tuple[str, str, str]] | tuple[tuple[str, str, str], ...]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    click.echo(f"\n{title}")
    for what, name, detail in rows:
        click.echo(f"  {what:{widths[0]}}  {name:{widths[1]}}  {detail}".rstrip())


@click.group()
def main() -> None:
    """Build the files of a release below build/release."""


@main.command()
@click.option("--tag", help="Tag of the release, such as v0.1.0. The changelog must have a section for it.")
@click.option("--owner", help="GitHub owner of the repository. The workflow publishes to the owner's registry.")
def check(tag: str | None, owner: str | None) -> None:
    """Check that version, tag, registry and changelog agree."""
    version = project_version()
    found = disagreements(version, tag=tag, owner=owner)
    if tag is not None:
        try:
            notes((ROOT / "CHANGELOG.md").read_text(), version)
        except ReleaseError as error:
            found.append(str(error))
    if found:
        raise ReleaseError("\n".join(found))
    click.echo(f"{version}, {IMAGE_REGISTRY}")


@main.command()
def wheels() -> None:
    """Build the source distribution and this machine's wheel, and test the wheel."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    click.echo(check_wheel(build_wheel()))


@main.command()
def files() -> None:
    """Build chart, plugin, krew manifest, bills of materials and release notes."""
    version = project_version()
    table("Built here, in build/release", write_files(version, notes((ROOT / "CHANGELOG.md").read_text(), version)))


@main.command("dry-run")
def dry_run() -> None:
    """Build everything that this machine can build, without publishing anything."""
    version = project_version()
    if found := disagreements(version, tag=None, owner=None):
        raise ReleaseError("\n".join(found))
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    steps = Steps()
    with steps.step("wheel and source distribution"):
        wheel = build_wheel()
    with steps.step("install the wheel into an empty environment"):
        tried = check_wheel(wheel)
    rows = [("wheel", wheel.name, tried), *(("source", path.name, "") for path in DISTRIBUTIONS.glob("*.tar.gz"))]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    try:
        text = notes(changelog, version)
    except ReleaseError as error:
        text = notes(changelog, UNRELEASED)
        rows.append(("missing", f"changelog of {version}", f"notes.md has [{UNRELEASED}]: {error}"))
    rows += write_files(version, text)
    rows += build_images()
    rows.append(("checksums", "SHA256SUMS", f"{len(write_checksums())} files"))
    table("Built here, in build/release", rows)
    table("Built by .github/workflows/release.yml only", WORKFLOW_ONLY)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ReleaseError, ClusterError) as error:
        sys.exit(str(error))
