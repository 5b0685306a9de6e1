"""Send many prompts concurrently from one event loop, and print each answer when it is complete.

Then pause generation, and continue.

python docs/examples/concurrent_async.py --model builtin:smollm2-135m
"""

import argparse
import asyncio

from megatron_runtime.megatron_core.apis import MegatronAsyncLLM
from megatron_runtime.megatron_core.sampling_params import SamplingParams

TOPICS = ["bread", "the sea", "chess", "rain"]


async def write(llm: MegatronAsyncLLM, topic: str, params: SamplingParams) -> None:
    request = await llm.generate(f"A short poem about {topic}:\n", params)
    print(f"--- {topic} ({request.finish_reason}, {request.latency:.2f} s)\n{request.generated_text}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()

    params = SamplingParams(temperature=0.7, top_p=0.9, num_tokens_to_generate=arguments.new_tokens)
    async with MegatronAsyncLLM.from_pretrained(arguments.model) as llm:
        await asyncio.gather(*(write(llm, topic, params) for topic in TOPICS))

        # The pause freezes the request; after unpause it continues from the same tokens.
        answer = asyncio.create_task(llm.generate("The sun rises in the", params))
        await llm.pause()
        await llm.unpause()
        print("---", (await answer).generated_text)


if __name__ == "__main__":
    asyncio.run(main())
