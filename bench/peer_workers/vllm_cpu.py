"""`python vllm_cpu.py DIRECTORY DTYPE THREADS` runs the offline engine of vLLM."""

import os
import sys
import time

from worker import Generate, serve

DIRECTORY, DTYPE, THREADS = sys.argv[1:4]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default, vLLM reserves a CPU for other work
    "OMP_NUM_THREADS": THREADS,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def load() -> tuple[Generate, int]:
    import vllm

    engine = vllm.LLM(
        DIRECTORY,
        dtype=DTYPE,
        max_model_len=1024,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
    ).llm_engine
    numbers = iter(range(1 << 60))

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        for prompt in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, params)
        started: set[str] = set()
        first = 0.0
        while engine.has_unfinished_requests():
            started.update(output.request_id for output in engine.step() if output.outputs[0].token_ids)
            if not first and len(started) == len(prompts):
                first = time.perf_counter() - begun
        return first

    return generate, engine.model_config.get_vocab_size()


if __name__ == "__main__":
    serve(load, platform="torch", libraries=("vllm",))
