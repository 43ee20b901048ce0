"""trainer/optim/muon.py against torch.optim.Muon, the reference, which takes one matrix at a time."""

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
