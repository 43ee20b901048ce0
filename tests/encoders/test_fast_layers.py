"""What compiled encoders compute on a CPU, and what others do. References: torch's own attention, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from encoders import fast_layers
from encoders.fast_layers import SHORT_ROWS, attention, dropout_mask, ready_mask, written_out


def test_hashed_dropout_is_even_and_independent():
    """Share of zeros, also by row and column, and no correlation of neighbours or of two calls."""
    torch.manual_seed(0)
    n, p = 2048, 0.1
    a, b = ((dropout_mask((n, n), p, "cpu").float() + p) / math.sqrt(p * (1 - p)) for _ in range(2))
    pairs = (a * b, a[1:] * a[:-1], a[:, 1:] * a[:, :-1], a[:, 32:] * a[:, :-32])
    # The standard error of a mean over all is 1 / n.
    assert max(abs(float(each.mean())) for each in (a, *pairs)) < 5 / n
    assert a.mean(0).std() == pytest.approx(n**-0.5, rel=0.1) and a.mean(1).std() == pytest.approx(n**-0.5, rel=0.1)


@pytest.mark.parametrize("T", [SHORT_ROWS, SHORT_ROWS + 1])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_attention_and_its_gradients_are_torchs(monkeypatch, T, dtype, tolerance, kind):
    """Relative to the norm, where it is written out too: a graph gives it a mask to add, a batch of another shape one of bools."""
    calls = []
    monkeypatch.setattr(fast_layers, "written_out", lambda *given: calls.append(1) or written_out(*given))
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, T, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, T, 2, 4, dtype=dtype)
    real = torch.arange(T) < torch.tensor([T, 2])[:, None]
    mask = None if kind == "none" else ready_mask(real, in_graphs=kind == "additive")
    module = torch.nn.Module()
    module.is_causal = False
    found, _ = attention(module, *inputs, mask, scaling=0.5)
    assert bool(calls) == (dtype is torch.bfloat16 and T <= SHORT_ROWS and kind != "none")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = mask.double() if kind == "additive" else mask
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.5).transpose(1, 2)
    assert found.dtype is dtype and found.shape == wanted.shape
    ours = (found, *torch.autograd.grad(found, inputs, upstream))
    theirs = (wanted, *torch.autograd.grad(wanted, exact, upstream.double()))
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).norm() <= tolerance * y.norm()


def test_dropout_of_attention_that_is_written_out():
    """With equal values, the sum over many positions shows the share that was kept, and that it was scaled."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 8, 64, 4, dtype=torch.bfloat16) for _ in range(2))
    every_key = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    found = written_out(query, key, torch.ones_like(query), every_key, 0.5, 0.4).float()
    assert found.std() > 0.05 and found.mean() == pytest.approx(1, abs=0.02)
    assert written_out(query, key, key, ~every_key, 0.5, 0.0).isfinite().all()  # padding beside a sliding window
