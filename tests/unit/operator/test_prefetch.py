"""The Job that fetches a model into a claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from megatron_operator.cli import main
from megatron_operator.render.context import RenderContext
from megatron_operator.render.model_source import model_argument
from megatron_operator.render.prefetch import NothingToPrefetch, claim_source, prefetch_job, prefetch_policy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "manifests/samples/llama-8gpu.yaml"
GOLDEN = Path(__file__).parent / "golden" / "prefetch-llama-8gpu.yaml"
SETTINGS = Settings(runtime_image="registry.example/runtime:1")


def context(source: dict[str, Any], **fields: Any) -> RenderContext:
    return RenderContext("demo", "default", "uid", parse_spec({"model": {"source": source}, **fields}), SETTINGS)


def run(path: Path) -> Any:
    arguments = ["prefetch", "-f", str(path), "--claim", "models", "--runtime-image", SETTINGS.runtime_image]
    return CliRunner().invoke(main, arguments)


def test_the_sample_gives_its_golden_file() -> None:
    result = run(SAMPLE)
    assert result.exit_code == 0, result.output
    assert result.output == GOLDEN.read_text()


def test_what_the_job_fetches_is_what_the_resource_then_loads() -> None:
    hub = context({"huggingFace": {"repo": "org/name"}}, weights={"revision": "v7"})
    job, after = prefetch_job(hub, "models"), claim_source(hub, "models")
    engine = context(after["model"]["source"], weights=after["weights"])
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == ["fetch", "org/name@v7", model_argument(engine)]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]


def test_another_revision_is_another_job_and_another_directory() -> None:
    jobs = [
        prefetch_job(context({"huggingFace": {"repo": "org/name", "revision": revision}}), "models")
        for revision in ("v1", "v2")
    ]
    assert len({job["metadata"]["name"] for job in jobs}) == 2
    assert len({job["spec"]["template"]["spec"]["containers"][0]["args"][-1] for job in jobs}) == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"builtin": "smollm2-135m"}, "spec.model.source: is not a huggingFace repository"),
        ({"huggingFace": {"repo": "org/name"}}, "spec.model.source.huggingFace.revision: is not set"),
    ],
)
def test_a_source_that_cannot_be_fetched_is_reported(source: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "resource.yaml"
    resource = yaml.safe_load(SAMPLE.read_text())
    resource["spec"]["model"]["source"] = source
    path.write_text(yaml.safe_dump(resource))
    result = run(path)
    assert result.exit_code == 1
    assert said in result.output


def test_the_jobs_pods_reach_dns_and_the_hub_and_nothing_else() -> None:
    hub = context({"huggingFace": {"repo": "org/name", "revision": "v1"}})
    policy, job = prefetch_policy(hub), prefetch_job(hub, "models")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ports = [{port["port"] for port in rule["ports"]} for rule in policy["spec"]["egress"]]
    assert (ports, policy["spec"].get("ingress", [])) == ([{53, 5353}, {443}], [])


def test_without_egress_policies_there_is_the_job_alone() -> None:
    arguments = ["prefetch", "-f", str(SAMPLE), "--claim", "models", "--no-egress-policies"]
    documents = yaml.safe_load_all(CliRunner().invoke(main, arguments).output)
    assert [each["kind"] for each in documents] == ["Job"]


def test_a_revision_that_is_no_name_of_a_directory_is_not_fetched() -> None:
    with pytest.raises(NothingToPrefetch, match=r"huggingFace.revision: is 'refs/pr/1'; .*name a commit"):
        prefetch_job(context({"huggingFace": {"repo": "org/name", "revision": "refs/pr/1"}}), "models")
