"""`--device` and `--tensor-parallel` on one machine: which GPUs each engine gets."""

from __future__ import annotations

import asyncio
import sys

import click
import psutil
import pytest
from click.testing import CliRunner
from eventually import eventually

from megatron_runtime.cli import devices, main
from megatron_runtime.cli.devices import Device, assign_gpus, show_only


@pytest.mark.parametrize(
    ("device", "engines", "ranks", "gpus", "assigned"),
    [
        (Device("auto"), 2, 1, 0, [None, None]),
        (Device("cpu"), 2, 1, 8, [None, None]),
        (Device("auto"), 2, 1, 2, [(0,), (1,)]),
        (Device("cuda"), 2, 2, 5, [(0, 1), (2, 3)]),
        (Device("cuda", (3, 1)), 2, 1, 4, [(3,), (1,)]),
    ],
)
def test_engines_share_no_gpu(
    device: Device, engines: int, ranks: int, gpus: int, assigned: list[tuple[int, ...] | None]
) -> None:
    assert assign_gpus(device, engines=engines, ranks=ranks, gpus=gpus) == assigned


@pytest.mark.parametrize(
    ("device", "engines", "ranks", "gpus", "words"),
    [
        (Device("auto"), 2, 1, 1, ["--engines", "need 2 GPUs", "has 1 GPU ", "--device cpu"]),
        (Device("auto"), 1, 4, 2, ["--tensor-parallel", "need 4 GPUs", "has 2 GPUs", "--device cpu"]),
        (Device("cuda"), 1, 1, 0, ["need 1 GPU,", "has no GPUs", "--device cpu"]),
        (Device("cuda", (0, 2)), 1, 2, 2, ["--device cuda:0,cuda:2", "no cuda:2", "cuda:0 to cuda:1"]),
        (Device("cuda", (1,)), 1, 2, 4, ["need 2 GPUs", "--device lists 1"]),
    ],
)
def test_too_few_gpus_name_the_options_and_the_remedy(
    device: Device, engines: int, ranks: int, gpus: int, words: list[str]
) -> None:
    with pytest.raises(click.UsageError) as failed:
        assign_gpus(device, engines=engines, ranks=ranks, gpus=gpus)
    for word in words:
        assert word in failed.value.message


def test_numbers_count_the_gpus_that_the_process_sees() -> None:
    for visible, expected in [({}, "1,0"), ({"CUDA_VISIBLE_DEVICES": "GPU-a, 7"}, "7,GPU-a")]:
        show_only((1, 0), visible)
        assert visible == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:1,2", "cuda:0,cuda:0", "cuda:-1"])
@pytest.mark.parametrize("command", ["serve", "engine"])
def test_a_wrong_device_is_an_error_of_the_option(command: str, text: str) -> None:
    result = CliRunner().invoke(main, [command, "--device", text])
    assert result.exit_code == 2
    assert f"'--device': {text!r}" in result.output


def test_an_engine_rejects_a_gpu_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_runtime.cli.containers.count_gpus", lambda: 1)
    options = ["--coordinator", "127.0.0.1:1", "--name", "e", "--device", "cuda:1"]
    result = CliRunner().invoke(main, ["engine", *options])
    assert result.exit_code == 2
    assert "there is no cuda:1: use cuda:0 or --device cpu" in " ".join(result.output.split())


def test_a_machine_without_the_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", absent)
    assert devices.count_gpus() == 0


async def test_each_engine_process_sees_its_own_gpus() -> None:
    program = (
        "from megatron_runtime.cli import main, serve\n"
        "serve.count_gpus = lambda: 4\n"
        "main(['serve', '--engines', '2', '--tensor-parallel', '2', '--port', '0'])\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )

    found: dict[str, str] = {}

    async def both_started() -> bool:
        for child in psutil.Process(process.pid).children():
            line = child.cmdline()
            if "engine" in line and "--name" in line:
                found[line[line.index("--name") + 1]] = child.environ().get("CUDA_VISIBLE_DEVICES", "")
        return len(found) == 2

    try:
        await eventually(both_started, what="two engine processes")
        assert found == {"engine-0": "0,1", "engine-1": "2,3"}
    finally:
        process.terminate()
        await process.communicate()
