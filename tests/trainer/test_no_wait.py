"""No host wait in a steady update on a GPU, as far as a machine without one can tell.

Whole runs of the trainer go with CUDA simulated. From their third update on, the engine may call no operator that reads
a tensor or whose result has a size that depends on one, and read no tensor itself; and no batch or number may be copied
to the device in a way that makes the host wait. What compiled code does is not seen; `make gpu` asks torch itself.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model import moe
from model.fast import experts as ways
from tests.helpers import train, write_corpus
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
    """Watches the engine of a run: `reads` and `copies` of the steady updates, see OnTheCpu."""

    def __init__(self, mode):
        self.mode = mode
        self.updates = 0
        self.reads = []
        # How many copies there had been before each update.
        self.copies_before = []

    def call(self, method, engine, *args, **kwargs):
        is_update = method.__name__ == "update"
        if is_update:
            self.updates += 1
            self.copies_before.append(len(self.mode.copies))
        steady = self.updates >= FIRST_STEADY
        reads_before = len(self.mode.reads)
        with NoHostWait() if steady else contextlib.nullcontext():
            result = method(engine, *args, **kwargs)
        if steady:
            self.reads += self.mode.reads[reads_before:]
        return result

    @property
    def copies(self):
        """From the first steady update to the last one."""
        return self.mode.copies[self.copies_before[FIRST_STEADY - 1] : self.copies_before[-1]]


def watched_run(tmp_path, **flags):
    """(Watch, Trainer) of a run on a simulated GPU."""
    data = write_corpus(tmp_path / "corpus.jsonl", 60)
    with simulated_cuda() as cuda, contextlib.ExitStack() as patches:
        watch = Watch(cuda.mode)
        for name in ("micro_batch", "update", "poll"):
            method = getattr(Engine, name)

            def watched(engine, *args, method=method, **kwargs):
                return watch.call(method, engine, *args, **kwargs)

            patches.enter_context(mock.patch.object(Engine, name, watched))
        run = train(data_path=data, out_dir=tmp_path / "out", device=None, max_updates=8, log_interval=1000, **flags)
    return watch, run


@pytest.mark.parametrize(
    ("model", "dtype", "optimizer"), [("dense", "float16", "adamw"), ("experts in blocks", "bfloat16", "muon")]
)
def test_a_steady_update_waits_for_nothing(model, dtype, optimizer, tmp_path, monkeypatch):
    in_blocks = mock.Mock(wraps=ways.blocked_experts)
    monkeypatch.setattr(moe, "choose_mix", lambda experts, tokens: in_blocks)
    watch, run = watched_run(tmp_path, dtype=dtype, optimizer=optimizer, use_moe=int(model != "dense"))
    assert watch.updates == 8 and run.engine.device.type == "cuda"
    assert run.engine.fused, "the host would read whether each update is good"
    assert run.engine.scaler.is_enabled() == (dtype == "float16")
    assert in_blocks.called == (model != "dense")
    assert watch.reads == [] and watch.copies == []
