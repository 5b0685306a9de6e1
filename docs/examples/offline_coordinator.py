"""Answer prompts through a coordinator, on one process or on several data-parallel ranks.

Every rank constructs the same object. Only the primary rank sends prompts, which the coordinator distributes over all
ranks.

python docs/examples/offline_coordinator.py --model builtin:smollm2-135m
torchrun --nproc-per-node 2 docs/examples/offline_coordinator.py --model builtin:smollm2-135m
"""

import argparse
import os

import torch.distributed as dist

from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "1, 2, 3, 4,", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun: the ranks learn the coordinator's address from each other
        dist.init_process_group("gloo")

    params = SamplingParams(temperature=0.0, num_tokens_to_generate=arguments.new_tokens)
    with MegatronLLM.from_pretrained(arguments.model, use_coordinator=True) as llm:
        if llm.is_primary_rank:
            for request in llm.generate(PROMPTS, params):
                print(f"{request.prompt}|{request.generated_text}", flush=True)
    # At the end of the block, the primary rank stops all engines, and the other ranks wait until they have stopped.


if __name__ == "__main__":
    main()
