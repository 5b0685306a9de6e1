"""`megatron engine`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_runtime.cli.options import (
    COUNT,
    DIRECTORY,
    SECONDS,
    Address,
    Memory,
    OptionalPort,
    batch_invariant,
    log_level,
    model,
    readable_errors,
)

if TYPE_CHECKING:
    from megatron_runtime.engine.settings import EngineSettings


@click.command()
@click.option("--coordinator", type=Address(), required=True, help="The coordinator's engine port.")
@click.option("--name", required=True, help="Stable identity of this engine; the same after a restart.")
@model
@click.option(
    "--format",
    "model_format",
    type=click.Choice(["Auto", "GGUF", "SafeTensors", "TorchDist"]),
    default="Auto",
    help="Refuse a model of another format.",
)
@click.option(
    "--executor",
    type=click.Choice(["torch", "echo"]),
    default="torch",
    envvar="MEGATRON_ENGINE_EXECUTOR",
    help="echo answers with a hash of the prompt, without a model: for tests and benchmarks.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where the model runs; auto takes a GPU where there is one.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16", "int8", "int4"]),
    default="auto",
    help="Of the weights.",
)
@click.option("--max-sequence-length", type=COUNT, help="Tokens of prompt and answer together.")
@click.option("--max-requests", type=COUNT, default=64, help="Generated at once.")
@click.option("--max-tokens", type=COUNT, default=2048, help="Of one step.")
@click.option("--kv-cache-memory", type=Memory(), default="1Gi")
@click.option("--block-size-tokens", type=COUNT, default=256, help="Of a block hash.")
@click.option("--chunked-prefill/--no-chunked-prefill", default=True, help="Spread long prompts over steps.")
@batch_invariant
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="Share the KV of equal prefixes.")
@click.option(
    "--prefix-eviction",
    type=click.Choice(["lru", "ref_zero"]),
    default="lru",
    help="Keep blocks that nobody holds until their memory is needed, or forget them at once.",
)
@click.option(
    "--kv-cache-mode",
    type=click.Choice(["persist", "offload", "recompute"]),
    default="recompute",
    help="What a suspend does with the KV cache.",
)
@click.option(
    "--model-hash", default="", show_default=False, help="Hash of the model; requests made for another one are refused."
)
@click.option(
    "--revision", default="", show_default=False, help="What this engine was rendered from; shown in the status."
)
@click.option("--health-port", type=OptionalPort(), default="8080", help="Probes and metrics.")
@click.option("--keys-dir", type=DIRECTORY, help="engine.key, engine.pub and server.pub; absent: no encryption.")
@click.option("--threads", type=COUNT, help="Torch threads of this machine's ranks together.")
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, 64),
    default=1,
    envvar="TENSOR_PARALLEL_SIZE",
    help="Ranks that share each layer.",
)
@click.option(
    "--pipeline-parallel",
    type=click.IntRange(1, 64),
    default=1,
    envvar="PIPELINE_PARALLEL_SIZE",
    help="Stages of layers, one after the other.",
)
@click.option(
    "--expert-parallel",
    type=click.IntRange(1, 64),
    default=1,
    envvar="EXPERT_PARALLEL_SIZE",
    help="Ranks that share the experts of each layer.",
)
@click.option(
    "--rendezvous-seconds",
    type=click.FloatRange(min=1),
    default=300,
    help="How long ranks wait for each other at the start.",
)
@click.option(
    "--step-timeout-seconds",
    type=click.FloatRange(min=1),
    default=60,
    help="A step in which no rank makes progress for so long ends an engine of several ranks.",
)
@click.option("--echo-step-seconds", type=SECONDS, default=0, help="How long a step of the echo executor takes.")
@click.option("--echo-ranks", type=COUNT, default=1, help="Simulated ranks of the echo executor.")
@click.option(
    "--fault",
    "echo_faults",
    multiple=True,
    envvar="MEGATRON_ENGINE_FAULTS",
    metavar="SPEC",
    help="What goes wrong in an echo engine, such as fail-verb:verb=PAUSE,rank=1; see backends/echo/faults.py.",
)
@click.option("--drain-seconds", type=SECONDS, default=60)
@log_level
@readable_errors
def command(
    *, keys_dir: Path | None, tensor_parallel: int, pipeline_parallel: int, expert_parallel: int, **options: Any
) -> None:
    """Run one data-parallel engine until SIGTERM.

    An engine of several ranks is started once on each of its machines, with NNODES, NODE_RANK, NPROC_PER_NODE,
    MASTER_ADDR and MASTER_PORT where there are several, or by torchrun.
    """
    from megatron_runtime.distributed.shard import ParallelSizes
    from megatron_runtime.engine.settings import EngineSettings

    sizes = ParallelSizes(tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel)
    settings = EngineSettings(keys_dir=keys_dir, parallel=sizes, **options)
    if sizes.world == 1:
        _run_engine(settings)
    else:
        _run_ranks(settings)


def _run_engine(settings: EngineSettings) -> None:
    """Compose the worker and the backend that `settings` choose."""
    from megatron_runtime.backends.registry import build_backend, link_for
    from megatron_runtime.engine import worker

    worker.run(settings, build_backend, link=link_for(settings))


def _run_ranks(settings: EngineSettings) -> None:
    """Be one rank of several, or start those of this machine."""
    from megatron_runtime.backends.native.ranked.executor import end_with
    from megatron_runtime.backends.registry import run_other_rank
    from megatron_runtime.distributed.errors import RankError
    from megatron_runtime.distributed.shard import node_identity, rank_identity

    identity = rank_identity(settings.parallel)
    if identity is None:
        from megatron_runtime.cli.processes import RanksFailedError, launch

        try:
            launch(node_identity(settings.parallel), sys.argv[1:])
        except RanksFailedError as error:
            raise click.ClickException(str(error)) from error
        return
    try:
        if identity.rank == 0:
            _run_engine(settings)
        else:
            run_other_rank(settings, identity)
    except RankError as error:
        end_with(error)
