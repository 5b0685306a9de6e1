"""Evaluations and benchmarks of other projects: one short run of each against `megatron serve` with SmolLM2."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL, Client, Server
from .environments import ROOT

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model's tokenizer, in the form of transformers."""
    directory = tmp_path_factory.mktemp("model") / "smollm2"
    command = [ROOT / ".venv" / "bin" / "megatron", "convert", f"builtin:{MODEL}", directory, "--to", "safetensors"]
    subprocess.run(command, check=True)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    return directory


def test_lm_eval(client: Callable[[str], Client], model_server: Server, tokenizer: Path) -> None:
    """Log-likelihoods of given answers, by /v1/completions, and generated answers by /v1/chat/completions."""
    evaluation = client("lm-eval")
    evaluation.variables = OFFLINE
    questions = [{"question": f"The capital of {country} is", "answer": city} for country, city in CAPITALS.items()]
    (evaluation.work / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    for kind, task in TASKS.items():
        options: dict[str, Any] = {
            "task": kind,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(evaluation.work / "data.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            **task,
        }
        (evaluation.work / f"{kind}.yaml").write_text(json.dumps(options))

    def evaluate(task: str, *options: str, model: str, path: str) -> dict[str, float]:
        arguments = f"model={MODEL},base_url={model_server.url}{path},num_concurrent=1,tokenizer={tokenizer}"
        output = evaluation.work / "results" / task
        command = ("lm_eval", "--model", model, "--model_args", arguments, "--include_path", str(evaluation.work))
        evaluation.run(*command, "--tasks", task, "--output_path", str(output), *options, seconds=300)
        (file,) = output.glob("**/results*.json")
        return json.loads(file.read_text())["results"][task]

    assert evaluate("choice", model="local-completions", path="/v1/completions")["acc,none"] >= 0.75
    chat = {"model": "local-chat-completions", "path": "/v1/chat/completions"}
    assert evaluate("written", "--apply_chat_template", **chat)["exact_match,none"] >= 0
    exchanges = model_server.exchanges(maximum=60, rejection="There is no /tokenizer_info here")
    scored = [each.body for each in exchanges if each.path == "/v1/completions"]
    assert scored
    assert all(body["logprobs"] and body["echo"] for body in scored)
    model_server.check_shapes("lm-eval", exchanges)


CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": list(CAPITALS.values()),
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_guidellm(client: Callable[[str], Client], model_server: Server, tokenizer: Path) -> None:
    guidellm = client("guidellm")
    guidellm.variables = OFFLINE
    report = guidellm.work / "report.json"
    guidellm.run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={model_server.url},model={MODEL}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
        *("--output", f"kind=json,path={report}", "--disable-console-interactive"),
        seconds=300,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 4
    model_server.check_shapes("guidellm", model_server.exchanges(maximum=20))


def test_inference_perf(client: Callable[[str], Client], model_server: Server, tokenizer: Path) -> None:
    perf = client("inference-perf")
    perf.variables = OFFLINE
    lengths = {"min": 16, "max": 16, "mean": 16, "std_dev": 0, "total_count": 4}
    settings = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": model_server.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "data": {"type": "random", "input_distribution": lengths, "output_distribution": lengths},
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": 2, "duration": 2}]},
        "storage": {"local_storage": {"path": str(perf.work / "reports")}},
    }
    (perf.work / "config.yml").write_text(json.dumps(settings))
    perf.run("inference-perf", "--config_file", "config.yml", seconds=300)
    (summary,) = perf.work.glob("reports/**/summary_lifecycle_metrics.json")
    totals = json.loads(summary.read_text())
    assert (totals["successes"]["count"], totals["failures"]["count"]) == (4, 0)
    model_server.check_shapes("inference-perf", model_server.exchanges(maximum=20))
