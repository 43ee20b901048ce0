"""The formula of memory. References: the states of an optimiser, and a peak that was measured."""

import pytest
import torch

from common.errors import UserError
from model.config import MiniMindConfig, parameter_count
from trainer.machine.ranks import Ranks
from trainer.pretrain import footprint
from trainer.pretrain.footprint import STATE_BYTES, refuse_too_large, training_bytes

SIZE = MiniMindConfig()
USUAL = {"half": 2, "compiled": True, "recomputes": False, "device_type": "cpu"}


def needed(rows=32, T=512, config=SIZE, **changes):
    return training_bytes(config, rows, T, **{**USUAL, **changes})


@pytest.mark.parametrize(
    ("rows", "compiled", "recomputes", "measured"),
    [
        (32, True, False, 4.4e9),
        (8, True, False, 1.9e9),
        (32, True, True, 2.1e9),
        (8, True, True, 1.2e9),
        (32, False, False, 6.7e9),
        (8, False, False, 2.4e9),
    ],
)
def test_the_formula_is_near_the_measured_peaks(rows, compiled, recomputes, measured):
    """26 M parameters on a CPU: the table of docs/performance.md."""
    assert needed(rows, compiled=compiled, recomputes=recomputes) == pytest.approx(measured, rel=0.2)


def test_what_can_never_fit_is_refused(monkeypatch):
    """16 bytes for each parameter, over the ranks of a group."""
    bytes_of_all = STATE_BYTES * parameter_count(SIZE)
    monkeypatch.setattr(footprint, "total_memory", lambda device: bytes_of_all - 1)
    gpu = torch.device("cuda")
    with pytest.raises(
        UserError, match="parameters need 0 GB to train, and this machine has 0 GB on cuda: choose a sm"
    ):
        refuse_too_large(SIZE, gpu, Ranks())
    refuse_too_large(SIZE, gpu, Ranks(world_size=2), group_size=2)
