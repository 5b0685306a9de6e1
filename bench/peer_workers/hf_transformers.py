"""`python hf_transformers.py DIRECTORY DTYPE THREADS` runs transformers with a static cache, one forward pass per
token.
"""

import sys
import time

from worker import Generate, serve

_PAGE = 64


def load() -> tuple[Generate, int]:
    import torch
    import transformers

    directory, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        begun = time.perf_counter()
        ids = torch.tensor(prompts)
        length = ids.shape[1]
        cache = transformers.StaticCache(config=model.config, max_cache_len=-(-(length + new_tokens) // _PAGE) * _PAGE)
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        ids = logits[:, -1:].argmax(-1)
        first = time.perf_counter() - begun
        for number in range(new_tokens - 1):
            position = torch.tensor([length + number])
            logits = model(ids, past_key_values=cache, cache_position=position, position_ids=position[None]).logits
            ids = logits[:, -1:].argmax(-1)
        return first

    return generate, model.config.vocab_size


serve(load, platform="torch", libraries=("transformers",))
