"""Writing a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and reading it again as a check.

Only for those who have the package gguf, which is not among the requirements: see `optional_package`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import torch
from gguf.gguf_writer import WriterState
from numpy.typing import NDArray

from model.hf_format import StateDict
from scripts.export_hf import cast
from scripts.gguf_format import Metadata

Type = gguf.GGMLQuantizationType
# The type of each tensor of a file, by its name.
Types = dict[str, Type]


# --dtype: the type of the matrices, and the number by which llama.cpp names such a file
KINDS = {
    "float32": (Type.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (Type.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (Type.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
# Which torch dtype a type rounds to. Q8_0 keeps the largest number of each block in float16 as well.
TORCH_DTYPES = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
# Q8_0: 32 numbers are whole multiples, -127 to 127, of one number.
BLOCK = 32
MOST_MULTIPLES = 127

# Which form of the quantised types a file has; there has been one since 2023.
QUANTISATION_VERSION = int(gguf.GGML_QUANT_VERSION)


def stays_exact(name: str, tensor: torch.Tensor) -> bool:
    """Whether llama.cpp wants float32 for it: vectors, and the router, whose close scores decide on the expert."""
    return tensor.dim() == 1 or "ffn_gate_inp." in name


def types_of(tensors: StateDict, of_matrices: Type) -> Types:
    """The type of each tensor in the file. A row that is no whole number of blocks of Q8_0 stays in float16."""
    types: Types = {}
    for name, tensor in tensors.items():
        types[name] = of_matrices
        if stays_exact(name, tensor):
            types[name] = Type.F32
        elif of_matrices == Type.Q8_0 and tensor.shape[-1] % BLOCK:
            types[name] = Type.F16
    return types


def as_stored(tensor: torch.Tensor, number_type: Type, name: str) -> NDArray[np.generic]:
    """fp32 tensor -> the array whose bytes the file holds. Errors: ValueError for numbers that the type cannot hold."""
    values = cast(tensor, TORCH_DTYPES.get(number_type, torch.float32), name).float()
    largest = float(values.abs().max())
    # Each block's step is a float16.
    if number_type == Type.Q8_0 and largest > MOST_MULTIPLES * torch.finfo(torch.float16).max:
        raise ValueError(f"{name} reaches {largest:.3g}, which q8_0 does not hold: try float32")
    # A block of numbers below 1e-36 becomes zeros by way of an infinity.
    with np.errstate(over="ignore", invalid="ignore"):
        stored: NDArray[np.generic] = gguf.quantize(values.numpy(), number_type)
    return np.ascontiguousarray(stored)


def write(file: BinaryIO, architecture: str, metadata: Metadata, tensors: StateDict, types: Types) -> None:
    """Write the whole file. Errors: ValueError as `as_stored`, OSError of a full disk."""
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        block, block_bytes = gguf.GGML_QUANT_SIZES[types[name]]
        n_bytes = tensor.numel() // block * block_bytes
        # With this dtype the shape is taken to be that of the numbers, not of the bytes.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), n_bytes, raw_dtype=types[name])
    # The writer would open a file by its name. This one is open already, and takes its name when it is whole.
    writer.fout = [file]  # type: ignore[list-item]  # it is annotated as a buffered writer, and wants `write` alone
    writer.state = WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(file, file.tell())
    for name, tensor in tensors.items():
        # Not by the writer's `tofile`, which says little about a full disk.
        stored = as_stored(tensor, types[name], name)
        file.write(stored.data)
        writer.write_padding(file, stored.nbytes)


def add(writer: gguf.GGUFWriter, key: str, value: str | bool | int | float | list[str] | list[int]) -> None:
    """Note a field; its type in the file follows from that in Python."""
    # A bool is an int as well.
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def check(path: Path, metadata: Mapping[str, object], tensors: StateDict, types: Types) -> float:
    """Read a file again and compare it with what it was made from; returns the largest change of a weight.

    Errors: ValueError where a field or a tensor is another one than was written.
    """
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        field = reader.get_field(key)
        found = None if field is None else field.contents()
        expected = float(np.float32(value)) if isinstance(value, float) else value
        if found != expected:
            raise ValueError(f"{path}: {key} is not what was written; is the disk sound?")
    if [tensor.name for tensor in reader.tensors] != list(tensors):
        raise ValueError(f"{path}: it has other tensors than were written; is the disk sound?")
    largest = 0.0
    for found_tensor in reader.tensors:
        name = found_tensor.name
        stored = as_stored(tensors[name], types[name], name)
        # Dimensions stand in the file from the last to the first.
        shape = tuple(int(size) for size in reversed(found_tensor.shape))
        is_same = shape == tuple(tensors[name].shape) and found_tensor.tensor_type == types[name]
        if not is_same or found_tensor.data.tobytes() != stored.tobytes():
            raise ValueError(f"{path}: {name} is not what was written; is the disk sound?")
        read = gguf.dequantize(found_tensor.data, types[name]).reshape(shape)
        largest = max(largest, float(np.abs(read - tensors[name].numpy()).max(initial=0.0)))
    return largest
