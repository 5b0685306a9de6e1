"""The chart, rendered by helm itself."""

import subprocess

import yaml

from localcluster import installation
from megatron_operator.install import install_manifests

from .conftest import Platform


def test_the_chart_installs_what_the_install_manifest_does(platform: Platform) -> None:
    command = [platform.helm, "template", "megatron", installation.CHART, "--kube-version", "1.34.0"]
    output = subprocess.run([*command, "-n", "megatron-system"], check=True, capture_output=True, text=True).stdout
    chart = {(doc["kind"], doc["metadata"]["name"]): doc for doc in yaml.safe_load_all(output) if doc}
    plain = install_manifests(
        namespace="megatron-system", image="megatron-operator:0.1.0", runtime_image="megatron-runtime:0.1.0"
    )
    for manifest in plain:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if manifest["kind"] == "Namespace":
            continue
        found = chart.pop(key)
        assert found.get("rules") == manifest.get("rules")
        assert found.get("subjects") == manifest.get("subjects")
        if manifest["kind"] == "Deployment":
            assert found["spec"]["template"]["spec"] == manifest["spec"]["template"]["spec"]
        if manifest["kind"] == "CustomResourceDefinition":
            assert found["spec"] == manifest["spec"]
    assert chart == {}
