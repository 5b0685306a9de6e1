"""The comparison of our server with vLLM's own: the same engine arguments for both, and figures of the same rounds."""

from itertools import pairwise
from pathlib import Path

from vllm_overhead import Sizes, first_token, our_command, throughput, vllm_command

from megatron_runtime.cli.serve import serve

SIZES = Sizes("float32", arguments={"enforce_eager": True, "block_size": 16, "kv_cache_dtype": "fp8"})


def test_both_servers_have_the_same_engine_arguments() -> None:
    ours = [part.format(port=1) for part in our_command(Path("/m"), SIZES, threads=2)]
    options = serve.make_context("serve", ours[4:]).params
    [options["model_name"]] = options.pop("model_names")
    theirs = [part.format(port=1) for part in vllm_command(Path("/m"), SIZES)]
    values = dict(pairwise(theirs))
    same = {
        "model": "model",
        "model_name": "served-model-name",
        "dtype": "dtype",
        "max_sequence_length": "max-model-len",
        "max_requests": "max-num-seqs",
        "max_tokens": "max-num-batched-tokens",
        "kv_cache_memory": "kv-cache-memory-bytes",
        "port": "port",
    }
    assert {name: str(options[name]) for name in same} == {name: values[f"--{flag}"] for name, flag in same.items()}
    assert options["vllm_arguments"] == {"enforce_eager": True, "block_size": 16, "kv_cache_dtype": "fp8"}
    assert "--enforce-eager" in theirs
    assert (values["--block-size"], values["--kv-cache-dtype"]) == ("16", "fp8")


def test_throughput_is_compared_within_a_round() -> None:
    found = throughput([100.0, 50.0, 90.0], [100.0, 100.0, 100.0])
    assert found == {"megatron": 90.0, "vllm": 100.0, "ratio": 0.9, "ratio_by_round": [1.0, 0.5, 0.9]}


def test_the_time_to_the_first_token_is_compared_by_percentiles() -> None:
    ours, vllm = [0.010 + 0.001 * number for number in range(11)], [0.010] * 11
    found = first_token(ours, vllm)
    assert found["requests"] == 11
    assert found["median"] == {"megatron": 15.0, "vllm": 10.0, "difference": 5.0}
    assert found["p90"] == {"megatron": 19.0, "vllm": 10.0, "difference": 9.0}
