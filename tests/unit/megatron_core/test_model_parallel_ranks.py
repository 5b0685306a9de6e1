"""Engines of several ranks from Python: tensor, pipeline and expert parallel, and several engines side by side."""

import json
import socket
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import CONFIGS, random_tensors, write_model
from warm_python import WarmProgram

from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.models.config import ModelConfig

RANK = """
    import json, os, sys
    from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams
    from megatron_runtime.megatron_core.config import InferenceConfig

    if __name__ == "__main__":
        directory, sizes = sys.argv[1], json.loads(sys.argv[2])
        config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.005)
        llm = MegatronLLM(
            model=directory, tokenizer="builtin:smollm2-135m", inference_config=config, use_coordinator=True,
            dtype="float32", threads=1, **sizes,
        )
        rank = int(os.environ["RANK"])
        reported = {"rank": rank, "primary": llm.is_primary_rank, "max_tokens": llm.context.max_sequence_length}
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=6)

        def generate():
            return [one.generated_tokens for one in llm.generate([[n, 1, 2] for n in range(6)], params)]

        if llm.is_primary_rank:
            reported["before"] = generate()
        else:
            try:
                llm.generate([1])
            except RuntimeError as error:
                reported["error"] = str(error)
        llm.pause()
        llm.suspend()
        llm.resume()
        llm.update_weights(directory, epoch=3)
        llm.unpause()
        llm.set_generation_epoch(4)
        if llm.is_primary_rank:
            reported["after"] = generate()
            reported["epochs"] = llm.generate([1], params).policy_epoch

            async def engines():
                return {engine.name: engine.ranks for engine in (await llm._client().status()).engines}

            reported["engines"] = llm.run_sync(engines())
        else:
            llm.wait_for_shutdown()
        llm.shutdown()
        print(json.dumps(reported), flush=True)
"""

DIRECT_RANK = """
    import json, os, sys
    from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams
    from megatron_runtime.megatron_core.config import InferenceConfig

    if __name__ == "__main__":
        directory, sizes = sys.argv[1], json.loads(sys.argv[2])
        config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.005)
        llm = MegatronLLM(
            model=directory, tokenizer="builtin:smollm2-135m", inference_config=config, dtype="float32", threads=1,
            **sizes,
        )
        rank = int(os.environ["RANK"])
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=6)
        engine = rank // 2
        reported = {"rank": rank, "primary": llm.is_primary_rank, "errors": []}
        prompts = [[n + engine, 1, 2] for n in range(6)]
        reported["tokens"] = [one.generated_tokens for one in llm.generate(prompts, params)]
        reported["text"] = llm.generate("Once upon a time", params).generated_text
        chunks = list(llm.generate_stream(prompts[0], params))
        reported["stream"] = [token for chunk in chunks for token in chunk.token_ids]
        first, second = (llm.generate_stream(prompt, params) for prompt in prompts[:2])
        tokens = [next(second).token_ids, next(first).token_ids]  # open at once, and calls between their chunks
        reported["between"] = llm.generate(prompts[:1], params)[0].generated_tokens
        for found, chunks in zip(tokens, (second, first)):
            found += [token for chunk in chunks for token in chunk.token_ids]
        reported["interleaved"] = tokens
        left = llm.generate_stream(prompts[0], params)
        next(left)
        left.close()
        mixed = llm.generate([prompts[0], [-1], prompts[0]], params)
        reported["mixed"] = [request.status.name for request in mixed]
        llm.engine.reset()
        for call in (llm.pause, llm.unpause, llm.suspend, llm.resume):
            try:
                call()
            except RuntimeError as error:
                reported["errors"].append(str(error))
        try:
            llm.generate([[1 + rank % 2]], params)
        except ValueError as error:
            reported["differs"] = str(error)
        reported["again"] = llm.generate(prompts[:1], params)[0].generated_tokens
        llm.shutdown()
        llm.wait_for_shutdown()
        print(json.dumps(reported), flush=True)
"""

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the ranks of a program as torchrun would. Return what each reported."""

    def start(directory: Path, world: int, *, program: str = RANK, **sizes: int) -> list[dict[str, Any]]:
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(program))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        ranks = [
            WarmProgram(
                script,
                str(directory),
                json.dumps(sizes),
                environment={key: str(value) for key, value in {**common, "RANK": n, "LOCAL_RANK": n}.items()},
            )
            for n in range(world)
        ]
        try:
            outputs = [rank.finish() for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    return start


@pytest.fixture(scope="module")
def mixture_directory(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(
        CONFIGS["mixtral"],
        vocab_size=tiny_config.vocab_size,
        num_layers=2,
        max_position_embeddings=512,
        eos_token_ids=(),
    )
    return write_model(tmp_path_factory.mktemp("mixture"), config, random_tensors(config))


@pytest.mark.parametrize(
    ("model", "world", "sizes"),
    [
        ("tiny_directory", 2, {"pipeline_model_parallel_size": 2}),
        ("mixture_directory", 2, {"expert_model_parallel_size": 2}),
        ("tiny_directory", 4, {"tensor_model_parallel_size": 2}),
    ],
    ids=["pipeline", "expert", "tensor, two engines"],
)
def test_ranks_answer_as_one_and_take_part_in_every_verb(
    request: pytest.FixtureRequest, run: Run, greedy: Any, options: dict[str, Any], model: str, world: int, sizes: Any
) -> None:
    directory = request.getfixturevalue(model)
    first, *others = run(directory, world, **sizes)
    with MegatronLLM(**{**options, "model": str(directory)}) as alone:
        expected = [one.generated_tokens for one in alone.generate([[n, 1, 2] for n in range(6)], greedy(6))]
    assert first["before"] == first["after"] == expected
    assert first["epochs"] == [[0, 4]]
    assert first["engines"] == {f"engine-{n}": 2 for n in range(world // 2)}
    assert [first["primary"], *(other["primary"] for other in others)] == [True] + [False] * (world - 1)
    assert all("primary rank" in other["error"] for other in others)
    assert all(other["max_tokens"] == 64 for other in others)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(2, {"pipeline_model_parallel_size": 2}), (4, {"tensor_model_parallel_size": 2})],
    ids=["pipeline", "tensor, two engines"],
)
def test_without_a_coordinator_every_rank_of_an_engine_returns_the_answers(
    run: Run, greedy: Any, options: dict[str, Any], tiny_directory: Path, world: int, sizes: Any
) -> None:
    ranks = run(tiny_directory, world, program=DIRECT_RANK, **sizes)
    with MegatronLLM(**{**options, "model": str(tiny_directory)}) as alone:
        for rank in ranks:
            prompts = [[n + rank["rank"] // 2, 1, 2] for n in range(6)]
            expected = [one.generated_tokens for one in alone.generate(prompts, greedy(6))]
            assert rank["tokens"] == expected
            assert rank["stream"] == rank["again"] == rank["between"] == expected[0]
            assert rank["interleaved"] == [expected[1], expected[0]]
            assert rank["mixed"] == ["COMPLETED", "FAILED", "COMPLETED"]
            assert rank["text"] == alone.generate("Once upon a time", greedy(6)).generated_text
            assert rank["primary"]
            assert len(rank["errors"]) == 4
            assert all("use_coordinator=True" in error for error in rank["errors"])
            assert ("make the same calls on all ranks" in rank.get("differs", "")) == (rank["rank"] % 2 == 1)
