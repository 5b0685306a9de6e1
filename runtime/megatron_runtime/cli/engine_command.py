"""`megatron engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.options import DIRECTORY, Address, Memory, OptionalPort, log_level, readable_errors


@click.command()
@click.option("--coordinator", type=Address(), required=True, help="The coordinator's engine port.")
@click.option("--name", required=True, help="Stable identity of this engine; the same after a restart.")
@click.option(
    "--model", default="builtin:smollm2-135m", show_default=True, help="builtin:NAME, a GGUF file or a directory."
)
@click.option(
    "--format",
    "model_format",
    type=click.Choice(["Auto", "GGUF", "SafeTensors"]),
    default="Auto",
    show_default=True,
    help="Refuse a model of another format.",
)
@click.option("--executor", type=click.Choice(["torch", "echo"]), default="torch", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the weights.",
)
@click.option("--max-sequence-length", type=click.IntRange(min=1), help="Tokens of prompt and answer together.")
@click.option("--max-requests", type=click.IntRange(min=1), default=64, show_default=True, help="Generated at once.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of one step.")
@click.option("--kv-cache-memory", type=Memory(), default="1Gi", show_default=True)
@click.option(
    "--block-size-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of a block hash."
)
@click.option("--chunked-prefill/--no-chunked-prefill", default=True, help="Spread long prompts over steps.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="Share the KV of equal prefixes.")
@click.option(
    "--prefix-eviction",
    type=click.Choice(["lru", "ref_zero"]),
    default="lru",
    show_default=True,
    help="Keep blocks that nobody holds until their memory is needed, or forget them at once.",
)
@click.option(
    "--kv-cache-mode",
    type=click.Choice(["persist", "offload", "recompute"]),
    default="recompute",
    show_default=True,
    help="What a suspend does with the KV cache.",
)
@click.option("--model-hash", default="", help="Hash of the model; requests made for another one are refused.")
@click.option("--revision", default="", help="What this engine was rendered from; shown in the status.")
@click.option("--health-port", type=OptionalPort(), default="8080", show_default=True, help="Probes and metrics.")
@click.option("--keys-dir", type=DIRECTORY, help="engine.key, engine.pub and server.pub; absent: no encryption.")
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads.")
@click.option(
    "--echo-step-seconds", type=click.FloatRange(min=0), default=0, help="How long a step of the echo executor takes."
)
@click.option(
    "--echo-ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Simulated ranks of the echo executor.",
)
@click.option(
    "--fault",
    "echo_faults",
    multiple=True,
    envvar="MEGATRON_ENGINE_FAULTS",
    metavar="SPEC",
    help="What goes wrong in an echo engine, such as fail-verb:verb=PAUSE,rank=1; see engines/faults.py.",
)
@click.option("--drain-seconds", type=click.FloatRange(min=0), default=60, show_default=True)
@log_level
@readable_errors
def command(*, keys_dir: Path | None, **options: Any) -> None:
    """Run one data-parallel engine until SIGTERM."""
    from megatron_runtime.engines import worker
    from megatron_runtime.engines.settings import EngineSettings

    worker.run(EngineSettings(keys_dir=keys_dir, **options))
