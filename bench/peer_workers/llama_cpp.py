"""python llama_cpp.py FILE.gguf THREADS: llama.cpp, through the package xllamacpp."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from worker import Generate, serve

_MOST = 32
_CONTEXT = 1024
_SMOLLM_VOCABULARY = 49152


def load() -> tuple[Generate, int]:
    file, threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel = _CONTEXT * _MOST, _MOST
    params.kv_unified = False
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_gpu_layers = 0
    params.warmup = True
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(_MOST)

    def answer(prompt: list[int], new_tokens: int) -> Any:
        reply = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": new_tokens,
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        made = reply["usage"]["completion_tokens"] if "usage" in reply else reply["tokens_predicted"]
        if made != new_tokens:
            raise RuntimeError(f"llama.cpp made {made} tokens of {new_tokens}: {str(reply)[:300]}")

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        list(pool.map(answer, prompts, [new_tokens] * len(prompts)))

    return generate, _SMOLLM_VOCABULARY


serve(load)
