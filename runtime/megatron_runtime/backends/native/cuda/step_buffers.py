"""What a step plan says, on the device: two copies a step, to addresses that never move: graphs can be replayed.

T tokens, B sequences (rows), M pages of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.backends.native.executor import StepPlan

Int64 = npt.NDArray[np.int64]

_ALIGNMENT = 8
_PADDING_SLOT = -1
"""A token of padding is not written to the cache."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The tensors of one step. Rows with one new token, the decodes, come first; D of them.

    token_ids_T, positions_T: int64; slots_T: int64, page · page_size + offset, −1 for padding.
    block_table_BM, lengths_B: int32; length 0 is a row of padding.
    prefill_starts:           int32 [B − D + 1]; where the tokens of each row after the decodes begin, from the first.
    temperature_B …:          as in SamplingBatch, by row of this step.
    """

    decodes: int
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    block_table_BM: torch.Tensor
    lengths_B: torch.Tensor
    prefill_starts: torch.Tensor
    temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    seeds_B: torch.Tensor
    sample_positions_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class StagedStep:
    """step: on the device. rows: the plan's row of each of the step's. ends: one past each row's last token."""

    step: DeviceStep
    rows: Int64
    ends: Int64


class StepBuffers:
    """Room for the largest step, on the device and, pinned, on the host.

    max_tokens, max_rows: of a step. max_pages: of a sequence.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, max_pages: int, device: torch.device) -> None:
        by_token = dict.fromkeys(("token_ids", "positions", "slots"), torch.int64)
        by_row = {
            "lengths": torch.int32,
            "temperature": torch.float32,
            "top_k": torch.int32,
            "top_p": torch.float32,
            "min_p": torch.float32,
            "seeds": torch.int64,
            "sample_positions": torch.int64,
        }
        counts = dict.fromkeys(by_token, max_tokens) | dict.fromkeys(by_row, max_rows) | {"starts": max_rows + 1}
        kinds = by_token | by_row | {"starts": torch.int32}
        sizes = {name: _aligned(count * kinds[name].itemsize) for name, count in counts.items()}
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device)
        self._host_tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, pin_memory=pinned)
        self._tables_BM = torch.zeros_like(self._host_tables, device=device)
        self._numbers: dict[str, npt.NDArray[np.generic]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            part = slice(start, start + counts[name] * kinds[name].itemsize)
            self._numbers[name] = self._host[part].view(kinds[name]).numpy()
            self._tensors[name] = self._device[part].view(kinds[name])
            start += size
        self._sent: torch.cuda.Event | None = torch.cuda.Event() if pinned else None
        """Recorded behind the copies of a step: until then its numbers on the host must stay."""

    def stage(self, plan: StepPlan, *, decode_size: int | None = None) -> StagedStep:
        """Bring the plan to the device.

        decode_size: pad a plan of decodes to so many rows; None does not pad.
        """
        if self._sent is not None:
            self._sent.synchronize()
        is_prefill = plan.query_lengths != 1
        rows = np.argsort(is_prefill, kind="stable")
        counts = plan.query_lengths[rows].astype(np.int64)
        ends = counts.cumsum()
        decodes = len(rows) - int(is_prefill.sum())
        size, tokens = len(rows), int(ends[-1])
        first_in_plan = (plan.query_lengths.cumsum() - plan.query_lengths)[rows]
        order_T = np.repeat(first_in_plan - (ends - counts), counts) + np.arange(tokens)
        batch, numbers = plan.sampling, self._numbers
        for name, values in (
            ("token_ids", plan.token_ids[order_T]),
            ("positions", plan.positions[order_T]),
            ("slots", plan.slot_mapping[order_T]),
            ("lengths", plan.context_lengths[rows]),
            ("temperature", batch.temperature[rows]),
            ("top_k", batch.top_k[rows]),
            ("top_p", batch.top_p[rows]),
            ("min_p", batch.min_p[rows]),
            ("seeds", batch.seeds[rows].view(np.int64)),
            ("sample_positions", batch.positions[rows]),
        ):
            numbers[name][: len(values)] = values
        numbers["starts"][0] = 0
        numbers["starts"][1 : size - decodes + 1] = ends[decodes:] - decodes
        tables = self._host_tables.numpy()
        tables[:size, : plan.block_tables.shape[1]] = plan.block_tables[rows]
        if decode_size is not None:
            self._pad(size, decode_size)
            size = tokens = decodes = decode_size
        self._device.copy_(self._host, non_blocking=True)
        self._tables_BM[:size].copy_(self._host_tables[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return StagedStep(self.step(size, tokens=tokens, decodes=decodes), rows, ends)

    def step(self, rows: int, *, tokens: int, decodes: int) -> DeviceStep:
        """The tensors of a step of this size, whatever they hold: the same memory each time."""
        by_row = {name: tensor[:rows] for name, tensor in self._tensors.items()}
        return DeviceStep(
            decodes=decodes,
            token_ids_T=self._tensors["token_ids"][:tokens],
            positions_T=self._tensors["positions"][:tokens],
            slots_T=self._tensors["slots"][:tokens],
            block_table_BM=self._tables_BM[:rows],
            lengths_B=by_row["lengths"],
            prefill_starts=self._tensors["starts"][: rows - decodes + 1],
            temperature_B=by_row["temperature"],
            top_k_B=by_row["top_k"],
            top_p_B=by_row["top_p"],
            min_p_B=by_row["min_p"],
            seeds_B=by_row["seeds"],
            sample_positions_B=by_row["sample_positions"],
        )

    def _pad(self, start: int, stop: int) -> None:
        """Rows of padding see nothing, write nothing, and take the likeliest token of whatever comes out."""
        for name in ("token_ids", "positions", "lengths", "temperature"):
            self._numbers[name][start:stop] = 0
        self._numbers["slots"][start:stop] = _PADDING_SLOT


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
