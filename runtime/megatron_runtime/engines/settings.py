"""What one engine process is told at start. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of `megatron engine`.

    coordinator:       address of the coordinator's engine port, "tcp://host:port".
    name:              stable identity of this engine; the same after a restart.
    model:             model reference: "builtin:NAME", a GGUF file, or a directory with safetensors.
    model_format:      "Auto", or the only format that is accepted: "GGUF" or "SafeTensors".
    executor:          "torch" runs the model; "echo" answers from a hash of the tokens, for tests of everything else.
    dtype:             "auto", "float32" or "bfloat16".
    max_sequence_length: prompt + generated tokens of one request; None means what the model was made for.
    max_requests:      requests generated at once.
    max_tokens:        most tokens of one step.
    chunked_prefill:   spread prompts longer than max_tokens over several steps.
    kv_cache_memory:   bytes of the KV cache.
    prefix_caching:    requests share the KV of equal prefixes.
    prefix_eviction:   "lru" keeps blocks that nobody holds until their memory is needed; "ref_zero" forgets them.
    kv_cache_mode:     what a suspend does with the KV cache: "persist" keeps it, "offload" moves what is in use to host
                       memory, "recompute" drops it.
    block_size_tokens: granularity of block hashes and of the prefix cache, in tokens.
    model_hash:        hash of the model that requests must be made for, up to 128 characters; empty: not said.
    revision:          hash of what this engine was rendered from; shown in the status.
    health_port:       HTTP probes and metrics; None leaves them out, 0 picks a free port.
    keys_dir:          directory of engine.key, engine.pub and server.pub; None means no encryption.
    threads:           torch threads; None leaves torch's choice.
    echo_step_seconds: how long a step of the echo executor takes.
    echo_ranks:        simulated ranks of the echo executor; each acknowledges every verb.
    echo_faults:       what goes wrong in an echo engine; see faults.py.
    drain_seconds:     after SIGTERM, time to finish what is in flight before it is handed over.
    """

    coordinator: str
    name: str
    model: str = "builtin:smollm2-135m"
    model_format: Literal["Auto", "GGUF", "SafeTensors"] = "Auto"
    executor: Literal["torch", "echo"] = "torch"
    dtype: str = "auto"
    max_sequence_length: int | None = None
    max_requests: int = 64
    max_tokens: int = 2048
    chunked_prefill: bool = True
    kv_cache_memory: int = 1 << 30
    prefix_caching: bool = True
    prefix_eviction: Literal["lru", "ref_zero"] = "lru"
    kv_cache_mode: Literal["persist", "offload", "recompute"] = "recompute"
    block_size_tokens: int = 256
    model_hash: str = ""
    revision: str = ""
    health_port: int | None = None
    keys_dir: Path | None = None
    threads: int | None = None
    echo_step_seconds: float = 0.0
    echo_ranks: int = 1
    echo_faults: tuple[str, ...] = ()
    drain_seconds: float = 60.0
