"""Serve the OpenAI API from inside a program.

python docs/examples/openai_server.py --model builtin:smollm2-135m --port 8000
curl http://127.0.0.1:8000/v1/models
"""

import argparse
import asyncio
import signal

from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, ServeConfig


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()

    async with MegatronAsyncLLM.from_pretrained(arguments.model) as llm:
        config = ServeConfig(host="127.0.0.1", port=arguments.port, frontend_replicas=1)
        await llm.serve(config, blocking=False)
        print(f"serving at {llm.url}/v1", flush=True)

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
