"""Saves by time. References: a clock that the test moves, and a run that is not saved by time."""

import pytest

from encoders.electra.settings import ElectraSettings
from encoders.glue.settings import GlueSettings
from tests.helpers import assert_same_weights, losses, train
from tests.trainer.budget.test_clock import Machine
from tests.trainer.machine.simulated_cuda import simulated_cuda
from tests.trainer.test_loop import saved_updates
from trainer.engine import Engine
from trainer.pretrain.settings import PretrainSettings
from trainer.saving import saver
from trainer.saving.checkpoint import Checkpoints
from trainer.saving.saver import GPU_MINUTES, SaveTimer

EACH_UPDATE_S = 10
COUNT_ALL = {"keep_checkpoints": 100, "accumulation_steps": 1}


@pytest.fixture
def clock(monkeypatch) -> Machine:
    """Each update takes EACH_UPDATE_S, and a save no time."""
    clock = Machine()
    monkeypatch.setattr(saver, "time", clock)
    monkeypatch.setattr(Checkpoints, "is_writing", lambda checkpoints: False)
    update = Engine.update

    def slow_update(engine, *arguments):
        update(engine, *arguments)
        clock.now += EACH_UPDATE_S

    monkeypatch.setattr(Engine, "update", slow_update)
    return clock


def test_saves_by_time_change_nothing_and_a_resume_goes_on_bitwise(tmp_path, data, clock):
    """Update 4 begins 30 s after the start or the last save, and asks for a save."""
    whole = train(data_path=data, out_dir=tmp_path / "whole", save_interval=10**6, epochs=2)
    clocked = train(data_path=data, out_dir=tmp_path / "clocked", save_minutes=0.5, epochs=2, keep_checkpoints=100)
    assert losses(clocked) == losses(whole)
    last = whole.progress.update
    assert saved_updates(tmp_path / "clocked") == sorted({*range(4, last, 4), last}) and last > 8
    # As after a kill: of all checkpoints only one that the clock asked for is left.
    first, *later = sorted((tmp_path / "clocked").rglob("update_*.pt"))
    for path in later:
        path.unlink()
    resumed = train(data_path=data, out_dir=tmp_path / "clocked", save_minutes=0.5, epochs=2, from_resume=1)
    assert_same_weights(resumed, whole)


@pytest.mark.slow
def test_on_cuda_a_run_is_saved_one_update_later(tmp_path, data, clock):
    """Asked for before update 4, known and saved after update 5, 50 s after the start; without a flag it is 2 minutes."""
    with simulated_cuda():
        run = train(data_path=data, out_dir=tmp_path / "half", device="cuda", save_minutes=0.5, **COUNT_ALL)
        train(data_path=data, out_dir=tmp_path / "usual", device="cuda", **COUNT_ALL)
    last = run.progress.update
    assert saved_updates(tmp_path / "half") == sorted({*range(5, last, 5), last})
    first = round(60 * GPU_MINUTES / EACH_UPDATE_S) + 2
    assert saved_updates(tmp_path / "usual")[0] == first < last


@pytest.mark.parametrize("kind, usual", [(PretrainSettings, 100), (ElectraSettings, 1000), (GlueSettings, 500)])
def test_what_is_not_given_follows_from_what_is(kind, usual):
    """(interval, seconds) on a CPU and on a GPU."""
    automatic = 60 * GPU_MINUTES
    expected = {
        "": [(usual, 0), (0, automatic)],
        "--save_minutes auto": [(usual, 0), (0, automatic)],
        "--save_interval 7": [(7, 0), (7, 0)],
        f"--save_interval {usual}": [(usual, 0), (usual, 0)],
        "--save_minutes 3": [(0, 180), (0, 180)],
        "--save_minutes 0": [(usual, 0), (usual, 0)],
        "--save_minutes 0.5 --save_interval 7": [(7, 30), (7, 30)],
    }
    required = ["--task", "cola", "--data_dir", "glue"] if kind is GlueSettings else []
    for given, times in expected.items():
        settings = kind.parse([*required, *given.split()])
        found = [SaveTimer(settings, device) for device in ("cpu", "cuda")]
        assert [(clock.interval, clock.seconds) for clock in found] == times, given
