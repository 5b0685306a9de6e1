"""Engines of several ranks from Python: tensor, pipeline and expert parallel, and several engines side by side."""

import json
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import CONFIGS, random_tensors, write_model
from warm_python import WarmProgram

from megatron_runtime.cli.processes import free_ports
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
                return {engine.name: engine.ranks for engine in (await llm._coord_runtime.client.status()).engines}

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

LOST_RANK = """
    import contextlib, json, os, signal, sys, time
    from pathlib import Path
    from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams
    from megatron_runtime.megatron_core.config import InferenceConfig

    if __name__ == "__main__":
        directory, options = sys.argv[1], json.loads(sys.argv[2])
        lost, folder = options.pop("lost"), Path(options.pop("folder"))
        config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.005)
        llm = MegatronLLM(
            model=directory, tokenizer="builtin:smollm2-135m", inference_config=config, dtype="float32", threads=1,
            **options,
        )
        rank = int(os.environ["RANK"])
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=6)
        if not options["use_coordinator"] or llm.is_primary_rank:
            llm.generate([1, 2, 3], params)
        (folder / str(rank)).touch()
        if rank == lost:
            while len(list(folder.iterdir())) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while llm.is_primary_rank:
            try:
                llm.generate([1, 2, 3], params)
            except RuntimeError as error:
                print("raised:", error, flush=True)
                break
        with contextlib.suppress(RuntimeError):
            llm.wait_for_shutdown()
        while True:  # a program that would go on for ever
            time.sleep(1)
"""

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[WarmProgram]]]:
    """Start the ranks of a program as torchrun would. Those that still run at the end are killed."""
    ranks: list[WarmProgram] = []

    def start(directory: Path, world: int, *, program: str, **options: Any) -> list[WarmProgram]:
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(program))
        (port,) = free_ports(1)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        for n in range(world):
            environment = {key: str(value) for key, value in {**common, "RANK": n, "LOCAL_RANK": n}.items()}
            ranks.append(WarmProgram(script, str(directory), json.dumps(options), environment=environment))
        return ranks

    yield start
    for rank in ranks:
        rank.close()


@pytest.fixture
def run(start: Callable[..., list[WarmProgram]]) -> Run:
    """Run the ranks of a program as torchrun would. Return what each reported."""

    def run(directory: Path, world: int, *, program: str = RANK, **sizes: int) -> list[dict[str, Any]]:
        outputs = [rank.finish() for rank in start(directory, world, program=program, **sizes)]
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    return run


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


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("use_coordinator", [False, True], ids=["direct", "coordinator"])
def test_a_killed_rank_ends_the_others_with_the_cause(
    start: Callable[..., list[WarmProgram]], tiny_directory: Path, tmp_path: Path, use_coordinator: bool, lost: int
) -> None:
    """No rank waits for ever, neither in a call nor in its own code."""
    folder = tmp_path / "ready"
    folder.mkdir()
    options = {"use_coordinator": use_coordinator, "lost": lost, "folder": str(folder)}
    ranks = start(tiny_directory, 2, program=LOST_RANK, pipeline_model_parallel_size=2, **options)
    assert ranks[lost].exit_code() == -signal.SIGKILL
    other = ranks[1 - lost]
    assert other.exit_code() == 1
    output = other.stdout.read()
    assert f"the engine exits: rank {lost}: its connection closed" in output
    if lost == 1:
        assert re.search(r"raised: .*rank 1: its connection closed", output)
