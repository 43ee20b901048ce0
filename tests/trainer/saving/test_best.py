"""The weights of the lowest validation loss. Kills are in tests/faults/test_kill.py."""

import shutil

import pytest
import torch

from tests.helpers import flags, records, train, write_corpus
from trainer import train_pretrain

# A rate at which the validation loss falls and rises again
RISES = {**dict.fromkeys(("eval_interval", "save_interval"), 10), "learning_rate": 0.05, "lr_schedule": "constant"}


@pytest.fixture
def data(tmp_path):
    return write_corpus(tmp_path / "a.jsonl", 6)


def test_the_weights_of_the_lowest_validation_loss_are_kept_and_named(tmp_path, data, capsys):
    """Reference: the run that ends there. A fresh run moves them away with the run that they are of."""
    run = train(data_path=data, out_dir=tmp_path / "run", epochs=20, report=1, val_fraction=0.4, **RISES)
    lowest = min(records(run, "val_loss"), key=lambda record: record["val_loss"])["update"]
    assert lowest < run.progress.update
    said = f"lowest after update {lowest}: "
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "run" / "pretrain_16.report.html").read_text()
    train(data_path=data, out_dir=tmp_path / "short", max_updates=lowest, val_fraction=0.4, **RISES)
    best, last = (torch.load(tmp_path / f"run/pretrain_16.{end}", weights_only=True) for end in ("best.pth", "pth"))
    for name, weight in torch.load(tmp_path / "short/pretrain_16.pth", weights_only=True).items():
        assert torch.equal(weight, best[name]) and not torch.equal(weight, last[name])
    # Its own lowest loss is its last.
    assert not list((tmp_path / "short").glob("*.best.*"))
    assert "lowest after update" not in capsys.readouterr().out

    train(data_path=data, out_dir=tmp_path / "run", max_updates=1)
    moved = sorted(path.name for path in (tmp_path / "run").rglob("*.best.*"))
    assert moved == ["pretrain_16.best.json", "pretrain_16.best.pth"]
    assert not list((tmp_path / "run").glob("*.best.*"))


def test_losses_of_other_validation_documents_do_not_compare(tmp_path, data):
    rises = {**RISES, "data_path": data, "out_dir": tmp_path / "run"}
    path = write_corpus(tmp_path / "v.jsonl", 2, seed=1)
    train(val_path=path, max_updates=40, **rises)
    elsewhere = flags(val_path=shutil.copy(path, tmp_path / "copy.jsonl"), max_updates=40, from_resume=1, **rises)
    assert train_pretrain.main(elsewhere) == 0
    assert (tmp_path / "run" / "pretrain_16.best.pth").exists()
    run = train(val_path=write_corpus(path, 3, seed=2), max_updates=60, from_resume=1, **rises)
    assert run.progress.best_val_loss == min(r["val_loss"] for r in records(run, "val_loss") if r["update"] > 40)


@pytest.mark.slow
def test_files_of_a_part_of_the_run_that_was_lost_do_not_stay(tmp_path, data):
    """A later part was killed between its best weights and its checkpoint. A resume goes by the checkpoint."""
    falling, risen = tmp_path / "falling", tmp_path / "risen"
    for out_dir, updates in ((falling, 10), (risen, 80)):
        train(data_path=data, out_dir=out_dir, max_updates=updates, val_fraction=0.4, **RISES)
    best = (risen / "pretrain_16.best.pth").read_bytes()
    for ending in ("pth", "json"):
        shutil.copy(risen / f"pretrain_16.best.{ending}", falling)
        shutil.copy(falling / f"pretrain_16.{ending}", risen / f"pretrain_16.best.{ending}")
    for out_dir, updates in ((falling, 10), (risen, 80)):
        again = {"data_path": data, "max_updates": updates, "from_resume": 1, "val_fraction": 0.4}
        assert train_pretrain.main(flags(out_dir=out_dir, **again, **RISES)) == 0
    assert not list(falling.glob("*.best.*"))
    assert (risen / "pretrain_16.best.pth").read_bytes() == best
