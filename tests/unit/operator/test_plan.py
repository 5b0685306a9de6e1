"""`megatron-operator plan`: an unchanged file changes nothing, and every change is shown by its field."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from spec_changes import SpecChange, changes

from megatron_operator.cli import main
from megatron_operator.cluster import read
from megatron_operator.render.children import all_children
from megatron_operator.render.compare import Preview, preview
from megatron_operator.render.context import RenderContext
from megatron_operator.render.model_source import model_hash
from megatron_operator.render.pod import config_name
from megatron_operator.resource.crd import custom_resource_definition
from megatron_operator.resource.engine import Backend
from megatron_operator.resource.names import GROUP
from megatron_operator.resource.release import Release
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

ROOT = Path(__file__).parents[3]
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))
(VERSION,) = custom_resource_definition()["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SETTINGS = Settings(runtime_image="runtime:1", pod_policy=None)


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value as the API server stores it: with the defaults of its schema, also within defaults."""
    if isinstance(value, list):
        return [defaulted(entry, schema.get("items", {})) for entry in value]
    if not isinstance(value, dict):
        return value
    absent = {
        name: copy.deepcopy(field["default"])
        for name, field in schema.get("properties", {}).items()
        if name not in value and "default" in field
    }
    fields = schema.get("properties", {})
    return {name: defaulted(each, fields.get(name, {})) for name, each in {**value, **absent}.items()}


def stored(manifest: dict[str, Any], *, namespace: str = "default") -> dict[str, Any]:
    """Return a resource as the API server and an operator of another release leave it."""
    found: dict[str, Any] = defaulted(manifest, SCHEMA)
    backend = Backend(found["spec"]["engine"]["backend"])
    settings = Settings(
        runtime_image="registry.example/runtime:7",
        vllm_runtime_image="registry.example/vllm:7",
        coordinator_image="registry.example/operator:7",
        image_pull_policy="Always",
    )
    found["metadata"] |= {"uid": "of-the-cluster", "namespace": namespace, "generation": 3, "resourceVersion": "9"}
    found["status"] = {"release": Release.of(settings, backend).to_status()}
    return found


@pytest.fixture
def in_cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let `--against cluster` find the resource that a test puts here."""
    found: dict[str, Any] = {}

    async def find_resource(name: str, *, namespace: str | None, context: str | None) -> dict[str, Any] | None:
        wanted = found["resource"]["metadata"]
        assert (name, namespace) in ((wanted["name"], wanted["namespace"]), (wanted["name"], None))
        return found["resource"]

    monkeypatch.setattr(read, "find_resource", find_resource)
    return found


def _plan(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["plan", "-f", str(path), "--against", "cluster", *arguments])
    assert result.exit_code == 0, result.output
    return str(result.output)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_an_unchanged_file_changes_nothing(sample: Path, in_cluster: dict[str, Any], tmp_path: Path) -> None:
    manifest = yaml.safe_load(sample.read_text())
    in_cluster["resource"] = stored(manifest)
    assert _plan(sample) == "nothing changes\n"
    in_cluster["resource"] = stored(manifest, namespace="of-the-context")
    assert _plan(sample) == "nothing changes\n"
    # A file of `kubectl get -o yaml`.
    path = tmp_path / "stored.yaml"
    path.write_text(yaml.safe_dump(in_cluster["resource"]))
    assert _plan(path) == "nothing changes\n"


def test_images_of_the_command_line_are_previewed(in_cluster: dict[str, Any]) -> None:
    demo = ROOT / "manifests/samples/cpu-demo.yaml"
    in_cluster["resource"] = stored(yaml.safe_load(demo.read_text()))
    output = _plan(demo, "--runtime-image", "registry.example/runtime:8")
    assert output.count("image: 'registry.example/runtime:7' -> 'registry.example/runtime:8'") == 2
    assert "engines that restart: demo-engine-0" in output
    assert "demo-coordinator" not in output, "its image is not given"


def test_a_policy_that_rejects_the_current_resource_is_not_that_of_its_operator(
    in_cluster: dict[str, Any], tmp_path: Path
) -> None:
    manifest = yaml.safe_load((ROOT / "manifests/samples/front-door.yaml").read_text())
    in_cluster["resource"] = stored(manifest)
    manifest["spec"]["replicas"] = 7
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(manifest))
    output = _plan(path)
    assert "the pod policy is not previewed, because it rejects the current resource" in output
    assert "set     spec.replicas: " in output


def _context(spec: dict[str, Any]) -> RenderContext:
    return RenderContext("demo", "default", "u", parse_spec(spec), SETTINGS)


def _text(found: Preview) -> str:
    changed = [f"{change.verb} {change.child} {change.field}" for change in found.changes]
    return "\n".join([*found.fields, *changed, *found.steps])


def _hashes(ctx: RenderContext) -> set[str]:
    """Return the hashes in the children of a resource."""
    found = {model_hash(ctx), config_name(ctx).rpartition("-")[2]}
    for manifest in all_children(ctx):
        pods = manifest.get("spec", {}).get("template", {})
        for metadata in (manifest["metadata"], pods.get("metadata", {})):
            values = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
            found |= {value for key, value in values.items() if key.startswith(f"{GROUP}/")}
    return {value for value in found if re.fullmatch("[0-9a-f]{10,}", value)}


@pytest.mark.parametrize("change", [pytest.param(each, id=str(each)) for each in changes()])
def test_the_preview_of_a_change_names_its_field_and_no_hash(change: SpecChange) -> None:
    old, new = _context(change.old), _context(change.new)
    text = _text(preview(old, new))
    assert f"spec.{change.field.replace('[]', '')}" in re.sub(r"\[[^\]]*\]", "", text), text
    assert not [value for value in _hashes(old) | _hashes(new) if value in text], text


def test_a_repeated_flag_is_shown_with_all_its_values() -> None:
    spec: dict[str, Any] = {"model": {"source": {"builtin": "smollm2-135m"}}}
    old, new = (_context({**spec, "server": {"modelAliases": aliases}}) for aliases in (["a", "b"], ["a", "c", "b"]))
    found = preview(old, new)
    assert found.fields == ("spec.server.modelAliases: ['a', 'b'] -> ['a', 'c', 'b']",)
    (change,) = found.changes
    assert change.field.endswith("args --model-name: 'demo', 'a', 'b' -> 'demo', 'a', 'c', 'b'")


def test_a_flag_without_a_value_is_shown_as_set() -> None:
    spec: dict[str, Any] = {"model": {"source": {"builtin": "smollm2-135m"}}}
    (change,) = preview(_context(spec), _context({**spec, "server": {"allowPriority": True}})).changes
    assert change.field.endswith("args --allow-priority: absent -> set")


def test_a_new_configuration_is_shown_by_its_variable() -> None:
    ctx = _context({"model": {"source": {"builtin": "smollm2-135m"}}})
    found = preview(ctx, replace(ctx, settings=replace(SETTINGS, runtime_log_format="json")))
    assert "change ConfigMap demo-config data.MEGATRON_LOG_FORMAT: absent -> 'json'" in _text(found)
