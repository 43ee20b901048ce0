"""Runs whose shares change. References: a run that nothing disturbed, and the rows that the plan has."""

import contextlib
import json
from unittest import mock

import pytest

from common.errors import UserError
from tests import helpers
from tests.helpers import assert_same_weights, flags, stopped_after, train, trainer_of, trainers_that_fit, write_corpus
from trainer import command, train_pretrain
from trainer.budget.clock import Clock, DecaySchedule
from trainer.engine import Engine
from trainer.machine.ranks import Ranks

POINTS = [[[0, 0.8], [1, 0.2]], [[0, 0.2], [1, 0.8]]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return [str(write_corpus(folder / f"{name}.jsonl", 80, seed)) for seed, name in enumerate("ab")]


@contextlib.contextmanager
def trained_rows():
    """The list of the rows that the engine computes within the block, as texts, in their order."""
    rows = []
    with helpers.before_calls(Engine, "micro_batch", lambda engine, batch, *_: rows.extend(rows_of(batch))):
        yield rows


def rows_of(batch):
    return [str(row) for row in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True)]


class Moves(Clock):
    """Moves the end to each of {update: DecaySchedule} once that update is done."""

    def __init__(self, courses, end):
        super().__init__(1e9, 0.0, DecaySchedule(end, end), Ranks())
        self.courses = courses

    def after_update(self, update):
        self.moved = self.courses.get(update, self.moved)
        return update in self.courses


@contextlib.contextmanager
def clock(courses):
    with mock.patch.object(command, "clock_of", lambda parts, *_: Moves(courses, parts.settings.max_updates)):
        yield


def run(**changes):
    """The Trainer of a run that ended or was stopped."""
    with trainers_that_fit() as trainers:
        train_pretrain.main(flags(**changes))
    return trainers[0]


def planned_rows(trainer, epoch=0):
    """The rows of a plan as the engine gets them."""
    plan = trainer.job.plan(epoch)
    return rows_of(trainer.job.assembler[plan.recipe(range(plan.n_rows))])


def schedule(sources, repeat=""):
    return [f"{sources[0]}:0.8..0.2{repeat}", f"{sources[1]}:0.2..0.8{repeat}"]


@pytest.mark.parametrize("length", [pytest.param({"epochs": 2}, marks=pytest.mark.slow), {"max_updates": 30}])
def test_a_stopped_run_goes_on_to_the_last_bit_and_trains_each_row_once(sources, tmp_path, length):
    options = {"data_path": schedule(sources, ":x2"), **length}
    with trained_rows() as whole:
        undisturbed = run(out_dir=tmp_path / "whole", **options)
    assert whole == planned_rows(undisturbed)
    with trained_rows() as parts:
        for stop in (7, 19):
            with stopped_after(stop):
                assert run(out_dir=tmp_path / "cut", from_resume=1, **options).progress.update == stop
        resumed = run(out_dir=tmp_path / "cut", from_resume=1, num_workers=1, **options)
    assert parts == whole
    assert_same_weights(undisturbed, resumed)


@pytest.mark.slow
def test_another_batch_size_goes_on_with_the_same_rows(sources, tmp_path):
    """Reference: the rows of the plan. Where shares change, so long as the run keeps the rows that it was planned for."""
    options = {"data_path": schedule(sources), "out_dir": tmp_path / "epochs"}
    with trained_rows() as rows:
        with stopped_after(5):
            run(**options)
        resumed = run(**options, from_resume=1, batch_size=1, accumulation_steps=3)
    assert rows == planned_rows(resumed)

    options = {"data_path": schedule(sources, ":x9"), "out_dir": tmp_path / "updates", "max_updates": 40}
    with trained_rows() as rows:
        with stopped_after(20):
            run(**options)
        line = r"\(--max_updates, --rows_per_update\): 40 updates of 4 rows there, .* in this run"
        for other in ({"batch_size": 6}, {"max_updates": 50}, {"batch_size": 2, "max_updates": 80}):
            with pytest.raises(UserError, match=line):
                run(**{**options, **other}, from_resume=1)
        resumed = run(**options, from_resume=1, batch_size=6, rows_per_update=4)
    assert rows == planned_rows(resumed)


@pytest.mark.slow
def test_a_clock_may_end_a_run_elsewhere(sources, tmp_path):
    """Earlier, or later, where the last shares go on; with stops, too, bit for bit. Reference: the rows of the plan."""
    options = {"data_path": schedule(sources, ":x9"), "max_updates": 50, "num_workers": 1}
    sooner = {4: DecaySchedule(20, end=30)}
    later = {**sooner, 20: DecaySchedule(50, end=70), 60: DecaySchedule(60, end=64, start_factor=0.5)}
    with clock(sooner), trained_rows() as rows:
        ended = run(out_dir=tmp_path / "sooner", **options)
    assert rows == planned_rows(ended)[: 30 * 4]
    with clock(later), trained_rows() as rows:
        whole = run(out_dir=tmp_path / "later", **options)
    assert rows == [*planned_rows(whole), *planned_rows(whole, epoch=1)][: 64 * 4]
    for stop in (20, 50, 55):
        with clock(later), stopped_after(stop):
            run(out_dir=tmp_path / "cut", from_resume=1, **options)
    with clock(later):
        resumed = run(out_dir=tmp_path / "cut", from_resume=1, **options)
    assert_same_weights(whole, resumed)
    assert resumed.job.trained(resumed.progress) == whole.job.trained(whole.progress)
    assert sum(tokens for _, tokens, _ in resumed.job.trained(resumed.progress)) == whole.progress.tokens


def test_another_schedule_is_not_gone_on_with(sources, tmp_path):
    with stopped_after(5):
        run(data_path=schedule(sources), out_dir=tmp_path)
    for other in ([f"{sources[0]}:0.7..0.2", f"{sources[1]}:0.3..0.8"], schedule(sources, ":x2")):
        with pytest.raises(UserError, match="made with another row layout (shares|repeats) .--data_path, --mixture"):
            run(data_path=other, out_dir=tmp_path, from_resume=1)
    with pytest.raises(UserError, match="row layout epochs: 1 there, 2 in this run"):
        run(data_path=schedule(sources), out_dir=tmp_path, from_resume=1, epochs=2)


@pytest.mark.slow
def test_a_mixture_file_is_the_same_run(sources, tmp_path):
    by_flags = run(data_path=schedule(sources), out_dir=tmp_path / "flags")
    file = tmp_path / "mix.yaml"
    entries = [{"path": path, "share": points} for path, points in zip(sources, POINTS, strict=True)]
    file.write_text(json.dumps({"sources": entries}))
    by_file = train(mixture=file, out_dir=tmp_path / "file")
    assert_same_weights(by_flags, by_file)
    # The settings of a run are read again.
    again = tmp_path / "file" / "pretrain_16.settings.yaml"
    repeated = trainer_of(train_pretrain.main, ["--config", str(again), "--out_dir", str(tmp_path / "again")])
    assert_same_weights(repeated, by_file)
