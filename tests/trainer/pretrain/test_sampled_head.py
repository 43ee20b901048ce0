"""--sampled_softmax against the softmax that its sample stands for."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from tests.helpers import assert_same_weights, losses, stopped_after, tiny_model, train
from trainer.pretrain.sampled_head import HeadSampler, rows_targets

V, K = 61, 29
SAMPLED = {"max_updates": 6, "sampled_softmax": 400, "val_fraction": 0.2}


def sampler(n_ids: int = K, seed: int = 1) -> HeadSampler:
    # Small ids are the frequent ones.
    return HeadSampler(np.random.default_rng(0).integers(0, V, (9, 60)) ** 2 // V, V, n_ids, seed)


def test_a_sample_holds_the_targets_of_each_row():
    targets = torch.tensor([[5, 9, -100, 5], [9, 60, 5, -100], [5, 9, -100, 5]])
    sample = sampler()(targets)
    known = targets != -100
    assert sample.sizes == [K] * 3
    drawn = sample.ids.view(3, K)
    for row in range(3):
        assert len(set(drawn[row].tolist())) == K
        positions = sample.targets[row][known[row]]
        assert torch.equal(drawn[row][positions], targets[row][known[row]])
        assert not sample.log_counts.view(3, K)[row][positions].any()
    assert torch.equal(sample.targets == -100, ~known)
    # Equal rows draw alike in any micro-batch, others not.
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(sampler()(targets[2:]).ids, drawn[0])
    assert not torch.equal(sampler(seed=2)(targets).ids, sample.ids)
    # no room for a drawn id: that row alone takes more, at most all
    few = sampler(n_ids=3)(targets)
    assert few.sizes == [3, 6, 3] and torch.equal(few.ids[:3], sampler(n_ids=3)(targets[:1]).ids)
    assert set(targets[1].tolist()) - {-100} < set(few.ids[3:9].tolist()) and few.log_counts[3:9].count_nonzero() == 3
    everything = torch.arange(V // 2 + 1).unsqueeze(0)
    assert torch.equal(sampler(n_ids=3)(everything).ids, torch.arange(V))


@pytest.mark.parametrize("n_ids", [K, 10])
def test_the_loss_and_its_gradients_are_those_of_the_formula(n_ids):
    """Reference: autograd, and over many samples the mean denominator of the whole softmax."""
    model = tiny_model(vocab_size=V).train()
    ids = torch.randint(0, V, (2, 12))
    # Ten ids are too few for the first row alone.
    ids[1] %= 5
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    rest = torch.zeros_like(ids), torch.arange(12).expand(2, 12)
    sample = sampler(n_ids)(targets)
    loss, _ = model.training_losses(ids, targets, *rest, sample)
    hidden = model.model(model.model.embed_tokens(ids), rest[1], None)[0]
    plain, cut = 0, 0
    begins = 0, sample.sizes[0]
    for row, size in enumerate(sample.sizes):
        own, micro_batch = slice(begins[row], begins[row] + size), slice(row, row + 1)
        logits = hidden[row] @ model.lm_head.weight[sample.ids[own]].T + sample.log_counts[own]
        plain += F.cross_entropy(logits, sample.targets[row], reduction="sum")
        inputs = (each[micro_batch] for each in (ids, targets, *rest))
        cut += model.training_losses(*inputs, sampler(n_ids)(targets[micro_batch]))[0]
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(loss, cut, rtol=1e-6, atol=0.0)
    parameters = list(model.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(each, parameters) for each in (loss, plain)))
    exp_logits = (hidden @ model.lm_head.weight.T).exp().detach()
    samples = [sampler(n_ids, seed)(targets[:1]) for seed in range(800)]
    estimates = [(exp_logits[0, :, each.ids] * each.log_counts.exp()).sum(-1) for each in samples]
    torch.testing.assert_close(torch.stack(estimates).mean(0), exp_logits[0].sum(-1), rtol=0.02, atol=0.0)


def test_runs_with_it_are_cut_and_resumed_like_others(data, tmp_path):
    """Other micro-batches draw the same ids, and a resumed run ends with the same bits. The loss is near that of all ids."""
    run = {**SAMPLED, "data_path": data}
    whole = train(**run, out_dir=str(tmp_path / "whole"))
    cut = train(**run, out_dir=str(tmp_path / "cut"), batch_size=1, accumulation_steps=4)
    torch.testing.assert_close(cut.engine.parameters, whole.engine.parameters, rtol=1e-4, atol=1e-6)
    full = train(**{**run, "sampled_softmax": 0}, out_dir=str(tmp_path / "full"))
    assert losses(full)[0] != losses(whole)[0] and math.isclose(losses(full)[0], losses(whole)[0], rel_tol=0.02)
    with stopped_after(3), pytest.raises(AssertionError):
        train(**run, out_dir=str(tmp_path / "stopped"))
    assert_same_weights(whole, train(**run, out_dir=str(tmp_path / "stopped"), from_resume=1))
    # Rows of the embedding that no update used have neither moments nor decay.
    embedding = whole.engine.model.lm_head.weight
    unused = ~whole.engine.optimizers[0].state[embedding]["exp_avg_sq"].any(1)
    short = train(**{**run, "max_updates": 1}, out_dir=str(tmp_path / "short"))
    assert 0 < unused.sum() < len(unused)
    assert torch.equal(embedding[unused], short.engine.model.lm_head.weight[unused])


def test_a_run_of_all_ids_continues_with_a_sample_and_is_verified(data, tmp_path, capsys):
    """--verify_every computes each update twice: the second time from the same moments. Reference: the run without it."""
    run = {**SAMPLED, "data_path": data}
    found = []
    for every in (0, 1):
        with stopped_after(3), pytest.raises(AssertionError):
            train(**{**run, "sampled_softmax": 0}, out_dir=str(tmp_path / f"{every}"))
        found.append(train(**run, out_dir=str(tmp_path / f"{every}"), from_resume=1, verify_every=every))
    assert_same_weights(*found)
    assert "gave other bits" not in capsys.readouterr().out


@pytest.mark.parametrize(("positions", "counted"), [(512, 1000), (2048, 1000), (32_768, 64), (2**22, 1)])
def test_long_rows_are_counted_in_little_memory(positions, counted):
    """Every run counts them: 1,000 rows of 32,768 positions would take more than a gigabyte."""
    plan = mock.Mock(n_rows=5000, T=positions, recipe=lambda rows: rows)
    assembler = mock.Mock(arrays=lambda rows: mock.Mock(targets=rows))
    rows = rows_targets(mock.Mock(plan=lambda epoch: plan, assembler=lambda: assembler))
    assert len(rows) == counted and rows[0] == 0 and rows[-1] == (0 if counted == 1 else 4999)


def test_a_number_that_does_not_fit_is_told(data, tmp_path, capsys):
    run = {"data_path": data, "out_dir": tmp_path, "max_updates": 2}
    train(**run, sampled_softmax=5)
    assert capsys.readouterr().out.count("--sampled_softmax 5 is too few for the targets of a row") == 1
    with pytest.raises(UserError, match="--sampled_softmax 6400: the vocabulary has 6400 ids"):
        train(**run, sampled_softmax=6400)
