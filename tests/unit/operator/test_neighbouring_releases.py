"""An operator starts pods of the images that a resource has recorded, which may be one minor version older or newer.

`options-MINOR.json` has the options of the containers' commands in that minor version. A new minor version adds a file,
by `python tests/unit/operator/test_neighbouring_releases.py`, and the file of the version before the last is deleted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_operator import __version__
from megatron_operator.manifest_file import read_resource
from megatron_operator.render.children import all_children
from megatron_operator.resource.settings import Settings
from megatron_runtime.cli import main

HERE = Path(__file__).parent
RECORDED = sorted(HERE.glob("options-*.json"))
SAMPLES = sorted((HERE.parents[2] / "manifests" / "samples").glob("*.yaml"))
COMMANDS = ("coordinator", "engine", "preflight", "server")


def known_options() -> dict[str, list[str]]:
    """Return the options of the commands of this version."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command = main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        options = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
        found[name] = sorted(option for option in options if option.startswith("--"))
    return found


def rendered_options(sample: Path) -> dict[str, set[str]]:
    """Return the options that the operator passes to each command."""
    settings = Settings(runtime_image="runtime:1", pod_policy=None)
    found: dict[str, set[str]] = {}
    for manifest in all_children(read_resource(sample).context(settings)):
        template: dict[str, Any] = (manifest.get("spec") or {}).get("template") or {}
        pod = template.get("spec") or {}
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            if container.get("args") and container["args"][0] in COMMANDS:
                options = {argument for argument in container["args"] if argument.startswith("--")}
                found.setdefault(container["args"][0], set()).update(options)
    return found


def test_the_options_of_this_minor_version_are_recorded() -> None:
    assert f"options-{minor()}.json" in [path.name for path in RECORDED]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_images_of_a_neighbouring_version_know_every_option_that_the_operator_passes(
    recorded: Path, sample: Path
) -> None:
    known = json.loads(recorded.read_text())
    rendered = rendered_options(sample)
    assert {"coordinator", "engine", "server"} <= set(rendered)
    for command, options in rendered.items():
        assert options <= set(known[command]), f"{command} of {recorded.stem} does not know these options"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
def test_this_version_knows_every_option_of_a_neighbouring_version(recorded: Path) -> None:
    known = known_options()
    for command, options in json.loads(recorded.read_text()).items():
        assert set(options) <= set(known[command]), f"{command} no longer has an option of {recorded.stem}"


def minor() -> str:
    return ".".join(__version__.split(".")[:2])


if __name__ == "__main__":
    text = json.dumps(known_options(), indent=1, sort_keys=True)
    (HERE / f"options-{minor()}.json").write_text(text + "\n")
