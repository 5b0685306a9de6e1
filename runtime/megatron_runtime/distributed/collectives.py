"""What the ranks of one model exchange inside a forward pass.

T tokens of this rank's step, A tokens of all expert ranks' steps, N rows whose logits are wanted, D hidden,
W this rank's part of the vocabulary, V the vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """Called by every rank of its group in the same order; the result may be the argument, changed in place."""

    def begin_layer(self, number: int) -> None:
        """The layer of the model that comes now: who watches this rank wants to know that it gets on."""

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The sum over the tensor ranks: after the attention's output, the down projection and the embedding."""

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """logits_NV of all tensor ranks' parts of the vocabulary."""

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x_AD, the tokens of all expert ranks: before the routed experts."""

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        """y_TD, this rank's tokens summed over the expert ranks: after the routed experts."""


class OneRank:
    """Implements Collectives: there is nobody to talk to, and nothing is copied."""

    def begin_layer(self, number: int) -> None:
        pass

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD

    def gather_logits(self, logits_NW: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits_NW

    def gather_tokens(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD

    def scatter_sums(self, y_AD: torch.Tensor) -> torch.Tensor:
        return y_AD
