"""trainer/optim/muon.py against torch.optim.Muon, the reference, which takes one matrix at a time."""

from unittest import mock

import numpy as np
import pytest
import torch

from trainer.machine import devices
from trainer.optim.muon import COEFFICIENTS, Muon, orthogonalise

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


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_a_multiple_of_the_identity(scale):
    """Its singular values are 1/2 after the division by the norm. Reference: NumPy's polynomial, five times; bfloat16 is 8 % off."""
    a, b, c = COEFFICIENTS
    s = np.float64(0.5)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert s == pytest.approx(0.7654, abs=5e-5)
    for dtype, value in ((torch.float32, s), (torch.bfloat16, 0.8242)):
        found = orthogonalise(scale * torch.eye(4, dtype=dtype).unsqueeze(0))[0].float()
        torch.testing.assert_close(found, value * torch.eye(4), atol=5e-5, rtol=0)
