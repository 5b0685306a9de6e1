"""The process groups of one rank, and the collectives in these groups.

Collectives use NCCL between GPUs, and Unix sockets between the CPU ranks of one host. Between CPU ranks of several
hosts, and in programs that use torch.distributed on CPUs, they use gloo.

The suffixes of tensor names are: T tokens of this rank's step, A tokens of all expert ranks' steps, M the maximum
number of tokens of an expert rank, N rows whose logits are computed, D hidden size, W a rank's part of the vocabulary,
V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_runtime.distributed.local_group import LocalGroup
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.distributed.watch import StepProgress


class Collectives:
    """The communication between the ranks of one model in a forward pass. This base class is for a single rank.

    Every rank of a group calls the methods in the same order. A method may change its argument in place and return it.
    """

    def begin_layer(self, number: int) -> None:
        """Record that this rank begins the model's layer with index `number`."""
        return

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the sum of x_TD over the tensor ranks.

        The model calls this method for the attention output, the down projection and the embedding.
        """
        return x_TD

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return logits_NV, in which the vocabulary parts of all tensor ranks are joined."""
        return logits_NW

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return x_AD, the tokens of all expert ranks. The model calls this method before the routed experts."""
        return x_TD

    def own_tokens(self, y_AD: torch.Tensor) -> torch.Tensor:
        """Return y_TD, the rows of y_AD that belong to this rank's tokens."""
        return y_AD

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        """Return y_TD, this rank's tokens summed over the expert ranks.

        The model calls this method after the routed experts.
        """
        return y_AD


class GroupError(RuntimeError):
    """A collective failed, because another rank exited or the network between ranks failed."""


class _ProcessGroup:
    """A group of torch.distributed, with the methods of LocalGroup."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def all_gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        dist.all_gather_into_tensor(gathered, tensor, group=self._group)

    def send(self, tensor: torch.Tensor, rank: int) -> Callable[[], object]:
        work = dist.isend(tensor, rank, group=self._group)
        assert work is not None, "this rank is in its pipeline group"
        return work.wait

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        dist.recv(tensor, rank, group=self._group)

    def close(self) -> None:
        """Do nothing, because destroy_process_group() closes all groups."""


class Groups(Collectives):
    """The process groups of this rank. They also send hidden states from one pipeline stage to the next.

    All ranks must construct this object at the same time, because the constructor waits for the other ranks. If the
    program has not initialised torch.distributed, the constructor initialises it.

    rank:     number of this rank in its engine.
    device:   device of this rank's tensors.
    engine, engines, folder: see RankIdentity.
    progress: progress of this rank's step.
    """

    def __init__(
        self,
        store: dist.Store,
        sizes: ParallelSizes,
        *,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        engine: int = 0,
        engines: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.shard = sizes.shard(rank)
        self.progress = StepProgress()
        self._tokens_of_experts: tuple[int, ...] = ()
        self._sending: list[tuple[Callable[[], object], torch.Tensor]] = []
        self.device = device
        self._first_rank = engine * sizes.world
        backend = "nccl" if device.type == "cuda" else "gloo"
        is_local = folder is not None and backend == "gloo"
        if not is_local and not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=store,
                rank=self._first_rank + rank,
                world_size=engines * sizes.world,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
        shape = (engines, sizes.pipeline, sizes.expert, sizes.tensor)  # the order of Shard.rank
        numbers = torch.arange(engines * sizes.world).view(shape)

        def group(dimension: int, name: str) -> _ProcessGroup | LocalGroup | None:
            """Create the groups of ranks along a dimension, and return this rank's group.

            Returns None if the group has no other rank.
            """
            ranks = numbers.movedim(dimension, -1).flatten(0, 2).tolist()
            if len(ranks[0]) == 1:
                return None
            if is_local:
                assert folder is not None
                (of_rank,) = (group for group in ranks if rank in group)
                return LocalGroup(folder, name, of_rank, rank=rank, timeout_seconds=timeout.total_seconds())
            own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend)
            assert isinstance(own, dist.ProcessGroup), "every rank is in one group of each dimension"
            return _ProcessGroup(own)

        self._pipeline, self._expert, self._tensor = group(1, "pipeline"), group(2, "expert"), group(3, "tensor")

    def begin(self, tokens_of_experts: tuple[int, ...]) -> None:
        """Record that a forward pass begins.

        tokens_of_experts: number of tokens on each expert rank, which every rank knows from the plan.
        """
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
        for group in (self._pipeline, self._expert, self._tensor):
            if group is not None:
                group.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def begin_layer(self, number: int) -> None:
        self.progress.reach("layer", number)

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._tensor is None:
            return x_TD
        x_TD = x_TD.contiguous()
        with self._exchange():
            self._tensor.all_reduce(x_TD)
        return x_TD

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        # Progress is recorded for each block of a prompt's log-probabilities, because there may be many blocks.
        self.progress.reach("logits")
        if self._tensor is None:
            return logits_NW
        width = self.shard.vocabulary_width(vocab_size)
        rows = logits_NW.shape[0]
        if logits_NW.shape[1] < width:
            logits_NW = torch.nn.functional.pad(logits_NW, (0, width - logits_NW.shape[1]))
        gathered = logits_NW.new_empty(self.shard.sizes.tensor * rows, width)
        with self._exchange():
            self._tensor.all_gather(gathered, logits_NW.contiguous())
        logits_NV = gathered.view(self.shard.sizes.tensor, rows, width).transpose(0, 1).flatten(1)
        return logits_NV[:, :vocab_size]

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        if self._expert is None:
            return x_TD
        counts = self._tokens_of_experts
        maximum, hidden = max(counts), x_TD.shape[1]
        padded_MD = torch.nn.functional.pad(x_TD, (0, 0, 0, maximum - x_TD.shape[0])).contiguous()
        gathered = x_TD.new_empty(len(counts) * maximum, hidden)
        with self._exchange():
            self._expert.all_gather(gathered, padded_MD)
        return torch.cat([gathered[index * maximum : index * maximum + count] for index, count in enumerate(counts)])

    def own_tokens(self, y_AD: torch.Tensor) -> torch.Tensor:
        if self._expert is None:
            return y_AD
        start = sum(self._tokens_of_experts[: self.shard.expert_rank])
        return y_AD[start : start + self._tokens_of_experts[self.shard.expert_rank]]

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        if self._expert is None:
            return y_AD
        y_AD = y_AD.contiguous()
        with self._exchange():
            self._expert.all_reduce(y_AD)
        return self.own_tokens(y_AD)

    def send_to_next_stage(self, x_TD: torch.Tensor) -> None:
        """Start to send hidden states to the next pipeline stage. `x_TD` must not change until flush()."""
        assert self._pipeline is not None
        x_TD = x_TD.contiguous()
        with self._exchange():
            self._sending.append((self._pipeline.send(x_TD, self._neighbour(1)), x_TD))

    def receive_from_previous_stage(self, tokens: int, hidden: int, *, dtype: torch.dtype) -> torch.Tensor:
        assert self._pipeline is not None
        x_TD = torch.empty(tokens, hidden, dtype=dtype, device=self.device)
        with self._exchange():
            self._pipeline.receive(x_TD, self._neighbour(-1))
        return x_TD

    def flush(self) -> None:
        """Wait until all hidden states have been sent."""
        while self._sending:
            with self._exchange():
                self._sending.pop(0)[0]()

    def _neighbour(self, step: int) -> int:
        return self._first_rank + self.shard.rank + step * self.shard.sizes.tensor * self.shard.sizes.expert
