"""`megatron bench`."""

from __future__ import annotations

from megatron_runtime.cli.options import LazyGroup

command = LazyGroup(
    name="bench",
    help="Measure one part by itself. Run it with nothing else on the machine; figures compare within one run only.",
    package="megatron_runtime.cli.bench",
    commands_by_name={
        "coordinator": "What a request costs in the coordinator.",
        "engine": "How fast one engine reads prompts and generates.",
        "serve": "How a running server answers many clients.",
    },
)
