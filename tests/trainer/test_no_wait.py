"""No host wait in a steady update on a GPU, as far as a machine without one can tell: whole runs with CUDA simulated. From their
third update on nothing may read a tensor, have a size that depends on one, or be copied to the device in a way that makes the
host wait. What compiled code does is not seen; `make gpu` asks torch itself."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import moe
from model.fast import experts as ways
from tests.helpers import train
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer.engine import Engine

FIRST_STEADY = 3


class NoHostWait(TorchDispatchMode):
    """Raises where an operator reads a number of a tensor, or has a result whose size depends on one."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        by_mask = name == "index" and any(index is not None and index.dtype is torch.bool for index in args[1])
        assert name not in self.WAITING and not by_mask, f"{function} makes the host wait for the device"
        return function(*args, **(kwargs or {}))


class Watch:
    """Watches the engine of a run: `waits` are the reads and copies of its steady updates, see OnTheCpu."""

    def __init__(self, mode):
        self.mode = mode
        self.updates = 0
        self.waits = []

    def around(self, method):
        def watched(engine, *args, **kwargs):
            self.updates += method.__name__ == "update"
            if self.updates < FIRST_STEADY:
                return method(engine, *args, **kwargs)
            reads, copies = len(self.mode.reads), len(self.mode.copies)
            with NoHostWait():
                result = method(engine, *args, **kwargs)
            self.waits += self.mode.reads[reads:] + self.mode.copies[copies:]
            return result

        return watched


@pytest.mark.parametrize(
    "fields, dtype, optimizer",
    [
        ({}, "float16", "adamw"),
        ({"use_moe": 1}, "bfloat16", "muon"),
        ({"use_moe": 1, "generation": "minimind3", "num_key_value_heads": 2}, "bfloat16", "adamw"),
    ],
)
def test_a_steady_update_waits_for_nothing(fields, dtype, optimizer, data, tmp_path, monkeypatch):
    mix = mock.Mock(wraps=ways.grouped_experts)
    monkeypatch.setattr(moe, "choose_mix", lambda experts, tokens: mix)
    options = {"data_path": data, "out_dir": tmp_path, "dtype": dtype, "optimizer": optimizer, **fields}
    with simulated_cuda() as cuda:
        watch = Watch(cuda.mode)
        for name in ("micro_batch", "update", "poll"):
            monkeypatch.setattr(Engine, name, watch.around(getattr(Engine, name)))
        run = train(device=None, max_updates=8, log_interval=1000, **options)
    assert watch.updates == 8 and run.engine.device.type == "cuda"
    assert run.engine.fused, "the host would read whether each update is good"
    assert run.engine.scaler.is_enabled() == (dtype == "float16")
    assert mix.called == bool(fields)
    assert watch.waits == []
