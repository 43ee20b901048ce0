"""The draws of the generator. References: torch's softmax and its cumulative sums."""

import math

import pytest
import torch

from encoders.electra.networks import CHUNK, running_sums, sample


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
    logits = torch.full((20_000, 4 * CHUNK + 10), -torch.inf)
    possible = torch.tensor([5, CHUNK - 1, CHUNK, 3 * CHUNK + 7, 4 * CHUNK + 8])
    logits[:, possible] = 0.0
    torch.manual_seed(0)
    tokens, counts = sample(logits).unique(return_counts=True)
    assert torch.equal(tokens, possible) and counts.min() > 3700


def test_logits_that_are_no_numbers_give_some_token():
    """The loss of such an update is no number either: it is skipped, not ended."""
    logits = torch.zeros(4, 600)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2, 300] = torch.inf
    drawn = sample(logits)
    assert ((drawn >= 0) & (drawn < 600)).all()


@pytest.mark.parametrize("how", ["fp32_gumbel", "multinomial", "fp16_gumbel"])
def test_sampled_frequencies_are_the_softmax(how):
    """One token at p = 0.98: within five standard errors. With noise in half precision it comes clearly more often."""
    torch.manual_seed(0)
    logits = torch.cat((torch.tensor([math.log(0.98)]), torch.full((400,), math.log(0.02 / 400))))
    n = 50_000
    counts = torch.bincount(sample(logits.expand(n, 401), how), minlength=401).double() / n
    p = logits.double().softmax(-1)
    if how == "fp16_gumbel":
        assert counts[0] > 0.99
    else:
        assert ((counts - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


def test_deterministic_runs_draw_without_the_sums_that_a_gpu_refuses(monkeypatch):
    """torch's own list of what raises then on CUDA has cumsum of floats. References: its sums, and what is drawn with them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 1000, generator=generator) * 3
    numbers = torch.rand(50, 300, dtype=torch.float64) * 10.0 ** torch.randint(-12, 3, (50, 300), generator=generator)

    def drawn():
        torch.manual_seed(1)
        return sample(logits), running_sums(numbers)

    wanted, wanted_sums = drawn()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    found, sums = drawn()
    assert torch.equal(found, wanted) and (sums.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-12, atol=0.0)
