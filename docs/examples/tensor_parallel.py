"""Answer prompts with one model that is divided over two ranks (tensor parallel). Without GPUs, the ranks use gloo.

Every rank makes the same calls. The primary rank sends the prompts and the verbs, and all ranks execute them.

torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py --model builtin:smollm2-135m
"""

import argparse

from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "1, 2, 3, 4,"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=arguments.new_tokens)
    llm = MegatronLLM.from_pretrained(
        arguments.model, use_coordinator=True, tensor_model_parallel_size=arguments.tensor_parallel
    )
    if llm.is_primary_rank:
        for request in llm.generate(PROMPTS, params):
            print(f"{request.prompt}|{request.generated_text}", flush=True)

    # A verb returns on every rank when its engine has executed it. Here, every rank has released its memory.
    llm.pause()
    llm.suspend()
    llm.resume()
    llm.unpause()

    if llm.is_primary_rank:
        print(llm.generate("Once upon a time", params).generated_text, flush=True)
    else:
        llm.wait_for_shutdown()
    llm.shutdown()


if __name__ == "__main__":
    main()
