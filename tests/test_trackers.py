"""Experiment trackers get the same records; each that is not installed here is a stand-in that notes its calls."""

import sys
from unittest import mock

import pytest

from tests.helpers import records, train
from trainer.runtime import UserError
from trainer.trackers import open_tracker


@pytest.mark.parametrize("kind", ["wandb", "swanlab", "trackio"])
def test_one_interface(data, tmp_path, kind):
    """One run with the flags as its config, every record on the same axis, lists as one curve an item."""
    module = mock.MagicMock(**{"init.return_value.id": "abc"})
    with mock.patch.dict(sys.modules, {kind: module}):
        run = train(data_path=data, out_dir=tmp_path, tracker=kind, use_moe=1, val_fraction=0.2)
    (call,) = module.init.call_args_list
    assert call.kwargs["config"]["hidden_size"] == 16 and call.kwargs["project"] == "MiniMind-Pretrain"
    logged = [(call.args[0], call.kwargs["step"]) for call in module.log.call_args_list]
    assert len(logged) == len(records(run)) + len(records(run, "val_loss"))
    assert all(record["step"] == step for record, step in logged)
    assert sum(logged[0][0][f"expert_load/{i}"] for i in range(4)) == pytest.approx(1)
    assert module.finish.call_count == 1


@pytest.mark.parametrize("kind", ["wandb", "swanlab", "trackio"])
def test_a_resume_continues_the_same_run(data, tmp_path, kind):
    module = mock.MagicMock(**{"init.return_value.id": "abc"})
    options = {"data_path": data, "out_dir": tmp_path, "tracker": kind}
    with mock.patch.dict(sys.modules, {kind: module}):
        ids = [train(**options).tracker_ids, train(**options, epochs=2, from_resume=1).tracker_ids]
    first, second = (call.kwargs for call in module.init.call_args_list)
    assert ids[0] == ids[1] and second["resume"] == "allow"
    if kind == "trackio":
        assert first["name"] == second["name"] == ids[0]["trackio"]
    else:
        assert (first["id"], second["id"]) == (None, "abc")


def test_tensorboard_files(data, tmp_path):
    """Reference: TensorBoard's own reader; after a resume each step is there once."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"data_path": data, "out_dir": tmp_path, "tracker": "tensorboard"}
    train(**options)
    run = train(**options, epochs=2, from_resume=1)
    reader = accumulator.EventAccumulator(str(tmp_path / "pretrain_16_tensorboard"))
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert found == [(record["step"], pytest.approx(record["loss"])) for record in records(run)]


@pytest.mark.parametrize("kind", ["wandb", "swanlab", "trackio"])
def test_a_package_that_is_missing_or_refuses(kind):
    with mock.patch.dict(sys.modules, {kind: None}), pytest.raises(UserError, match=f"pip install {kind}"):
        open_tracker(kind, "P", "n", {}, ".")
    module = mock.MagicMock(**{"init.side_effect": RuntimeError("no account\n  log in first")})
    with (
        mock.patch.dict(sys.modules, {kind: module}),
        pytest.raises(UserError, match=f"--tracker {kind}: no account log in first"),
    ):
        open_tracker(kind, "P", "n", {}, ".")
