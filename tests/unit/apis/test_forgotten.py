"""A program that forgets to shut down, or is killed, leaves nothing behind and does not hang."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

PROGRAM = """
    import sys
    from transformers import LlamaForCausalLM
    from megatron_runtime.apis import MegatronLLM, ServeConfig
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.sampling_params import SamplingParams

    model = LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)
    llm = MegatronLLM(
        model=model, tokenizer="builtin:smollm2-135m", inference_config=config, use_coordinator=True, threads=1
    )
    llm.serve(ServeConfig(host="127.0.0.1", port=0, frontend_replicas=2), blocking=False)
    assert llm.generate([1, 2], SamplingParams(num_tokens_to_generate=2)).generated_length == 2
    print("ready", flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["return", "kill"])
def test_nothing_is_left(tmp_path: Path, tiny_model, end: str) -> None:
    tiny_model.save_pretrained(tmp_path / "model")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    program = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "model"), "wait" if end == "kill" else end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        children = psutil.Process(program.pid).children(recursive=True) if end == "kill" else []
        if end == "kill":
            assert len(children) == 2, "a coordinator and a replica"
            program.send_signal(signal.SIGKILL)
        program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == (-signal.SIGKILL if end == "kill" else 0)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
