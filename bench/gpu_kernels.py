"""Times every kernel and its torch reference on a CUDA device, and prints how close each kernel comes to its bound in
%.

    python bench/gpu_kernels.py --json kernels.json

The bound on the time is the larger of bytes divided by bandwidth and operations divided by rate. Both rates are
measured on the device first, with a large copy and a large matrix product. A kernel is timed in a CUDA graph, as in a
captured decode step. The calls use several sets of inputs, which together do not fit into the L2 cache. The reference
of a kernel may synchronise with the device, so each call of the reference is timed separately. Before a kernel is
timed, its result is compared with the reference's result.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from megatron_kernels import (
    add_rms_norm,
    moe_experts,
    moe_routing,
    paged_decode,
    paged_prefill,
    qk_norm_rope_append,
    sampling,
    swiglu,
)
from megatron_kernels.registry import Backend, KernelConfig, select_kernels
from megatron_kernels.tuning import expert_places
from megatron_runtime.protocol import strict_json as json

GRAPH_CALLS = 20
REPLAYS = 20

T = TypeVar("T")

Random = Callable[..., torch.Tensor]
"""Returns normally distributed numbers of a shape, on the device and with the type of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of Llama 3.1 8B, with the experts of Qwen3 30B."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    feed_forward: int = 14336
    vocabulary: int = 128256
    experts: int = 128
    expert_width: int = 768
    top_k: int = 8
    page_size: int = 16

    def products(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each matrix product of a layer and of the LM head, by name.

        These products read nearly all bytes of a step.
        """
        attention = self.heads * self.head_dim
        return {
            "qkv": (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            "output": (self.hidden, attention),
            "gate_up": (2 * self.feed_forward, self.hidden),
            "down": (self.hidden, self.feed_forward),
            "head": (self.vocabulary, self.hidden),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation with one set of shapes.

    make: returns the inputs of a call.
    run:  calls an implementation with the inputs, and returns the tensors to compare.
    """

    operation: str
    name: str
    make: Callable[[], Any]
    run: Callable[[Any, Any], Sequence[torch.Tensor]]
    bytes_moved: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The time and the error of one case.

    error: norm of the difference divided by the norm of the reference. For integers, the share of values that differ.
    """

    operation: str
    case: str
    microseconds: float
    percent_of_bound: float
    bound: str
    reference_microseconds: float
    error: float


def cases(
    model: ModelShape, device: torch.device, dtype: torch.dtype, *, tokens: Sequence[int], context: int
) -> Iterator[Case]:
    """Yield the benchmark cases of every operation.

    tokens:  numbers of tokens in a step. Each number has its own cases.
    context: number of cached tokens of each sequence.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for count in tokens:
        yield _norm_case(model, count, random)
        yield _swiglu_case(model, count, random)
        yield _routing_case(model, count, random)
        yield _experts_case(model, count, random)
        yield _append_case(model, count, random)
        yield decode_case(model, count, context, random)
        yield _sampling_case(model, count, random)
    yield _prefill_case(model, [context], [context], random)
    yield _prefill_case(model, [context // 2] * 2, [context] * 2, random)


def _norm_case(model: ModelShape, count: int, random: Random) -> Case:
    return Case(
        operation="add_rms_norm",
        name=f"{count} tokens",
        make=lambda: (random(count, model.hidden), random(count, model.hidden), random(model.hidden)),
        run=lambda function, inputs: (function(*inputs, epsilon=1e-5), inputs[1]),
        bytes_moved=add_rms_norm.bytes_moved(count, model.hidden, element_size=random(1).element_size()),
    )


def _swiglu_case(model: ModelShape, count: int, random: Random) -> Case:
    return Case(
        operation="swiglu",
        name=f"{count} tokens",
        make=lambda: random(count, 2 * model.feed_forward),
        run=lambda function, inputs: (function(inputs),),
        bytes_moved=swiglu.bytes_moved(count, model.feed_forward, element_size=random(1).element_size()),
    )


def _routing_case(model: ModelShape, count: int, random: Random) -> Case:
    def run(function: Any, logits_TN: Any) -> Sequence[torch.Tensor]:
        routing = function(logits_TN, top_k=model.top_k, alignment=16)
        return routing.weights_TJ, routing.experts_TJ, routing.order_R

    moved = moe_routing.bytes_moved(
        count, num_experts=model.experts, top_k=model.top_k, element_size=random(1).element_size()
    )
    return Case(
        operation="moe_routing",
        name=f"{count} tokens",
        make=lambda: random(count, model.experts),
        run=run,
        bytes_moved=moved,
    )


def _experts_case(model: ModelShape, count: int, random: Random) -> Case:
    """Return a case whose tokens select as many different experts as possible."""
    places = expert_places(tokens=count, top_k=model.top_k, num_experts=model.experts)

    def make() -> Any:
        gate_up = random(model.experts, 2 * model.expert_width, model.hidden) * model.hidden**-0.5
        down = random(model.experts, model.hidden, model.expert_width) * model.expert_width**-0.5
        wanted_TJ = torch.arange(count * model.top_k, device=down.device).view(count, -1) % model.experts
        logits = random(count, model.experts).float().scatter_(1, wanted_TJ, 9.0)
        routing = moe_routing.moe_routing(logits, top_k=model.top_k, alignment=places)
        return random(count, model.hidden), gate_up, down, routing

    sizes = {"hidden": model.hidden, "width": model.expert_width}
    chosen = min(model.experts, count * model.top_k)
    return Case(
        operation="moe_experts",
        name=f"{count} tokens",
        make=make,
        run=lambda function, inputs: (function(*inputs, alignment=places),),
        bytes_moved=moe_experts.bytes_moved(count, chosen, element_size=random(1).element_size(), **sizes),
        flops=moe_experts.flops(count * model.top_k, **sizes),
    )


def _append_case(model: ModelShape, count: int, random: Random) -> Case:
    heads = {"num_heads": model.heads, "num_kv_heads": model.kv_heads}
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    kv_width = 2 * model.kv_heads * model.head_dim
    pages = -(-count // model.page_size)

    def make() -> Any:
        cache = random(pages, model.page_size, kv_width)
        slots = torch.randperm(pages * model.page_size, device=cache.device)[:count]
        cos, sin = random(2, count, model.head_dim // 2).float()
        return random(count, width), cos, sin, cache, slots

    def run(function: Any, inputs: Any) -> Sequence[torch.Tensor]:
        function(*inputs, **heads)
        return inputs[0], inputs[3]

    moved = qk_norm_rope_append.bytes_moved(
        count, head_dim=model.head_dim, element_size=random(1).element_size(), **heads
    )
    return Case(operation="qk_norm_rope_append", name=f"{count} tokens", make=make, run=run, bytes_moved=moved)


def _cached(model: ModelShape, lengths: Sequence[int], random: Random) -> tuple[torch.Tensor, ...]:
    """Return a KV cache, block tables with the pages of the cache in random order, and the lengths of the sequences."""
    pages = [-(-length // model.page_size) for length in lengths]
    cache = random(sum(pages), model.page_size, 2 * model.kv_heads * model.head_dim)
    order = torch.randperm(sum(pages), device=cache.device, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=cache.device)
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    return cache, table, torch.tensor(lengths, dtype=torch.int32, device=cache.device)


def decode_case(model: ModelShape, batch: int, context: int, random: Random) -> Case:
    lengths = [context] * batch
    moved = paged_decode.bytes_moved(
        lengths,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        element_size=random(1).element_size(),
    )
    return Case(
        operation="paged_decode",
        name=f"batch {batch}, context {context}",
        make=lambda: (random(batch, model.heads, model.head_dim), *_cached(model, lengths, random)),
        run=lambda function, inputs: (function(*inputs, num_kv_heads=model.kv_heads),),
        bytes_moved=moved,
    )


def _prefill_case(model: ModelShape, queries: Sequence[int], lengths: Sequence[int], random: Random) -> Case:
    def make() -> Any:
        q = random(sum(queries), model.heads, model.head_dim)
        starts = torch.tensor([0, *queries], device=q.device).cumsum(0).int()
        return q, *_cached(model, lengths, random), starts

    width = 2 * (model.heads + model.kv_heads) * model.head_dim
    return Case(
        operation="paged_prefill",
        name=f"{len(queries)} x {queries[0]} tokens in {lengths[0]}",
        make=make,
        run=lambda function, inputs: (function(*inputs, num_kv_heads=model.kv_heads),),
        bytes_moved=max(sum(queries), sum(lengths)) * width * random(1).element_size(),
        flops=paged_prefill.flops(queries, lengths, num_heads=model.heads, head_dim=model.head_dim),
    )


def _sampling_case(model: ModelShape, rows: int, random: Random) -> Case:
    """Return a case in which four sampling modes have the same number of rows each.

    The modes are greedy, all tokens, top-k with top-p, and min-p.
    """

    def make() -> Any:
        logits = 2.5 * random(rows, model.vocabulary)
        kind = torch.arange(rows, device=logits.device) % 4

        def column(*values: float) -> torch.Tensor:
            return torch.tensor(values, device=logits.device)[kind]

        return logits, {
            "temperature_N": column(0.0, 1.0, 0.8, 1.0),
            "top_k_N": column(0, 0, 50, 0).int(),
            "top_p_N": column(0.0, 0.0, 0.95, 0.0),
            "min_p_N": column(0.0, 0.0, 0.0, 0.05),
            "seeds_N": torch.arange(rows, device=logits.device),
            "positions_N": torch.zeros(rows, dtype=torch.int64, device=logits.device),
        }

    return Case(
        operation="sample",
        name=f"{rows} rows",
        make=make,
        run=lambda function, inputs: function(inputs[0], **inputs[1]),
        bytes_moved=sampling.bytes_moved(rows, model.vocabulary, element_size=random(1).element_size()),
    )


def difference(case: Case, function: Any, reference: Any) -> float:
    """Return the error of `function` compared with `reference`: the maximum over the tensors that they return.

    Both get the same inputs.
    """
    torch.manual_seed(1)
    actual = case.run(function, case.make())
    torch.manual_seed(1)
    expected = case.run(reference, case.make())
    return max(_difference(a, e) for a, e in zip(actual, expected, strict=True))


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return float((actual != expected).float().mean())
    distance = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(distance) if torch.isfinite(distance) else float("inf")


def milliseconds(calls: Callable[[], object], device: torch.device) -> float:
    """Return the duration of `calls` in milliseconds, from two events on a CUDA device or from the clock on a CPU."""
    if device.type != "cuda":
        begun = time.perf_counter()
        calls()
        return 1e3 * (time.perf_counter() - begun)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    calls()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def time_in_graph(call: Callable[[T], object], inputs: Sequence[T], device: torch.device) -> float:
    """Return the median microseconds of a call inside a CUDA graph. The calls use `inputs` in rotation.

    On a CPU, which has no graphs, one call is timed.
    """
    if device.type != "cuda":
        return 1e3 * milliseconds(lambda: call(inputs[0]), device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for item in inputs:
            call(item)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(GRAPH_CALLS):
            call(inputs[index % len(inputs)])
    graph.replay()
    return statistics.median(milliseconds(graph.replay, device) for _ in range(REPLAYS)) * 1e3 / GRAPH_CALLS


def time_captured(case: Case, function: Any, device: torch.device) -> float:
    """Return the median microseconds of a call inside a CUDA graph, over inputs that do not fit into the L2 cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    inputs = [case.make() for _ in range(min(GRAPH_CALLS, 1 + 2 * cache // max(1, case.bytes_moved)))]
    return time_in_graph(lambda item: case.run(function, item), inputs, device)


def time_eager(case: Case, function: Any, device: torch.device) -> float:
    """Return the median microseconds of a single call outside a graph."""
    inputs = case.make()
    case.run(function, inputs)
    return statistics.median(milliseconds(lambda: case.run(function, inputs), device) for _ in range(3)) * 1e3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of the device.

    bytes_per_second: bytes that a copy reads plus bytes that it writes.
    flops_per_second: floating-point operations of a matrix product.
    """

    bytes_per_second: float
    flops_per_second: float

    def bound(self, case: Case) -> tuple[str, float]:
        """Return the name of the rate that limits an operation, and the lower bound of its time in microseconds."""
        memory, compute = case.bytes_moved / self.bytes_per_second, case.flops / self.flops_per_second
        return ("memory", memory * 1e6) if memory >= compute else ("compute", compute * 1e6)


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, elements: int = 2**28, side: int = 8192) -> Ceilings:
    """Return the memory bandwidth and the arithmetic rate of a device, measured with a copy and a matrix product.

    elements: size of the copy, in float32 elements.
    side:     number of rows and columns of the matrices.
    """
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copy_ms = statistics.median(milliseconds(lambda: target.copy_(source), device) for _ in range(10))
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    out = torch.empty_like(a)
    product_ms = statistics.median(milliseconds(lambda: torch.mm(a, b, out=out), device) for _ in range(10))
    return Ceilings(2 * source.nbytes / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)


def measure(case: Case, ceilings: Ceilings, device: torch.device) -> Result:
    reference = getattr(select_kernels(_only(Backend.TORCH, case.operation), device), case.operation)
    function = getattr(select_kernels(_only(Backend.TRITON, case.operation), device), case.operation)
    error = difference(case, function, reference)
    microseconds = time_captured(case, function, device)
    kind, minimum = ceilings.bound(case)
    return Result(
        operation=case.operation,
        case=case.name,
        microseconds=round(microseconds, 2),
        percent_of_bound=round(100 * minimum / microseconds, 1),
        bound=kind,
        reference_microseconds=round(time_eager(case, reference, device), 2),
        error=error,
    )


def _line(result: Result) -> str:
    return (
        f"{result.operation:20} {result.case:32} {result.microseconds:10.1f} µs"
        f"  {result.percent_of_bound:5.1f} % of the {result.bound} bound"
        f"  reference {result.reference_microseconds:10.1f} µs  error {result.error:.1e}"
    )


def _only(backend: Backend, operation: str) -> KernelConfig:
    return KernelConfig(**{operation: backend})


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--tokens", default="1,8,64,256", show_default=True, help="Numbers of tokens per step to measure.")
@click.option("--context", default=2048, show_default=True, help="Number of cached tokens per sequence.")
@click.option("--operation", multiple=True, help="Measure only this operation. Repeatable.")
def main(path: Path | None, dtype: str, tokens: str, context: int, operation: tuple[str, ...]) -> None:
    if not torch.cuda.is_available():
        click.echo(
            "no CUDA device: these timings mean nothing elsewhere; `make test-models` checks the arithmetic", err=True
        )
        sys.exit(2)
    device, kind = torch.device("cuda"), getattr(torch, dtype)
    ceilings = measure_ceilings(device, kind)
    name = torch.cuda.get_device_name(device)
    gigabytes, teraflops = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e12
    click.echo(f"{name}: copy {gigabytes:.0f} GB/s, product {teraflops:.0f} TFLOP/s")
    results = []
    for case in cases(ModelShape(), device, kind, tokens=[int(t) for t in tokens.split(",")], context=context):
        if operation and case.operation not in operation:
            continue
        result = measure(case, ceilings, device)
        results.append(result)
        click.echo(_line(result))
    if path is not None:
        report = {
            "device": name,
            "torch": torch.__version__,
            "dtype": dtype,
            "ceilings": asdict(ceilings),
            "results": [asdict(result) for result in results],
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
