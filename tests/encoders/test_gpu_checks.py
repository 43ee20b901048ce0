"""The checks of `make gpu-electra`, on a CPU."""

import pytest
import torch

from encoders.gpu_checks import learns_and_is_fine_tuned


@pytest.mark.slow
def test_electra_learns_on_a_cpu():
    assert learns_and_is_fine_tuned(torch.device("cpu")).startswith("a held-out AUC of 0.")
