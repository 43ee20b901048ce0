"""The draws of the generator. References: torch's softmax and its cumulative sums."""

import math

import pytest
import torch

from model.electra.sampling import CHUNK, running_sums, sample


@pytest.fixture
def deterministic_algorithms():
    """As --deterministic 1 has it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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
    """Why fp16_gumbel is not the default: with its noise p = 0.98 is drawn clearly more often."""
    torch.manual_seed(0)
    logits = torch.cat((torch.tensor([math.log(0.98)]), torch.full((400,), math.log(0.02 / 400))))
    share = (sample(logits.expand(20_000, 401), "fp16_gumbel") == 0).double().mean()
    assert share > 0.99
    assert (sample(logits.expand(20_000, 401)) == 0).double().mean() == pytest.approx(0.98, abs=0.005)


def test_deterministic_runs_draw_without_the_sums_that_a_gpu_refuses(monkeypatch, deterministic_algorithms):
    """Operations that raise then on CUDA, by torch's own list: cumsum of floats. Reference: what is drawn with it."""
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0)) * 3

    def drawn():
        torch.manual_seed(1)
        return sample(logits)

    def refused(numbers, dim):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cumsum", refused)
        ours = drawn()
    torch.use_deterministic_algorithms(False)
    assert torch.equal(ours, drawn())


def test_running_sums_never_fall(deterministic_algorithms):
    """Of numbers of very different sizes. Reference: torch.cumsum, to rounding."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 3, (50, 300), generator=generator)
    numbers = torch.rand(50, 300, generator=generator, dtype=torch.float64) * 10.0**exponents
    sums = running_sums(numbers)
    assert (sums.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(sums, numbers.cumsum(-1), rtol=1e-12, atol=0.0)


def test_logits_that_are_no_numbers_give_some_token_in_deterministic_runs_too(deterministic_algorithms):
    test_logits_that_are_no_numbers_give_some_token()
