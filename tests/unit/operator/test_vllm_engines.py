"""vLLM engines: the rendered pods, the checks of their arguments, and what the operator does with a bad one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from megatron_operator.cli import main
from megatron_operator.decision.coordinator_snapshot import OperationReport
from megatron_operator.decision.decide import NOT_QUOTED, decide, quotable
from megatron_operator.decision.world import PodView
from megatron_operator.render.children import all_children
from megatron_operator.render.compare import preview
from megatron_operator.render.context import NotAllowed, RenderContext, UnsupportedByBackend
from megatron_operator.render.engine import revision_of
from megatron_operator.render.model_source import model_hash
from megatron_operator.render.revision import context_of, revision_child
from megatron_operator.resource.crd import structural_schema
from megatron_operator.resource.engine import SpeculativeMethod
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import MegatronInferenceSpec, parse_spec
from megatron_operator.resource.states import OperationOutcome
from megatron_operator.resource.status import MegatronInferenceStatus
from megatron_operator.resource.text import printable
from megatron_runtime.cli.containers import engine as engine_command
from megatron_runtime.protocol.vllm_arguments import CLASSES, Effect

SETTINGS = Settings(runtime_image="registry.example/runtime:1", vllm_runtime_image="registry.example/vllm:1")
CODE = replace(SETTINGS, pod_policy=PodPolicy(vllm_code=True))

POD = PodView("demo-engine-0-0", "u", "engine", engine="demo-engine-0", last_message="the cause")
DONE = {"op": OperationReport(OperationOutcome.FAILED, message="failed")}


def context(
    *, settings: Settings = SETTINGS, engine: dict[str, Any] | None = None, backend: str = "VLLM", **fields: Any
) -> RenderContext:
    spec = {"model": {"source": {"builtin": "smollm2-135m"}}, "engine": {"backend": backend, **(engine or {})}}
    return RenderContext("demo", "default", "uid", parse_spec({**spec, **fields}), settings)


def with_args(args: dict[str, Any], *, settings: Settings = SETTINGS) -> RenderContext:
    return context(settings=settings, engine={"vllm": {"args": args}})


def pod(ctx: RenderContext, kind: str = "StatefulSet", name: str = "demo-engine-0") -> dict[str, Any]:
    found = next(each for each in all_children(ctx) if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return dict(found["spec"]["template"]["spec"])


def engine(ctx: RenderContext) -> dict[str, Any]:
    (container,) = pod(ctx)["containers"]
    return dict(container)


def option(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def variables(ctx: RenderContext) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in engine(ctx)["env"]}


# --- Rendered pods --------------------------------------------------------------------------------------------------


def test_arguments_are_passed_as_canonical_json() -> None:
    ctx = with_args({"quantization": "fp8", "block_size": 32, "enforce_eager": True})
    args = engine(ctx)["args"]
    assert option(args, "--backend") == "vllm"
    assert option(args, "--vllm-arguments") == '{"block_size":32,"enforce_eager":true,"quantization":"fp8"}'
    assert "--vllm-allow-code" not in args
    other_order = with_args({"enforce_eager": True, "block_size": 32, "quantization": "fp8"})
    assert revision_of(other_order) == revision_of(ctx)
    assert option(engine(context())["args"], "--vllm-arguments") == "{}"


def test_no_variable_is_expanded_in_an_argument() -> None:
    text = option(engine(with_args({"moe_backend": "$(HF_TOKEN)"}))["args"], "--vllm-arguments")
    assert "$" not in text
    assert json.loads(text) == {"moe_backend": "$(HF_TOKEN)"}


def test_megatron_engine_accepts_the_command_line(tmp_path: Path) -> None:
    wanted = {"load_format": "$(HF_TOKEN)", "gpu_memory_utilization": 0.5}
    _, *args = engine(with_args(wanted, settings=CODE))["args"]
    for name, value in (("--threads", "1"), ("--keys-dir", str(tmp_path))):
        args[args.index(name) + 1] = value
    params = engine_command.make_context("engine", args).params
    assert (params["backend"], params["vllm_arguments"], params["vllm_allow_code"]) == ("vllm", wanted, True)


def test_engines_with_roles_exchange_kv_by_nixl_with_engines_of_the_resource_only() -> None:
    split = {"roles": {"prefill": {}}, "vllm": {"allowNixlBetweenPods": True}}
    ctx = context(engine=split)
    for role in ("decode", "prefill"):
        manifest = pod(ctx, name=f"demo-{'engine' if role == 'decode' else role}-0")
        assert "--vllm-allow-nixl" in manifest["containers"][0]["args"]
    policies = [each for each in all_children(ctx) if each["kind"] == "NetworkPolicy"]
    [policy] = [each for each in policies if each["metadata"]["name"] == "demo-engines"]
    [rule] = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    labels = rule["from"][0]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == "demo"
    assert labels["app.kubernetes.io/component"] == "engine"
    args = {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}
    conflict = context(engine={**split, "vllm": {"allowNixlBetweenPods": True, "args": args}})
    with pytest.raises(
        UnsupportedByBackend, match=r"kv_transfer_config conflicts with spec\.engine\.roles: remove one"
    ):
        all_children(conflict)


def test_a_native_engine_has_nothing_of_vllm() -> None:
    native = json.dumps(pod(context(backend="Native")))
    assert "vllm" not in native.lower()
    assert "DO_NOT_TRACK" not in native


@pytest.mark.parametrize(
    ("engine_fields", "image"),
    [({}, "registry.example/vllm:1"), ({"vllm": {"image": "registry.example/vllm:2"}}, "registry.example/vllm:2")],
)
def test_engines_and_servers_run_the_vllm_image_and_coordinators_their_own(
    engine_fields: dict[str, Any], image: str
) -> None:
    several = {"allowPickleBetweenPods": True, **engine_fields.get("vllm", {})}
    ctx = context(engine={"vllm": several}, parallelism={"tensor": 2})
    found = pod(ctx)
    assert [each["image"] for each in (*found["containers"], *found["initContainers"])] == [image, image]
    (server,) = pod(ctx, "Deployment", "demo-server")["containers"]
    assert server["image"] == image
    assert {"name": "MEGATRON_ENGINE_BACKEND", "value": "vllm"} in server["env"]
    (native,) = pod(context(backend="Native"), "Deployment", "demo-server")["containers"]
    assert native["image"] == "registry.example/runtime:1"
    assert "MEGATRON_ENGINE_BACKEND" not in json.dumps(native)
    assert pod(ctx, "Deployment", "demo-coordinator")["containers"][0]["image"] == SETTINGS.coordinator_image


def test_a_parser_of_vllm_needs_vllm_engines() -> None:
    for field, other in (("toolCallParser", "qwen3_xml"), ("reasoningParser", "deepseek_r1")):
        context(server={field: other})
        with pytest.raises(ValidationError, match=rf"spec\.server\.{field}.*need spec\.engine\.backend VLLM"):
            context(backend="Native", server={field: other})
        context(backend="Native", server={field: "gemma4"})


def test_a_server_with_an_image_that_the_policy_rejects_is_not_rendered() -> None:
    with pytest.raises(NotAllowed, match=r"spec\.engine\.vllm\.image"):
        pod(context(engine={"vllm": {"image": "elsewhere.example/vllm:1"}}), "Deployment", "demo-server")


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_processes_of_a_pod_share_memory(ranks: int) -> None:
    ctx = context(engine={"ranksPerPod": ranks}, parallelism={"tensor": ranks})
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod(ctx)["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine(ctx)["volumeMounts"]


def test_an_engine_in_one_pod_starts_its_own_ranks() -> None:
    ctx = context(engine={"gpusPerPod": 4}, parallelism={"tensor": 4})
    found = engine(ctx)
    assert found["resources"]["limits"] == {"nvidia.com/gpu": 4}
    env = variables(ctx)
    assert (env["NNODES"], env["NPROC_PER_NODE"], env["TENSOR_PARALLEL_SIZE"]) == ("1", "4", "4")
    assert "VLLM_HOST_IP" not in env


def test_an_engine_over_several_pods_has_the_variables_of_a_native_one_and_its_own_address() -> None:
    sizes: dict[str, Any] = {"parallelism": {"tensor": 2, "pipeline": 2}}
    several = context(engine={"ranksPerPod": 2, "vllm": {"allowPickleBetweenPods": True}}, **sizes)
    native = context(backend="Native", engine={"ranksPerPod": 2}, **sizes)
    env = variables(several)
    assert env.items() >= variables(native).items()
    assert (env["NNODES"], env["NPROC_PER_NODE"], env["MASTER_PORT"]) == ("2", "2", "29500")
    assert env["VLLM_HOST_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_data_parallel_ranks_are_in_one_pod_and_read_their_number_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tensor": 2, "expert": 8, "data": 4}
    ctx = context(engine={"gpusPerPod": 8}, parallelism=sizes)
    assert (ctx.spec.parallelism.ranks, ctx.spec.pods_per_engine) == (8, 1)
    for name, value in variables(ctx).items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
    params = engine_command.make_context("engine", [], resilient_parsing=True).params
    assert {name: params[f"{name}_parallel"] for name in sizes} == sizes
    one, absent = (context(parallelism=each) for each in ({"data": 1}, {}))
    assert revision_of(one) == revision_of(absent)
    assert "DATA_PARALLEL_SIZE" not in variables(context(engine={"gpusPerPod": 2}, parallelism={"tensor": 2}))


@pytest.mark.parametrize(
    ("backend", "engine_fields", "sizes", "message"),
    [
        ("Native", {"ranksPerPod": 2}, {"data": 2}, "parallelism.data: above 1 requires spec.engine.backend VLLM"),
        ("VLLM", {}, {"data": 2}, "parallelism.data: above 1 requires .* and an engine that fits in one pod"),
        ("VLLM", {"ranksPerPod": 4}, {"tensor": 2, "expert": 2, "data": 2}, "set it to 1 or to tensor x data"),
        ("VLLM", {"ranksPerPod": 3}, {"data": 2}, r"tensor x pipeline x expert \(with data above 1: x data\)"),
    ],
)
def test_data_parallelism_that_no_engine_has_is_rejected_by_name(
    backend: str, engine_fields: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        context(backend=backend, engine=engine_fields, parallelism=sizes)


def test_caches_are_on_the_writable_volume_and_nothing_is_reported() -> None:
    ctx = context()
    config = next(each["data"] for each in all_children(ctx) if each["kind"] == "ConfigMap")
    env = {**config, **variables(ctx)}
    caches = ("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")
    assert all(env[name].startswith("/cache/") for name in caches)
    assert (env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"]) == ("1", "1")
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in engine(ctx)["volumeMounts"]}
    assert mounts["/cache"] is False


@pytest.mark.parametrize("backend", ["Native", "VLLM"])
def test_engines_on_gpus_choose_what_the_resource_leaves_open(backend: str) -> None:
    on_cpus, on_gpus = (engine(context(backend=backend, engine={"gpusPerPod": n}))["args"] for n in (0, 1))
    assert (option(on_cpus, "--kv-cache-memory"), option(on_cpus, "--max-sequence-length")) == ("2Gi", "4096")
    limits = {"--kv-cache-memory", "--max-sequence-length", "--max-requests", "--max-tokens"}
    assert not limits & {*on_gpus}
    batching = {"kvCacheMemory": "9Gi", "maxRequests": 8, "maxTokens": 16}
    chosen = context(
        backend=backend,
        engine={"gpusPerPod": 1, "batching": batching},
        model={"source": {"builtin": "smollm2-135m"}, "maxSequenceLength": 512},
    )
    assert [option(engine(chosen)["args"], name) for name in sorted(limits)] == ["9Gi", "8", "512", "16"]


def test_the_status_has_the_lowest_limit_of_the_engines_that_serve(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    assert "limits" not in cluster.status, "engines of an earlier release report none"
    world = cluster.world()
    first, second = world.coordinator.engines
    engines = (
        replace(first, max_sequence_length=8192, kv_cache_bytes=9 << 30, max_requests=256),
        replace(second, max_sequence_length=4096, kv_cache_bytes=10 << 30, max_requests=256, max_tokens=8192),
    )
    status = decide(replace(world, coordinator=replace(world.coordinator, engines=engines))).status
    MegatronInferenceStatus.model_validate(status)
    limits = {"maxSequenceLength": 4096, "kvCacheBytes": 9 << 30, "maxRequests": 256, "maxTokens": 8192}
    assert status["limits"] == limits
    cluster.status["limits"] = limits
    assert decide(cluster.world()).status["limits"] == limits, "they are kept while no engine reports any"


def test_a_figure_of_cpus_is_the_same_model_whether_it_is_set_or_absent() -> None:
    explicit = {"source": {"builtin": "smollm2-135m"}, "maxSequenceLength": 4096}
    assert model_hash(context()) == model_hash(context(model=explicit))
    assert revision_of(context()) == revision_of(context(model=explicit))
    deployments = [
        next(each for each in all_children(ctx) if each["metadata"]["name"] == "demo-server")["metadata"]
        for ctx in (context(), context(model=explicit))
    ]
    assert deployments[0] == deployments[1]


# --- Checks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_model_len": 9}, "args.max_model_len conflicts with spec.model.maxSequenceLength: set that field"),
        ({"tensor_parallel_size": 2}, "args.tensor_parallel_size conflicts with spec.parallelism.tensor"),
        ({"data_parallel_size": 2}, "args.data_parallel_size conflicts with spec.parallelism.data"),
        ({"download_dir": "/tmp"}, "args.download_dir opens a port or a file: leave it out"),
        ({"kv_transfer_config": {"kv_port": 1}}, "args.kv_transfer_config.kv_port opens a port or a file"),
        ({"master_port": 1}, "args.master_port is set by the engine: leave it out"),
        ({"compilation_config": 3}, "args.compilation_config is 3: give an object"),
        (
            {"speculative_config": {"method": "eagle3", "model": "org/draft"}},
            r'args.speculative_config.model is "org/draft": give hf:ORG/NAME\[@REVISION\], the URL',
        ),
        (
            {"speculative_config": {"method": "eagle3", "model": "/model/../etc"}},
            r"args.speculative_config.model is .* without \.\.",
        ),
        ({"quantization": "x" * 16_384}, r"has 16403 characters as JSON .*at most 16384 characters .*shorten it"),
    ],
)
def test_an_argument_that_vllm_engines_do_not_accept_is_named_with_the_remedy(
    args: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedByBackend, match=message):
        all_children(with_args(args))


def test_arguments_are_bounded_in_depth() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(UnsupportedByBackend, match=r"in 22 levels; .*in 16 levels are allowed"):
        all_children(with_args({"hf_overrides": {"a": deep}}, settings=CODE))


@pytest.mark.parametrize(
    "args",
    [
        {"trust_remote_code": True},
        {"load_format": "pt"},
        {"worker_cls": "evil.Worker"},
        {"worker_extension_cls": "evil.Extension"},
        {"compilation_config": {"level": 3}},
        {"colour": 1},
        {"seed\n\x1b": 1},
        {"speculative_config": {"model": "evil.Proposer"}},
        {"speculative_config": {"method": "custom_class", "model": "evil.Proposer"}},
        {"speculative_config": {"method": "eagle", "model": "hf:org/draft", "code_revision": "main"}},
        {"quantization": "fp8", "scheduler_cls": "evil.Scheduler"},
    ],
    ids=str,
)
def test_an_argument_that_can_load_code_needs_the_switch_of_the_chart(args: dict[str, Any]) -> None:
    name = re.escape(printable(next(name for name in args if name != "quantization")))
    with pytest.raises(
        NotAllowed, match=rf"^spec.engine.vllm.args.{name}[.a-z_]*: is .*vllm.allowCode .*--allow-vllm-code"
    ):
        all_children(with_args(args))
    allowed = engine(with_args(args, settings=CODE))["args"]
    assert "--vllm-allow-code" in allowed
    assert json.loads(option(allowed, "--vllm-arguments")) == args


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        {"method": "mtp", "num_speculative_tokens": 1},
        {"method": "eagle3", "num_speculative_tokens": 3, "model": "hf:org/draft@main"},
        {"method": "draft_model", "num_speculative_tokens": 3, "model": "/model/draft"},
        {"method": "eagle", "num_speculative_tokens": 3, "model": "s3://bucket/draft"},
    ],
    ids=lambda config: config["method"],
)
def test_speculation_that_loads_no_code_needs_no_switch(config: dict[str, Any]) -> None:
    args = engine(with_args({"speculative_config": config}))["args"]
    assert json.loads(option(args, "--vllm-arguments")) == {"speculative_config": config}
    assert "--vllm-allow-code" not in args


def test_fields_that_vllm_has_an_argument_for_are_passed_as_arguments() -> None:
    fields = {
        "kvOffload": {"cpuMemory": "64Gi"},
        "quantization": "fp8",
        "speculative": {"method": "Eagle3", "tokens": 3, "model": "hf:org/draft@main"},
    }
    args = engine(context(engine={**fields, "vllm": {"args": {"block_size": 32}}}))["args"]
    assert json.loads(option(args, "--vllm-arguments")) == {
        "block_size": 32,
        "kv_offloading_backend": "native",
        "kv_offloading_size": 64.0,
        "quantization": "fp8",
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3, "model": "hf:org/draft@main"},
    }
    assert "--vllm-allow-code" not in args
    assert model_hash(context(engine={"quantization": "fp8"})) == model_hash(with_args({"quantization": "fp8"}))
    for name, value in fields.items():
        with pytest.raises(ValidationError, match=rf"spec.engine.{name}: not allowed with spec.engine.backend Native"):
            context(backend="Native", engine={name: value})


@pytest.mark.parametrize("method", SpeculativeMethod)
def test_speculation_has_a_draft_model_exactly_if_its_method_needs_one(method: SpeculativeMethod) -> None:
    needs_model = method in ("Eagle", "Eagle3", "DraftModel")
    for model in ({}, {"model": "hf:org/draft"}):
        fields = {"speculative": {"method": method.value, "tokens": 2, **model}}
        if bool(model) == needs_model:
            engine(context(engine=fields))
        else:
            with pytest.raises(ValidationError, match=r"spec.engine.speculative.model: "):
                context(engine=fields)


def test_an_argument_and_its_field_are_not_set_together() -> None:
    both = {"quantization": "fp8", "vllm": {"args": {"quantization": "fp8"}}}
    with pytest.raises(UnsupportedByBackend, match=r"args.quantization conflicts with spec.engine.quantization: "):
        all_children(context(engine=both))


def test_a_foreign_image_needs_its_repository_in_the_chart() -> None:
    foreign = {"vllm": {"image": "registry.example/other:1"}}
    with pytest.raises(
        NotAllowed, match=r"^spec.engine.vllm.image: is .*vllm:1 and .* are allowed; .*imageRepositories"
    ):
        all_children(context(engine=foreign))
    listed = replace(SETTINGS, pod_policy=PodPolicy(image_repositories=("registry.example/other",)))
    assert engine(context(engine=foreign, settings=listed))["image"] == "registry.example/other:1"


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_PLUGINS",
        "VLLM_ASSETS_CACHE",
        "VLLM_LOGGING_CONFIG_PATH",
        "FLASHINFER_WORKSPACE_BASE",
        "DG_JIT_NVCC",
    ],
)
def test_variables_by_which_vllm_loads_code_are_rejected(name: str) -> None:
    overlay = {"spec": {"containers": [{"name": "engine", "env": [{"name": name, "value": "1"}]}]}}
    with pytest.raises(NotAllowed, match=r"podPolicy\.environment"):
        all_children(context(engine={"podTemplate": overlay}))


@pytest.mark.parametrize("name", ["VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_XLA_CACHE_PATH", "VLLM_MEDIA_CACHE"])
def test_no_root_of_a_cache_can_be_moved(name: str) -> None:
    overlay = {"spec": {"containers": [{"name": "engine", "env": [{"name": name, "value": "/x"}]}]}}
    with pytest.raises(NotAllowed):
        all_children(context(engine={"podTemplate": overlay}))


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_ALLREDUCE_USE_FLASHINFER"])
def test_variables_that_choose_what_is_built_in_are_passed_on(name: str) -> None:
    overlay = {"spec": {"containers": [{"name": "engine", "env": [{"name": name, "value": "1"}]}]}}
    assert variables(context(engine={"podTemplate": overlay}))[name] == "1"


def test_each_field_that_conflicts_with_an_argument_exists() -> None:
    schema = structural_schema(MegatronInferenceSpec, "spec")
    paths = {each.field for each in CLASSES.values() if each.kind is Effect.FIELD}
    for path in paths - {"spec.engine.vllm.args.speculative_config"}:  # untyped
        field = reduce(lambda node, name: node["properties"][name], path.split(".")[1:], schema)
        assert field["description"], path


# --- Revisions ------------------------------------------------------------------------------------------------------


def test_another_quantization_is_another_model_and_another_backend_is_not() -> None:
    assert model_hash(with_args({"quantization": "fp8"})) != model_hash(with_args({"quantization": "awq"}))
    assert model_hash(with_args({"block_size": 32})) == model_hash(context()) == model_hash(context(backend="Native"))
    assert revision_of(context()) != revision_of(context(backend="Native"))


def test_the_default_image_is_recorded_with_a_revision_of_vllm_engines() -> None:
    upgraded = replace(SETTINGS, vllm_runtime_image="registry.example/vllm:2")
    now = context(settings=upgraded)
    recorded = revision_child(context())["data"]
    restored = context_of(now, recorded, revision=revision_of(context()))
    assert restored is not None
    assert engine(restored)["image"] == "registry.example/vllm:1"
    assert revision_of(now) != revision_of(context())
    native = context(backend="Native")
    assert revision_of(replace(native, settings=upgraded)) == revision_of(native)
    assert "vllm_runtime_image" not in revision_child(native)["data"]["settings"]


def test_a_plan_names_the_change_and_replaces_engines_one_after_another() -> None:
    found = preview(context(backend="Native", replicas=2), context(replicas=2))
    restarted = {change.child for change in found.changes if change.restarts}
    assert restarted == {"StatefulSet demo-engine-0", "StatefulSet demo-engine-1", "Deployment demo-server"}
    assert found.steps[-1] == "lowest capacity meanwhile: 1 of 2 engines"


# --- The operator ---------------------------------------------------------------------------------------------------


def test_a_bad_argument_is_named_in_the_status_and_changes_nothing_that_runs(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, engine={"backend": "VLLM"}).settled()
    before = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    cluster.change(engine={"vllm": {"args": {"quantisation": "fp8"}}})
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == before
    assert cluster.signals() == []
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NotAllowed")
    assert "spec.engine.vllm.args.quantisation: is 'fp8'; arguments of vLLM that" in degraded["message"]
    assert cluster.condition("Ready")["status"] == "True"

    cluster.change(desiredState="Stopped")
    assert (cluster.state, cluster.engine_pods()) == ("Stopped", [])
    cluster.change(desiredState="Running")
    assert cluster.status["ready"] == "2/2", "engines of the recorded revision run again"

    cluster.change(engine={"vllm": {"args": {"quantization": "fp8"}}})
    assert (cluster.status["ready"], cluster.status["updatedReplicas"]) == ("2/2", 2)
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_new_resource_with_a_bad_argument_gets_no_engine(make_cluster: Any) -> None:
    cluster = make_cluster(engine={"backend": "VLLM", "vllm": {"args": {"dtype": "half"}}}).settled()
    assert cluster.engine_pods() == []
    assert cluster.condition("Ready")["reason"] == "UnsupportedByBackend"


def test_messages_of_the_default_vllm_image_are_quoted_and_of_others_not(make_cluster: Any) -> None:
    world = make_cluster(engine={"backend": "VLLM"}).world()
    foreign = make_cluster(engine={"backend": "VLLM", "vllm": {"image": "registry.example/other:1"}}).world()

    def quoted(world: Any, image: str) -> tuple[str, str]:
        ended = replace(POD, image=image)
        found = quotable(replace(world, pods=(ended,), coordinator=replace(world.coordinator, operations=DONE)))
        return found.pods[0].last_message, found.coordinator.operations["op"].message

    assert quoted(world, world.settings.vllm_runtime_image) == ("the cause", "failed")
    assert quoted(foreign, "registry.example/other:1") == (NOT_QUOTED, NOT_QUOTED)


def test_the_offline_commands_apply_the_same_checks(tmp_path: Path) -> None:
    path = tmp_path / "resource.yaml"
    spec = {
        "model": {"source": {"builtin": "smollm2-135m"}},
        "engine": {"backend": "VLLM", "vllm": {"args": {"trust_remote_code": True}}},
    }
    resource = {"apiVersion": "inference.megatron.dev/v1beta1", "kind": "MegatronInference"}
    path.write_text(json.dumps({**resource, "metadata": {"name": "demo"}, "spec": spec}))
    for command in ("render", "plan"):
        rejected = CliRunner().invoke(main, [command, "-f", str(path)])
        assert rejected.exit_code == 1
        assert "spec.engine.vllm.args.trust_remote_code" in rejected.output
        accepted = CliRunner().invoke(main, [command, "-f", str(path), "--allow-vllm-code"])
        assert accepted.exit_code == 0, accepted.output
    rendered = CliRunner().invoke(main, ["render", "-f", str(path), "--allow-vllm-code", "--vllm-runtime-image", "v:9"])
    assert "image: v:9" in rendered.output
