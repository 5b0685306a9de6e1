"""Reads and writes model directories whose matrices are stored in the panel format of the CPU kernels.

`model.packed` is a safetensors file with the matrices as bytes. config.json and the tokenizer are next to it. An engine
maps the file and computes directly from its pages. The engine converts and copies nothing, and all engines on a node
share the memory. Weights in other formats are converted while they are read, and each engine has its own copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_kernels.cpu.library import PANEL
from megatron_kernels.cpu.packing import (
    PANEL_FORMATS,
    QUANTIZED_KINDS,
    PackedMatrix,
    block_inputs,
    fits,
    pack,
    packed_format,
    panel_bytes,
)
from megatron_runtime.checkpoints.model_files import (
    MAX_INDEX_ELEMENTS,
    ModelDirectory,
    ModelFile,
    ModelFileError,
    parse_json,
)
from megatron_runtime.checkpoints.safetensors import (
    DTYPES,
    StoredTensor,
    num_bytes,
    read_config,
    read_header,
    write_file,
)
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.layers.cpu import FORMATS, Format, table_format
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind, tensor_shapes
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import shown

PACKED_FILE = "model.packed"
_VERSION = "megatron-packed-1"
"""Version of the file format. It changes if the layout of a panel changes."""
_REMEDY = "write it again with megatron convert --to packed"
_DTYPES = {**DTYPES, "U8": torch.uint8}
_NAMES = {number: name for name, number in PANEL_FORMATS.items()}
_STORED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Map from the name of a format to the type of its values. All other formats have float32 values."""


class PackedCheckpoint(Checkpoint):
    """The checkpoint in a packed directory.

    The constructor reads config.json and the header of model.packed, and maps model.packed.
    """

    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        file = ModelDirectory(directory).file(PACKED_FILE)
        if file is None:
            raise ModelFileError(f"{directory / PACKED_FILE} is missing: complete the directory")
        tensors, metadata = read_header(file, _DTYPES)
        self.panels_of, matrices = _metadata(metadata, file.path)
        self.kinds: dict[str, TensorKind] = {}
        self._matrices: dict[str, PackedMatrix] = {}
        self._file = _map(file)
        self._offsets = {name: tensor.offset for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if tensor.kind.dtype is torch.uint8:
                self._matrices[name] = self._matrix(tensor, matrices.get(name), f"matrix {shown(name)} of {file.path}")
            self.kinds[name] = self._kind_of(name, tensor)

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        kind, matrix = self.kinds[name], self._matrices.get(name)
        if matrix is not None:
            rows, columns = (*part, slice(None), slice(None))[:2]
            values = matrix.look_up(torch.arange(matrix.outputs)[rows])
            return values[:, columns].to(kind.dtype)
        offset = self._offsets[name]
        data = self._file[offset : offset + num_bytes(kind)]
        # The address of a value must be a multiple of its size.
        data = data if data.data_ptr() % kind.dtype.itemsize == 0 else data.clone()
        return data.view(kind.dtype).view(kind.shape)[part]

    def panels(self, name: str, part: Part = (), *, wanted: Container[int]) -> PackedMatrix | None:
        matrix = self._matrices.get(name)
        if matrix is None or matrix.format not in wanted:
            return None
        return matrix.part(*(*part, slice(None), slice(None))[:2])

    def _matrix(self, tensor: StoredTensor, described: Any, where: str) -> PackedMatrix:
        """Return a matrix as a view of the file.

        described: [name of the number format, number of inputs], from the metadata of the file.
        """
        shape, offset = tensor.kind.shape, tensor.offset
        match described:
            case [str(name), int(inputs)] if name in PANEL_FORMATS and inputs > 0:
                format = PANEL_FORMATS[name]
                blocks, rest = divmod(inputs, block_inputs(format))
                if rest == 0 and len(shape) == 2 and shape[1] == blocks * panel_bytes(format, block_inputs(format)):
                    data = self._file[offset : offset + num_bytes(tensor.kind)].view(shape)
                    return PackedMatrix(format, shape[0] * PANEL, inputs, data)
        says = shown(json.dumps(described))
        raise ModelFileError(f"{where} is described as {says}, which its shape {shape} is not: {_REMEDY}")

    def _kind_of(self, name: str, tensor: StoredTensor) -> TensorKind:
        matrix = self._matrices.get(name)
        if matrix is None:
            return tensor.kind
        dtype = _STORED_DTYPES.get(_NAMES[matrix.format], torch.float32)
        return TensorKind((matrix.outputs, matrix.inputs), dtype)


def _metadata(metadata: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name of the number format of the file, and the description of each matrix by name."""
    version, numbers, matrices = (metadata.get(key) for key in ("format", "numbers", "matrices"))
    if version != _VERSION:
        raise ModelFileError(f"{path} has format {shown(version)}, this release reads {_VERSION}: {_REMEDY}")
    if not isinstance(numbers, str) or numbers not in FORMATS or not isinstance(matrices, str):
        raise ModelFileError(f"{path} has numbers {shown(numbers)}, known are {', '.join(FORMATS)}: {_REMEDY}")
    where = f"the list of matrices of {path}"
    return numbers, parse_json(matrices.encode(), where=where, elements=MAX_INDEX_ELEMENTS)


def _map(file: ModelFile) -> torch.Tensor:
    """Map a file into memory, and return its bytes as uint8 [size]. Callers must not write to the tensor."""
    with file.open() as opened:
        # The mapping is copy-on-write because torch accepts no read-only buffer.
        view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    # If the kernel and the file system support it, parts of the file that are not in memory yet are read in pages of 2
    # MiB.
    with suppress(OSError):
        view.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(view, dtype=torch.uint8)


def write_packed(checkpoint: Checkpoint, directory: Path, *, numbers: Format, written: Callable[[int], None]) -> None:
    """Write the weights of a checkpoint to `directory`.

    numbers: number format of the matrices. If it is int8 or int4, matrices that are quantized in the checkpoint keep
             their quantization blocks.
    written: called with the size of each tensor of the checkpoint in bytes.
    """
    family, shapes = FAMILIES[checkpoint.config.family], tensor_shapes(checkpoint.config)
    formats = {
        family.hf_name(name): table_format(numbers) if name == "embedding" else numbers
        for name, shape in shapes.items()
        if len(shape) == 2 and not name.endswith("router") and fits(*shape)
    }
    matrices: dict[str, tuple[str, int]] = {}
    kinds: dict[str, TensorKind] = {}
    for name, format in formats.items():
        outputs, inputs = checkpoint.kinds[name].shape
        stored = checkpoint.blocks(name, (slice(0, PANEL),), wanted=QUANTIZED_KINDS)
        number = PANEL_FORMATS[format] if stored is None else packed_format(stored, format)
        matrices[name] = _NAMES[number], inputs
        kinds[name] = TensorKind((outputs // PANEL, panel_bytes(number, inputs)), torch.uint8)
    # Matrices come first. Matrices that a step reads as one, such as queries and keys, are then adjacent.
    dense = (family.hf_name(name) for name in shapes)
    kinds |= {name: checkpoint.kinds[name] for name in dense if name not in matrices}

    def read(name: str) -> torch.Tensor:
        written(num_bytes(checkpoint.kinds[name]))
        if name not in matrices:
            return checkpoint.read(name)
        weight = checkpoint.blocks(name, wanted=QUANTIZED_KINDS) or checkpoint.read(name)
        return pack(weight, formats[name]).data

    metadata = {"format": _VERSION, "numbers": numbers, "matrices": json.dumps(matrices)}
    write_file(directory / PACKED_FILE, kinds, read=read, dtypes=_DTYPES, metadata=metadata)
