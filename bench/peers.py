"""How the engine compares with other engines on this machine, on the same weights and prompts, in one run.

    python bench/peers.py --venv build/peers/venv --vllm-venv build/peers/vllm --json docs/peers.json

Each engine is a process of its own that waits while another is measured; all are pinned to the same processors. In each
round every engine runs every cell once, one after the other; a cell's figure is the median of the rounds. Peers live in
environments of their own (`pip install 'megatron-inference[peers]'`); one that does not start is named with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from megatron_runtime.cli.bench.engine_load import memory_bandwidth
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.loading.export import export_hf

_WORKERS = Path(__file__).parent / "peer_workers"
_MODEL = "builtin:smollm2-135m"
_PARAMETERS = 134_515_008
_START_SECONDS = 300
_RUN_SECONDS = 120
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "4-bit": 5 / 8}
"""Of a weight. 4-bit: the blocks of Q4_1."""


@dataclass(frozen=True, slots=True)
class Cell:
    """batch, prompt_tokens, new_tokens of one measurement. rate: what is counted, None for milliseconds."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    is_decode: bool = False
    is_time: bool = False


CELLS = (
    Cell("decode b1", 1, 64, 64, is_decode=True),
    Cell("decode b8", 8, 64, 64, is_decode=True),
    Cell("decode b32", 32, 64, 32, is_decode=True),
    Cell("prefill 512", 1, 512, 1),
    Cell("first token of 64 ms", 1, 64, 1, is_time=True),
)


class WorkerError(RuntimeError):
    """An engine did not start, or did not answer."""


class Worker:
    """One engine, in a process of its own."""

    def __init__(self, command: list[str], *, cpus: set[int]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            cwd=_WORKERS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"},
        )
        self.load_seconds: float = self._read(_START_SECONDS)["load_seconds"]
        self.peak_rss_mib = 0.0

    def seconds(self, *, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> float:
        assert self._process.stdin is not None
        ask = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "seed": seed}
        self._process.stdin.write(json.dumps(ask) + "\n")
        reply = self._read(_RUN_SECONDS)
        self.peak_rss_mib = reply["peak_rss_mib"]
        return reply["seconds"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def _read(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._process.kill()
            self._errors.seek(0)
            tail = [text for text in self._errors.read().splitlines() if text.strip()][-1:] or ["no message"]
            self.close()
            raise WorkerError(tail[0][:200] if ready else f"no answer within {seconds:.0f} s")
        return json.loads(line)


@dataclass(slots=True)
class Engine:
    """What was measured of one engine on weights of one kind."""

    name: str
    weights: str
    command: list[str]
    worker: Worker | None = None
    failure: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)


def engines(options: argparse.Namespace, files: dict[str, str]) -> list[Engine]:
    """All engines on all weights they take. files: "hf" directory and GGUF files by weights."""
    threads = str(options.threads)
    found = []
    for weights, dtype in (("4-bit", "int4"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        found.append(Engine("megatron", weights, [sys.executable, "ours.py", _MODEL, dtype, threads]))
        if options.venv is not None:
            python = str(options.venv.absolute() / "bin" / "python")
            found.append(Engine("llama.cpp", weights, [python, "llama_cpp.py", files[weights], threads]))
            found.append(Engine("OpenVINO", weights, [python, "openvino_cpu.py", files[weights], threads]))
        if weights == "4-bit":
            continue
        found.append(
            Engine("transformers", weights, [sys.executable, "hf_transformers.py", files["hf"], dtype, threads])
        )
        if options.vllm_venv is not None:
            python = str(options.vllm_venv.absolute() / "bin" / "python")
            found.append(Engine("vLLM", weights, [python, "vllm_cpu.py", files["hf"], dtype, threads]))
    return [engine for engine in found if engine.weights in options.weights.split(",")]


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The model of `source` with its matrices as plain numbers of `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, entry.contents(), entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        is_plain = values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32
        data = values if is_plain else gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.F32 if is_plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(engine: Engine, cell: Cell, *, seed: int) -> None:
    """Run one cell once."""
    assert engine.worker is not None
    run = engine.worker.seconds
    whole = run(batch=cell.batch, prompt_tokens=cell.prompt_tokens, new_tokens=cell.new_tokens, seed=seed)
    if cell.is_decode:
        first = run(batch=cell.batch, prompt_tokens=cell.prompt_tokens, new_tokens=1, seed=seed + 1)
        figure = cell.batch * (cell.new_tokens - 1) / max(whole - first, 1e-9)
    else:
        figure = whole * 1000 if cell.is_time else cell.prompt_tokens / whole
    engine.figures.setdefault(cell.name, []).append(figure)


def run(found: list[Engine], *, rounds: int, cpus: set[int]) -> None:
    """One kind of weights at a time, so that few engines are in memory."""
    for weights in dict.fromkeys(engine.weights for engine in found):
        group = [engine for engine in found if engine.weights == weights]
        for engine in group:
            attempt(engine, lambda engine=engine: start(engine, cpus))
        for number in range(rounds):
            for cell in CELLS:
                for engine in group:
                    if engine.worker is not None:
                        attempt(engine, lambda e=engine, c=cell, n=number: measure(e, c, seed=2 * n))
            print(f"{weights}: round {number + 1} of {rounds}", flush=True)
        for engine in group:
            if engine.worker is not None:
                engine.worker.close()


def start(engine: Engine, cpus: set[int]) -> None:
    engine.worker = Worker(engine.command, cpus=cpus)
    # What is made at first use.
    engine.worker.seconds(batch=1, prompt_tokens=16, new_tokens=2, seed=0)


def attempt(engine: Engine, what: Any) -> None:
    try:
        what()
    except WorkerError as error:
        engine.worker, engine.failure = None, str(error)
        print(f"{engine.name}, {engine.weights}: {error}", flush=True)


def rows(found: list[Engine], bandwidth: float) -> list[dict[str, Any]]:
    """One for each kind of weights and cell: ours, the best peer, and by how much ours is ahead."""
    result = []
    for weights in dict.fromkeys(engine.weights for engine in found):
        group = [engine for engine in found if engine.weights == weights]
        for cell in CELLS:
            figures = {engine.name: engine.figures[cell.name] for engine in group if engine.figures.get(cell.name)}
            medians = {name: statistics.median(values) for name, values in figures.items()}
            ours = medians.pop("megatron", None)
            if ours is None:
                continue
            best = (min if cell.is_time else max)(medians, key=lambda name: medians[name], default=None)
            row: dict[str, Any] = {"weights": weights, "cell": cell.name, "ours": round(ours, 1)}
            row["best_peer"] = round(medians[best], 1) if best else None
            row["peer"] = best
            ratio = (medians[best] / ours if cell.is_time else ours / medians[best]) if best else None
            row["ratio"] = round(ratio, 2) if ratio else None
            if cell.is_decode:
                # Weights are read once a step, whatever the batch.
                achieved = ours / cell.batch * _PARAMETERS * _BYTES[weights]
                row["percent_of_memory_bound"] = round(100 * achieved / bandwidth, 1)
            row["all"] = {
                name: {"median": round(statistics.median(v), 1), "min": round(min(v), 1), "max": round(max(v), 1)}
                for name, v in figures.items()
            }
            result.append(row)
    return result


def plot(document: dict[str, Any], path: Path) -> None:
    """Ratios as bars, one a row: an SVG, written by hand for want of more."""
    shown = [row for row in document["rows"] if row["ratio"]]
    height, most = 22 * len(shown) + 40, max((row["ratio"] for row in shown), default=1.0)
    scale = 420 / max(most, 1.2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        '<text x="8" y="18">megatron / best peer at equal weights; the line is 1.0</text>',
    ]
    for number, row in enumerate(shown):
        y = 30 + 22 * number
        colour = "#2a7" if row["ratio"] >= 1 else "#c63"
        label = f"{row['weights']}, {row['cell']}"
        lines += [
            f'<text x="8" y="{y + 12}">{label}</text>',
            f'<rect x="210" y="{y}" width="{row["ratio"] * scale:.0f}" height="16" fill="{colour}"/>',
            f'<text x="{214 + row["ratio"] * scale:.0f}" y="{y + 12}">{row["ratio"]} ({row["peer"]})</text>',
        ]
    lines += [f'<path d="M{210 + scale:.0f} 26 V{height - 12}" stroke="black" stroke-dasharray="3"/>', "</svg>"]
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="environment with xllamacpp and openvino-genai")
    parser.add_argument("--vllm-venv", type=Path, help="environment with vllm-cpu")
    parser.add_argument("--weights", default="4-bit,bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("docs/peers.json"))
    options = parser.parse_args()
    cpus = set(sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    bandwidth = memory_bandwidth()
    with tempfile.TemporaryDirectory() as directory:
        source = next((Path(gguf_directory())).glob("*.gguf"))
        files = {"hf": f"{directory}/hf", "4-bit": str(source)}
        export_hf(_MODEL, Path(files["hf"]))
        for weights, kind in (
            # Their fastest form of 16 bits on processors without instructions for bfloat16.
            ("bfloat16", gguf.GGMLQuantizationType.F16),
            ("float32", gguf.GGMLQuantizationType.F32),
        ):
            files[weights] = f"{directory}/{weights}.gguf"
            write_gguf(source, Path(files[weights]), kind)
        found = engines(options, files)
        run(found, rounds=options.rounds, cpus=cpus)
    document = {
        "machine": machine() | {"memory_gb_per_s": round(bandwidth / 1e9, 1), "threads": options.threads},
        "rounds": options.rounds,
        "rows": rows(found, bandwidth),
        "engines": [
            {
                "engine": engine.name,
                "weights": engine.weights,
                "load_seconds": round(engine.worker.load_seconds, 2) if engine.worker else None,
                "peak_rss_mib": round(engine.worker.peak_rss_mib) if engine.worker else None,
                "failure": engine.failure or None,
            }
            for engine in found
        ],
        "at": time.strftime("%Y-%m-%d"),
    }
    options.json.write_text(json.dumps(document, indent=2) + "\n")
    plot(document, options.json.with_suffix(".svg"))
    for row in document["rows"]:
        peer = f"{row['best_peer']!s:>9} {row['peer']!s:13}"
        print(f"{row['weights']:9} {row['cell']:22} {row['ours']:9} {peer} {row['ratio']}")


def gguf_directory() -> str:
    """Where the package with the built-in model's weights is."""
    from megatron_runtime.loading.source import resolve

    return str(resolve(_MODEL).location.parent)


if __name__ == "__main__":
    main()
