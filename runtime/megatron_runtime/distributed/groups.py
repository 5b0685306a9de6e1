"""The process groups of one rank and the collectives in them: torch.distributed with gloo on CPUs, NCCL on GPUs.

T tokens of this rank's step, A tokens of all expert ranks' steps, M the most tokens of one expert rank, N rows whose
logits are computed, D hidden, W a rank's part of the vocabulary, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.distributed.watch import StepProgress


class Collectives(Protocol):
    """What the ranks of one model exchange in a forward pass. The implementation here is that of a single rank.

    Every rank of a group calls the methods in the same order. A result may be the argument, changed in place.
    """

    def begin_layer(self, number: int) -> None:
        """The model's layer `number` begins. Marks the progress of this rank."""
        return

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The sum over the tensor ranks: after the attention's output, the down projection and the embedding."""
        return x_TD

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """logits_NV of all tensor ranks' parts of the vocabulary."""
        return logits_NW

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x_AD, the tokens of all expert ranks: before the routed experts."""
        return x_TD

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        """y_TD, this rank's tokens summed over the expert ranks: after the routed experts."""
        return y_AD


class OneRank(Collectives):
    """A single rank: every method returns its argument."""


class GroupError(RuntimeError):
    """A collective failed: another rank is gone, or the network between them."""


class Groups:
    """Implements Collectives, and sends hidden states from one pipeline stage to the next.

    All ranks construct it at the same time: the constructor waits for the others.

    device:   of this rank's tensors.
    progress: of this rank's step.
    """

    def __init__(
        self, store: dist.Store, sizes: ParallelSizes, *, rank: int, device: torch.device, timeout: timedelta
    ) -> None:
        self.shard: Shard = sizes.shard(rank)
        self.progress = StepProgress()
        self._tokens_of_experts: tuple[int, ...] = ()
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        self.device = device
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=sizes.world,
            timeout=timeout,
            device_id=device if is_gpu else None,
        )
        shards = [sizes.shard(number) for number in range(sizes.world)]
        self._timeout = timeout
        self._tensor = self._own(shards, lambda one: (one.pipeline_rank, one.expert_rank))
        self._expert = self._own(shards, lambda one: (one.pipeline_rank, one.tensor_rank))
        self._pipeline = self._own(shards, lambda one: (one.expert_rank, one.tensor_rank))

    def _own(self, shards: list[Shard], key: Callable[[Shard], tuple[int, int]]) -> dist.ProcessGroup | None:
        """The group of the ranks with this rank's key; None where it is alone. All ranks make all groups, in order."""
        mine = None
        for each in sorted({key(one) for one in shards}):
            ranks = [one.rank for one in shards if key(one) == each]
            group = dist.new_group(ranks, timeout=self._timeout) if len(ranks) > 1 else None
            if each == key(self.shard) and isinstance(group, dist.ProcessGroup):
                mine = group
        return mine

    def begin(self, tokens_of_experts: tuple[int, ...]) -> None:
        """A forward pass with so many tokens on each expert rank begins. Every rank knows the counts from the plan."""
        self._tokens_of_experts = tokens_of_experts
        self.progress.reach("the input")

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            with self.progress.exchange():
                yield
        except RuntimeError as error:
            raise GroupError(f"an exchange with other ranks failed: {error}") from error

    def close(self) -> None:
        dist.destroy_process_group()

    def begin_layer(self, number: int) -> None:
        self.progress.reach("layer", number)

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._tensor is None:
            return x_TD
        x_TD = x_TD.contiguous()
        with self._exchange():
            dist.all_reduce(x_TD, group=self._tensor)
        return x_TD

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        # A mark for each block of a prompt's log-probabilities, of which there may be many.
        self.progress.reach("logits")
        if self._tensor is None:
            return logits_NW
        width = self.shard.vocabulary_width(vocab_size)
        rows = logits_NW.shape[0]
        if logits_NW.shape[1] < width:
            logits_NW = torch.nn.functional.pad(logits_NW, (0, width - logits_NW.shape[1]))
        gathered = logits_NW.new_empty(self.shard.tensor_size * rows, width)
        with self._exchange():
            dist.all_gather_into_tensor(gathered, logits_NW.contiguous(), group=self._tensor)
        logits_NV = gathered.view(self.shard.tensor_size, rows, width).transpose(0, 1).flatten(1)
        return logits_NV[:, :vocab_size]

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._expert is None:
            return x_TD
        counts = self._tokens_of_experts
        most, hidden = max(counts), x_TD.shape[1]
        padded_MD = torch.nn.functional.pad(x_TD, (0, 0, 0, most - x_TD.shape[0])).contiguous()
        gathered = x_TD.new_empty(len(counts) * most, hidden)
        with self._exchange():
            dist.all_gather_into_tensor(gathered, padded_MD, group=self._expert)
        return torch.cat([gathered[index * most : index * most + count] for index, count in enumerate(counts)])

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        if self._expert is None:
            return y_AD
        y_AD = y_AD.contiguous()
        with self._exchange():
            dist.all_reduce(y_AD, group=self._expert)
        start = sum(self._tokens_of_experts[: self.shard.expert_rank])
        return y_AD[start : start + self._tokens_of_experts[self.shard.expert_rank]]

    def send_to_next_stage(self, x_TD: torch.Tensor) -> None:
        """Start to send and return. `x_TD` must not change until flush()."""
        x_TD = x_TD.contiguous()
        with self._exchange():
            work = dist.isend(x_TD, self._neighbour(1), group=self._pipeline)
        assert work is not None, "this rank is in its pipeline group"
        self._sending.append((work, x_TD))

    def receive_from_previous_stage(self, tokens: int, hidden: int, *, dtype: torch.dtype) -> torch.Tensor:
        x_TD = torch.empty(tokens, hidden, dtype=dtype, device=self.device)
        with self._exchange():
            dist.recv(x_TD, self._neighbour(-1), group=self._pipeline)
        return x_TD

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sending:
            with self._exchange():
                self._sending.pop(0)[0].wait()

    def _neighbour(self, step: int) -> int:
        return self.shard.rank + step * self.shard.tensor_size * self.shard.expert_size
