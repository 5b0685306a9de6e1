"""The versions of the API: one schema, the newest one everywhere, and older files are read."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from megatron_operator.manifest_file import ResourceFileError, read_resource, resource_of
from megatron_operator.model.crd import custom_resource_definition
from megatron_operator.model.resource import API_VERSION

ROOT = Path(__file__).parents[3]
MANIFESTS = sorted(
    [*ROOT.glob("manifests/samples/*.yaml"), ROOT / "manifests/cells/cells.yaml", *ROOT.glob("manifests/health/*.yaml")]
)
SAMPLE = ROOT / "manifests/samples/cpu-demo.yaml"


def test_the_versions_of_the_crd_differ_in_nothing_but_their_maturity() -> None:
    beta, alpha = custom_resource_definition()["spec"]["versions"]
    assert (beta["name"], beta["storage"], alpha["name"], alpha["storage"]) == ("v1beta1", True, "v1alpha1", False)
    maturity = {"name", "storage", "deprecated", "deprecationWarning"}
    older, newer = ({key: entry[key] for key in entry.keys() - maturity} for entry in (alpha, beta))
    assert older == newer


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_use_the_current_version(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        for entry in document if isinstance(document, list) else [document]:
            assert entry["apiVersion"] == API_VERSION


def test_a_file_of_a_deprecated_version_is_read_and_others_are_rejected(tmp_path: Path) -> None:
    older, unknown = tmp_path / "older.yaml", tmp_path / "unknown.yaml"
    older.write_text(SAMPLE.read_text().replace("/v1beta1", "/v1alpha1"))
    unknown.write_text(SAMPLE.read_text().replace("/v1beta1", "/v2"))
    assert read_resource(older) == read_resource(SAMPLE)
    with pytest.raises(ResourceFileError, match=r"apiVersion: is 'inference\.megatron\.dev/v2'; use .*/v1beta1"):
        read_resource(unknown)


def test_the_metadata_of_the_chart_describe_the_current_version_and_the_icon() -> None:
    chart = yaml.safe_load((ROOT / "charts/megatron-inference/Chart.yaml").read_text())
    (described,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crds"])
    crd = custom_resource_definition()
    storage = next(entry["name"] for entry in crd["spec"]["versions"] if entry["storage"])
    assert (described["name"], described["version"]) == (crd["metadata"]["name"], storage)
    (example,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"])
    assert resource_of(example, origin="Chart.yaml").name == "demo"
    kind, _, data = chart["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (ROOT / "docs/assets/icon.svg").read_bytes()
