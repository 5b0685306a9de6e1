"""The subcommands of `megatron bench`."""

from megatron_runtime.cli.options import LazyGroup

bench = LazyGroup(
    name="bench",
    help="Measure one component. Run it on an idle machine, and compare only results of the same run.",
    package=__name__,
    commands={
        "coordinator": ("coordinator", "Measure the CPU time per request in the coordinator."),
        "engine": ("engine", "Measure the prefill and decode throughput of one engine."),
        "routing": ("routing", "Compare routing policies on a trace, with simulated engines."),
        "serve": ("serve", "Measure latency and throughput of a running server."),
    },
)
