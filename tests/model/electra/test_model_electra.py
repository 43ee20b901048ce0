"""The ELECTRA networks, masking and sampling. References: golden/electra.pt, torch's softmax, brute force."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import ElectraConfig

from common.errors import UserError
from model.electra.masking import IGNORE, mask_count, mask_tokens
from model.electra.model_electra import ElectraPretrainer, configs, flops_per_token
from model.electra.sizes import SIZES
from tests.helpers import SHARED, needs_shared


def tiny(seed=0, vocab_size=60, position_init="normal", **options):
    """An ElectraPretrainer of two layers of width 32 without dropout."""
    torch.manual_seed(seed)
    sizes = {"layers": 2, "width": 32, "heads": 4, "ffn": 64, "embedding": 16}
    pair = configs(SIZES["small"], vocab_size, position_init=position_init, **sizes)
    for config in pair:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return ElectraPretrainer.from_configs(*pair, **options).train()


def random_examples(R=5, T=24, vocab_size=60, share=0.15, style="electra", seed=0):
    """(ids, lengths, Masked): rows CLS=2 ... SEP=3 and padding 0; ordinary ids from 5 up, [MASK] is 4."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, T + 1, R)
    ids = np.zeros((R, T), dtype=np.int64)
    for r, n in enumerate(lengths):
        ids[r, 0], ids[r, 1 : n - 1], ids[r, n - 1] = 2, generator.integers(5, vocab_size, n - 2), 3
    K = int(mask_count(T, share))
    random = np.random.Philox(seed).random_raw(R * (T + 2 * K)).reshape(R, -1)
    return ids, lengths, mask_tokens(ids, lengths, ids >= 5, share, style, 4, np.arange(5, vocab_size), random, K)


def batch(ids, lengths, masked):
    types = torch.zeros(ids.shape, dtype=torch.long)
    return (
        *map(torch.from_numpy, (ids, masked.ids, masked.positions, masked.labels)),
        types,
        torch.from_numpy(lengths),
    )


# ------------------------------------------------------------------------------------------------ networks


def test_networks_whose_embeddings_differ_cannot_share_them():
    generator = ElectraConfig(
        vocab_size=60, embedding_size=8, hidden_size=8, num_attention_heads=1, num_hidden_layers=1
    )
    discriminator = ElectraConfig(
        vocab_size=60, embedding_size=16, hidden_size=8, num_attention_heads=1, num_hidden_layers=1
    )
    with pytest.raises(ValueError, match="embedding_size is 8 in the generator and 16"):
        ElectraPretrainer.from_configs(generator, discriminator)


def test_gradients_flow_through_the_losses_alone():
    """Every other output with a gradient would have hooks of FSDP2, and a warning where it is a view."""
    found = tiny()(*batch(*random_examples()))
    assert [name for name, value in found._asdict().items() if value.requires_grad] == ["mlm", "disc"]


@needs_shared
def test_one_step_of_the_public_implementation():
    """golden/electra.pt: losses to 1e-5, the discriminator's labels, the gradient norm of every parameter to 1e-4."""
    golden = torch.load(SHARED / "golden" / "electra.pt", weights_only=True)
    model = ElectraPretrainer.from_configs(
        ElectraConfig(**golden["generator_config"]), ElectraConfig(**golden["discriminator_config"])
    ).train()
    model.generator.load_state_dict(golden["generator"])
    model.discriminator.load_state_dict(golden["discriminator"])
    ids, chosen = golden["input_ids"], golden["mask"]
    K = int(chosen.sum(1).max())
    positions, sampled = torch.zeros(len(ids), K, dtype=torch.long), torch.zeros(len(ids), K, dtype=torch.long)
    used = torch.arange(K) < chosen.sum(1, keepdim=True)
    positions[used], sampled[used] = chosen.nonzero()[:, 1], golden["sampled"]
    labels = torch.where(used, ids.gather(1, positions), IGNORE)
    lengths = golden["attention_mask"].sum(1)
    found = model(ids, golden["masked_input"], positions, labels, torch.zeros_like(ids), lengths, sampled=sampled)
    mlm, disc = found.mlm / int(chosen.sum()), found.disc / int(lengths.sum())
    assert mlm.item() == pytest.approx(golden["mlm_loss"], abs=1e-5)
    assert disc.item() == pytest.approx(golden["disc_loss"], abs=1e-5)
    assert (mlm + 50 * disc).item() == pytest.approx(golden["loss"], abs=1e-5)
    assert torch.equal(found.replaced.float(), golden["disc_labels"])
    assert found.correct / int(chosen.sum()) == pytest.approx(golden["gen_acc"], abs=1e-6)
    (mlm + 50 * disc).backward()
    generator = dict(model.generator.named_parameters(remove_duplicate=False))
    discriminator = dict(model.discriminator.named_parameters(remove_duplicate=False))
    for name, norm in golden["grad_norms"].items():
        p = discriminator[name[2:]] if name.startswith("D.") else generator[name]
        assert p.grad.norm().item() == pytest.approx(norm, abs=1e-4), name


def test_small_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = ElectraPretrainer.from_configs(*configs(SIZES["small"], 30_522))
    assert sum(p.numel() for p in model.parameters()) == 14_196_219


@pytest.mark.parametrize("size, layers, heads, generator_heads", [("base", 12, 12, 4), ("large", 24, 16, 4)])
def test_the_other_sizes(size, layers, heads, generator_heads):
    generator, discriminator = configs(SIZES[size], 30_522)
    assert (discriminator.num_hidden_layers, discriminator.num_attention_heads) == (layers, heads)
    assert (generator.num_hidden_layers, generator.num_attention_heads) == (layers, generator_heads)
    assert discriminator.embedding_size == generator.embedding_size == discriminator.hidden_size


def test_position_init():
    """Reference: the formula of Vaswani et al., entry by entry; the product of two depends on their distance alone."""
    model = tiny(position_init="sinusoidal")
    weight = model.generator.electra.embeddings.position_embeddings.weight.detach()
    for position, i in ((0, 0), (0, 1), (7, 4), (300, 15)):
        angle = position / 10_000 ** (2 * (i // 2) / 16)
        wanted = 0.02 * math.sqrt(2) * (math.cos(angle) if i % 2 else math.sin(angle))
        assert weight[position, i].item() == pytest.approx(wanted, abs=1e-6)
    assert weight.square().mean().sqrt().item() == pytest.approx(0.02, rel=1e-4)
    products = weight[:100] @ weight[:100].T
    assert torch.allclose(products[3:50, 0:47].diagonal(), products[60:100, 57:97].diagonal()[0], atol=1e-6)
    assert model.discriminator.electra.embeddings.position_embeddings.weight.requires_grad
    drawn = tiny().discriminator.electra.embeddings.position_embeddings.weight
    assert drawn.std().item() == pytest.approx(0.02, rel=0.1) and not torch.allclose(drawn, weight)


def test_embeddings_are_one_set_after_save_and_reload(tmp_path):
    """Words, positions, types, their norm and the generator's head: the same tensors in both networks, trained as one."""
    model = tiny()
    for name in ("generator", "discriminator"):
        getattr(model, name).save_pretrained(tmp_path / name)
    again = ElectraPretrainer.from_pretrained(tmp_path)
    for one in (model, again):
        generator, discriminator = (
            dict(n.named_parameters(remove_duplicate=False)) for n in (one.generator, one.discriminator)
        )
        shared = [name for name in discriminator if name.startswith("electra.embeddings.")]
        assert len(shared) == 5 and all(generator[name] is discriminator[name] for name in shared)
        assert generator["generator_lm_head.weight"] is discriminator["electra.embeddings.word_embeddings.weight"]
    pairs = zip(model.named_parameters(), again.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_network_that_names_a_program_on_a_hub_is_refused(tmp_path, network, name):
    model = tiny()
    for part in ("generator", "discriminator"):
        getattr(model, part).save_pretrained(tmp_path / part)
    config = tmp_path / network / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), name: "evil/attention"}))
    with pytest.raises(UserError, match=f"{network}: its config asks for the attention of evil/attention"):
        ElectraPretrainer.from_pretrained(tmp_path)


def test_the_head_on_masked_positions_is_the_head_on_all_of_them():
    """Reference: transformers' own generator and discriminator heads on every position, losses by hand."""
    ids, lengths, masked = random_examples()
    model = tiny()
    found = model(*batch(ids, lengths, masked))
    x, mask = torch.from_numpy(ids), torch.from_numpy(np.arange(24) < lengths[:, None]).long()
    logits = model.generator(torch.from_numpy(masked.ids), attention_mask=mask).logits
    expected, corrupted = 0.0, x.clone()
    for r in range(len(ids)):
        for k, (p, label) in enumerate(zip(masked.positions[r], masked.labels[r], strict=True)):
            if label != IGNORE:
                expected += torch.nn.functional.cross_entropy(logits[r, p], x[r, p]).item()
                corrupted[r, p] = found.sampled[r, k]
    assert found.mlm.item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(found.replaced, corrupted != x)  # a token that was drawn right counts as the original
    disc = model.discriminator(corrupted, attention_mask=mask).logits
    each = torch.nn.functional.binary_cross_entropy_with_logits(disc, (corrupted != x).float(), reduction="none")
    assert found.disc.item() == pytest.approx((each * mask).sum().item(), rel=1e-5)


def test_padding_changes_nothing():
    ids, lengths, masked = random_examples(R=3)
    model, wide = tiny(), [np.pad(a, ((0, 0), (0, 8))) for a in (ids, masked.ids)]
    sampled = torch.randint(5, 60, masked.labels.shape)
    types = torch.zeros(3, 24, dtype=torch.long)
    a = model(*batch(ids, lengths, masked)[:4], types, torch.from_numpy(lengths), sampled=sampled)
    b = model(*map(torch.from_numpy, (wide[0], wide[1], masked.positions, masked.labels)), torch.zeros(3, 32, dtype=torch.long),
              torch.from_numpy(lengths), sampled=sampled)  # fmt: skip
    assert a.mlm.item() == pytest.approx(b.mlm.item(), rel=1e-5) and a.disc.item() == pytest.approx(
        b.disc.item(), rel=1e-5
    )


def test_label_smoothing():
    """The generator's differs from the plain one; the discriminator's targets are s for an original token and 1 for a
    replaced one. Reference: binary cross-entropy worked out by hand."""
    example = batch(*random_examples())
    sampled = torch.randint(5, 60, example[2].shape)
    plain, smooth = tiny(), tiny(gen_smooth=0.1, disc_smooth=0.2)
    a, b = plain(*example, sampled=sampled), smooth(*example, sampled=sampled)
    real = torch.arange(24) < example[5][:, None]
    p = a.disc_logits.sigmoid()
    target = torch.where(a.replaced, 1.0, 0.2)
    assert 0 < a.replaced.sum() < real.sum()
    by_hand = -(target * p.log() + (1 - target) * (1 - p).log())[real].sum()
    assert b.disc.item() == pytest.approx(by_hand.item(), rel=1e-4)
    assert b.mlm.item() != pytest.approx(a.mlm.item(), rel=1e-5)


def test_flops_are_those_of_the_layers():
    """Reference: torch's own counter on a forward and backward pass of full rows, which leaves out attention on a CPU."""
    from torch.utils.flop_counter import FlopCounterMode

    R, T = 4, 24
    ids, _, _ = random_examples(R, T)
    ids[:] = np.random.default_rng(0).integers(5, 60, ids.shape)
    K = int(mask_count(T, 0.15))
    random = np.random.Philox(1).random_raw(R * (T + 2 * K)).reshape(R, -1)
    masked = mask_tokens(ids, np.full(R, T), ids >= 5, 0.15, "electra", 4, np.arange(5, 60), random)
    model = tiny()
    with FlopCounterMode(display=False) as counter:
        found = model(*batch(ids, np.full(R, T), masked))
        (found.mlm + found.disc).backward()
    counted = counter.get_total_flops()
    attention = sum(12 * 2 * T * width for width in (8, 32)) * R * T  # two layers: T · width for scores, for values
    ours = flops_per_token(model.generator.config, model.discriminator.config, T, K / T) * R * T
    assert ours == pytest.approx(counted + attention, rel=1e-2)


# ------------------------------------------------------------------------------------------------- masking


@pytest.mark.parametrize("style", ["electra", "bert"])
@pytest.mark.parametrize("share", [0.15, 0.25, 0.5])
def test_counts_are_exact_and_specials_are_never_touched(share, style):
    """10,000 random examples: max(1, round(share · length)) positions, none special, the rest as it was."""
    ids, lengths, masked = random_examples(R=10_000, T=40, share=share, style=style, seed=3)
    used = masked.labels != IGNORE
    wanted = np.minimum([max(1, round(share * n)) for n in lengths.tolist()], lengths - 2)
    assert (used.sum(1) == wanted).all()
    assert (masked.labels[used] >= 5).all() and (
        masked.labels[used] == ids[np.nonzero(used)[0], masked.positions[used]]
    ).all()
    at = np.zeros(ids.shape, dtype=bool)
    at[np.nonzero(used)[0], masked.positions[used]] = True
    assert at.sum() == used.sum()  # no position twice
    assert (masked.ids[~at] == ids[~at]).all()
    assert np.isin(masked.ids[at], [4, *range(5, 60)]).all()  # what is written is [MASK] or an ordinary token


@pytest.mark.parametrize("style", ["electra", "bert"])
@pytest.mark.parametrize("K", [None, 6])
def test_masking_is_that_of_a_plain_loop(style, K):
    """Reference: row by row, the candidates whose random number is smallest; then a die for each, in their order."""
    R = 300
    T = 24
    n_random = T + 2 * (K or T)
    generator = np.random.default_rng(5)
    ids = generator.integers(0, 60, (R, T))
    lengths = generator.integers(3, T + 1, R)
    candidates = (ids >= 5) & (np.arange(T) < lengths[:, None])
    ordinary = np.arange(5, 60)
    random = np.random.Philox(5).random_raw(R * n_random).reshape(R, n_random)
    if K is None:
        K = max(min(max(1, round(0.25 * n)), int(c.sum())) for n, c in zip(lengths.tolist(), candidates, strict=True))
    masked = mask_tokens(ids, lengths, candidates, 0.25, style, 4, ordinary, random, K)
    for row in range(R):
        allowed = [place for place in range(T) if candidates[row, place]]
        numbers = random[row].tolist()
        allowed.sort(key=numbers.__getitem__)
        n_masked = min(max(1, round(0.25 * int(lengths[row]))), len(allowed))
        chosen = sorted(allowed[:n_masked])
        wanted = ids[row].tolist()
        for number, place in enumerate(chosen):
            die = (int(random[row, T + number]) >> 11) / 2**53
            if die < (0.85 if style == "electra" else 0.8):
                wanted[place] = 4
            elif style == "bert" and die < 0.9:
                wanted[place] = ordinary[int(random[row, T + K + number]) % len(ordinary)]
        unused = K - n_masked
        assert masked.ids[row].tolist() == wanted
        assert masked.positions[row].tolist() == chosen + [0] * unused
        assert masked.labels[row].tolist() == ids[row, chosen].tolist() + [IGNORE] * unused


@pytest.mark.parametrize("style, written, kept", [("electra", 0.85, 0.15), ("bert", 0.8, 0.1 + 0.1 / 55)])
def test_what_is_written(style, written, kept):
    ids, _, masked = random_examples(R=20_000, T=40, style=style, seed=4)
    used = masked.labels != IGNORE
    now, n = masked.ids[np.nonzero(used)[0], masked.positions[used]], used.sum()
    for share, expected in (((now == 4).mean(), written), ((now == masked.labels[used]).mean(), kept)):
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / n))


def test_every_candidate_is_chosen_equally_often():
    R, T = 40_000, 22
    ids = np.tile(np.r_[2, np.arange(5, 25), 3], (R, 1))
    random = np.random.Philox(7).random_raw(R * (T + 6)).reshape(R, -1)
    masked = mask_tokens(ids, np.full(R, T), ids >= 5, 0.15, "electra", 4, np.arange(5, 60), random)
    counts = np.bincount(masked.positions.ravel(), minlength=T)[1:-1]
    assert masked.positions.shape == (R, 3)
    expected = R * 3 / 20
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared with 19 degrees of freedom, p = 0.0007


# ------------------------------------------------------------------------------------------------ sampling


@pytest.mark.slow
def test_compiled_training_gives_the_losses_of_the_plain_one():
    """Without dropout the same numbers; with it the same on average, and other shapes than the compiled one work."""
    example = batch(*random_examples(R=4))
    sampled = torch.randint(5, 60, example[2].shape)
    a, b = tiny(), tiny()
    b.compile_training((4, 24))
    first, second = (model(*example, sampled=sampled) for model in (a, b))
    assert second.mlm.item() == pytest.approx(first.mlm.item(), rel=1e-5)
    assert second.disc.item() == pytest.approx(first.disc.item(), rel=1e-5)
    first.disc.backward(), second.disc.backward()
    gradients = zip(a.named_parameters(), b.named_parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad, atol=1e-5) for (_, p), (_, q) in gradients if p.grad is not None)
    ragged = [x[:3] for x in example]
    assert b(*ragged, sampled=sampled[:3]).disc.item() == pytest.approx(
        a(*ragged, sampled=sampled[:3]).disc.item(), rel=1e-5
    )

    for model in (a, b):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
    torch._dynamo.reset()
    means = [np.mean([model(*example, sampled=sampled).disc.item() for _ in range(40)]) for model in (a, b)]
    assert means[1] == pytest.approx(means[0], rel=0.01)
