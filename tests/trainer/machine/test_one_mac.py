"""A start on a Mac with an Apple GPU, which simulated_mps.py plays. Reference: the same run on the CPU."""

import pytest

from tests.helpers import losses, train
from tests.trainer.machine.simulated_mps import simulated_mps


def test_pretraining_starts_ends_and_goes_on_there(data, tmp_path):
    options = {"data_path": data, "dtype": "float32", "val_fraction": 0.2, "use_moe": 1}
    with simulated_mps() as mode:
        run = train(**options, out_dir=tmp_path / "mac", device=None)
        losses_there = losses(run)
        again = train(**options, out_dir=tmp_path / "mac", device=None, epochs=2, from_resume=1)
    assert run.engine.device.type == "mps" and mode.asked > 0
    assert again.progress.epoch == 2
    # Sums for the log are in float32 there.
    on_cpu = train(**options, out_dir=tmp_path / "cpu", device="cpu")
    assert losses_there == pytest.approx(losses(on_cpu), rel=1e-5)
