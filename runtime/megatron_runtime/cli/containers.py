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
@click.option("--listen", default="::", help="Address on which every port listens; :: is every IPv4 and IPv6 address.")
@click.option("--client-port", type=PORT, default=5555, help="Port to which servers and clients connect.")
@click.option("--engine-port", type=PORT, default=5556, help="Port to which engines connect.")
@click.option("--admin-port", type=PORT, default=5557, help="Port to which the operator connects.")
@click.option(
    "--socket-dir",
    type=DIRECTORY,
    help="Listen on the Unix sockets client, engine and admin in this directory instead of TCP ports. Only "
    "processes of the same user can connect.",
)
@click.option(
    "--health-port", type=OPTIONAL_PORT, default="8080", help="Port for probes and metrics; off disables both."
)
@click.option(
    "--other-host", help="Host of the other coordinator of an active/standby pair. It must use the same ports."
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with server.key and the .pub file of every role. Without it, connections are neither encrypted "
    "nor authenticated.",
)
@click.option(
    "--routing-policy",
    type=ROUTING_POLICIES,
    default="LeastCost",
    help="Policy that chooses the engine of a request. LeastCost suits most loads.",
)
@click.option(
    "--alpha",
    type=FiniteRange(0, 1),
    default=0.5,
    help="Weight of the prefix match against free capacity, from 0 to 1, for FirstPrefixBlock and LongestPrefix. "
    "Lower it if load is uneven.",
)
@click.option(
    "--pause-mode",
    type=click.Choice(["Hold", "Reject"]),
    default="Hold",
    help="Handling of requests that arrive while paused or suspended. Hold queues them; Reject answers 503.",
)
@click.option(
    "--max-queued",
    type=COUNT,
    default=10_000,
    help="Maximum number of requests that wait for an engine. The coordinator rejects further requests with 429.",
)
@click.option(
    "--max-wait-seconds",
    type=POSITIVE_SECONDS,
    default=300,
    help="Seconds that a request waits for an engine. After that, the coordinator rejects it with 504.",
)
@click.option(
    "--journal-memory",
    "journal_bytes",
    type=MEMORY,
    default="1Gi",
    help="Memory for the prompts and tokens of all open requests. Beyond it, the coordinator rejects new requests "
    "with 429.",
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
@click.option("--name", required=True, help="Name of this engine. It must be unique and stay the same across restarts.")
@engine_options
@click.option(
    "--format",
    "model_format",
    type=click.Choice(["Auto", "GGUF", "SafeTensors", "TorchDist", "Packed"]),
    default="Auto",
    help="Required format of the model. The engine rejects any other format; Auto accepts all.",
)
@device_option
@click.option(
    "--block-size-tokens",
    type=COUNT,
    default=256,
    help="Number of tokens per block of the prefix cache. Lower it to share shorter prefixes.",
)
@click.option(
    "--chunked-prefill/--no-chunked-prefill",
    default=True,
    help="Split long prompts over several steps, so that other requests continue meanwhile.",
)
@click.option(
    "--max-prefill-tokens",
    type=COUNT,
    help="Maximum number of prompt tokens in a step that also decodes. Lower it for shorter gaps between tokens, at "
    "the cost of the time to the first token. Default: --max-tokens.",
)
@click.option(
    "--prefix-eviction",
    type=click.Choice(["lru", "ref_zero"]),
    default="lru",
    help="When unused blocks leave the prefix cache. lru evicts them when their memory is needed; ref_zero evicts "
    "them immediately.",
)
@click.option(
    "--kv-cache-mode",
    type=click.Choice(["persist", "offload", "recompute"]),
    default="recompute",
    help="Effect of a suspend on the KV cache. recompute drops it, persist keeps it, offload moves it to host memory.",
)
@click.option(
    "--model-hash",
    default="",
    show_default=False,
    help="Hash of the model. The engine rejects requests that were tokenized for a model with another hash.",
)
@click.option(
    "--revision",
    default="",
    show_default=False,
    help="Revision of the engine, which the operator sets and the status shows.",
)
@click.option(
    "--health-port", type=OPTIONAL_PORT, default="8080", help="Port for probes and metrics; off disables both."
)
@click.option(
    "--role",
    type=click.Choice(["prefill", "decode"]),
    help="Preferred stage of requests. prefill computes long prompts for other engines; decode imports them and "
    "generates. Default: both stages on one engine.",
)
@click.option(
    "--kv-port",
    type=PORT,
    default=0,
    help="Port on which engines with a role exchange the KV of prompts. 0 chooses a free port.",
)
@click.option(
    "--weights-port",
    type=PORT,
    default=0,
    help="Port on which rank 0 offers the weights of a trainer to other engines. Each other rank of the host or pod "
    "uses the next port. 0 chooses free ports.",
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with engine.key, engine.pub and server.pub, and with trainer.pub to accept weights from a "
    "trainer. Without it, connections are neither encrypted nor authenticated.",
)
@tensor_parallel
@environment_option(
    "--pipeline-parallel",
    type=PARALLEL,
    default=1,
    envvar="PIPELINE_PARALLEL_SIZE",
    help="Number of pipeline stages. Each stage has a share of the layers.",
)
@environment_option(
    "--expert-parallel",
    type=PARALLEL,
    default=1,
    envvar="EXPERT_PARALLEL_SIZE",
    help="Number of ranks that divide the experts of each layer among them (expert parallelism).",
)
@environment_option(
    "--data-parallel",
    type=PARALLEL,
    default=1,
    envvar="DATA_PARALLEL_SIZE",
    help="Number of copies of the dense layers in one engine, with --backend vllm only. --expert-parallel must then "
    "be 1 or tensor x data.",
)
@click.option(
    "--vllm-sleep-level",
    type=click.Choice(["1", "2"]),
    callback=lambda _context, _option, value: None if value is None else int(value),
    help="Effect of a suspend of vLLM on the weights in GPU memory. 1 moves them to host memory; 2 drops them, and "
    "a resume reads their files again. Default: 2, or 1 with speculative decoding that has weights of its own.",
)
@click.option(
    "--rendezvous-seconds",
    type=_AT_LEAST_A_SECOND,
    default=300,
    help="Seconds that ranks wait for each other at the start. Raise it if pods need longer to be scheduled.",
)
@click.option(
    "--step-timeout-seconds",
    type=_AT_LEAST_A_SECOND,
    default=60,
    help="Timeout of a step, in seconds. An engine with several ranks exits if none of its ranks makes progress for "
    "this long. Raise it if steps are slow.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=60,
    help="Seconds that requests in progress get to finish after SIGTERM. Other engines continue the rest.",
)
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Validate the settings and the model's metadata and exit. It needs neither the weights nor a GPU.",
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
    help="Hash of the model. Only engines of a model with this hash get the server's requests.",
)
@click.option("--host", default="::", help="Address on which the server listens; :: is every IPv4 and IPv6 address.")
@click.option("--port", type=PORT, default=8000, help="Port on which the server listens; 0 picks a free port.")
@click.option(
    "--health-port",
    type=OPTIONAL_PORT,
    default="8080",
    help="Port for probes and metrics, without an API key. With off, metrics are on --port and need an API key.",
)
@click.option(
    "--keys-dir",
    type=DIRECTORY,
    help="Directory with client.key, client.pub and server.pub. Without it, the connection to the coordinator is "
    "neither encrypted nor authenticated.",
)
@click.option(
    "--tls-certificate-file",
    type=FILE,
    help="PEM file with the certificate chain for HTTPS, reloaded when it changes. Without it, the server uses "
    "plain HTTP.",
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
    help="Maximum size of a request body. The server rejects larger ones with 413. Raise it for images.",
)
@click.option(
    "--max-open-requests",
    type=COUNT,
    default=10_000,
    help="Maximum number of open requests. The server rejects further requests with 429.",
)
@click.option(
    "--max-connections",
    type=COUNT,
    default=4096,
    help="Maximum number of HTTP connections. Beyond it, the server closes the connection that has been idle "
    "longest, or answers 503 if none is idle.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Accept only requests whose Host header has this name, and reject web pages of other origins. Repeatable.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=60,
    help="Seconds that open requests get to finish after SIGTERM. The server aborts the rest.",
)
@click.option(
    "--linger-seconds",
    type=SECONDS,
    default=8,
    help="Seconds without a new request after SIGTERM before the server stops listening. Set it longer than load "
    "balancers need to notice that the server is not ready.",
)
@click.option("--access-log/--no-access-log", default=False, help="Log each HTTP request at level info.")
@click.option(
    "--vllm-metrics/--no-vllm-metrics",
    default=True,
    help="Also export metrics under the names that vLLM uses (vllm:...), for dashboards made for vLLM.",
)
@click.option(
    "--listen-fd", type=click.IntRange(min=0), hidden=True, help="File descriptor of a socket that is already bound."
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
    help="Host name of the engine's pods, with {node} in place of the pod's number.",
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
    help="Port of the ranks' rendezvous, which the check uses.",
)
@click.option(
    "--timeout-seconds", type=POSITIVE_SECONDS, default=15.0, help="Seconds until the check of a pair of pods fails."
)
@click.option("--listen", default="::", help="Address on which both ports listen; :: is every IPv4 and IPv6 address.")
@log_options
def preflight(*, template: str, nodes: int, **options: Any) -> None:
    """Check that any two pods of an engine can communicate, before its ranks load the model (init container)."""
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
