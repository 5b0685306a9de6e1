"""A client that submits streams and waits until a test kills it: `killed_client.py PORT KEYS STREAMS TOKENS`.

Prints `started` when each stream has yielded a token.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.security import PeerKeys


async def main(port: int, keys_dir: Path, streams: int, tokens: int) -> None:
    client = InferenceClient(port, deserialize=False, keys=PeerKeys.load(keys_dir, Role.CLIENT))
    await client.start()
    opened = [
        client.add_request_streaming([number, 1, 2, 3], SamplingParams(num_tokens_to_generate=tokens))
        for number in range(streams)
    ]
    await asyncio.gather(*(anext(stream) for stream in opened))
    print("started", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
