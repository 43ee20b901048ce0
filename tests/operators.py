"""What torch does within a block of a test, operator by operator."""

import weakref
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


class LiveBytes(TorchDispatchMode):
    """Counts the memory of what operators make: `now`, and `peak`, the most that there was at once.

    A storage is gone when torch frees it, be it held by Python or by autograd. Work space of a kernel is not seen.
    """

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        self._storages.add(key)
        weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size
