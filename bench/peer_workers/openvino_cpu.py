"""`python openvino_cpu.py FILE.gguf THREADS` runs OpenVINO GenAI, which reads GGUF files."""

import itertools
import sys
import time

from worker import Generate, serve

_SMOLLM_VOCABULARY = 49152


def load() -> tuple[Generate, int]:
    import numpy as np
    import openvino
    import openvino_genai

    file, threads = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    # Prefix caching is on by default. With it, prefixes of earlier prompts would not be computed.
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        file, scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(threads)}
    )
    numbers = itertools.count()

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        begun = time.perf_counter()
        handles = [
            pipeline.add_request(next(numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        made = [0] * len(handles)
        first = 0.0
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    made[number] += sum(len(output.generated_ids) for output in handle.read().values())
            if not first and all(made):
                first = time.perf_counter() - begun
        if set(made) != {new_tokens}:
            raise RuntimeError(f"OpenVINO made {made} tokens of {new_tokens}")
        return first

    return generate, _SMOLLM_VOCABULARY


serve(load, libraries=("openvino", "openvino_genai"))
