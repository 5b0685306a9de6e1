"""Builds kubectl-megatron as one executable file, a zip archive with a `#!` line that Python 3.11 or newer runs.

The file has the modules of this project that its commands import, and the packages that these modules import. The build
fails if a module is not pure Python, so that the file runs on every Linux and macOS. The file does not contain the
dashboard, because the packages of the dashboard are compiled. The same sources produce the same bytes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import py_compile
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ("operator", "runtime")
"""Folders with packages of this project."""
PROGRAM = "megatron_kubectl.cli"
IMPORTED_BY_COMMANDS = ("megatron_operator.explain", "megatron_kubectl.pod_logs", "megatron_kubectl.top")
"""Modules that the program imports only when a command needs them."""
PACKAGES = {"click": "click", "prometheus_client": "prometheus-client", "yaml": "PyYAML"}
"""Packages that may be in the file, with their distributions. PyYAML works without its compiled module."""
MAIN = f"""import sys

if sys.version_info < (3, 11):
    sys.exit("kubectl megatron needs Python 3.11 or newer; this is %s" % sys.version.split()[0])

from {PROGRAM} import complete, main

if sys.argv[0].endswith("kubectl_complete-megatron"):  # a link to this file
    complete()
else:
    main(prog_name="kubectl megatron")
"""
SHEBANG = b"#!/usr/bin/env python3\n"
TIME = (1980, 1, 1, 0, 0, 0)


class BuildError(Exception):
    """The kubectl plugin cannot be built. The message names the module that prevents this."""


def own_modules() -> dict[str, Path]:
    """Import the plugin, and return the file of each module of this project that it imports, by path in the archive.

    Raises:
        BuildError: the plugin imports a package that is not in PACKAGES.
    """
    before = set(sys.modules)  # such as the hooks of editable installations
    for name in (PROGRAM, *IMPORTED_BY_COMMANDS):
        importlib.import_module(name)
    installed = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))
    found: dict[str, Path] = {}
    for name in sorted(set(sys.modules) - before):
        file = getattr(sys.modules[name], "__file__", None)
        path = Path(file) if file else ROOT
        for folder in OWN:
            if path.is_relative_to(ROOT / folder):
                found[path.relative_to(ROOT / folder).as_posix()] = path
        if any(path.is_relative_to(folder) for folder in installed) and name.partition(".")[0] not in PACKAGES:
            raise BuildError(f"the plugin imports {name}: keep it out of the commands, or add it to PACKAGES")
    return found


def package_files() -> dict[str, Path]:
    """Return the files of all packages in PACKAGES, with their licences and metadata, by path in the archive."""
    found: dict[str, Path] = {}
    for package, distribution in PACKAGES.items():
        for file in importlib.metadata.files(distribution) or ():
            top, name = file.parts[0], file.name
            is_notice = top.endswith(".dist-info") and (name in ("METADATA", "NOTICE") or "LICEN" in name.upper())
            if is_notice or (top == package and file.suffix == ".py"):
                found[file.as_posix()] = Path(str(file.locate()))
    return found


def build(target: Path) -> None:
    """Write the kubectl plugin to `target`, as one executable file. Raises the errors of own_modules()."""
    files = {**own_modules(), **package_files(), "LICENSE": ROOT / "LICENSE"}
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.new")
    with unfinished.open("wb") as stream, tempfile.TemporaryDirectory() as scratch:
        stream.write(SHEBANG)
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:

            def add(name: str, content: bytes) -> None:
                archive.writestr(zipfile.ZipInfo(name, TIME), content, zipfile.ZIP_DEFLATED)

            add("__main__.py", MAIN.encode())
            for name, path in sorted(files.items()):
                add(name, path.read_bytes())
                if path.suffix == ".py":
                    # Python of this version starts faster with the bytecode. Other versions compile the source.
                    compiled = Path(scratch, "module.pyc")
                    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
                    py_compile.compile(str(path), str(compiled), name, doraise=True, invalidation_mode=unchecked)
                    add(f"{name}c", compiled.read_bytes())
    unfinished.chmod(0o755)
    unfinished.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    try:
        build(target)
    except BuildError as error:
        sys.exit(f"Error: {error}")
    print(f"{target}: {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
