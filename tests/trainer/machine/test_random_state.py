"""--deterministic. Reference: PyTorch's own switches."""

import contextlib

import pytest
import torch

from tests.helpers import before_update, train
from tests.trainer.machine.simulated_cuda import simulated_cuda
from trainer.machine.command_line import error_line
from trainer.machine.devices import deterministic


def test_an_operation_without_such_a_form_ends_the_run_with_its_name():
    """Reference: torch.Tensor.put_, which PyTorch lists among those that raise."""
    with pytest.raises(RuntimeError) as refused, deterministic():
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    line, code = error_line(refused.value)
    assert line.startswith("--deterministic 1: put_ has no deterministic form") and code == 2


def test_a_run_on_a_gpu_computes_within_it(data, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    for on_gpu, wanted in ((True, 1), (True, 0), (False, 1)):
        look = before_update(1, lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
        with simulated_cuda() if on_gpu else contextlib.nullcontext(), look:
            device = None if on_gpu else "cpu"
            train(data_path=data, out_dir=tmp_path, max_updates=1, deterministic=wanted, device=device)
    # On a CPU every run gives the same bits anyway.
    assert seen == [True, False, False]
