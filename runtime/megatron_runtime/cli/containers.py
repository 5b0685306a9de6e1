"""The entry points of containers: `megatron coordinator`, `engine`, `server` and `preflight`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from megatron_runtime.cli.devices import Device, assign_gpus, count_gpus, device_option, show_only
from megatron_runtime.cli.options import (
    ADDRESS,
    COUNT,
    DIRECTORY,
    FILE,
    MEMORY,
    OPTIONAL_PORT,
    PARALLEL,
    PORT,
    POSITIVE_SECONDS,
    ROUTING_POLICIES,
    SECONDS,
    check_parsers,
    config_option,
    engine_options,
    log_options,
    sequence_length,
    server_options,
    tensor_parallel,
)
from megatron_runtime.process.gpu_failures import nvidia_driver
from megatron_runtime.process.logs import write_termination_message
from megatron_runtime.process.options import FiniteRange, environment_option

if TYPE_CHECKING:
    from megatron_runtime.engine.settings import EngineSettings

_AT_LEAST_A_SECOND = FiniteRange(min=1)


@click.command()
@click.option("--listen", default="::", help="Address of every port; :: is every address, IPv4 and IPv6.")
@click.option("--client-port", type=PORT, default=5555, help="For servers and clients.")
@click.option("--engine-port", type=PORT, default=5556, help="For engines.")
@click.option("--admin-port", type=PORT, default=5557, help="For the operator.")
@click.option(
    "--socket-dir",
    type=DIRECTORY,
    help="Listen on Unix sockets in this directory, client, engine and admin, instead of the ports. Only processes of "
    "this user may connect.",
)
@click.option("--health-port", type=OPTIONAL_PORT, default="8080", help="Probes and metrics.")
@click.option("--other-host", help="Host of the other coordinator of a pair, with the same ports; absent: none.")
@click.option("--keys-dir", type=DIRECTORY, help="server.key and every role's .pub; absent: no encryption.")
@click.option("--routing-policy", type=ROUTING_POLICIES, default="LeastCost")
@click.option("--alpha", type=FiniteRange(0, 1), default=0.5, help="Weight of a cached prefix.")
@click.option("--pause-mode", type=click.Choice(["Hold", "Reject"]), default="Hold")
@click.option("--max-queued", type=COUNT, default=10_000, help="Requests held.")
@click.option("--max-wait-seconds", type=POSITIVE_SECONDS, default=300, help="Of a request.")
@click.option("--journal-memory", "journal_bytes", type=MEMORY, default="1Gi", help="Of all open requests.")
@config_option()
@log_options
def coordinator(*, routing_policy: str, **options: Any) -> None:
    """Run the coordinator until SIGTERM."""
    from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy
    from megatron_runtime.coordinator.service import run

    run(CoordinatorSettings(routing_policy=RoutingPolicy(routing_policy), **options))


@click.command()
@click.option("--coordinator", type=ADDRESS, required=True, help="The coordinator's engine port.")
@click.option("--name", required=True, help="Stable identity of this engine; the same after a restart.")
@engine_options
@click.option(
    "--format",
    "model_format",
    type=click.Choice(["Auto", "GGUF", "SafeTensors", "TorchDist", "Packed"]),
    default="Auto",
    help="Reject a model of another format.",
)
@device_option
@click.option("--block-size-tokens", type=COUNT, default=256, help="Of a block hash.")
@click.option("--chunked-prefill/--no-chunked-prefill", default=True, help="Spread long prompts over steps.")
@click.option("--max-prefill-tokens", type=COUNT, help="Limit of prompt tokens in a step that also generates.")
@click.option(
    "--prefix-eviction",
    type=click.Choice(["lru", "ref_zero"]),
    default="lru",
    help="Keep unused blocks until their memory is needed, or evict them at once.",
)
@click.option(
    "--kv-cache-mode",
    type=click.Choice(["persist", "offload", "recompute"]),
    default="recompute",
    help="What a suspend does with the KV cache.",
)
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode"]),
    help="Preferred stage of requests. prefill: compute long prompts for other engines. decode: import them and "
    "generate. Absent: both on one engine.",
)
@click.option(
    "--kv-port",
    type=PORT,
    default=0,
    help="Port on which engines with a role exchange the KV of prompts. 0 chooses a free one.",
)
@click.option("--model-hash", default="", show_default=False, help="Reject requests made for a model of another hash.")
@click.option("--revision", default="", show_default=False, help="Revision of this engine, shown in the status.")
@click.option("--health-port", type=OPTIONAL_PORT, default="8080", help="Probes and metrics.")
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="engine.key, engine.pub and server.pub; trainer.pub for weights of a trainer; absent: no encryption.",
)
@tensor_parallel
@environment_option(
    "--pipeline-parallel",
    type=PARALLEL,
    default=1,
    envvar="PIPELINE_PARALLEL_SIZE",
    help="Stages with a part of the layers.",
)
@environment_option(
    "--expert-parallel",
    type=PARALLEL,
    default=1,
    envvar="EXPERT_PARALLEL_SIZE",
    help="Ranks that share the experts of each layer.",
)
@environment_option(
    "--data-parallel",
    type=PARALLEL,
    default=1,
    envvar="DATA_PARALLEL_SIZE",
    help="Copies of the dense layers in one engine, with --backend vllm only. --expert-parallel is then 1, or "
    "tensor x data.",
)
@click.option(
    "--vllm-sleep-level",
    type=click.Choice(["1", "2"]),
    callback=lambda _context, _option, value: None if value is None else int(value),
    help="What a suspend of vLLM does on a GPU. 1 moves the weights to the memory of the host; 2 drops them, and the "
    "resume reads their files again. Absent: 2, or 1 with layers or a model for drafts.",
)
@click.option(
    "--rendezvous-seconds",
    type=_AT_LEAST_A_SECOND,
    default=300,
    help="How long ranks wait for each other at the start.",
)
@click.option(
    "--step-timeout-seconds",
    type=_AT_LEAST_A_SECOND,
    default=60,
    help="An engine of several ranks ends if no rank makes progress in a step for so long.",
)
@click.option("--drain-seconds", type=SECONDS, default=60)
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Validate the settings and the model's metadata, without weights and GPU, and exit.",
)
@config_option()
@log_options
def engine(
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: int,
    data_parallel: int,
    device: Device,
    is_check: bool,
    **options: Any,
) -> None:
    """Run one data-parallel engine until SIGTERM.

    Without --revision, the STOP signal ends it, too. With it, a stopped engine waits for SIGTERM.

    Start an engine of several ranks once on each of its machines: with NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR
    and MASTER_PORT if there are several machines, or by torchrun.

    Exit codes of --check: 0 the engine can start; 75 the model cannot be read now, or the check was killed, try again
    later; 1 or 2 trying again does not help.
    """
    from megatron_runtime.backends.registry import build_backend
    from megatron_runtime.distributed.shard import ParallelSizes, node_identity, rank_identity
    from megatron_runtime.engine import worker
    from megatron_runtime.engine.settings import EngineSettings

    sizes = ParallelSizes(
        tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel, data=data_parallel
    )
    settings = EngineSettings(parallel=sizes, device=device.kind, **options)
    if sizes.data > 1 and settings.backend != "vllm":
        raise click.UsageError(
            f"--data-parallel {sizes.data} is not supported by --backend {settings.backend}: use --backend vllm, or "
            "start several engines"
        )
    if is_check:
        _check(settings)
        return
    is_launcher = settings.backend != "vllm" and sizes.world > 1 and rank_identity(sizes) is None
    if device.gpus is not None and not is_launcher:  # once: the launcher's ranks have its environment
        assign_gpus(device, engines=1, ranks=len(device.gpus), gpus=count_gpus())
        show_only(device.gpus)

    def run_worker() -> None:
        worker.run(settings, build_backend)

    if sizes.world == 1 or (settings.backend == "vllm" and node_identity(sizes).node_rank == 0):
        run_worker()  # vLLM starts its ranks itself
    elif settings.backend == "vllm":
        _run_pod(settings)
    else:
        _run_ranks(settings, run_worker)


def _check(settings: EngineSettings) -> None:
    from megatron_runtime.backends.registry import check_backend
    from megatron_runtime.backends.vllm.process import VllmKilledError

    try:
        check_backend(settings)
    except (OSError, VllmKilledError) as error:
        write_termination_message(error)
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(os.EX_TEMPFAIL) from error
    except Exception as error:
        write_termination_message(error)
        raise
    click.echo(f"an engine with model {settings.model} can start")


def _run_pod(settings: EngineSettings) -> None:
    """Run the ranks of another pod than the first of a vLLM engine."""
    from megatron_runtime.backends.vllm.nodes import follow
    from megatron_runtime.distributed.errors import RankError

    try:
        asyncio.run(follow(settings))
    except RankError as error:
        write_termination_message(error)
        raise click.ClickException(str(error)) from error


def _run_ranks(settings: EngineSettings, run_worker: Callable[[], None]) -> None:
    """Run as one rank of several, or start the ranks of this machine. run_worker: runs as rank 0."""
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
            run_worker()
        else:
            run_other_rank(settings, identity)
    except RankError as error:
        end_with(error)
    except (OSError, ValueError) as error:
        if identity.rank != 0:  # rank 0 has written its own
            write_termination_message(error)
        raise


@click.command()
@click.option("--coordinator", type=ADDRESS, required=True, help="The coordinator's client port.")
@click.option("--model", default="builtin:smollm2-135m", help="The model whose tokenizer is used.")
@click.option("--model-hash", default="", show_default=False, help="Use only engines of a model with this hash.")
@click.option("--host", default="::", help="Address to listen on; :: is every address, IPv4 and IPv6.")
@click.option("--port", type=PORT, default=8000, help="0 picks a free one.")
@click.option(
    "--health-port",
    type=OPTIONAL_PORT,
    default="8080",
    help="Probes and metrics, without a key; off: metrics are on --port, behind the API key.",
)
@click.option("--keys-dir", type=DIRECTORY, help="client.key, client.pub and server.pub; absent: no encryption.")
@click.option("--tls-certificate-file", type=FILE, help="PEM chain; absent: plain HTTP. Read again when it changes.")
@click.option("--tls-key-file", type=FILE, help="Key of the certificate, in PEM.")
@server_options
@environment_option(
    "--backend",
    type=click.Choice(["native", "vllm"]),
    default="native",
    envvar="MEGATRON_ENGINE_BACKEND",
    help="Of the engines. vllm: vLLM renders conversations and parses answers, if it is installed and reads the model.",
)
@sequence_length
@click.option("--max-body-size", "max_body_bytes", type=MEMORY, default="4Mi")
@click.option("--max-open-requests", type=COUNT, default=10_000, help="Beyond that 429.")
@click.option(
    "--max-connections",
    type=COUNT,
    default=4096,
    help="Beyond that the one idle longest is closed; if none is idle, the new one gets a 503.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Serve only requests whose Host header has this name, and no web page of another origin; repeatable.",
)
@click.option("--drain-seconds", type=SECONDS, default=60)
@click.option(
    "--linger-seconds",
    type=SECONDS,
    default=8,
    help="After SIGTERM, time without a new request before the server closes: more than load balancers need to notice "
    "that it is not ready.",
)
@click.option("--access-log/--no-access-log", default=False, help="Log each HTTP request, at the level info.")
@click.option("--vllm-metrics/--no-vllm-metrics", default=True, help="Aliases under vllm: names.")
@click.option("--listen-fd", type=click.IntRange(min=0), hidden=True, help="An already bound socket.")
@config_option()
@log_options
def server(*, listen_fd: int | None, max_connections: int, model_names: tuple[str, ...], **options: Any) -> None:
    """Run the OpenAI server until SIGTERM."""
    if (options["tls_certificate_file"] is None) is not (options["tls_key_file"] is None):
        raise click.UsageError("--tls-certificate-file and --tls-key-file go together: give both or neither")
    check_parsers(**{name: options[name] for name in ("backend", "tool_call_parser", "reasoning_parser")})
    from megatron_runtime.server.process import run
    from megatron_runtime.server.settings import ConnectionLimits, ServerSettings

    listener = None if listen_fd is None else socket.socket(fileno=listen_fd)
    settings = ServerSettings(
        connections=ConnectionLimits(max_connections=max_connections),
        model_name=next(iter(model_names), None),
        model_aliases=model_names[1:],
        **options,
    )
    run(settings, listener=listener)


@click.command()
@click.option("--name", "template", required=True, help="Host name of a pod, {node} for its number.")
@environment_option("--node", type=click.IntRange(min=0), envvar="NODE_RANK", required=True, help="Number of this pod.")
@environment_option("--nodes", type=click.IntRange(min=2), envvar="NNODES", required=True, help="Pods of the engine.")
@environment_option("--port", type=click.IntRange(1, 65535), envvar="MASTER_PORT", default=29500)
@click.option("--timeout-seconds", type=POSITIVE_SECONDS, default=15.0, help="For each pair.")
@click.option("--listen", default="::", help="Address of both ports; :: is every address, IPv4 and IPv6.")
@log_options
def preflight(*, template: str, nodes: int, **options: Any) -> None:
    """Check that every two pods of an engine can communicate, before its ranks load anything (init container)."""
    from megatron_runtime.distributed import preflight as checks

    names = tuple(template.replace("{node}", str(number)) for number in range(nodes))
    try:
        found = asyncio.run(checks.preflight(checks.PreflightSettings(names=names, **options)))
    except checks.PreflightError as error:
        write_termination_message(error)
        raise click.ClickException(str(error)) from error
    for name, outcome in found.items():
        click.echo(f"{name} {outcome.value}")
    if driver := nvidia_driver():
        click.echo(f"NVIDIA driver of this node: {driver}")
