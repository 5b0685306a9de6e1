"""The resource as types: defaults, rejections, and the CRD that is generated from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.resource.base import require
from megatron_operator.resource.crd import COLUMNS, custom_resource_definition
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import NAME_RULES, parse_spec

SOURCE = {"builtin": "smollm2-135m"}


def _spec(**fields: Any) -> dict[str, Any]:
    return {"model": {"source": SOURCE}, **fields}


def _vllm(*, engine: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return _spec(engine={"backend": "VLLM", **(engine or {})}, **fields)


@pytest.mark.parametrize(
    "spec",
    [
        _vllm(),
        _vllm(model={"source": SOURCE, "dtype": "BFloat16", "format": "GGUF"}),
        _vllm(model={"source": SOURCE, "format": "TorchDist"}),
        _vllm(engine={"gpusPerPod": 4}, parallelism={"tensor": 4}),
        _vllm(engine={"vllm": {"allowPickleBetweenPods": True}}, parallelism={"tensor": 2}),
        _spec(model={"source": SOURCE, "dtype": "Int4", "format": "TorchDist"}, parallelism={"tensor": 2}),
    ],
)
def test_each_backend_accepts_what_it_can_run(spec: dict[str, Any]) -> None:
    parse_spec(spec)


def test_defaults_are_those_of_the_reference() -> None:
    spec = parse_spec(_spec()).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert spec["desiredState"] == "Running"
    assert spec["replicas"] == 1
    assert spec["engine"]["batching"] == {
        "blockSizeTokens": 256,
        "prefixCaching": True,
        "chunkedPrefill": True,
    }
    assert "maxSequenceLength" not in spec["model"]
    assert (parse_spec(_spec()).kv_cache_memory, parse_spec(_spec()).max_sequence_length) == ("2Gi", 4096)
    assert spec["lifecycle"]["pause"] == {"mode": "Hold", "maxQueued": 10000, "maxWaitSeconds": 300}
    assert spec["rollout"] == {"maxSurge": 0, "paused": False, "autoUpdate": False}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (_spec(nope=1), "nope"),
        (_spec(replicas=-1), "replicas"),
        (_spec(desiredState="Asleep"), "desiredState"),
        ({"model": {"source": {}}}, "no source is set; set exactly one of builtin"),
        ({"model": {"source": {**SOURCE, "image": {"reference": "x"}}}}, "several sources are set"),
        (_spec(parallelism={"tensor": 3}, engine={"gpusPerPod": 2}), "by spec.engine.gpus.*is 3 ranks, 2 per pod"),
        (_spec(parallelism={"tensor": 3}, engine={"ranksPerPod": 2}), "by spec.engine.ranks.*is 3 ranks, 2 per pod"),
        (_spec(parallelism={"tensor": 0}), "tensor"),
        (_spec(parallelism={"tensor": 129}), "tensor"),
        (_spec(parallelism={"tensor": 128, "pipeline": 3}), "must be at most 256.*raise spec.replicas.*is 384"),
        ({"model": {"source": SOURCE, "dtype": "Float8"}}, "'Int8' or 'Int4'"),
        (_spec(engine={"batching": {"kvCacheMemory": "0Gi"}}), "kvCacheMemory"),
        (_spec(coordinator={"routing": {"alpha": "1.5"}}), "alpha"),
        (
            {"model": {"source": {"persistentVolumeClaim": {"claimName": "c", "path": "/x/{revision}"}}}},
            "so spec.weights.revision must be set",
        ),
        (_spec(weights={"revision": "7"}), "a builtin model has no other revisions; remove spec.weights"),
        (
            {
                "model": {"source": {"image": {"reference": "r", "path": "/x"}}},
                "weights": {"revision": "7"},
            },
            "image.path: has no .revision. placeholder",
        ),
        (_spec(rollout={"maxUnavailable": 0}), "maxUnavailable: is 0 and .*maxSurge is 0"),
        (_spec(engine={"batching": {"maxTokens": 8, "maxRequests": 9}}), "maxTokens: .*maxRequests .is 8, less than 9"),
        (
            {
                "model": {"source": {"huggingFace": {"repo": "a/b", "revision": "c"}}},
                "weights": {"revision": "d"},
            },
            "not allowed together",
        ),
        (_spec(engine={"vllm": {}}), "set spec.engine.backend to VLLM, or remove spec.engine.vllm"),
        (_vllm(engine={"native": {}}), "set spec.engine.backend to Native, or remove spec.engine.native"),
        (_spec(engine={"native": {"stepTimeoutSeconds": 0}}), "stepTimeoutSeconds"),
        (_spec(coordinator={"replicas": 3}), "replicas"),
        (_spec(engine={"backend": "VLLM", "image": "x"}), "set spec.engine.vllm.image instead"),
        (_spec(engine={"backend": "VLLM", "vllm": {"args": dict.fromkeys(map(str, range(65)), 1)}}), "at most 64"),
        (_vllm(model={"source": SOURCE, "dtype": "Int4"}), "spec.model.dtype: .*args.quantization.*is Int4"),
        (_vllm(parallelism={"tensor": 2}), "allowPickleBetweenPods: .*can run code there; set it to true"),
        (_vllm(engine={"roles": {"prefill": {}}}), "allowNixlBetweenPods: .*without authentication; set it to true"),
        (
            _vllm(parallelism={"tensor": 4}, engine={"gpusPerPod": 2, "vllm": {"args": {}}}),
            "allowPickleBetweenPods: .*raise spec.engine.gpusPerPod",
        ),
    ],
)
def test_a_wrong_spec_is_rejected_with_field_and_remedy(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        parse_spec(spec)


@pytest.mark.parametrize("name", ["a", "demo", "demo-2", "a" * 40, "engine-x"])
def test_good_names_pass(name: str) -> None:
    require(NAME_RULES, name)


@pytest.mark.parametrize(
    "name", ["", "Demo", "0demo", "demo-", "a" * 41, "x-coordinator", "x-server", "x-keys", "x-engine-0", "x-engines"]
)
def test_names_that_children_could_not_use_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=rf"metadata\.name: .*is '{name}'"):
        require(NAME_RULES, name)


def test_every_child_name_of_the_longest_resource_fits() -> None:
    ctx = RenderContext("a" * 40, "ns", "uid", parse_spec(_spec(replicas=1024)), Settings(runtime_image="r"))
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in all_children(ctx)]
    assert max(len(name) for _, name in names) <= 63
    # The StatefulSet controller labels pods with its name, a dash and ten characters.
    assert max(len(name) for kind, name in names if kind == "StatefulSet") <= 63 - 11


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")


def _version() -> dict[str, Any]:
    (version,) = custom_resource_definition()["spec"]["versions"]
    return dict(version)


def test_the_schema_is_structural_and_every_field_is_described() -> None:
    schema = _version()["schema"]["openAPIV3Schema"]["properties"]
    for part in ("spec", "status"):
        for path, node in _nodes(schema[part]):
            assert "type" in node, path
            assert not {"$ref", "anyOf", "allOf", "oneOf", "title"} & set(node), path
            assert not {"additionalProperties", "properties"} <= set(node), path
            if path:
                assert node.get("description") or path.endswith("[]"), path


def test_sections_default_to_an_object_so_that_their_own_defaults_apply() -> None:
    spec = _version()["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in ("parallelism", "engine", "coordinator", "server", "lifecycle", "rollout"):
        assert spec["properties"][name]["default"] == {}
    assert spec["required"] == ["model"]


def test_scale_and_status_are_subresources() -> None:
    assert _version()["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }


def test_print_columns_narrow_and_wide() -> None:
    assert [name for name, _, _, priority in COLUMNS if not priority] == ["State", "Ready", "Model", "Reason", "Age"]
    assert [name for name, _, _, priority in COLUMNS if priority] == ["Backend", "Epoch", "Revision", "Endpoint"]


def test_no_field_of_the_spec_shows_a_user_a_regular_expression() -> None:
    schema = _version()["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert [path for path, node in _nodes(schema) if "pattern" in node] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"model": {"source": {"persistentVolumeClaim": {"claimName": "c", "path": "models"}}}},
            "is 'models'; must be an absolute path without . and .. parts, such as /models/llama; begin it with /",
        ),
        (
            {"model": {"source": {"huggingFace": {"repo": "gpt2"}}}},
            "is 'gpt2'; must be a repository of the hub, as org/name",
        ),
        ({"model": {"source": {"builtin": "x\n"}}}, "must be the name of a builtin model"),
        (
            {"model": {"source": {"builtin": "x"}}, "coordinator": {"routing": {"alpha": "2"}}},
            "is '2'; must be a decimal number from 0 to 1, such as 0.5",
        ),
    ],
)
def test_the_offline_commands_show_the_same_sentence(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_spec(spec)
    assert words in str(caught.value)


def test_every_rule_has_a_message_that_names_its_field() -> None:
    schema = _version()["schema"]["openAPIV3Schema"]
    rules = [rule for _, node in _nodes(schema) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 7
    assert all(rule["message"].startswith(("spec.", "metadata.name")) for rule in rules)


@pytest.mark.parametrize("kind", ["persistentVolumeClaim", "image"])
@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        *(
            (path, True)
            for path in ("/", "/a", "/a/b.gguf", "//a//b/", "/.hidden", "/..data/model", "/a..b", "/{revision}")
        ),
        *((path, False) for path in ("/..", "/../etc", "/a/../../etc", "/a/..", "/./a", "/a/./b", "a", "")),
    ],
)
def test_a_path_of_a_model_stays_in_its_volume(kind: str, path: str, accepted: bool) -> None:
    source = {"claimName": "c", "path": path} if kind == "persistentVolumeClaim" else {"reference": "x", "path": path}
    spec = {"model": {"source": {kind: source}}}
    if "{revision}" in path:
        spec["weights"] = {"revision": "7"}
    if accepted:
        assert parse_spec(spec).model.source.path == path
    else:
        with pytest.raises(ValidationError, match="path"):
            parse_spec(spec)


@pytest.mark.parametrize(
    ("rollout", "unavailable"),
    [({}, 1), ({"maxSurge": 1}, 0), ({"maxSurge": 1, "maxUnavailable": 2}, 2), ({"maxUnavailable": 3}, 3)],
)
def test_a_rollout_with_surge_takes_no_capacity_by_default(rollout: dict[str, int], unavailable: int) -> None:
    assert parse_spec(_spec(rollout=rollout)).rollout.unavailable == unavailable


_REVISIONS = [
    "..",
    "a/../b",
    "a..b",
    "-x",
    "--config",
    "/x",
    "a b",
    "a\nb",
    "$(HF_TOKEN)",
    "a;b",
    "a'b",
    "é",
    "a@b",
    "",
]
_NAMES = ["..", "a/../b", "a..b", "-x", "--config", "a b", "a\nb", "$(HF_TOKEN)", "a;b", "é"]
_REPOSITORIES = ["a/..", "../a", "a/b/c", "-a/b", "a/b c"]
_PREFIXES = ["..", "a/../b", "a b", "a?b"]
_COMMIT = "7ae557604adf67be50417f59c2c2f167def9a775"
_PATHS = ["models", "/a/../b", "/..", "/.", "/a/./b", "/a\nb", "/a\x00b", "/a\x7f"]


@pytest.mark.parametrize(
    ("build", "values"),
    [
        (lambda text: _spec(model={"source": {"huggingFace": {"repo": "a/b", "revision": text}}}), _REVISIONS),
        (
            lambda text: _spec(model={"source": {"huggingFace": {"repo": text}}}),
            _REPOSITORIES,
        ),
        (
            lambda text: _spec(
                model={"source": {"objectStore": {"url": "s3://b/{revision}"}}}, weights={"revision": text}
            ),
            [*_REVISIONS, "a/b"],
        ),
        (lambda text: _spec(model={"source": SOURCE, "name": text}), _NAMES),
        (
            lambda text: _spec(
                model={"source": SOURCE, "adapters": [{"name": text, "source": {"huggingFace": {"repo": "a/b"}}}]}
            ),
            _NAMES,
        ),
        (
            lambda text: _spec(
                model={
                    "source": SOURCE,
                    "adapters": [{"name": "x", "source": {"huggingFace": {"repo": "a/b", "revision": text}}}],
                }
            ),
            [each for each in _REVISIONS if each],
        ),
        (lambda text: _spec(model={"source": {"persistentVolumeClaim": {"claimName": "c", "path": text}}}), _PATHS),
        (lambda text: _spec(model={"source": {"image": {"reference": "r", "path": text}}}), _PATHS),
        (
            lambda text: _spec(model={"source": {"objectStore": {"url": f"s3://b/{text}"}}}),
            _PREFIXES,
        ),
    ],
    ids=["revision", "repo", "weights", "name", "adapter", "adapter revision", "claim", "image", "url"],
)
def test_texts_of_a_command_line_have_a_pattern(build: Callable[[str], dict[str, Any]], values: list[str]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=r"spec|must be|String"):
            parse_spec(build(value))


def test_revisions_of_the_hub_pass() -> None:
    for revision in (
        "main",
        "v1.0",
        "refs/pr/12",
        "gptq-4bit-32g-actorder_True",
        "7ae557604adf67be50417f59c2c2f167def9a775",
    ):
        parse_spec(_spec(model={"source": {"huggingFace": {"repo": "a/b", "revision": revision}}}))
