"""What torch does within a block of a test, operator by operator."""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """Of an operator: its name without the overload, as "mm", and the shapes of the tensors that it took and gave."""

    name: str
    arguments: list[torch.Size]
    results: list[torch.Size]


class Operators(TorchDispatchMode):
    """Keeps the calls of all operators, also of backward passes. What is compiled is not seen."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        self.calls.append(Call(function.overloadpacket.__name__, _shapes((args, kwargs)), _shapes(results)))
        return results

    @property
    def names(self) -> set[str]:
        return {call.name for call in self.calls}

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


def _shapes(values) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
