"""What compiled encoders compute on a CPU. References: the formulas, by autograd."""

import math

import pytest
import torch
import torch.nn.functional as F

from model.electra.compiled_encoder import (
    SHORT_ROWS,
    _Attention,
    additive,
    attention,
    dropped,
    is_slow_for_sdpa,
    ready_mask,
)


def test_hashed_dropout_is_even_and_independent():
    """Share of zeros, also by row and column, and no correlation of neighbours or of two calls."""
    torch.manual_seed(0)
    n, p = 2048, 0.1
    a, b = ((dropped((n, n), p, "cpu").float() + p) / math.sqrt(p * (1 - p)) for _ in range(2))
    error = 1 / n  # of a mean over all
    means = [
        a.mean(),
        (a * b).mean(),
        (a[1:] * a[:-1]).mean(),
        (a[:, 1:] * a[:, :-1]).mean(),
        (a[:, 32:] * a[:, :-32]).mean(),
    ]
    assert max(abs(float(mean)) for mean in means) < 5 * error
    assert a.mean(0).std() == pytest.approx(n**-0.5, rel=0.1) and a.mean(1).std() == pytest.approx(n**-0.5, rel=0.1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_and_its_gradients_are_those_of_the_formula(dtype, tolerance, p, is_padded):
    """With the same elements dropped; what is relative to the norm."""
    R, H, T, D = 3, 2, 17, 8
    torch.manual_seed(0)
    inputs = [torch.randn(R, H, T, D, dtype=dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(R, H, T, D, dtype=dtype)
    mask = additive(torch.arange(T) < torch.tensor([17, 9, 1])[:, None])[:, None, None, :] if is_padded else None

    torch.manual_seed(1)
    ours = _Attention.apply(*inputs, mask, D**-0.5, p)
    found = (ours, *torch.autograd.grad(ours, inputs, upstream))

    torch.manual_seed(1)
    kept = 1 + dropped((R, H, T, T), p, "cpu") if p else 1
    exact = [x.detach().double().requires_grad_() for x in inputs]
    query, key, value = exact
    scores = query @ key.transpose(-2, -1) * D**-0.5
    if mask is not None:
        scores = scores + mask
    theirs = (scores.softmax(-1) * kept / (1 - p)) @ value
    wanted = (theirs, *torch.autograd.grad(theirs, exact, upstream.double()))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is dtype
        assert (x - y).norm() <= tolerance * y.norm()


def test_the_ready_mask_of_compiled_layers_shows_what_the_other_one_shows():
    real = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    ready = ready_mask(real, in_graphs=False)
    assert ready.dtype is torch.bool and ready.shape == (3, 1, 9, 9)
    assert torch.equal(ready, real[:, None, None, :].expand(3, 1, 9, 9))
    to_add = ready_mask(real, in_graphs=True)
    assert to_add.shape == ready.shape
    assert torch.equal(to_add == 0, ready) and torch.equal(to_add == -torch.inf, ~ready)


@pytest.mark.parametrize("T", [5, SHORT_ROWS, SHORT_ROWS + 1])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_outside_of_graphs_attention_is_torchs(T, dtype, tolerance, kind):
    """Outputs and gradients, relative to the norm, where it is written out too. A graph gives it a mask to add; a batch of
    another shape comes with one of bools."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, T, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, T, 2, 4, dtype=dtype)
    real = torch.arange(T) < torch.tensor([T, 2])[:, None]
    mask = None if kind == "none" else ready_mask(real, in_graphs=kind == "additive")
    assert is_slow_for_sdpa(inputs[0]) == (dtype is torch.bfloat16 and T <= SHORT_ROWS)
    module = torch.nn.Module()
    # As those of encoders: without a mask transformers would take it for a decoder's.
    module.is_causal = False
    found, _ = attention(module, *inputs, mask, scaling=0.5)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = mask.double() if kind == "additive" else mask
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.5).transpose(1, 2)
    assert found.dtype is dtype and found.shape == wanted.shape
    for x, y in zip(
        (found, *torch.autograd.grad(found, inputs, upstream)),
        (wanted, *torch.autograd.grad(wanted, exact, upstream.double())),
        strict=True,
    ):
        assert (x - y).norm() <= tolerance * y.norm()


def test_dropout_of_attention_without_a_compiler():
    """Of equal values the sum over many positions tells the share that was kept, and that the others were scaled."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 8, 64, 4, dtype=torch.bfloat16) for _ in range(2))
    ones = torch.ones_like(query)
    module = torch.nn.Module()
    found, _ = attention(module, query, key, ones, None, scaling=0.5, dropout=0.4)
    assert found.float().std() > 0.05
    assert found.float().mean() == pytest.approx(1, abs=0.02)
