"""The ELECTRA networks, masking and draws. References: golden/electra.pt, transformers' own heads, a plain loop, torch's softmax."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import ElectraConfig

from encoders.electra import networks
from encoders.electra.examples import ElectraAssembler
from encoders.electra.job import configs_of_sizes
from encoders.electra.networks import CHUNK, NETWORKS, ElectraPretrainer, running_sums, sample
from encoders.electra.settings import ElectraSettings
from model.config import IGNORE
from tests.helpers import SHARED, needs_shared

# a discriminator of two layers; the generator's are a quarter as wide
TINY = dict(zip(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "embedding_size",
                 "generator_divisor"), (2, 32, 4, 64, 16, 4), strict=True))  # fmt: skip


def tiny(seed=0, vocab_size=60, position_init="normal", **options):
    """An ElectraPretrainer without dropout."""
    torch.manual_seed(seed)
    pair = configs_of_sizes(ElectraSettings(**TINY, position_init=position_init, dropout=0.0), vocab_size)
    return ElectraPretrainer(*pair, **options).train()


def drawn(tokens):
    """Let the generator draw these [R, K]."""
    return mock.patch.object(networks, "sample", lambda *args: tokens.flatten())


class Tokens:
    """In the place of a tokenizer: CLS is 2, SEP 3, padding 0, [MASK] 4, ordinary ids from 5 up."""

    pad_token_id, cls_token_id, sep_token_id, mask_token_id = 0, 2, 3, 4
    all_special_ids = (0, 1, 2, 3, 4)

    def __len__(self):
        return 60


def masked_by(assembler, ids, lengths, seed):
    """(its masked ids, positions, labels; the random bits)"""
    random = np.random.Philox(seed).random_raw(len(ids) * (assembler.T + 2 * assembler.K)).reshape(len(ids), -1)
    return *assembler.mask(ids, lengths, random), random


def random_examples(R=5, T=24, seed=0):
    """(ids, lengths, (masked ids, positions, labels)): rows CLS ... SEP and padding."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, T + 1, R)
    ids = np.zeros((R, T), dtype=np.int64)
    for r, n in enumerate(lengths):
        ids[r, 0], ids[r, 1 : n - 1], ids[r, n - 1] = 2, generator.integers(5, 60, n - 2), 3
    return ids, lengths, masked_by(ElectraAssembler(None, Tokens(), T, 0.15, "electra", 1), ids, lengths, seed)[:3]


def batch(ids, lengths, masked):
    types = torch.zeros(ids.shape, dtype=torch.long)
    arrays = map(torch.from_numpy, (ids, *masked))
    return (*arrays, types, torch.from_numpy(lengths))


@needs_shared
def test_one_step_of_the_public_implementation():
    """golden/electra.pt: losses to 1e-5, the discriminator's labels, the gradient norm of every parameter to 1e-4."""
    golden = torch.load(SHARED / "golden" / "electra.pt", weights_only=True)
    pair = (ElectraConfig(**golden[f"{name}_config"]) for name in NETWORKS)
    model = ElectraPretrainer(*pair).train()
    model.generator.load_state_dict(golden["generator"])
    model.discriminator.load_state_dict(golden["discriminator"])
    ids, chosen = golden["input_ids"], golden["mask"]
    K = int(chosen.sum(1).max())
    positions, sampled = torch.zeros(len(ids), K, dtype=torch.long), torch.zeros(len(ids), K, dtype=torch.long)
    used = torch.arange(K) < chosen.sum(1, keepdim=True)
    positions[used], sampled[used] = chosen.nonzero()[:, 1], golden["sampled"]
    labels = torch.where(used, ids.gather(1, positions), IGNORE)
    lengths = golden["attention_mask"].sum(1)
    with drawn(sampled):
        found = model(ids, golden["masked_input"], positions, labels, torch.zeros_like(ids), lengths)
    mlm, disc = found.mlm / int(chosen.sum()), found.disc / int(lengths.sum())
    assert mlm.item() == pytest.approx(golden["mlm_loss"], abs=1e-5)
    assert disc.item() == pytest.approx(golden["disc_loss"], abs=1e-5)
    assert torch.equal(found.replaced.float(), golden["disc_labels"])
    assert found.correct / int(chosen.sum()) == pytest.approx(golden["gen_acc"], abs=1e-6)
    (mlm + 50 * disc).backward()
    generator = dict(model.generator.named_parameters(remove_duplicate=False))
    discriminator = dict(model.discriminator.named_parameters(remove_duplicate=False))
    for name, norm in golden["grad_norms"].items():
        p = discriminator[name[2:]] if name.startswith("D.") else generator[name]
        assert p.grad.norm().item() == pytest.approx(norm, abs=1e-4), name


def test_small_has_the_published_number_of_parameters():
    """With one set of embeddings, their norm and the generator's head included."""
    with torch.device("meta"):
        model = ElectraPretrainer(*configs_of_sizes(ElectraSettings(), 30_522))
    assert sum(p.numel() for p in model.parameters()) == 14_196_219


def test_networks_that_cannot_share_their_embeddings_are_refused():
    other, ours = (configs_of_sizes(ElectraSettings(**{**TINY, "embedding_size": n}), 60) for n in (8, 16))
    with pytest.raises(ValueError, match="embedding_size is 8 in the generator and 16 in the discriminator"):
        ElectraPretrainer(other[0], ours[1])


def test_the_losses_are_those_of_transformers_heads():
    """Reference: its own heads on every position and without our padding; losses by hand, and with label smoothing."""
    ids, lengths, masked = random_examples()
    model = tiny()
    found = model(*batch(ids, lengths, masked))
    x, mask = torch.from_numpy(ids), torch.from_numpy(np.arange(24) < lengths[:, None]).long()
    logits = model.generator(torch.from_numpy(masked[0]), attention_mask=mask).logits
    expected, corrupted = 0.0, x.clone()
    for r in range(len(ids)):
        for p, label in zip(masked[1][r], masked[2][r], strict=True):
            if label != IGNORE:
                expected += torch.nn.functional.cross_entropy(logits[r, p], x[r, p]).item()
                corrupted[r, p] = found.corrupted[r, p]
    assert found.mlm.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(found.replaced, corrupted != x)  # a token that was drawn right counts as the original
    # An output with a gradient beside the losses would have hooks of FSDP2.
    assert [name for name, value in found._asdict().items() if value.requires_grad] == ["mlm", "disc"]
    p = model.discriminator(corrupted, attention_mask=mask).logits.sigmoid()
    for smoothing in (0.0, 0.2):
        target = torch.where(found.replaced, 1.0, smoothing)
        wanted = -((target * p.log() + (1 - target) * (1 - p).log()) * mask).sum()
        with drawn(corrupted.gather(1, torch.from_numpy(masked[1]))):
            smooth = tiny(gen_smooth=smoothing, disc_smooth=smoothing)(*batch(ids, lengths, masked))
        assert smooth.disc.item() == pytest.approx(wanted.item(), rel=1e-4)
        assert (smooth.mlm.item() == pytest.approx(expected, rel=1e-5)) == (smoothing == 0)


@pytest.mark.slow
def test_compiled_training_gives_the_losses_of_the_plain_one():
    """Without dropout the same numbers, also of other shapes than the compiled one; with it the same on average."""
    example = batch(*random_examples(R=4))
    sampled = torch.randint(5, 60, example[2].shape)
    plain, compiled = tiny(), tiny()
    compiled.compile_training((4, 24))
    for rows in (4, 3):
        part = [x[:rows] for x in example]
        with drawn(sampled[:rows]):
            first, second = (model(*part) for model in (plain, compiled))
        assert second.mlm.item() == pytest.approx(first.mlm.item(), rel=1e-5)
        assert second.disc.item() == pytest.approx(first.disc.item(), rel=1e-5)
        first.disc.backward(), second.disc.backward()
    gradients = zip(plain.parameters(), compiled.parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad, atol=1e-5) for p, q in gradients if p.grad is not None)
    for module in (*plain.modules(), *compiled.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    torch._dynamo.reset()
    with drawn(sampled):
        means = [np.mean([model(*example).disc.item() for _ in range(40)]) for model in (plain, compiled)]
    assert means[1] == pytest.approx(means[0], rel=0.01)


@pytest.mark.parametrize("style", ["electra", "bert"])
def test_masking_is_that_of_a_plain_loop(style):
    """Reference: in each row the max(1, round(share · length)) candidates of the smallest random numbers; then a die for each."""
    R, T = 300, 24
    generator = np.random.default_rng(5)
    lengths = generator.integers(3, T + 1, R)
    # Special tokens stand among the others, and fill some rows nearly.
    ids = generator.integers(0, 60, (R, T)) * (generator.random((R, T)) < generator.random((R, 1)))
    ids[np.arange(T) >= lengths[:, None]] = 0
    assembler = ElectraAssembler(None, Tokens(), T, 0.25, style, 1)
    masked, positions, labels, random = masked_by(assembler, ids, lengths, 5)
    for row in range(R):
        numbers = random[row].tolist()
        allowed = sorted((place for place in range(T) if ids[row, place] >= 5), key=numbers.__getitem__)
        n_masked = min(max(1, round(0.25 * int(lengths[row]))), len(allowed))
        chosen = sorted(allowed[:n_masked])
        wanted = ids[row].tolist()
        for number, place in enumerate(chosen):
            die = (numbers[T + number] >> 11) / 2**53
            if die < (0.85 if style == "electra" else 0.8):
                wanted[place] = 4
            elif style == "bert" and die < 0.9:
                wanted[place] = 5 + numbers[T + assembler.K + number] % 55
        unused = assembler.K - n_masked
        assert masked[row].tolist() == wanted
        assert positions[row].tolist() == chosen + [0] * unused
        assert labels[row].tolist() == ids[row, chosen].tolist() + [IGNORE] * unused


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
