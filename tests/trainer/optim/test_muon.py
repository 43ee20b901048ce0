"""trainer/optim/muon.py against torch.optim.Muon, the reference, which takes one matrix at a time."""

import copy

import pytest
import torch

from trainer.optim.muon import COEFFICIENTS, Muon, Together, orthogonalise

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


def orthogonalised_plainly(matrix):
    """[rows, columns] -> the same by a singular value decomposition in float64: U p(p(...p(S))) V^T."""
    a, b, c = COEFFICIENTS
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 16), (16, 48)])
def test_orthogonalise_is_a_polynomial_of_the_singular_values(rows, columns):
    """Reference: a singular value decomposition, one matrix at a time. bf16 has 8 bits."""
    batch = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
    for matrix, result in zip(batch, orthogonalise(batch), strict=True):
        difference = result.double() - orthogonalised_plainly(matrix)
        assert difference.norm() < 0.03 * result.double().norm()


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


def test_together_saves_and_restores_all_parts():
    def build(parameters):
        return Together([Muon(parameters[:2]), torch.optim.AdamW(parameters[2:], fused=True)])

    ours, twin = matrices(), matrices()
    first = build(ours)
    run(first, ours, 3)
    second = build(twin)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for a, b in zip(ours, twin, strict=True):
        b.data.copy_(a.data)
    run(first, ours, 2, seed=3)
    run(second, twin, 2, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))
    assert len(first.param_groups) == 2
