"""`megatron-operator verify` against a real API server and a real operator, and the chart's static checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import check_chart

pytestmark = pytest.mark.cluster

SAMPLE = check_chart.ROOT / "manifests/samples/cpu-demo.yaml"


async def test_a_ready_operator_passes_and_an_absent_one_fails(operator: Any, verify: Any) -> None:
    """Without the CRD: in test_delete.py."""
    url = f"http://127.0.0.1:{operator.health_port}"
    passed = await verify("--operator-url", url)
    assert (passed.returncode, passed.stderr) == (0, "")
    assert passed.stdout.splitlines() == [
        "the API server serves the resource: inference.megatron.dev/v1beta1 megatroninferences",
        f"the operator is ready: {url}",
    ]

    absent = await verify("--operator-url", "http://127.0.0.1:9", "--timeout", "0")
    assert absent.returncode == 1
    assert "check failed that the operator is ready: Cannot connect" in absent.stderr


def test_lint_and_schemas_accept_the_chart_and_all_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_chart.main() == 0, capsys.readouterr().out


def test_the_schemas_reject_unknown_fields_and_wrong_types(tmp_path: Path) -> None:
    check_chart.write_schemas(tmp_path)
    resource = yaml.safe_load(SAMPLE.read_text())
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}]}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**resource, "spec": {**resource["spec"], "replica": 1}}, "replica"),
        ({**resource, "spec": {**resource["spec"], "desiredState": "Sleeping"}}, "desiredState"),
        ({**service, "spec": {"ports": [{"port": "http"}]}}, "port"),
        ({**service, "spec": {"port": 80}}, "port"),
        ({**service, "kind": "Servise"}, "could not find schema"),
    ]
    assert check_chart.validate(check_chart.kubeconform(), tmp_path, yaml.safe_dump(service)).returncode == 0
    for document, words in wrong:
        checked = check_chart.validate(check_chart.kubeconform(), tmp_path, yaml.safe_dump(document))
        assert checked.returncode == 1, document
        assert words in checked.stdout
