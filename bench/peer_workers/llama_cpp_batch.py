"""`python llama_cpp_batch.py FILE.gguf THREADS SEQUENCES` runs llama.cpp's batch API through llama-cpp-python."""

import sys
import time

from worker import Generate, serve

_TOKENS_EACH = 768
_BATCH, _MICRO_BATCH = 2048, 512
_FLASH_ATTENTION_OFF = 0
"""Without flash attention, llama.cpp is faster on CPUs at the sequence lengths of the benchmark."""


def load() -> tuple[Generate, int]:
    import ctypes

    import llama_cpp as api
    import numpy as np

    file, threads, sequences = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_seq_max, params.n_ctx = sequences, sequences * _TOKENS_EACH
    params.n_batch, params.n_ubatch = _BATCH, _MICRO_BATCH
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = _FLASH_ATTENTION_OFF
    context = api.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens for {file}")
    memory = api.llama_get_memory(context)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(_BATCH, 0, 1)

    def decode(tokens_BT: list[list[int]], position: int) -> list[int]:
        """Return the most likely token after each sequence of `tokens_BT`.

        position: position of the first token of each row in its sequence.
        """
        count = 0
        for sequence, tokens in enumerate(tokens_BT):
            for offset, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, position + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
        batch.n_tokens = count
        if (code := api.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode of {count} tokens answered {code}")
        address = ctypes.cast(api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        logits_BV = np.ctypeslib.as_array(address, shape=(len(tokens_BT), vocabulary))
        return logits_BV.argmax(axis=1).tolist()

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        api.llama_memory_clear(memory, False)
        begun = time.perf_counter()
        last = decode(prompts, 0)
        first = time.perf_counter() - begun
        length = len(prompts[0])
        for number in range(new_tokens - 1):
            last = decode([[token] for token in last], length + number)
        return first

    return generate, vocabulary


serve(load, libraries=("numpy", "llama_cpp"))
