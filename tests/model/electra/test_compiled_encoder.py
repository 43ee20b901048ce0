"""What compiled encoders compute on a CPU. References: the formulas, by autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import ElectraConfig, ElectraForPreTraining

from model.electra import compiled_encoder
from model.electra.compiled_encoder import (
    QUICK_ON_CPU,
    SHORT_ROWS,
    _Attention,
    additive,
    attention,
    dropped,
    quicken_attention,
    ready_mask,
)
from model.electra.model_electra import ElectraPretrainer

TINY = {
    "embedding_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


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


@pytest.fixture
def taken(monkeypatch):
    """The ways that `attention` took, in order."""
    ways = []

    def note_calls_of(name):
        original = getattr(compiled_encoder, name)

        def noted(*args, **options):
            ways.append(name)
            return original(*args, **options)

        monkeypatch.setattr(compiled_encoder, name, noted)

    note_calls_of("written_out")
    note_calls_of("sdpa_attention_forward")
    return ways


def encoder_attention():
    """A module as those of encoders: without a mask transformers would take it for a decoder's."""
    module = torch.nn.Module()
    module.is_causal = False
    return module


@pytest.mark.parametrize("T", [5, SHORT_ROWS, SHORT_ROWS + 1])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.01)]
)
@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_outside_of_graphs_attention_is_torchs(T, dtype, tolerance, kind, taken):
    """Outputs and gradients, relative to the norm, where it is written out too. A graph gives it a mask to add; a batch of
    another shape comes with one of bools."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, T, 4, dtype=dtype).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, T, 2, 4, dtype=dtype)
    real = torch.arange(T) < torch.tensor([T, 2])[:, None]
    mask = None if kind == "none" else ready_mask(real, in_graphs=kind == "additive")
    if kind == "additive" and dtype is torch.float64:
        mask = mask.double()
    found, _ = attention(encoder_attention(), *inputs, mask, scaling=0.5)
    is_written_out = dtype is torch.bfloat16 and T <= SHORT_ROWS and kind != "none"
    assert taken == ["written_out" if is_written_out else "sdpa_attention_forward"]
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


@pytest.mark.parametrize("case", ["a decoder's", "no scale"])
def test_an_attention_that_is_more_than_a_softmax_is_left_to_transformers(case, taken):
    """Reference: torch in float64, by the mask that each of them stands for."""
    torch.manual_seed(0)
    T = 6
    keys = T
    query = torch.randn(2, 2, T, 4, dtype=torch.bfloat16)
    key, value = (torch.randn(2, 2, keys, 4, dtype=torch.bfloat16) for _ in range(2))
    module, mask, options = encoder_attention(), torch.ones(2, 1, T, keys, dtype=torch.bool), {"scaling": 0.5}
    to_add = torch.zeros(2, 2, T, keys, dtype=torch.float64)
    if case == "a decoder's":
        module.is_causal, mask = True, None
        to_add = to_add.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    if case == "no scale":
        options = {}
    found, _ = attention(module, query, key, value, mask, **options)
    assert taken == ["sdpa_attention_forward"]
    # Without a scale it is 1 / sqrt(4), the same.
    wanted = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), to_add).transpose(1, 2)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_the_networks_of_a_pretraining_attend_quickly():
    config = ElectraConfig(vocab_size=9, **TINY)
    networks = ElectraPretrainer.from_configs(config, config).networks()
    assert [network.config._attn_implementation for network in networks] == [QUICK_ON_CPU] * 2


def test_a_config_that_asks_for_its_attention_can_be_saved_afterwards(tmp_path):
    """transformers refuses to save one that asks for weights of attention which its implementation does not give."""
    config = ElectraConfig(vocab_size=9, **TINY, attn_implementation="eager", output_attentions=True)
    network = ElectraForPreTraining(config)
    quicken_attention(network)
    network.save_pretrained(tmp_path)
    assert ElectraForPreTraining.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_dropout_of_attention_without_a_compiler(taken):
    """Of equal values the sum over many positions tells the share that was kept, and that the others were scaled."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 8, 64, 4, dtype=torch.bfloat16) for _ in range(2))
    ones = torch.ones_like(query)
    every_key = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    found, _ = attention(encoder_attention(), query, key, ones, every_key, scaling=0.5, dropout=0.4)
    assert taken == ["written_out"]
    assert found.float().std() > 0.05
    assert found.float().mean() == pytest.approx(1, abs=0.02)
