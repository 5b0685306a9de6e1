"""Answer a list of prompts, then stream one answer. The engine runs in this thread, without a server or coordinator.

python docs/examples/offline_sync.py --model builtin:smollm2-135m
"""

import argparse

from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.sampling_params import SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "1, 2, 3, 4,"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=arguments.new_tokens)
    with MegatronLLM.from_pretrained(arguments.model) as llm:
        for request in llm.generate(PROMPTS, params):
            print(f"{request.prompt}|{request.generated_text}")
        for chunk in llm.generate_stream("Once upon a time", params):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
