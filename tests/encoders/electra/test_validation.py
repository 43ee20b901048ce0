"""Held-out validation while pretraining. References: scikit-learn, a run without validation, the figures of one process."""

import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from common.errors import UserError
from encoders.electra.job import AUC_BINS, VAL_SEED, ElectraJob, sums_of
from encoders.electra.networks import Output
from model.config import IGNORE
from tests.encoders.electra.test_command import data as data  # noqa: F401 - a fixture
from tests.encoders.electra.test_command import train
from tests.encoders.electra.test_examples import write_lines
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks

FIGURES = {"val_loss", "val_mlm_loss", "val_disc_loss", "val_gen_acc", "val_disc_acc", "val_disc_auc"}


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):  # noqa: F811
    """A run that was evaluated on other documents, with dropout."""
    out = tmp_path_factory.mktemp("run")
    other = write_lines(out / "other.jsonl", n_documents=9, seed=7)[0]
    trained = train(**data, out_dir=out, val_path=other, eval_interval=5, eval_batch_size=5, accumulation_steps=2)
    return SimpleNamespace(trainer=trained, other=other)


def test_the_figures_are_those_of_the_examples(run):
    """Reference: batch by batch, its tokens drawn by its number, sums of cross-entropies, and scikit-learn's AUC."""
    job = run.trainer.job
    model = job.model.eval()
    sums = dict.fromkeys(("mlm", "disc", "correct", "masked", "right"), 0.0)
    n_rows, n_words, replaced, logits = job.val_plan.n_rows, 0, [], []
    for number in range(math.ceil(n_rows / 5)):
        batch = job.val_assembler[job.val_plan.recipe(range(5 * number, min(5 * number + 5, n_rows)))]
        torch.manual_seed(VAL_SEED + number)
        with torch.no_grad():
            found = model(*batch)
        real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
        for name in ("mlm", "disc", "correct"):
            sums[name] += float(getattr(found, name))
        sums["masked"] += int((batch.labels != IGNORE).sum())
        sums["right"] += int(((found.disc_logits >= 0) == found.replaced)[real].sum())
        replaced += found.replaced[real].tolist()
        logits += found.disc_logits[real].tolist()
        n_words += int((real & (batch.ids > 4)).sum())
    model.train()
    assert n_words == sum(len(json.loads(line)["text"].split()) for line in run.other.read_text().splitlines())
    mlm, disc = sums["mlm"] / sums["masked"], sums["disc"] / len(replaced)
    values, stop_request = job.evaluate(run.trainer.engine, StopSignals(), 12)
    assert stop_request == 0 and set(values) == FIGURES
    assert values["val_mlm_loss"] == pytest.approx(mlm, rel=1e-5)
    assert values["val_disc_loss"] == pytest.approx(disc, rel=1e-5)
    assert values["val_loss"] == pytest.approx(mlm + 50 * disc, rel=1e-5)
    assert values["val_gen_acc"] == pytest.approx(sums["correct"] / sums["masked"], rel=1e-5)
    assert values["val_disc_acc"] == pytest.approx(sums["right"] / len(replaced), rel=1e-5)
    # Equal ones within a bin of the logit count half.
    bins = np.floor((np.array(logits) + 10) / 20 * AUC_BINS)
    assert values["val_disc_auc"] == pytest.approx(roc_auc_score(replaced, bins), abs=1e-3)
    signals = StopSignals()
    signals.signum = 15
    assert job.evaluate(run.trainer.engine, signals, 12)[1] == 15 and model.training


def test_figures_are_the_same_on_every_world_size(run, monkeypatch):
    """Reference: one process, to the last bit, whatever was drawn before. The sum over the ranks is made here."""
    engine = run.trainer.engine
    monkeypatch.setattr("trainer.evaluation.min_over_ranks", lambda ranks, number: number)
    alone, _ = run.trainer.job.evaluate(engine, StopSignals(), 12)
    torch.manual_seed(99)
    parts, world_size = [], 7
    for rank in range(world_size):
        monkeypatch.setattr(engine, "ranks", Ranks(rank=rank, world_size=world_size))
        with mock.patch("torch.distributed.all_reduce", lambda slots: parts.append(slots.clone())):
            run.trainer.job.evaluate(engine, StopSignals(), 12)
    total = torch.stack(parts).sum(0)
    with mock.patch("torch.distributed.all_reduce", lambda slots: slots.copy_(total)):
        together, _ = run.trainer.job.evaluate(engine, StopSignals(), 12)
    assert together == alone


def sums_of_row(logits, replaced):
    """The sums of a batch of one row without padding, in which nothing is masked."""
    nothing = torch.tensor(0.0)
    found = Output(nothing, nothing, nothing, replaced[None], logits[None], nothing)
    ids = torch.zeros(1, len(logits), dtype=torch.long)
    batch = SimpleNamespace(ids=ids, lengths=torch.tensor([len(logits)]), labels=torch.tensor([[IGNORE]]))
    return sums_of(found, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_auc_is_right_of_a_discriminator_that_doubts_little(dtype):
    """Reference: scikit-learn. Of a few replaced tokens in a hundred most have a probability near 0."""
    probabilities = np.repeat([0.0005, 0.3, 0.004, 0.8, 0.5], [900, 100, 20, 80, 10])
    replaced = np.repeat([False, True], [1000, 110])
    sums = sums_of_row(torch.logit(torch.tensor(probabilities)).to(dtype), torch.tensor(replaced))
    values, _ = ElectraJob.metrics(sums.tolist())
    assert values["disc_auc"] == pytest.approx(roc_auc_score(replaced, probabilities), abs=1e-6)
    # A probability of 0.5 calls a token replaced.
    assert values["disc_recall"] == pytest.approx(90 / 110) and values["disc_precision"] == 1
    # The engine skips an update with a NaN, but its counts are made before that.
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
    counts = sums_of_row(odd.to(dtype), torch.ones(6, dtype=torch.bool))[4 + AUC_BINS :]
    assert counts.sum() == 6 and counts[0] == 3 and counts[-1] == 2 and counts[AUC_BINS // 2] == 1


def test_what_is_held_out_is_not_trained(data, tmp_path, capsys):  # noqa: F811
    """--val_fraction. Reference: the documents of the examples of both sides."""
    options = {**data, "out_dir": tmp_path, "val_fraction": 0.3, "warmup_steps": 2}
    split = train(**options, max_steps=1)
    job = split.job
    plans = [job.plan(0), job.val_plan]
    trained, evaluated = ({*plan.documents_of(0, plan.n_rows)} for plan in plans)
    assert trained and evaluated and not trained & evaluated
    assert trained | evaluated == set(range(len(job.parts.corpus.store)))
    assert f"validation: {job.val_plan.n_rows} examples" in capsys.readouterr().out
    assert train(**options, max_steps=3, from_resume=1).progress.update == 3
    assert "the learning rate was" not in capsys.readouterr().out, "it rises from 0"
    with pytest.raises(UserError, match="val_fraction"):
        train(**options | {"val_fraction": 0.2}, max_steps=4, from_resume=1)
