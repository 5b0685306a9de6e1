"""Sampling on the device. Only tokens and requested log-probabilities are copied to the host.

The graph that computes the logits of a step also draws the tokens. The tokens of some rows are drawn after the step, by
the same kernel. These are rows whose logits are edited first, and rows whose log-probabilities refer to edited logits.
The results equal the results of `megatron_runtime.sampling.sampler`, which documents each function.

Shapes: B rows of the step, M rows that are drawn later, W rows that report log-probabilities, V vocabulary, K most
        likely tokens, E (row, token) entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.operations import Sample
from megatron_runtime.backends.native.cuda.step_buffers import DeviceStep, StagedStep
from megatron_runtime.backends.native.executor import Int32, Int64
from megatron_runtime.backends.native.torch_executor import LOGIT_ROWS, ForwardStep
from megatron_runtime.sampling.batch import NO_LOG_PROBS, LogitEdits, RowFailure, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

_NONE = float("-inf")
_LOW = 0xFFFFFFFF


def rows_drawn_later(batch: SamplingBatch, needs_sample: npt.NDArray[np.bool_], *, reports_raw: bool) -> Int64:
    """Return the rows of a plan whose tokens are drawn after the step, int64 [M], ascending."""
    is_late = np.zeros(len(needs_sample), np.bool_)
    is_late[list(batch.edits)] = True
    if not reports_raw:
        is_late |= batch.num_log_probs != NO_LOG_PROBS
    return np.flatnonzero(is_late & needs_sample)


def draw(
    sample: Sample,
    logits_NV: torch.Tensor,
    step: DeviceStep,
    *,
    which_N: torch.Tensor | None = None,
    processed_NV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row of `logits_NV` with the parameters of the step.

    Returns the tokens, int32 [N], and their log-probabilities, float32 [N].

    sample:       the sampling kernel.
    which_N:      int64 [N], the row of the step for each row of logits_NV. None means that logits_NV has all rows of
                  the step. In this case, the rows in StagedStep.later are sampled greedily here, and drawn again later.
    processed_NV: float32; receives the logits from which the tokens are drawn. None if they are not needed.
    """
    columns = {
        "temperature_N": step.temperature_B if which_N is None else step.own_temperature_B,
        "top_k_N": step.top_k_B,
        "top_p_N": step.top_p_B,
        "min_p_N": step.min_p_B,
        "seeds_N": step.seeds_B,
        "positions_N": step.sample_positions_B,
    }
    if which_N is not None:
        columns = {name: column_B.index_select(0, which_N) for name, column_B in columns.items()}
    return sample(logits_NV, **columns, processed_NV=processed_NV)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForwardStep(ForwardStep):
    """A ForwardStep whose tokens are sampled on the device.

    staged:      the step plan on the device, and the order of its rows.
    at:          int64 [n]; the row of logits_BV for each row of rows.sampled_rows.
    kernel:      the sampling kernel.
    tokens_B, log_probs_B: the sampled tokens, int32, and their log-probabilities, float32. The values of the rows in
                 staged.later are not used.
    read_tokens: waits for the device and returns tokens_B.
    """

    staged: StagedStep
    at: Int64
    kernel: Sample
    tokens_B: torch.Tensor
    log_probs_B: torch.Tensor
    read_tokens: Callable[[], Int32]

    def wait(self) -> None:
        self.read_tokens()

    def sample(self, batch: SamplingBatch, *, reports_raw: bool) -> tuple[Int32, dict[int, LogProbs]]:
        at, rows = self.at, self.sampled_rows
        later, tokens_B, processed_MV = self.staged.later, self.tokens_B, None
        if len(later):
            tokens_B, processed_MV = self._draw_later(batch, reports_raw=reports_raw)
        wanted = np.flatnonzero(batch.num_log_probs[rows] != NO_LOG_PROBS)
        counts = batch.num_log_probs[rows[wanted]]
        if len(later) or not len(wanted):
            tokens = tokens_B.cpu().numpy()[at]
        else:
            tokens = self.read_tokens()[at]
        tokens = np.where(tokens == -1, RowFailure.MODEL, tokens).astype(np.int32)
        if not len(wanted):
            return tokens, {}
        where = at[wanted]
        if processed_MV is None and not counts.any() and not np.isin(where, later).any():
            chosen_W = self.log_probs_B.cpu().numpy()[where]
            nothing = np.empty((len(where), 0), np.float32)
            lines = LogProbs(chosen_W, nothing.astype(np.int32), nothing)
        else:
            logits = self.logits_BV if processed_MV is None else processed_MV
            found = np.searchsorted(later, where) if processed_MV is not None else where
            lines = _log_probs(logits, found, tokens[wanted].clip(0), top_n=int(counts.max()))
        return tokens, {
            row: LogProbs(
                lines.chosen_N[index : index + 1],
                lines.top_ids_NK[index : index + 1, :count],
                lines.top_NK[index : index + 1, :count],
            )
            for index, (row, count) in enumerate(zip(rows[wanted].tolist(), counts.tolist(), strict=True))
            if tokens[wanted[index]] >= 0
        }

    def prompt_log_probs(self, batch: SamplingBatch) -> Iterator[tuple[int, LogProbs]]:
        for row, first, logits_NV in self.prompt_logits():
            targets = batch.prompt_targets[row][first : first + len(logits_NV)]
            yield (
                row,
                _log_probs(logits_NV, np.arange(len(targets)), targets, top_n=max(0, int(batch.num_log_probs[row]))),
            )

    def _draw_later(self, batch: SamplingBatch, *, reports_raw: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the tokens of the rows in staged.later. Return tokens_B with the drawn tokens, and processed_MV.

        A row that fails has a RowFailure instead of a token. processed_MV has the logits from which the tokens are
        drawn. processed_MV is None if `reports_raw`.
        """
        later, device = self.staged.later, self.logits_BV.device
        which_M = torch.from_numpy(later).to(device)
        logits_MV = self.logits_BV.index_select(0, which_M).float()
        edits = [batch.edits.get(row) or LogitEdits() for row in self.staged.rows[later].tolist()]
        apply_edits(logits_MV, edits)
        processed_MV = None if reports_raw else torch.empty_like(logits_MV)
        drawn_M, _ = draw(self.kernel, logits_MV, self.staged.step, which_N=which_M, processed_NV=processed_MV)
        has_mask_M = torch.tensor([edit.allowed is not None for edit in edits], device=device)
        is_masked_M = has_mask_M & (logits_MV.amax(dim=1) == _NONE)
        drawn_M = drawn_M.masked_fill(drawn_M < 0, RowFailure.EDITS).masked_fill(is_masked_M, RowFailure.MASK)
        # An edit must not hide model outputs that are not finite.
        drawn_M = drawn_M.masked_fill(self.tokens_B.index_select(0, which_M) < 0, RowFailure.MODEL)
        return self.tokens_B.index_copy(0, which_M, drawn_M), processed_MV


def apply_edits(logits_MV: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    """Apply penalties, biases and masks to rows in place, like sampler.apply_edits(). logits_MV: float32,
    contiguous.
    """
    vocabulary, device = logits_MV.shape[1], logits_MV.device
    flat = logits_MV.view(-1)

    def places(ids: list[tuple[int, Int32]]) -> torch.Tensor:
        """Return the indices in `flat`, int64 [E], of the tokens in `ids`. ids: pairs (row, token ids)."""
        lengths, rows = [len(of_row) for _, of_row in ids], [row for row, _ in ids]
        place_E = np.concatenate([of_row for _, of_row in ids]) + np.repeat(np.array(rows) * vocabulary, lengths)
        return torch.from_numpy(place_E).to(device)

    rows = list(enumerate(edits))
    if penalties := [(row, edit.penalties) for row, edit in rows if edit.penalties is not None]:
        place_E = places([(row, value.ids) for row, value in penalties])
        factors = np.array([(value.repetition, value.presence, value.frequency) for _, value in penalties])
        lengths = [len(value.ids) for _, value in penalties]
        repetition_E, presence_E, frequency_E = torch.from_numpy(np.repeat(factors.T, lengths, axis=1)).to(device)
        repetition_E = repetition_E.float()
        counts_E = torch.from_numpy(np.concatenate([value.counts for _, value in penalties])).to(device)
        seen_E = flat[place_E]
        seen_E = torch.where(seen_E > 0, seen_E / repetition_E, seen_E * repetition_E)
        flat[place_E] = (seen_E.double() - frequency_E * counts_E - presence_E * (counts_E > 0)).float()
    if biased := [(row, edit.bias_ids) for row, edit in rows if edit.bias_ids is not None]:
        bias = np.concatenate([edit.bias for edit in edits if edit.bias is not None])
        flat[places(biased)] += torch.from_numpy(bias).to(device)
    if any(edit.allowed is not None for edit in edits):
        words = np.full((len(edits), -(-vocabulary // 32)), _LOW, np.uint32)
        for row, edit in rows:
            if edit.allowed is not None:
                words[row, : len(edit.allowed)] = edit.allowed
                words[row, len(edit.allowed) :] = 0
        words_MU = torch.from_numpy(words.view(np.int32)).to(device)
        bits_MV = (words_MU[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        logits_MV.masked_fill_(bits_MV.flatten(1)[:, :vocabulary] == 0, _NONE)
    if banned := [(row, edit.banned) for row, edit in rows if edit.banned is not None]:
        place_E = places(banned)
        before_E = flat[place_E]
        flat[place_E] = _NONE
        has_no_other_M = logits_MV.amax(dim=1) == _NONE
        flat[place_E] = before_E.where(has_no_other_M[place_E // vocabulary], _NONE)


def _log_probs(logits_BV: torch.Tensor, which: Int64, tokens: npt.NDArray[np.integer], *, top_n: int) -> LogProbs:
    """Compute sampler.log_probs() on the device, for the rows `which`, int64 [W], and their tokens, int [W]."""
    device, top_n = logits_BV.device, min(top_n, logits_BV.shape[1])
    which_W, tokens_W = torch.from_numpy(np.stack([which, tokens.astype(np.int64)])).to(device)
    parts = []
    for some, chosen in zip(which_W.split(LOGIT_ROWS), tokens_W.split(LOGIT_ROWS), strict=True):
        values_WV = logits_BV.index_select(0, some).float()
        ids_WK = torch.cat([chosen[:, None], _likeliest(values_WV, top_n)], dim=1)
        lines_WK = values_WV.gather(1, ids_WK) - values_WV.logsumexp(dim=1, keepdim=True)
        is_finite_W = values_WV.amax(dim=1, keepdim=True).isfinite()
        parts.append((ids_WK.int(), lines_WK.where(is_finite_W, torch.nan)))
    ids, lines = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return LogProbs(lines[:, 0], ids[:, 1:], lines[:, 1:])


def _likeliest(values_WV: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the largest values, int64 [W, count], by descending value. Of equal values, the lower id is
    first.
    """
    if count == 0:
        return values_WV.new_empty(len(values_WV), 0, dtype=torch.int64)
    bits_WV = (values_WV + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered_WV = bits_WV ^ ((bits_WV >> 31) & 0x7FFFFFFF)  # the integers now sort like the floats
    keys_WV = (ordered_WV.long() << 32) | (_LOW - torch.arange(values_WV.shape[1], device=values_WV.device))
    return _LOW - (keys_WV.topk(count, dim=1).values & _LOW)
