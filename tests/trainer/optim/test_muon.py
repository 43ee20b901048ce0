"""trainer/optim/muon.py against torch.optim.Muon, the reference, which takes one matrix at a time."""

from unittest import mock

import pytest
import torch

from trainer.machine import devices
from trainer.optim.muon import Muon, orthogonalise

SHAPES = [(8, 8), (24, 8), (8, 24), (8, 8)]


def matrices(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def run(optimizer, parameters, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_muon(weight_decay):
    ours, theirs = matrices(), matrices()
    run(Muon(ours, lr=0.02, weight_decay=weight_decay), ours, 5)
    run(torch.optim.Muon(theirs, lr=0.02, weight_decay=weight_decay), theirs, 5)
    for a, b in zip(ours, theirs, strict=True):  # in a batch, or in float32, they round differently
        assert torch.allclose(a, b, atol=2e-3)
    assert max((a - b).abs().max() for a, b in zip(ours, matrices(), strict=True)) > 0.05


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_iterates_in_the_type_that_the_cpu_multiplies(monkeypatch, native, dtype):
    """Emulated bfloat16 took twenty times as long as float32."""
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: native)
    noted = mock.Mock(wraps=orthogonalise)
    parameters = matrices()
    run(Muon(parameters, orthogonalise=noted), parameters, 1)
    assert {call.args[0].dtype for call in noted.call_args_list} == {dtype}
