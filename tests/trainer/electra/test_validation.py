"""Held-out validation while pretraining. References: a pass over the examples one by one with scikit-learn, a run without
validation, and the figures of one process."""

import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from common.errors import DataError, UserError
from model.electra.masking import IGNORE
from model.electra.model_electra import Losses
from tests.dataset.electra.test_electra_dataset import write_lines, write_vocab
from tests.helpers import new_port, run_ranks
from tests.trainer.test_train_electra import equal, flags, train, weights
from trainer import train_electra
from trainer.electra.loss import AUC_BINS, metrics, sums_of
from trainer.electra.validation import SEED
from trainer.machine.ranks import Ranks
from trainer.machine.signals import StopSignals

FIGURES = {"val_loss", "val_mlm_loss", "val_disc_loss", "val_gen_acc", "val_disc_acc", "val_disc_auc"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("electra")
    return {"data_path": write_lines(folder / "data.jsonl")[0], "vocab_path": write_vocab(folder / "vocab.txt")}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Documents that are not trained."""
    return write_lines(tmp_path_factory.mktemp("other") / "other.jsonl", n_documents=9, seed=7)[0]


@pytest.fixture(scope="module")
def run(data, other, tmp_path_factory):
    """A run that was evaluated, with dropout."""
    out = tmp_path_factory.mktemp("run")
    trained = train(**data, out_dir=out, val_path=other, eval_interval=5, eval_batch_size=5, accumulation_steps=2)
    lines = (out / "electra_small" / "electra_small.metrics.jsonl").read_text().splitlines()
    return SimpleNamespace(trainer=trained, out=out, lines=[json.loads(line) for line in lines])


def batches_of(validation):
    return math.ceil(validation.plan.n_rows / validation.batch_size)


def test_the_figures_are_those_of_the_examples(run):
    """Reference: each batch by itself, its tokens drawn by its number; sums of cross-entropies, and scikit-learn's AUC."""
    job = run.trainer.job
    model = job.model.eval()
    validation = job.validation
    mlm = disc = correct = right = 0.0
    masked = 0
    replaced = []
    probabilities = []
    for number in range(batches_of(validation)):
        batch = validation[number]
        torch.manual_seed(SEED + number)
        with torch.no_grad():
            found = model(*batch)
        real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
        mlm += float(found.mlm)
        disc += float(found.disc)
        correct += float(found.correct)
        masked += int((batch.labels != IGNORE).sum())
        replaced += found.replaced[real].tolist()
        probabilities += found.disc_logits[real].sigmoid().tolist()
        right += int(((found.disc_logits >= 0) == found.replaced)[real].sum())
    model.train()
    wanted = {
        "val_mlm_loss": mlm / masked,
        "val_disc_loss": disc / len(replaced),
        "val_loss": mlm / masked + 50 * disc / len(replaced),
        "val_gen_acc": correct / masked,
        "val_disc_acc": right / len(replaced),
    }
    values, stop_signal = job.evaluate(run.trainer.engine, StopSignals(), 12)
    assert stop_signal == 0 and set(values) == FIGURES
    for name, value in wanted.items():
        assert values[name] == pytest.approx(value, rel=1e-5), name
    # Equal ones within a bin count half.
    bins = [bin_of(probability) for probability in probabilities]
    assert values["val_disc_auc"] == pytest.approx(roc_auc_score(replaced, bins), abs=1e-3)


def test_every_held_out_token_is_evaluated_once(run, other):
    """Reference: the words of the file."""
    validation = run.trainer.job.validation
    words = sum(len(json.loads(line)["text"].split()) for line in other.read_text().splitlines())
    special = set(run.trainer.job.tokenizer.all_special_ids) - {run.trainer.job.tokenizer.unk_token_id}
    seen = 0
    for number in range(batches_of(validation)):
        seen += sum(token not in special for token in validation[number].ids.flatten().tolist())
    assert seen >= words
    assert seen == int((validation.plan.examples.first + validation.plan.examples.second).sum())


def test_evaluations_come_by_updates_and_change_nothing(run, data, tmp_path):
    """Reference: the same run without them, dropout and draws included."""
    evaluated = [line for line in run.lines if "val_loss" in line]
    assert [line["update"] for line in evaluated] == [5, 10, 12]
    assert set(evaluated[0]) >= FIGURES
    assert len({line["val_disc_auc"] for line in evaluated}) == 3
    plain = train(**data, out_dir=tmp_path, accumulation_steps=2)
    assert equal(weights(run.trainer), weights(plain))


def test_an_evaluation_gives_the_same_figures_again_whatever_the_seed(run, data, other, tmp_path):
    """Masks and draws are fixed."""
    job = run.trainer.job
    first, _ = job.evaluate(run.trainer.engine, StopSignals(), 12)
    torch.manual_seed(99)
    second, _ = job.evaluate(run.trainer.engine, StopSignals(), 12)
    assert first == second
    reseeded = train(**data, out_dir=tmp_path, val_path=other, eval_batch_size=5, seed=7, max_steps=1)
    for number in range(batches_of(job.validation)):
        for ours, theirs in zip(job.validation[number], reseeded.job.validation[number], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_figures_are_the_same_on_every_world_size(run, world_size, monkeypatch):
    """Reference: one process, to the last bit. The sum over the ranks is made here."""
    engine = run.trainer.engine
    alone, _ = run.trainer.job.evaluate(engine, StopSignals(), 12)
    parts = []
    for rank in range(world_size):
        monkeypatch.setattr(engine, "ranks", Ranks(rank=rank, world_size=world_size))
        with mock.patch("torch.distributed.all_reduce", lambda slots: parts.append(slots.clone())):
            run.trainer.job.evaluate(engine, StopSignals(), 12)
    total = torch.stack(parts).sum(0)
    with mock.patch("torch.distributed.all_reduce", lambda slots: slots.copy_(total)):
        together, _ = run.trainer.job.evaluate(engine, StopSignals(), 12)
    assert together == alone


def _evaluated_by_a_rank(flags_of_run):
    """A run whose first update has the rate 0, so that it evaluates the networks that it was given."""
    new_port("electra")
    return train_electra.main(flags_of_run)


@pytest.mark.slow
def test_figures_of_two_real_ranks_are_those_of_one(run, data, other, tmp_path):
    """Networks that were trained, evaluated over Gloo. Reference: one rank, to the last bit."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "embedding_size")
    options = dict.fromkeys(sizes) | {"model_path": run.out / "electra_small", "max_steps": 1, "warmup_steps": 2}
    figures = []
    for world_size in (1, 2):
        out = tmp_path / str(world_size)
        given = flags(**data, **options, out_dir=out, val_path=other, eval_batch_size=5)
        assert run_ranks(_evaluated_by_a_rank, given, world_size=world_size) == [0] * world_size
        lines = (out / "electra_small" / "electra_small.metrics.jsonl").read_text().splitlines()
        (line,) = [line for line in map(json.loads, lines) if "val_loss" in line]
        figures.append({name: line[name] for name in FIGURES})
    assert figures[0] == figures[1]
    # They are figures of networks that have learned: those of fresh ones are others.
    last = [line for line in run.lines if "val_loss" in line][-1]
    assert figures[0]["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)


def test_a_stop_signal_ends_an_evaluation(run):
    signals = StopSignals()
    signals.signum = 15
    values, stop_signal = run.trainer.job.evaluate(run.trainer.engine, signals, 12)
    assert stop_signal == 15 and run.trainer.job.model.training


def bin_of(probability):
    """Of equal bins of the logit from -10 to 10."""
    logit = math.log(probability / (1 - probability))
    return min(max(math.floor((logit + 10) / 20 * AUC_BINS), 0), AUC_BINS - 1)


def sums_of_row(logits, replaced):
    """The sums of a batch of one row without padding, in which nothing is masked."""
    nothing = torch.tensor(0.0)
    found = Losses(nothing, nothing, nothing, nothing, replaced[None], logits[None], nothing)
    ids = torch.zeros(1, len(logits), dtype=torch.long)
    batch = SimpleNamespace(ids=ids, lengths=torch.tensor([len(logits)]), labels=torch.tensor([[IGNORE]]))
    return sums_of(found, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_auc_is_right_of_a_discriminator_that_doubts_little(dtype):
    """Reference: scikit-learn. Of a few replaced tokens in a hundred most have a probability near 0."""
    probabilities = np.repeat([0.0005, 0.3, 0.004, 0.8, 0.5], [900, 100, 20, 80, 10])
    replaced = np.repeat([False, True], [1000, 110])
    sums = sums_of_row(torch.logit(torch.tensor(probabilities)).to(dtype), torch.tensor(replaced))
    values, _ = metrics(sums.tolist())
    assert values["disc_auc"] == pytest.approx(roc_auc_score(replaced, probabilities), abs=1e-6)
    # A probability of 0.5 calls a token replaced.
    assert values["disc_recall"] == pytest.approx(90 / 110) and values["disc_precision"] == 1


def test_logits_that_are_none_are_counted_all_the_same():
    """The engine skips their update, but the counts are made before that."""
    logits = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
    counts = sums_of_row(logits, torch.ones(6, dtype=torch.bool))[4 + AUC_BINS :]
    assert counts.sum() == 6 and counts[0] == 3 and counts[-1] == 2 and counts[AUC_BINS // 2] == 1


# ----------------------------------------------------------------------------------------------- the split


def test_what_is_held_out_is_not_trained(data, tmp_path, capsys):
    """--val_fraction. Reference: the documents of the examples of both sides."""
    split = train(**data, out_dir=tmp_path, val_fraction=0.3, max_steps=2)
    job = split.job
    plans = [job.plan(0), job.validation.plan]
    trained, evaluated = ({*plan.documents_of(0, plan.n_rows)} for plan in plans)
    assert trained and evaluated and not trained & evaluated
    assert trained | evaluated == set(range(len(job.store)))
    assert f"validation: {len(evaluated)} documents, {job.validation.plan.n_rows} examples" in capsys.readouterr().out
    assert train(**data, out_dir=tmp_path, val_fraction=0.3, max_steps=3, from_resume=1).progress.update == 3
    with pytest.raises(UserError, match="val_fraction"):
        train(**data, out_dir=tmp_path, val_fraction=0.2, max_steps=4, from_resume=1)


def test_faults_of_the_validation_documents(data, tmp_path, capsys):
    with pytest.raises(DataError, match="all 30 documents of it are in the training data too"):
        train(**data, out_dir=tmp_path, val_path=data["data_path"])
    train(**data, out_dir=tmp_path, val_path=data["data_path"], allow_val_overlap=1, max_steps=1)
    assert "30 of the 30 validation documents" in capsys.readouterr().out
    empty = tmp_path / "empty.jsonl"
    # BERT's rules take such characters away.
    empty.write_text('{"text": "\\u0001 \\u0002"}\n')
    with pytest.raises(DataError, match="empty.jsonl: no document in there"):
        train(**data, out_dir=tmp_path / "b", val_path=empty)
    with pytest.raises(SystemExit):
        train(**data, out_dir=tmp_path / "c", val_path=empty, val_fraction=0.1)
    assert "--val_path and --val_fraction exclude each other" in capsys.readouterr().err


def test_flags_of_an_evaluation_that_never_comes(data, tmp_path, capsys):
    train(**data, out_dir=tmp_path, max_steps=1, eval_interval=7, eval_batch_size=8, allow_val_overlap=1)
    out = capsys.readouterr().out
    for told in ("--eval_interval 7", "--eval_batch_size 8", "--allow_val_overlap True"):
        assert f"{told} has no effect" in out
