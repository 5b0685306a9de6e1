"""A step plan on the device.

Each plan is copied in one transfer to addresses that do not change, so that CUDA graphs can be replayed.

Shapes: T tokens, B sequences (rows), M pages of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.backends.native.executor import Int64, StepPlan

_NO_ROWS = np.empty(0, np.int64)
_PADDING_SLOT = -1
"""Cache slot of padding tokens, whose keys and values are not written."""
_BY_TOKEN = dict.fromkeys(("token_ids_T", "positions_T", "slots_T"), torch.int64)
_BY_ROW = {
    "seeds_B": torch.int64,
    "sample_positions_B": torch.int64,
    "lengths_B": torch.int32,
    "temperature_B": torch.float32,
    "own_temperature_B": torch.float32,
    "top_k_B": torch.int32,
    "top_p_B": torch.float32,
    "min_p_B": torch.float32,
}
"""Types of the tensors of DeviceStep. 8-byte types come first, so that all parts of one buffer are aligned."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The tensors of one step. The D decode rows, which have one new token each, come first.

    token_ids_T, positions_T: int64; slots_T: int64, page · page_size + offset, −1 for padding.
    block_table_BM, lengths_B: int32; a padding row has length 0.
    prefill_starts:           int32 [B − D + 1]; offset of the first token of each row after the decodes, counted from
        the end of the decode tokens.
    own_temperature_B, top_k_B …: as in SamplingBatch, by row of this step.
    temperature_B:            own_temperature_B, but 0 for the rows of StagedStep.later.
    """

    decodes: int
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    block_table_BM: torch.Tensor
    lengths_B: torch.Tensor
    prefill_starts: torch.Tensor
    temperature_B: torch.Tensor
    own_temperature_B: torch.Tensor
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor
    seeds_B: torch.Tensor
    sample_positions_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step plan that has been copied to the device. The step can have another order of rows than the plan.

    rows: int64 [B]; for each row of the step, the number of its row in the plan.
    ends: int64 [B]; index after the last token of each row of the step.
    later: int64 [m]; rows of the step whose tokens are drawn after the step, because their logits are edited first.
    """

    step: DeviceStep
    rows: Int64
    ends: Int64
    later: Int64


class StepBuffers:
    """Memory for the largest step, on the device and in pinned host memory.

    max_tokens, max_rows: limits of a step.
    max_pages: maximum number of pages of a sequence.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, max_pages: int, device: torch.device) -> None:
        counts = dict.fromkeys(_BY_TOKEN, max_tokens) | dict.fromkeys(_BY_ROW, max_rows)
        counts |= {"starts": max_rows + 1, "tables": max_rows * max_pages}
        kinds = _BY_TOKEN | _BY_ROW | {"starts": torch.int32, "tables": torch.int32}
        sizes = {name: count * kinds[name].itemsize for name, count in counts.items()}
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device)
        self._tables_BM = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)
        self._numbers: dict[str, npt.NDArray[np.generic]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            part = slice(start, start + size)
            self._numbers[name] = self._host[part].view(kinds[name]).numpy()
            self._tensors[name] = self._device[part].view(kinds[name])
            start += size
        self._decodes: dict[int, DeviceStep] = {}
        """The decode steps, by number of rows."""
        self._sent: torch.cuda.Event | None = torch.cuda.Event() if pinned else None
        """Recorded after a step's copies. The host buffers must not change before the device has reached this event."""

    def clear(self) -> None:
        """Fill the decode buffers with padding rows, so that a step with these rows writes to no cache slot."""
        if self._sent is not None:
            self._sent.synchronize()
        self._pad(0, len(self._numbers["lengths_B"]))
        self._device.copy_(self._host)

    def stage(self, plan: StepPlan, *, later: Int64 = _NO_ROWS, decode_size: int | None = None) -> StagedStep:
        """Copy the plan to the device, and return it as a StagedStep.

        later: int64 [m]; the rows of the plan whose tokens are drawn after the step (see StagedStep.later).
        decode_size: number of rows to which a plan of decodes is padded; None adds no padding.
        """
        if self._sent is not None:
            self._sent.synchronize()
        is_prefill = plan.query_lengths != 1
        rows = np.argsort(is_prefill, kind="stable")
        ends = plan.query_lengths[rows].cumsum(dtype=np.int64)
        decodes = len(rows) - int(np.count_nonzero(is_prefill))
        size, tokens = len(rows), int(ends[-1])
        # A plan with decodes only is already in order.
        order, order_T = (slice(None), slice(None)) if decodes == size else (rows, plan.tokens_of(rows))
        batch, numbers = plan.sampling, self._numbers
        for name, values in (
            ("token_ids_T", plan.token_ids[order_T]),
            ("positions_T", plan.positions[order_T]),
            ("slots_T", plan.slot_mapping[order_T]),
            ("lengths_B", plan.context_lengths[order]),
            ("temperature_B", batch.temperature[order]),
            ("own_temperature_B", batch.temperature[order]),
            ("top_k_B", batch.top_k[order]),
            ("top_p_B", batch.top_p[order]),
            ("min_p_B", batch.min_p[order]),
            ("seeds_B", batch.seeds[order].view(np.int64)),
            ("sample_positions_B", batch.positions[order]),
        ):
            numbers[name][: len(values)] = values
        if len(later):
            later = np.flatnonzero(np.isin(rows, later))
            numbers["temperature_B"][later] = 0
        numbers["starts"][1 : size - decodes + 1] = ends[decodes:] - decodes
        # In the buffer, the tables come last and have the width in use. A kernel copies them to _tables_BM.
        width = plan.block_tables.shape[1]
        numbers["tables"][: size * width] = plan.block_tables[order].ravel()
        end = len(self._host) - 4 * (len(numbers["tables"]) - size * width)
        tables_BM, own_BM = self._tables_BM[:size, :width], self._tensors["tables"][: size * width].view(size, width)
        if decode_size is not None:
            self._pad(size, decode_size)
            size = tokens = decodes = decode_size
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        tables_BM.copy_(own_BM)
        if self._sent is not None:
            self._sent.record()
        return StagedStep(self.step(size, tokens=tokens, decodes=decodes), rows, ends, later)

    def step(self, rows: int, *, tokens: int, decodes: int) -> DeviceStep:
        """Return the tensors of a step with `tokens` tokens and `rows` rows. The first `decodes` rows are decodes.

        The tensors are views of the buffers with their current contents.
        """
        if decodes == tokens and decodes in self._decodes:
            return self._decodes[decodes]
        tensors = self._tensors
        step = DeviceStep(
            decodes=decodes,
            block_table_BM=self._tables_BM[:rows],
            prefill_starts=tensors["starts"][: rows - decodes + 1],
            **{name: tensors[name][:tokens] for name in _BY_TOKEN},
            **{name: tensors[name][:rows] for name in _BY_ROW},
        )
        if decodes == tokens:
            self._decodes[decodes] = step
        return step

    def _pad(self, start: int, stop: int) -> None:
        """Write padding to the rows from `start` up to `stop`.

        Padding rows attend to no token, write no KV, and sample greedily.
        """
        for name in ("token_ids_T", "positions_T", "lengths_B", "temperature_B"):
            self._numbers[name][start:stop] = 0
        self._numbers["slots_T"][start:stop] = _PADDING_SLOT
