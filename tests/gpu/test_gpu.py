"""Training on a GPU, against references: the checks of `make gpu`. `pytest -m gpu` runs them alone."""

import pytest
import torch

from benchmarks import gpu_checks
from trainer.machine.devices import deterministic

CHECKS = gpu_checks.NUMBERS | gpu_checks.TRAINER | gpu_checks.WAITING | gpu_checks.BAD_NUMBERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    with deterministic():
        CHECKS[name](torch.device("cuda", 0))
