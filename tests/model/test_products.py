"""model/products.py. References: nn.Linear under autocast, and what autograd keeps."""

import copy

import pytest
import torch
from torch import nn

from model.products import without_kept_copies


def trained(model, x, dtype):
    """(outputs, gradients of the input and of each parameter, the shapes and types of what was kept for them)"""
    x = x.clone().requires_grad_()
    kept = []

    def keep(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype, enabled=dtype is not torch.float32, cache_enabled=False),
    ):
        y = model(x)
    y.float().square().sum().backward()
    return y, [x.grad, *(parameter.grad for parameter in model.parameters())], kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias, shape", [(False, (2, 3, 24)), (True, (6, 24))])
def test_results_are_the_same_to_the_last_bit_and_no_rounded_weight_is_kept(dtype, bias, shape):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias), nn.SiLU(), nn.Linear(40, 16, bias))
    ours = copy.deepcopy(plain)
    without_kept_copies(ours)
    assert list(ours.state_dict()) == list(plain.state_dict())
    x = torch.randn(shape)
    (y, gradients, kept), (y_plain, gradients_plain, kept_plain) = (trained(m, x, dtype) for m in (ours, plain))
    assert y.dtype == y_plain.dtype and torch.equal(y, y_plain)
    for found, expected in zip(gradients, gradients_plain, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    # Autograd keeps it as it is or turned over.
    weights = [(40, 24), (24, 40), (16, 40), (40, 16)]
    if dtype is not torch.float32:
        assert any(shape in weights and kind is dtype for shape, kind in kept_plain)
        assert not any(shape in weights and kind is dtype for shape, kind in kept)
