"""The version of the API is the same everywhere, and files of another one are rejected."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from megatron_operator.manifest_file import ResourceFileError, read_resource, resource_of
from megatron_operator.resource.crd import custom_resource_definition
from megatron_operator.resource.names import API_VERSION

ROOT = Path(__file__).parents[3]
MANIFESTS = sorted(
    [*ROOT.glob("manifests/samples/*.yaml"), ROOT / "manifests/cells/cells.yaml", *ROOT.glob("manifests/health/*.yaml")]
)
SAMPLE = ROOT / "manifests/samples/cpu-demo.yaml"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_use_the_current_version(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        for entry in document if isinstance(document, list) else [document]:
            assert entry["apiVersion"] == API_VERSION


def test_a_file_of_another_version_is_rejected(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(SAMPLE.read_text().replace("/v1beta1", "/v2"))
    with pytest.raises(ResourceFileError, match=r"apiVersion: is 'inference\.megatron\.dev/v2'; use .*/v1beta1"):
        read_resource(unknown)


def test_the_metadata_of_the_chart_describe_the_current_version_and_the_icon() -> None:
    chart = yaml.safe_load((ROOT / "charts/megatron-inference/Chart.yaml").read_text())
    (described,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    crd = custom_resource_definition()
    (version,) = crd["spec"]["versions"]
    assert (described["name"], described["version"]) == (crd["metadata"]["name"], version["name"])
    (example,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"])
    assert resource_of(example, origin="Chart.yaml").name == "demo"
    kind, _, data = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (ROOT / "docs/assets/icon.svg").read_bytes()
