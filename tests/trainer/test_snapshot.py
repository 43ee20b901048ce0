"""Copies of a run's state. Reference: the tensors that were copied."""

from typing import ClassVar

import torch
from torch.overrides import TorchFunctionMode

from trainer.snapshot import snapshot


def test_snapshot_is_a_copy_and_keeps_ties(tmp_path):
    weight = torch.ones(3, 3)
    copy = snapshot({"a": weight, "b": weight, "list": [weight.t(), {"c": 1}], "empty": torch.empty(0)})
    weight.zero_()
    assert copy["a"].eq(1).all() and copy["a"] is copy["b"] and copy["list"][1] == {"c": 1}
    assert copy["list"][0].eq(1).all()


class CopiesUnderWay(TorchFunctionMode):
    """Copies from a GPU, as a machine without one can play them: they are made when the host waits, and not before."""

    under_way: ClassVar[list] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert not any(value is copy for value in args for copy, _ in self.under_way), "of a copy that is under way"
        if function is torch.Tensor.copy_:
            self.under_way.append(args)
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})

    def synchronize(self):
        copies = self.under_way[:]
        self.under_way.clear()
        with torch._C.DisableTorchFunction():
            for copy, source in copies:
                copy.copy_(source)


def test_a_snapshot_of_a_gpu_is_read_when_all_copies_are_there(monkeypatch):
    weight, moment = torch.randn(3, 4), torch.randn(4, 3).t()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with CopiesUnderWay() as gpu:
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        copy = snapshot({"weight": weight, "tied": weight, "moment": moment})
    assert not gpu.under_way and copy["weight"] is copy["tied"]
    assert torch.equal(copy["weight"], weight) and torch.equal(copy["moment"], moment)
    assert copy["weight"].data_ptr() != weight.data_ptr()
