"""A program for Megatron-Core's high-level API. test_program.py changes nothing of it but the imports of inference."""

import asyncio

import torch.distributed as dist
from gpt_models import make_configured_gpt
from megatron.core import parallel_state
from megatron.core.inference.apis import MegatronLLM
from megatron.core.inference.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron.core.inference.inference_client import InferenceClient
from megatron.core.inference.inference_request import DynamicInferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams

PROMPTS = [[5, 9, 200, 31, 7], [17, 3], [40, 41, 42]]


class NumberTokenizer:
    """The tokenizer of this program: texts are numbers."""

    vocab_size = 256
    eod = 255
    bos = None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


async def ask(address: str, prompt: str, sampling_params: SamplingParams) -> DynamicInferenceRequest:
    client = InferenceClient(address, deserialize=True)
    await client.start()
    try:
        return await client.add_request(prompt, sampling_params)
    finally:
        client.stop()


def main(tensor: int) -> dict:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    model = make_configured_gpt("llama")
    model.eval()

    inference_config = InferenceConfig(
        block_size_tokens=16,
        buffer_size_gb=0.01,
        max_requests=8,
        max_tokens=128,
        kv_cache_management_mode=KVCacheManagementMode.RECOMPUTE,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        pg_collection=None,
        materialize_only_last_token_logits=False,
    )
    sampling_params = SamplingParams(
        temperature=1.0, top_k=1, num_tokens_to_generate=6, termination_id=-1, return_log_probs=True
    )
    inference_config.max_sequence_length = max(map(len, PROMPTS)) + sampling_params.num_tokens_to_generate + 5

    report = {"rank": dist.get_rank(), "answers": [], "text": None, "after": None}
    with MegatronLLM(
        model=model, tokenizer=NumberTokenizer(), inference_config=inference_config, use_coordinator=True
    ) as llm:
        if llm.is_primary_rank:
            results = llm.generate(PROMPTS, sampling_params)
            assert all(result.status == Status.COMPLETED and not result.failed() for result in results)
            assert all(len(result.generated_log_probs) == 6 for result in results)
            report["answers"] = [result.generated_tokens for result in results]
            single = llm.generate("5 9 200 31 7", sampling_params)
            assert single.generated_tokens == results[0].generated_tokens
            answer = asyncio.run(ask(llm._coord_runtime.coord_addr, "17 3", sampling_params))
            report["text"] = answer.generated_text
        llm.pause()
        llm.suspend()
        llm.resume()
        llm.unpause()
        if llm.is_primary_rank:
            report["after"] = llm.generate(PROMPTS, sampling_params)[0].generated_tokens
    return report
