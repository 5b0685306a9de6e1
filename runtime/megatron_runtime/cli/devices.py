"""The option `--device`, and the assignment of a machine's GPUs to engines. This module does not import torch.

The variable CUDA_VISIBLE_DEVICES restricts each engine to its GPUs, with every backend. The ranks of the engine use
these GPUs in order.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import click

from megatron_runtime.cli.options import Parsed

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = re.compile(r"cuda:\d+(,cuda:\d+)*")


@dataclass(frozen=True, slots=True)
class Device:
    """The value of `--device`.

    kind: kind of device. "auto" means GPUs if the machine has GPUs.
    gpus: numbers of the GPUs to use, in this order. GPU 0 is the first GPU that this process can see. None means all
          GPUs, in order from 0.
    """

    kind: Literal["auto", "cpu", "cuda"]
    gpus: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.kind if self.gpus is None else ",".join(f"cuda:{number}" for number in self.gpus)


def _device(text: str) -> Device:
    if text in ("auto", "cpu", "cuda"):
        return Device(text)  # type: ignore[arg-type]  # one of its literals
    if not _GPUS.fullmatch(text):
        raise click.BadParameter(
            f"{text!r} is not a device: use auto, cpu, cuda or GPUs by number, such as cuda:1 or cuda:0,cuda:1."
        )
    gpus = tuple(int(part.removeprefix("cuda:")) for part in text.split(","))
    if len(set(gpus)) < len(gpus):
        raise click.BadParameter(f"{text!r} lists a GPU twice: list each GPU once.")
    return Device("cuda", gpus)


device_option = click.option(
    "--device",
    type=Parsed("auto|cpu|cuda|cuda:N,…", _device),
    default="auto",
    help="Devices that run the model. auto uses the GPUs of the machine, or CPUs if there are none. cpu uses no "
    "GPUs. cuda:1,cuda:3 uses only these GPUs. Each rank of each engine gets its own GPU.",
)


def count_gpus() -> int:
    """Return the number of GPUs that the CUDA driver reports to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def assign_gpus(device: Device, *, engines: int, ranks: int, gpus: int) -> list[tuple[int, ...] | None]:
    """Return the GPU numbers for each engine, in the order of the engines; None for an engine that needs no assignment.

    engines: number of engines.
    ranks:   number of ranks per engine.
    gpus:    number of GPUs of this machine.

    Raises click.UsageError if the machine has too few GPUs. The message names the options, the numbers and the remedy.
    """
    if device.kind == "cpu" or (device.kind == "auto" and gpus == 0):
        return [None] * engines
    usable = tuple(range(gpus)) if device.gpus is None else device.gpus
    absent = [f"cuda:{number}" for number in usable if number >= gpus]
    machine = f"this machine has {gpus or 'no'} GPU{'s' * (gpus != 1)} that CUDA can use"
    if absent:
        allowed = {0: "", 1: "cuda:0 or "}.get(gpus, f"cuda:0 to cuda:{gpus - 1}, or ")
        raise click.UsageError(f"--device {device}: {machine}, so there is no {absent[0]}: use {allowed}--device cpu.")
    needed = engines * ranks
    if len(usable) < needed:
        available = machine if device.gpus is None else f"--device lists {len(usable)}"
        raise click.UsageError(
            f"--engines {engines} with --tensor-parallel {ranks} need {needed} GPU{'s' * (needed != 1)}, "
            f"{available}: use fewer engines or ranks, or --device cpu."
        )
    return [usable[index * ranks : (index + 1) * ranks] for index in range(engines)]


def show_only(gpus: tuple[int, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Restrict programs started with `environment` to `gpus`, which are indices among the GPUs visible so far."""
    visible = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    environment[VISIBLE] = ",".join(visible[number] if visible else str(number) for number in gpus)
