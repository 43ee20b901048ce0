"""Which rows, micro-batches and rates updates have, what is due when. References: what a run leaves, consecutive slices, one rank."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import flags, losses, records, steps_of, stopped_after, train, write_corpus
from trainer import train_pretrain
from trainer.batching import Batching
from trainer.engine import Engine, Outcome
from trainer.machine.command_line import StopSignals
from trainer.machine.ranks import Ranks


@pytest.fixture
def late_outcomes(monkeypatch):
    """An update's outcome comes with the next one, or when it is waited for."""
    poll = Engine.poll

    def poll_late(engine, where=None):
        known = drain(engine)
        engine.under_way = poll(engine, where)
        return known

    def drain(engine) -> list[Outcome]:
        known, engine.under_way = getattr(engine, "under_way", []), []
        return known

    monkeypatch.setattr(Engine, "poll", poll_late)
    monkeypatch.setattr(Engine, "drain", drain)


def saved_updates(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("update_")) for path in folder.rglob("update_*.pt"))


@pytest.mark.parametrize(("interval", "accumulation_steps"), [(0, 2), (1, 3), (5, 3), (7, 2)])
def test_an_interval_of_micro_batches_ends_within_an_update(tmp_path, interval, accumulation_steps):
    """Saves, evaluations and log lines. Reference: the micro-batches of the run, looked at one by one."""
    n_updates = 12
    steps = range(n_updates * accumulation_steps)
    run = train(
        data_path=write_corpus(tmp_path / "data.jsonl", 200), out_dir=tmp_path, batch_size=1, val_fraction=0.2,
        accumulation_steps=accumulation_steps, max_updates=n_updates, save_interval=interval, eval_interval=interval,
        log_interval=interval or 100, keep_checkpoints=50,
    )  # fmt: skip
    ended = {step // accumulation_steps + 1 for step in steps if interval and (step + 1) % interval == 0}
    expected = sorted(ended | {n_updates})
    assert saved_updates(tmp_path) == expected
    assert [line["update"] for line in records(run, "val_loss")] == expected
    lines = [step for step in steps if step % (interval or 100) == 0 or step == steps[-1]]
    assert [line["step"] for line in records(run)] == lines


@pytest.mark.parametrize("before_the_end", [0, 1])
def test_a_request_to_save_is_not_lost_at_the_end_of_an_epoch(tmp_path, monkeypatch, late_outcomes, before_the_end):
    """There the plan changes, so the outcome that is under way is waited for: it may bring the request."""
    data = write_corpus(tmp_path / "data.jsonl", 40)
    options = {"data_path": data, "epochs": 2, "save_interval": 10**6, "keep_checkpoints": 50}
    n_updates = train(**options, out_dir=tmp_path / "whole").progress.update // 2
    assert saved_updates(tmp_path / "whole") == [2 * n_updates]
    # SIGUSR1
    requests = (number == n_updates - before_the_end for number in itertools.count(1))
    monkeypatch.setattr(StopSignals, "take_save_request", lambda signals: next(requests))
    train(**options, out_dir=tmp_path / "asked")
    # A request of the update before is known one update later.
    assert saved_updates(tmp_path / "asked") == [n_updates, 2 * n_updates]


def test_a_run_that_is_stopped_with_its_last_update_is_ended_by_its_resume(tmp_path):
    """By its report, which a run that is stopped does not write."""
    options = flags(data_path=write_corpus(tmp_path / "data.jsonl", 20), out_dir=tmp_path, max_updates=3, report=1)
    with stopped_after(3):
        assert train_pretrain.main(options) == 128 + 15
    assert saved_updates(tmp_path) == [3] and not list(tmp_path.glob("*.report.html"))
    assert train_pretrain.main([*options, "--from_resume", "1"]) == 0
    assert list(tmp_path.glob("*.report.html"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 80), st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 80))
def test_updates_have_the_same_rows_on_any_number_of_ranks(n_rows, rows, batch, world, is_divided, start):
    """Reference: slices of `rows` rows, whatever the ranks and their micro-batches are."""
    start = min(start, n_rows)
    flags = SimpleNamespace(batch_size=batch, accumulation_steps=8, rows_per_update=rows)
    schedule = Batching.of(flags, Ranks(world_size=world, share_batches=is_divided)).schedule(n_rows, start)
    seen = {}
    steps = set()
    for rank in range(world):
        mine = steps_of(schedule, rank)
        sizes = [hi - lo for update, _, lo, hi in mine if update == schedule.first_update]
        assert rows % (len(sizes) * world or 1) or n_rows - start < rows or len(set(sizes)) == 1, "an uneven update"
        steps.add(tuple((update, micro) for update, micro, *_ in mine))
        for update, _, lo, hi in mine:
            assert hi - lo <= batch
            seen.setdefault(update, []).extend(range(lo, hi))
    assert len(steps) == 1, "ranks disagree about the micro-batches"
    in_order = [sorted(seen[update]) for update in sorted(seen)]
    assert in_order == [list(range(at, min(at + rows, n_rows))) for at in range(start, n_rows, rows)]
    if start == 0:
        assert schedule.n_updates == len(in_order)
        assert schedule.n_steps == len(steps.pop())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_interval_is_as_many_rows_on_any_number_of_ranks(world):
    """By hand: 9 micro-batches of 2 rows end with row 18, 36, 54 and 72, and updates with row 12, 24 and so on."""
    flags = SimpleNamespace(batch_size=2, accumulation_steps=8, rows_per_update=12)
    batching = Batching.of(flags, Ranks(world_size=world))
    each = batching.micro_batches
    due = [update for update in range(1, 7) if batching.completes(9, each * (update - 1), each * update)]
    assert due == [2, 3, 5, 6] and batching.updates_in(9) == 1.5


def test_a_run_has_the_updates_of_accumulation_steps(data, tmp_path, capsys):
    """Reference: the same rows by --accumulation_steps, which the settings that are kept do not name."""
    options = {"data_path": data, "batch_size": 2, "log_interval": 3, "warmup_iters": 6}
    by_rows = train(out_dir=tmp_path / "rows", rows_per_update=6, accumulation_steps=None, **options)
    assert "(2 x 3 micro-batches x 1 rank)" in capsys.readouterr().out
    by_steps = train(out_dir=tmp_path / "steps", accumulation_steps=3, **options)
    assert losses(by_rows) == losses(by_steps)
    assert [line["lr"] for line in records(by_rows)] == [line["lr"] for line in records(by_steps)]
    assert f"{records(by_rows)[0]['lr']:.6f}" == "0.000275", "half of the warm-up, at MiniMind's 1.1 times 5e-4"
    kept = (tmp_path / "rows" / "pretrain_16.settings.yaml").read_text()
    assert "rows_per_update: 6" in kept and "accumulation_steps: 8" in kept
