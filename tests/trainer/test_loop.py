"""The training loop where outcomes come late, as on CUDA. Reference: the checkpoints that a run leaves."""

from pathlib import Path

import pytest

from tests.helpers import train, write_corpus
from trainer.engine import Engine, Outcome
from trainer.machine.signals import StopSignals


@pytest.fixture
def late_outcomes(monkeypatch):
    """An update's outcome comes with the next one, or when it is waited for."""
    poll = Engine.poll

    def poll_late(engine, where=None):
        known = drain(engine)
        (engine.under_way,) = poll(engine, where)
        return known

    def drain(engine) -> list[Outcome]:
        known = [engine.under_way] if getattr(engine, "under_way", None) else []
        engine.under_way = None
        return known

    monkeypatch.setattr(Engine, "poll", poll_late)
    monkeypatch.setattr(Engine, "drain", drain)


def save_requested_at(monkeypatch, update):
    """Let SIGUSR1 come before the given update."""
    asked = []

    def take_save_request(signals):
        asked.append(None)
        return len(asked) == update

    monkeypatch.setattr(StopSignals, "take_save_request", take_save_request)


def saved_updates(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("update_")) for path in folder.rglob("update_*.pt"))


@pytest.mark.parametrize("before_the_end", [0, 1])
def test_a_request_to_save_is_not_lost_at_the_end_of_an_epoch(tmp_path, monkeypatch, late_outcomes, before_the_end):
    """There the plan changes, so the outcome that is under way is waited for: it may bring the request."""
    data = write_corpus(tmp_path / "data.jsonl", 40)
    options = {"data_path": data, "epochs": 2, "save_interval": 10**6, "keep_checkpoints": 50}
    whole = train(**options, out_dir=tmp_path / "whole")
    n_updates = whole.progress.update // 2
    assert saved_updates(tmp_path / "whole") == [2 * n_updates]
    save_requested_at(monkeypatch, n_updates - before_the_end)
    train(**options, out_dir=tmp_path / "asked")
    # A request of the update before is known one update later.
    assert saved_updates(tmp_path / "asked") == [n_updates, 2 * n_updates]
