"""python hf_transformers.py DIRECTORY DTYPE THREADS"""

import sys

import torch
import transformers
from worker import Generate, serve


def load() -> tuple[Generate, int]:
    directory, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )

    return generate, model.config.vocab_size


serve(load)
