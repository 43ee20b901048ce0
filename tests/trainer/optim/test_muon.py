"""trainer/optim/muon.py against torch.optim.Muon, the reference, which takes one matrix at a time."""

import copy

import pytest
import torch

from trainer.optim.muon import Muon

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
    for a, b in zip(ours, theirs, strict=True):  # both iterate in bf16, so they round differently in a batch
        assert torch.allclose(a, b, atol=2e-3)
    assert max((a - b).abs().max() for a, b in zip(ours, matrices(), strict=True)) > 0.05


def test_found_inf_leaves_parameters_and_momentum_as_they_are():
    """A NaN gradient with found_inf set changes nothing, and later updates are as if it never came."""
    ours, twin = matrices(), matrices()
    optimizer, reference = Muon(ours), Muon(twin)
    run(optimizer, ours, 2)
    run(reference, twin, 2)
    before = copy.deepcopy([*ours, *(optimizer.state[p]["momentum_buffer"] for p in ours)])
    for p in ours:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [*ours, *(optimizer.state[p]["momentum_buffer"] for p in ours)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.found_inf = torch.zeros(())
    run(optimizer, ours, 2, seed=5)
    run(reference, twin, 2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))
