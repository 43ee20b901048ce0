"""What the config.json of a folder may ask for: no more than the weights beside it can hold.

transformers builds whatever a config speaks of before it looks at the weights: ten million layers, or a matrix of ten million
columns, would take all time and memory. So the model is built on paper first, on the device "meta", whose tensors have shapes
and no memory. That stops at the first tensor that is too much.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from common.errors import UserError
from common.files import MOST_CONFIG_BYTES, read_object

CONFIG = "config.json"
# The deepest published models have a few hundred. Some configs make lists of so many entries, so this is known first.
MOST_LAYERS = 2_000
# A number has one bit at least. Most have more, which leaves room for tensors that a file has once and a model twice.
MOST_NUMBERS_PER_BYTE = 8
# No machine is too small for so many (1 GB in float32), so tiny models may have tables larger than their weights.
ALWAYS_ALLOWED = 1 << 28
# What a tensor counts for at least: each takes time and memory even on paper.
LEAST_NUMBERS = 1024
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def read_checked(folder: Path) -> dict[str, object]:
    """The content of a folder's config.json. Errors: UserError for what is none, and for more layers than any model has."""
    path = folder / CONFIG
    try:
        content = read_object(path, MOST_CONFIG_BYTES)
    except ValueError as error:
        raise UserError(str(error)) from None
    for name, value in whole_numbers_in(content):
        # Names such as vocab_size_per_layer_input (Gemma 3n) are sizes.
        is_count = name.lower().endswith(("layer", "layers")) and "per_layer" not in name.lower()
        if is_count and abs(value) > MOST_LAYERS:
            # A number may have thousands of digits.
            raise UserError(f"{path}: {name[:60]} is {str(value)[:20]}, and at most {MOST_LAYERS:,} layers are built")
    return content


def whole_numbers_in(content: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """(name, number) of each whole number in a config and in the configs of its parts."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from whole_numbers_in(value)
        elif isinstance(value, int):
            yield name, value


def refuse_oversize(folder: Path, build: Callable[[], object]) -> None:
    """Errors: UserError where the model that `build` makes has more numbers than the weights in the folder can hold."""
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    most = max(MOST_NUMBERS_PER_BYTE * n_bytes, ALWAYS_ALLOWED)
    numbers = 0

    def count(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal numbers
        if tensor is not None:
            numbers += max(tensor.numel(), LEAST_NUMBERS)
        if numbers > most:
            raise UserError(
                f"{folder}: its {CONFIG} asks for {numbers:,} numbers or more, and its weights are files of {n_bytes:,} "
                f"bytes in all: it is not the config of these weights"
            )

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            stack.callback(register(count).remove)
        try:
            build()
        except UserError:
            raise
        except Exception:
            # Whatever else is wrong, the one who builds it for use will meet it again, and tell.
            return
