"""python openvino.py FILE.gguf THREADS: OpenVINO GenAI reads GGUF files itself."""

import sys

import numpy as np
import openvino
import openvino_genai
from worker import Generate, serve

_SMOLLM_VOCABULARY = 49152


def load() -> tuple[Generate, int]:
    file, threads = sys.argv[1:]
    pipeline = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=int(threads))

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        made = pipeline.generate(inputs, config).tokens
        if any(len(tokens) != new_tokens for tokens in made):
            raise RuntimeError(f"OpenVINO made {[len(tokens) for tokens in made]} tokens of {new_tokens}")

    return generate, _SMOLLM_VOCABULARY


serve(load)
