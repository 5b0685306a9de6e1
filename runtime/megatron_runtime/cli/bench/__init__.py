"""`megatron bench`."""

from megatron_runtime.cli.options import LazyGroup

bench = LazyGroup(
    name="bench",
    help="Measure one part by itself. Run it on an idle machine; compare only figures of the same run.",
    package=__name__,
    commands={
        "coordinator": ("coordinator", "What a request costs in the coordinator."),
        "engine": ("engine", "How fast one engine reads prompts and generates."),
        "routing": ("routing", "How routing policies compare on a trace, with simulated engines."),
        "serve": ("serve", "How a running server answers many clients."),
    },
)
