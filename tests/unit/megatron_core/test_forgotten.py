"""A program without a shutdown, or a killed one, leaves no process and does not hang, whatever is open."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from eventually import LONG_SECONDS
from warm_python import WarmProgram

PROGRAM = """
    import signal, sys, threading
    from megatron_runtime.megatron_core.apis import MegatronLLM, ServeConfig
    from megatron_runtime.megatron_core.config import InferenceConfig
    from megatron_runtime.checkpoints.checkpoint import open_checkpoint
    from megatron_runtime.checkpoints.source import resolve
    from megatron_runtime.megatron_core.sampling_params import SamplingParams

    model = open_checkpoint(resolve(sys.argv[1]))
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)
    llm = MegatronLLM(
        model=model, tokenizer="builtin:smollm2-135m", inference_config=config, use_coordinator=True, threads=1
    )
    llm.serve(ServeConfig(host="127.0.0.1", port=0, frontend_replicas=2), blocking=False)
    assert llm.generate([1, 2], SamplingParams(num_tokens_to_generate=2)).generated_length == 2
    direct = MegatronLLM(model=model, tokenizer="builtin:smollm2-135m", inference_config=config, threads=1)
    streams = [one.generate_stream([1, 2], SamplingParams(num_tokens_to_generate=60)) for one in (llm, direct)]
    for stream in streams:
        next(stream)
    if "calls" in sys.argv:
        for one in (llm, direct):
            prompts = [[number + 1, 2] for number in range(1000)]
            threading.Thread(target=one.generate, args=(prompts,), daemon=True).start()
    print("ready", flush=True)
    if "wait" in sys.argv:
        signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path, tiny_directory: Path) -> tuple[Path, str]:
    """The script and its model."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    return script, str(tiny_directory)


def test_a_program_without_shutdown_ends(program: tuple[Path, str]) -> None:
    command = [sys.executable, *program, "calls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_SECONDS)
    assert (done.stdout, done.returncode) == ("ready\n", 0), done.stderr
    assert "terminate called" not in done.stderr
    assert "Fatal" not in done.stderr


def test_a_killed_program_leaves_no_process(program: tuple[Path, str]) -> None:
    killed = WarmProgram(*program, "wait")
    try:
        assert killed.stdout.readline() == "ready\n"
        children = psutil.Process(killed.pid).children(recursive=True)
        assert len(children) >= 3, "a coordinator, a replica and a process that renders chat templates"
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.exit_code() == -signal.SIGKILL
    finally:
        killed.close()
    _, alive = psutil.wait_procs(children, timeout=LONG_SECONDS)
    assert alive == []
