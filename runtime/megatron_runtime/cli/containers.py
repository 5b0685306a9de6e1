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
@click.option(
    "--listen",
    default="::",
    help="Address on which all ports listen. :: means every IPv4 and IPv6 address; 127.0.0.1 accepts only "
    "connections from this machine.",
)
@click.option("--client-port", type=PORT, default=5555, help="Port to which servers and clients connect.")
@click.option("--engine-port", type=PORT, default=5556, help="Port to which engines connect.")
@click.option("--admin-port", type=PORT, default=5557, help="Port to which the operator connects.")
@click.option(
    "--socket-dir",
    type=DIRECTORY,
    help="Directory in which the coordinator listens on the Unix sockets client, engine and admin, instead of on "
    "TCP ports. Only processes of the same user can connect.",
)
@click.option(
    "--health-port", type=OPTIONAL_PORT, default="8080", help="Port for probes and metrics. off disables this port."
)
@click.option(
    "--other-host",
    help="Host of the other coordinator, if two coordinators form an active/standby pair. It must use the same "
    "ports. Default: a single coordinator.",
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with server.key and the .pub file of every role. If it is not set, connections are neither "
    "encrypted nor authenticated.",
)
@click.option(
    "--routing-policy",
    type=ROUTING_POLICIES,
    default="LeastCost",
    help="Policy that chooses an engine for each request. LeastCost suits most loads.",
)
@click.option(
    "--alpha",
    type=FiniteRange(0, 1),
    default=0.5,
    help="Weight of a cached prefix relative to free capacity, from 0 to 1. Only FirstPrefixBlock and LongestPrefix "
    "use it. Lower it if the load of the engines is uneven.",
)
@click.option(
    "--pause-mode",
    type=click.Choice(["Hold", "Reject"]),
    default="Hold",
    help="What happens to requests that arrive while the resource is paused or suspended. Hold queues them. Reject "
    "answers them with 503.",
)
@click.option(
    "--max-queued",
    type=COUNT,
    default=10_000,
    help="Maximum number of requests that wait for an engine. The coordinator rejects further requests with 429. "
    "Raise it if clients should wait through longer pauses or bursts.",
)
@click.option(
    "--max-wait-seconds",
    type=POSITIVE_SECONDS,
    default=300,
    help="Maximum number of seconds that a request waits for an engine. After that, the coordinator rejects the "
    "request with 504. Raise it if pauses or cold starts take longer.",
)
@click.option(
    "--journal-memory",
    "journal_bytes",
    type=MEMORY,
    default="1Gi",
    help="Memory for the prompts and tokens of all open requests. If it is full, the coordinator rejects new "
    "requests with 429. Raise it for many open requests with long prompts.",
)
@config_option()
@log_options
def coordinator(*, routing_policy: str, **options: Any) -> None:
    """Run the coordinator until it receives SIGTERM."""
    from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy
    from megatron_runtime.coordinator.service import run

    run(CoordinatorSettings(routing_policy=RoutingPolicy(routing_policy), **options))


@click.command()
@click.option("--coordinator", type=ADDRESS, required=True, help="Address of the coordinator's engine port.")
@click.option(
    "--name",
    required=True,
    help="Name of this engine. It must be unique among the engines of the coordinator, and stay the same when the "
    "engine restarts.",
)
@engine_options
@click.option(
    "--format",
    "model_format",
    type=click.Choice(["Auto", "GGUF", "SafeTensors", "TorchDist", "Packed"]),
    default="Auto",
    help="Format that the model must have. The engine rejects other formats. Auto accepts every format.",
)
@device_option
@click.option(
    "--block-size-tokens",
    type=COUNT,
    default=256,
    help="Number of tokens per block of the prefix cache. Only whole blocks are shared, so lower it to share "
    "shorter prefixes.",
)
@click.option(
    "--chunked-prefill/--no-chunked-prefill",
    default=True,
    help="Split long prompts over several steps, so that other requests can continue between these steps. If it is "
    "disabled, each prompt is computed in one step.",
)
@click.option(
    "--max-prefill-tokens",
    type=COUNT,
    help="Maximum number of prompt tokens in a step that also decodes. Lower it for shorter gaps between tokens, at "
    "the cost of a longer time to the first token. Default: --max-tokens.",
)
@click.option(
    "--prefix-eviction",
    type=click.Choice(["lru", "ref_zero"]),
    default="lru",
    help="Time at which unused blocks leave the prefix cache. lru evicts the least recently used blocks when their "
    "memory is needed. ref_zero evicts a block as soon as no request uses it.",
)
@click.option(
    "--kv-cache-mode",
    type=click.Choice(["persist", "offload", "recompute"]),
    default="recompute",
    help="What happens to the KV cache on a suspend. recompute drops it and computes it again on a resume, persist "
    "keeps it, and offload moves it to host memory.",
)
@click.option(
    "--model-hash",
    default="",
    show_default=False,
    help="Hash of the model, which the operator sets. The engine rejects requests that were tokenized for a model "
    "with another hash. Default: no check.",
)
@click.option(
    "--revision",
    default="",
    show_default=False,
    help="Revision of the engine's settings, which the operator sets and shows in the status.",
)
@click.option(
    "--health-port", type=OPTIONAL_PORT, default="8080", help="Port for probes and metrics. off disables this port."
)
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode"]),
    help="Stage of requests that this engine prefers. A prefill engine computes long prompts for other engines. A "
    "decode engine imports the results and generates. Default: the engine does both.",
)
@click.option(
    "--kv-port",
    type=PORT,
    default=0,
    help="Port on which an engine with --role offers the KV of prompts to other engines. 0 chooses a free port.",
)
@click.option(
    "--weights-port",
    type=PORT,
    default=0,
    help="Port on which rank 0 offers a trainer's weights to other engines. The other ranks on the same host or pod "
    "use the following ports. 0 chooses free ports.",
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with engine.key, engine.pub and server.pub. Add trainer.pub to accept weights from a trainer. "
    "If it is not set, connections are neither encrypted nor authenticated.",
)
@tensor_parallel
@environment_option(
    "--pipeline-parallel",
    type=PARALLEL,
    default=1,
    envvar="PIPELINE_PARALLEL_SIZE",
    help="Number of pipeline stages, each of which runs a share of the layers. Raise it if the model does not fit "
    "on one machine.",
)
@environment_option(
    "--expert-parallel",
    type=PARALLEL,
    default=1,
    envvar="EXPERT_PARALLEL_SIZE",
    help="Number of ranks that divide the experts of each layer among them (expert parallelism). Use it for "
    "mixture-of-experts models only.",
)
@environment_option(
    "--data-parallel",
    type=PARALLEL,
    default=1,
    envvar="DATA_PARALLEL_SIZE",
    help="Number of copies of the dense layers in one engine. Use it only with --backend vllm and "
    "mixture-of-experts models. If it is above 1, --expert-parallel must be 1 or --tensor-parallel times "
    "--data-parallel.",
)
@click.option(
    "--vllm-allow-nixl/--no-vllm-allow-nixl",
    default=False,
    help="Let vLLM engines with --role exchange KV by NIXL, which neither authenticates nor encrypts connections. Set "
    "it only in a network that other machines and users cannot reach.",
)
@click.option(
    "--vllm-sleep-level",
    type=click.Choice(["1", "2"]),
    callback=lambda _context, _option, value: None if value is None else int(value),
    help="What happens to vLLM's weights in GPU memory on a suspend. 1 moves them to host memory. 2 drops them, and "
    "a resume reads their files again. Default: 2, or 1 if speculative decoding uses additional weights.",
)
@click.option(
    "--rendezvous-seconds",
    type=_AT_LEAST_A_SECOND,
    default=300,
    help="Maximum number of seconds that ranks wait for each other at the start. Raise it if pods of an engine "
    "start further apart.",
)
@click.option(
    "--step-timeout-seconds",
    type=_AT_LEAST_A_SECOND,
    default=60,
    help="Timeout of a step, in seconds. An engine of several ranks exits if none of its ranks makes progress for "
    "this time. Raise it if steps take longer.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=60,
    help="Seconds that open requests get to finish after SIGTERM. Other engines continue requests that do not "
    "finish in this time.",
)
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Check the settings and the model's metadata, and exit. The check needs neither the weights nor a GPU.",
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

    Without --revision, the STOP signal also ends the process. With --revision, a stopped engine waits for SIGTERM.

    For an engine with several ranks, run the command once on each machine. If there are several machines, set NNODES,
    NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT, or use torchrun.

    Exit codes of --check: 0 if the engine can start; 75 if the model cannot be read now or the check was killed (retry
    later); 1 or 2 if a retry does not help.
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
    if device.gpus is not None and not is_launcher:  # ranks of a launcher do this themselves
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
    """Run the ranks of a vLLM engine in a pod that does not contain rank 0."""
    from megatron_runtime.backends.vllm.nodes import follow
    from megatron_runtime.distributed.errors import RankError

    try:
        asyncio.run(follow(settings))
    except RankError as error:
        write_termination_message(error)
        raise click.ClickException(str(error)) from error


def _run_ranks(settings: EngineSettings, run_worker: Callable[[], None]) -> None:
    """Run this process as one rank of an engine, or start the ranks of this machine as child processes.

    run_worker: called to run rank 0.
    """
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
        if identity.rank != 0:  # rank 0 has written its own termination message
            write_termination_message(error)
        raise


@click.command()
@click.option("--coordinator", type=ADDRESS, required=True, help="Address of the coordinator's client port.")
@click.option(
    "--model", default="builtin:smollm2-135m", help="Model whose tokenizer and chat template the server uses."
)
@click.option(
    "--model-hash",
    default="",
    show_default=False,
    help="Hash of the model, which the operator sets. The coordinator sends the server's requests only to engines "
    "with the same hash. Default: no check.",
)
@click.option(
    "--host",
    default="::",
    help="Address on which the server listens. :: means every IPv4 and IPv6 address; 127.0.0.1 accepts only "
    "connections from this machine.",
)
@click.option("--port", type=PORT, default=8000, help="Port on which the server listens; 0 picks a free port.")
@click.option(
    "--health-port",
    type=OPTIONAL_PORT,
    default="8080",
    help="Port for probes and metrics, which needs no API key. With off, the metrics are on --port and need an API "
    "key.",
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with client.key, client.pub and server.pub. If it is not set, the connection to the coordinator "
    "is neither encrypted nor authenticated.",
)
@click.option(
    "--tls-certificate-file",
    type=FILE,
    help="PEM file with the certificate chain for HTTPS. The server reloads the file when it changes. If it is not "
    "set, the server uses plain HTTP.",
)
@click.option("--tls-key-file", type=FILE, help="PEM file with the private key of the certificate.")
@server_options
@environment_option(
    "--backend",
    type=click.Choice(["native", "vllm"]),
    default="native",
    envvar="MEGATRON_ENGINE_BACKEND",
    help="Backend of the engines. With vllm, vLLM renders conversations and parses answers, if it is installed and "
    "supports the model.",
)
@sequence_length
@click.option(
    "--max-body-size",
    "max_body_bytes",
    type=MEMORY,
    default="4Mi",
    help="Maximum size of a request body. The server rejects larger bodies with 413. Raise it for requests with "
    "images.",
)
@click.option(
    "--max-open-requests",
    type=COUNT,
    default=10_000,
    help="Maximum number of open requests in this server. The server rejects further requests with 429.",
)
@click.option(
    "--max-connections",
    type=COUNT,
    default=4096,
    help="Maximum number of HTTP connections. If there are more, the server closes the connection that has been "
    "idle longest, or answers 503 if no connection is idle.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Host name that requests must have in their Host header. If it is set, the server rejects other names, and "
    "web pages of other origins. Default: every name is accepted. Repeatable.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=60,
    help="Seconds that open requests get to finish after SIGTERM. The server aborts requests that do not finish in "
    "this time.",
)
@click.option(
    "--linger-seconds",
    type=SECONDS,
    default=8,
    help="Seconds without a new request that the server waits after SIGTERM before it stops listening. Load "
    "balancers must notice within this time that the server is not ready.",
)
@click.option("--access-log/--no-access-log", default=False, help="Log each HTTP request at level info.")
@click.option(
    "--vllm-metrics/--no-vllm-metrics",
    default=True,
    help="Also export metrics under vLLM's names (vllm:...), for dashboards that were made for vLLM.",
)
@click.option(
    "--listen-fd",
    type=click.IntRange(min=0),
    hidden=True,
    help="File descriptor of a bound socket on which the server listens, instead of --host and --port. For programs "
    "that start the server.",
)
@config_option()
@log_options
def server(*, listen_fd: int | None, max_connections: int, model_names: tuple[str, ...], **options: Any) -> None:
    """Run the OpenAI server until it receives SIGTERM."""
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
@click.option(
    "--name",
    "template",
    required=True,
    help="Template of the host names of the engine's pods. {node} stands for the pod's number.",
)
@environment_option(
    "--node", type=click.IntRange(min=0), envvar="NODE_RANK", required=True, help="Number of this pod, from 0."
)
@environment_option(
    "--nodes", type=click.IntRange(min=2), envvar="NNODES", required=True, help="Number of pods of the engine."
)
@environment_option(
    "--port",
    type=click.IntRange(1, 65535),
    envvar="MASTER_PORT",
    default=29500,
    help="Port on which the ranks will meet, and which the check uses.",
)
@click.option(
    "--timeout-seconds",
    type=POSITIVE_SECONDS,
    default=15.0,
    help="Seconds within which two pods must connect. Otherwise, the check fails.",
)
@click.option(
    "--listen", default="::", help="Address on which both ports listen. :: means every IPv4 and IPv6 address."
)
@log_options
def preflight(*, template: str, nodes: int, **options: Any) -> None:
    """Check that all pods of an engine can connect to each other. The command runs in an init container, before the
    ranks load the model."""
    from megatron_runtime.distributed import preflight as checks

    names = tuple(template.replace("{node}", str(number)) for number in range(nodes))
    try:
        outcomes = asyncio.run(checks.preflight(checks.PreflightSettings(names=names, **options)))
    except checks.PreflightError as error:
        write_termination_message(error)
        raise click.ClickException(str(error)) from error
    for name, outcome in outcomes.items():
        click.echo(f"{name} {outcome.value}")
    if driver := nvidia_driver():
        click.echo(f"NVIDIA driver of this node: {driver}")
