"""Two ranks under torch.distributed: the second gets the coordinator's address, and both run rank 0's prompts."""

import json
import textwrap
from pathlib import Path

from warm_python import WarmProgram

from megatron_runtime.cli.processes import free_ports

RANK = """
    import json, os, sys, time
    import torch
    from megatron_runtime.megatron_core.apis import MegatronLLM, ServeConfig
    from megatron_runtime.megatron_core.config import InferenceConfig
    from megatron_runtime.checkpoints.checkpoint import open_checkpoint
    from megatron_runtime.checkpoints.source import resolve
    from megatron_runtime.megatron_core.sampling_params import SamplingParams

    if __name__ == "__main__":
        torch.distributed.init_process_group("gloo")
        model = open_checkpoint(resolve(sys.argv[1]))
        config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)
        llm = MegatronLLM(
            model=model, tokenizer="builtin:smollm2-135m", inference_config=config, use_coordinator=True,
            dtype="float32", threads=1,
        )
        torch.distributed.barrier()  # both engines are registered
        reported = {"rank": torch.distributed.get_rank(), "primary": llm.is_primary_rank}
        if llm.is_primary_rank:
            params = SamplingParams(temperature=0.0, num_tokens_to_generate=4)
            reported["answers"] = [one.generated_tokens for one in llm.generate([[n, 1] for n in range(12)], params)]

            async def names():
                return sorted(engine.name for engine in (await llm._coord_runtime.client.status()).engines)

            reported["engines"] = llm.run_sync(names())
        else:
            try:
                llm.generate("x")
            except RuntimeError as error:
                reported["error"] = str(error)
            llm.serve(ServeConfig(), blocking=False)
        torch.distributed.barrier()
        if not llm.is_primary_rank:
            time.sleep(0.5)  # the primary is far ahead
        for _ in range(2):
            llm.pause()
            llm.pause()  # paused already
            llm.suspend()
            llm.resume()
            llm.unpause()
        if not llm.is_primary_rank:
            llm.wait_for_shutdown()
            reported["steps"] = llm.engine.core.stats().generation_tokens
        llm.shutdown()
        print(json.dumps(reported), flush=True)
        torch.distributed.destroy_process_group()
"""


def test_two_ranks_are_one_pool(tmp_path: Path, tiny_directory: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    (port,) = free_ports(1)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [WarmProgram(script, str(tiny_directory), environment={**common, "RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [rank.finish() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert (first["primary"], second["primary"]) == (True, False)
    assert first["engines"] == ["engine-0", "engine-1"]
    assert len(first["answers"]) == 12
    assert "primary rank" in second["error"]
    assert second["steps"] > 0, "the first rank did all the work"
