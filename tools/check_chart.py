"""Checks the chart and all manifests: `python tools/check_chart.py`, or `make lint-chart`.

`helm lint --strict` checks the chart. kubeconform checks the output of helm, the install manifest, the samples and the
children that the operator renders, against the schemas of the API server. The schemas come from CRDs, and from the
OpenAPI document in Kubernetes' Go module. So the check needs Go and its module proxy, but no cluster.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from localcluster import programs
from localcluster.progress import Steps
from localcluster.settings import cache_root
from localcluster.shell import run
from megatron_operator.resource.crd import custom_resource_definition
from megatron_runtime.protocol import strict_json as json

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/megatron-inference"
KUBECONFORM, KUBECONFORM_VERSION = "github.com/yannh/kubeconform/cmd/kubeconform", "v0.7.0"
CRD_FILES = {
    "sigs.k8s.io/gateway-api@v1.4.0": "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_*monitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
"""CRDs of other projects, by Go module."""
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "namespaced": ["operator.namespaces={team-a,team-b}", "operator.replicas=2"],
    "monitored": ["monitoring.scrape=true", "monitoring.alerts=true", "monitoring.dashboard=true"],
    "plain": ["security.enabled=false", "networkPolicy.enabled=false", "crd.install=false"],
    "tested": ["tests.serverUrl=http://demo", "tests.apiKeySecret.name=keys", "tests.apiKeySecret.key=key"],
    "extended": [
        *("podPolicy.hostPaths={/dev/infiniband}", "podPolicy.hostNetwork=true", "imagePullSecrets[0].name=registry"),
        *("operator.extraEnv[0].name=A", "operator.extraEnv[0].value=b", "operator.podLabels.team=a"),
        *("global.imageRegistry=mirror.example", "global.imagePullSecrets={mirror}"),
        "operator.topologySpreadConstraints[0].maxSkew=1",
        "operator.topologySpreadConstraints[0].topologyKey=topology.kubernetes.io/zone",
        "operator.topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
    ],
}
"""Sets of `--set` values for which the chart is checked."""
MANIFESTS = ("manifests/*.yaml", "manifests/samples/*.yaml", "manifests/cells/*.yaml", "manifests/autoscaling/hpa.yaml")
RENDERED = "tests/unit/operator/golden/*.yaml"
"""Golden files of the objects that the operator renders."""

Schema = dict[str, Any]


def kubeconform() -> Path:
    """Return the path of the program kubeconform. The first call builds it in the user's cache."""
    folder = cache_root() / "tools" / f"kubeconform-{KUBECONFORM_VERSION}"
    if not (folder / "kubeconform").exists():
        run(["go", "install", f"{KUBECONFORM}@{KUBECONFORM_VERSION}"], env={"GOBIN": str(folder)}, cwd=Path("/"))
    return folder / "kubeconform"


def helm() -> Path:
    return programs.ensure(["helm"], Steps()) / "helm"


def _module(path: str) -> Path:
    """Return the folder with the source of a Go module. path: the module, as `path@version`."""
    found = run(["go", "mod", "download", "-json", path], cwd=Path("/"))
    return Path(json.loads(found.stdout)["Dir"])


def write_schemas(folder: Path) -> None:
    """Write the JSON schema of each Kubernetes kind to the file `kind-group-version.json` (in lower case)."""
    kubernetes = _module(f"k8s.io/kubernetes@{programs.KUBERNETES_VERSION}")
    document = json.loads((kubernetes / "api/openapi-spec/swagger.json").read_text())
    definitions = {name: _closed(schema) for name, schema in document["definitions"].items()}
    definitions["io.k8s.apimachinery.pkg.util.intstr.IntOrString"] = {"type": ["integer", "string"]}
    definitions["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["number", "string"]}
    for name, schema in definitions.items():
        gvks = schema.get("x-kubernetes-group-version-kind", ())
        # Options of requests have one schema for all groups.
        if len(gvks) == 1 and "metadata" in schema["properties"]:
            needed = {each: definitions[each] for each in _referenced(name, definitions)}
            _write(folder, **gvks[0], schema={"$ref": f"#/definitions/{name}", "definitions": needed})
    for crd in [custom_resource_definition(), *_foreign_crds()]:
        spec = crd["spec"]
        for version in spec["versions"]:
            schema = _closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            _write(folder, kind=spec["names"]["kind"], group=spec["group"], version=version["name"], schema=schema)


def _foreign_crds() -> Iterator[Schema]:
    for module, patterns in CRD_FILES.items():
        folder = _module(module)
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            for path in folder.glob(pattern):
                yield yaml.safe_load(path.read_text())


def _referenced(name: str, definitions: dict[str, Schema]) -> set[str]:
    """Return the name of a definition and of every definition that it refers to, directly or indirectly."""
    found, left = {name}, [name]
    while left:
        text = json.dumps(definitions[left.pop()])
        new = set(re.findall(r'"#/definitions/([^"]+)"', text)) - found
        found |= new
        left += new
    return found


def _write(folder: Path, *, kind: str, group: str, version: str, schema: Schema) -> None:
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    (folder / f"{name}.json").write_text(json.dumps(schema))


def _closed(schema: Any) -> Any:
    """Return a copy of a schema that allows only the listed properties, like `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    properties = {name: _closed(value) for name, value in schema.get("properties", {}).items()}
    # OpenAPI has formats, such as int32, that JSON schema lacks.
    others = {key: value for key, value in schema.items() if key not in ("properties", "format", "default", "example")}
    found = {key: _closed(value) for key, value in others.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found["type"] = ["integer", "string"]
        found.pop("anyOf", None)
    if properties:
        found["properties"] = properties
        if "additionalProperties" not in found and not found.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


def validate(program: Path, schemas: Path, documents: str) -> subprocess.CompletedProcess[str]:
    """Run kubeconform over YAML documents. An unknown kind is an error."""
    suffix = "{{.ResourceKind}}{{.KindSuffix}}.json"
    command = [program, "-strict", "-summary", "-schema-location", f"{schemas}/{suffix}", "-"]
    return run(command, stdin=documents, check=False)


def render(program: Path, values: Iterable[str]) -> str:
    """Return the output of helm with these `--set` values, including the pods of `helm test`."""
    chosen = [part for value in values for part in ("--set", value)]
    version = programs.KUBERNETES_VERSION.lstrip("v")
    return run([program, "template", "megatron", CHART, "-n", "system", "--kube-version", version, *chosen]).stdout


def main() -> int:
    """Check everything. Return the exit status."""
    tool, chart_tool = kubeconform(), helm()
    linted = run([chart_tool, "lint", "--strict", CHART], check=False)
    print(linted.stdout.strip() or linted.stderr.strip())
    failed = linted.returncode != 0
    files = [path for pattern in (*MANIFESTS, RENDERED) for path in sorted(ROOT.glob(pattern))]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        write_schemas(Path(folder))
        inputs = {f"chart, {name}": render(chart_tool, values) for name, values in VARIANTS.items()}
        inputs |= {str(path.relative_to(ROOT)): path.read_text() for path in files}
        for name, documents in inputs.items():
            checked = validate(tool, Path(folder), documents)
            print(f"{name}: {checked.stdout.strip() or checked.stderr.strip()}")
            failed |= checked.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
