"""--sampled_softmax against the softmax that its sample stands for."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.errors import UserError
from tests.helpers import assert_same_weights, losses, stopped_after, tiny_model, train, write_corpus
from trainer.pretrain.sampled_head import sample_head

V, K = 61, 29
SAMPLED = {"max_updates": 6, "sampled_softmax": 400, "val_fraction": 0.2}


def test_a_sample_holds_the_targets_and_stands_for_all_ids():
    update = SimpleNamespace(targets=np.array([[5, 9, -100], [9, 60, 5]]))
    sample = sample_head(update, V, K, (1, 2))
    ids = sample.ids.tolist()
    assert len(ids) == K == len(set(ids)) and {5, 9, 60} <= set(ids)
    assert torch.equal(sample.positions[sample.ids], torch.arange(K))
    assert sample.log_counts.exp().sum().item() == pytest.approx(V)
    assert all(sample.log_counts[ids.index(target)] == 0 for target in (5, 9, 60))
    assert ids == sample_head(update, V, K, (1, 2)).ids.tolist() != sample_head(update, V, K, (1, 3)).ids.tolist()
    # No room for a drawn id, and none left to draw: the whole head
    assert sample_head(update, V, 3, (1,)) is None
    assert sample_head(update, V, V, (1,)) is None


def test_the_loss_and_its_gradients_are_those_of_the_formula():
    """Reference: autograd, and over many samples the mean denominator of the whole softmax."""
    model = tiny_model(vocab_size=V).train()
    ids = torch.randint(0, V, (2, 12))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    rest = torch.zeros_like(ids), torch.arange(12).expand(2, 12)
    update = SimpleNamespace(targets=targets)
    sample = sample_head(update, V, K, (0,))
    loss, _ = model.training_losses(ids, targets, *rest, sample)
    hidden = model.model(model.model.embed_tokens(ids), rest[1], None)[0]
    logits = hidden @ model.lm_head.weight[sample.ids].T + sample.log_counts
    known = targets != -100
    plain = F.cross_entropy(logits[known], sample.positions[targets[known]], reduction="sum")
    torch.testing.assert_close(loss, plain)
    parameters = list(model.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(each, parameters) for each in (loss, plain)))
    exp_logits = (hidden @ model.lm_head.weight.T).exp().detach()
    samples = [sample_head(update, V, K, (number,)) for number in range(400)]
    estimates = [(exp_logits[..., sample.ids] * sample.log_counts.exp()).sum(-1) for sample in samples]
    torch.testing.assert_close(torch.stack(estimates).mean(0), exp_logits.sum(-1), rtol=0.02, atol=0.0)


def test_runs_with_it_are_cut_and_resumed_like_others(tmp_path):
    """Other micro-batches draw the same ids, and a resumed run ends with the same bits. The loss is near that of all ids."""
    data = str(write_corpus(tmp_path / "text.jsonl"))
    run = {**SAMPLED, "data_path": data, "cache_dir": str(tmp_path)}
    whole = train(**run, out_dir=str(tmp_path / "whole"))
    cut = train(**run, out_dir=str(tmp_path / "cut"), batch_size=1, accumulation_steps=4)
    torch.testing.assert_close(cut.engine.parameters, whole.engine.parameters, rtol=1e-4, atol=1e-6)
    full = train(**{**run, "sampled_softmax": 0}, out_dir=str(tmp_path / "full"))
    assert losses(full)[0] != losses(whole)[0] and math.isclose(losses(full)[0], losses(whole)[0], rel_tol=0.02)
    with stopped_after(3), pytest.raises(AssertionError):
        train(**run, out_dir=str(tmp_path / "stopped"))
    assert_same_weights(whole, train(**run, out_dir=str(tmp_path / "stopped"), from_resume=1))


def test_a_number_that_does_not_fit_is_told(tmp_path, capsys):
    data = str(write_corpus(tmp_path / "text.jsonl"))
    run = {"data_path": data, "cache_dir": str(tmp_path), "out_dir": str(tmp_path / "out"), "max_updates": 2}
    train(**run, sampled_softmax=5)
    assert capsys.readouterr().out.count("--sampled_softmax 5 is too few for the targets of update 1") == 1
    with pytest.raises(UserError, match="--sampled_softmax 6400: the vocabulary has 6400 ids"):
        train(**run, sampled_softmax=6400)
