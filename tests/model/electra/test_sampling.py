"""The draws of the generator. References: torch's softmax and its cumulative sums."""

import math

import pytest
import torch

from model.electra.sampling import CHUNK, sample


@pytest.mark.parametrize("V", [1, 50, CHUNK, 2 * CHUNK + 90])
def test_a_draw_is_the_place_in_the_cumulative_probabilities(V):
    """By the same uniform numbers; a place within rounding of a border may be either token's."""
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(3000, V, generator=generator) * 3
    torch.manual_seed(1)
    drawn = sample(logits)
    torch.manual_seed(1)
    place = torch.rand(3000, 1, dtype=torch.float64)
    wanted = torch.searchsorted(logits.double().softmax(-1).cumsum(-1), place).squeeze(1).clamp(max=V - 1)
    assert (drawn != wanted).sum() <= 3
    assert (drawn - wanted).abs().max() <= 1


def test_what_cannot_be_is_never_drawn():
    """At the ends of the first, of a middle and of the last chunk, and a chunk in which nothing can be."""
    V = 4 * CHUNK + 10
    logits = torch.full((20_000, V), -torch.inf)
    possible = torch.tensor([5, CHUNK - 1, CHUNK, 3 * CHUNK + 7, V - 2])
    logits[:, possible] = 0.0
    torch.manual_seed(0)
    counts = torch.bincount(sample(logits), minlength=V)
    assert counts.sum() == counts[possible].sum() == 20_000
    assert counts[possible].min() > 3700


def test_logits_that_are_no_numbers_give_some_token():
    """The loss of such an update is no number either: it is skipped, not ended."""
    logits = torch.zeros(4, 600)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, 300] = torch.inf
    drawn = sample(logits)
    assert ((drawn >= 0) & (drawn < 600)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["fp32_gumbel", "multinomial"])
def test_sampled_frequencies_are_the_softmax(how, dtype):
    """400,000 draws from logits of each --dtype, one token at p = 0.98: within five standard errors everywhere."""
    torch.manual_seed(0)
    logits = torch.randn(50).to(dtype)
    logits[7] = torch.logsumexp(logits[torch.arange(50) != 7].float(), 0).to(dtype) + math.log(0.98 / 0.02)
    n = 400_000
    counts = torch.bincount(sample(logits.expand(n, 50), how), minlength=50).double() / n
    p = logits.double().softmax(-1)
    assert p[7] == pytest.approx(0.98, abs=2e-3)
    assert ((counts - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 2e-6).all()


def test_half_precision_noise_favours_likely_tokens():
    """Why fp32 is the default: with noise in fp16 p = 0.98 is drawn clearly more often."""
    torch.manual_seed(0)
    logits = torch.cat((torch.tensor([math.log(0.98)]), torch.full((400,), math.log(0.02 / 400))))
    share = (sample(logits.expand(20_000, 401), "fp16_gumbel") == 0).double().mean()
    assert share > 0.99
    assert (sample(logits.expand(20_000, 401)) == 0).double().mean() == pytest.approx(0.98, abs=0.005)
