"""`python ours.py MODEL DTYPE THREADS` runs the native engine without a coordinator."""

import itertools
import sys
import time

from worker import Generate, serve


def load() -> tuple[Generate, int]:
    import numpy as np

    from megatron_runtime.backends.native.build import build_native
    from megatron_runtime.engine.engine_request import EngineRequest
    from megatron_runtime.engine.settings import EngineSettings
    from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

    model, dtype, threads = sys.argv[1:]
    engine = build_native(
        EngineSettings(
            coordinator="tcp://127.0.0.1:0",  # never connected to
            name="bench",
            model=model,
            dtype=dtype,
            max_sequence_length=1024,
            threads=int(threads),
            prefix_caching=False,
        )
    ).core
    engine.executor.load()
    numbers = itertools.count()

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, top_k=1)
        begun = time.perf_counter()
        for prompt in prompts:
            tokens = np.array(prompt, dtype=np.int32)
            engine.add_request(EngineRequest(next(numbers), tokens, np.empty(0, dtype=np.int32), params))
        started: set[int] = set()
        first = 0.0
        while engine.has_work:
            outputs = engine.step()
            if not first:
                started.update(output.request_id for output in outputs if output.new_tokens)
                if len(started) == len(prompts):
                    first = time.perf_counter() - begun
        return first

    return generate, engine.executor.vocab_size


serve(load, platform="torch", libraries=("megatron_runtime.backends.native.build",))
