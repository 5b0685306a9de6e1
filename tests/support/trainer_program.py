"""A trainer in a process of its own: `trainer_program.py COORDINATOR KEYS_DIR MODEL_DIRECTORY PORT SOCKET`.

Reads one JSON object per line from the socket, which it has inherited: {"epoch": E}. It computes the weights of this
epoch, publishes them, and writes {"source": …}, or {"error": …, "is_committed": …}. First it writes {"epoch": E} with
the epoch of the engines.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import torch

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.trainer import PublishError, WeightServer


def weights_of(model: str, epoch: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an epoch; those of epoch 0 are the files of the model."""
    checkpoint = open_checkpoint(resolve(model))
    generator = torch.Generator().manual_seed(epoch)
    return {
        name: torch.randn(kind.shape, generator=generator).mul_(0.2) if epoch else checkpoint.read(name).clone()
        for name, kind in checkpoint.kinds.items()
    }


def main(coordinator: str, keys: str, model: str, port: str, descriptor: str) -> None:
    tensors = weights_of(model, 0)
    with (
        WeightServer(tensors, coordinator=coordinator, keys=Path(keys), port=int(port)) as server,
        socket.socket(fileno=int(descriptor)) as connection,
        connection.makefile("r") as orders,
    ):

        def send(answer: dict[str, object]) -> None:
            connection.sendall(json.dumps(answer).encode() + b"\n")

        send({"epoch": server.status().epoch})
        for line in orders:
            epoch = json.loads(line)["epoch"]
            tensors.update(weights_of(model, epoch))
            try:
                answer: dict[str, object] = {"source": server.publish(epoch)}
            except PublishError as error:
                answer = {"error": str(error), "is_committed": error.is_committed}
            send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
