"""Re-exports `start_text_gen_server` and `stop_text_gen_server`. The package path is the same as in Megatron-Core."""

from megatron_runtime.megatron_core.text_generation_server.dynamic_text_gen_server.text_generation_server import (
    start_text_gen_server,
    stop_text_gen_server,
)

__all__ = ["start_text_gen_server", "stop_text_gen_server"]
