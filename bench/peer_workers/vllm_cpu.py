"""python vllm_cpu.py DIRECTORY DTYPE THREADS"""

import os
import sys

from worker import Generate, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ["OMP_NUM_THREADS"] = sys.argv[3]


def load() -> tuple[Generate, int]:
    import vllm

    model = vllm.LLM(sys.argv[1], dtype=sys.argv[2], max_model_len=1024, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate, model.llm_engine.model_config.get_vocab_size()


if __name__ == "__main__":
    serve(load)
